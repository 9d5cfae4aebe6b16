"""A process of its own around `Supervisor.run`: the launch comes as JSON on stdin, the reports go to stdout."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from slimserve.admission.config import Config
from slimserve.engine import attempt, supervisor
from slimserve.engine.process import EngineProcess
from slimserve.errors import SlimserveError
from slimserve.shapes import build


class Spawn(EngineProcess):
    """An engine in whose start, between the fork and our knowing it, a signal comes."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--term-at", default="", help="SIGTERM to ourselves when a report begins so")
    parser.add_argument("--term-in-spawn", action="store_true")
    parser.add_argument("--ignore-hup", action="store_true", help="as nohup does")
    parser.add_argument("--hold-seconds", type=float, default=supervisor.HOLD_SECONDS)
    parser.add_argument("--steady-seconds", type=float, default=supervisor.STEADY_SECONDS)
    switches = parser.parse_args()
    fields = json.load(sys.stdin)
    paths = {name: Path(fields[name]) for name in ("run_folder", "control")}
    admission = build(Config, fields["admission"])
    launch = supervisor.Launch(**{**fields, **paths, "argv": tuple(fields["argv"]), "admission": admission})
    supervisor.HOLD_SECONDS = switches.hold_seconds
    supervisor.STEADY_SECONDS = switches.steady_seconds
    if switches.ignore_hup:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if switches.term_in_spawn:
        attempt.EngineProcess = Spawn  # type: ignore[misc]

    def report(line: str) -> None:
        print(line, flush=True)
        if switches.term_at and line.startswith(switches.term_at):
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        return supervisor.Supervisor(launch, report).run()
    except SlimserveError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
