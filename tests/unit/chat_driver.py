"""Runs the chat as the command does, without the command: `chat_driver.py BASE_URL [--ask TEXT] ...`."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from slimserve.chat import Endpoint, Stop, ask, chat


def main() -> int:
    args = argparse.ArgumentParser()
    args.add_argument("base_url")
    args.add_argument("--model", default="fake")
    args.add_argument("--ask")
    args.add_argument("--system")
    args.add_argument("--stop-on-sigterm", action="store_true", help="with a handler that does not raise")
    given = args.parse_args()
    endpoint = Endpoint(given.base_url, given.model, os.environ.get("CHAT_KEY"))
    if given.ask is None:
        return chat(endpoint, system=given.system, stdin=sys.stdin, out=sys.stdout, err=sys.stderr)
    stop = Stop()
    if given.stop_on_sigterm:
        signal.signal(signal.SIGTERM, lambda *_: stop.request())
    return ask(endpoint, given.ask, system=given.system, out=sys.stdout, err=sys.stderr, stop=stop)


if __name__ == "__main__":
    sys.exit(main())
