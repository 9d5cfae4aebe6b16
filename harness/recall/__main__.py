"""Ask an OpenAI-compatible server everything in the battery, and say whether its answers are right.

    python -m harness.recall URL MODEL [--preset small] [--contexts 8192,24576,43008] [--churn-tokens N] [--json]

What the result proves, and what not: docs/recall.md. Exit 0: pass; 1: fail or inconclusive, or it broke; 2: usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from harness.recall.battery import run_battery
from harness.recall.dots import Dots
from harness.recall.settings import PRESETS, Settings
from slimserve.client_faults import Endpoint
from slimserve.errors import Finding, SlimserveError, UsageError


def main(argv: list[str] | None = None) -> int:
    """Run the command with these arguments, the process's own by default, and return its exit status."""
    args = _parser().parse_args(argv)
    dots = Dots(sys.stderr)
    try:
        report = run_battery(_endpoint(args), _settings(args), seed=args.seed, on_probe=dots)
    except SlimserveError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped; nothing is concluded from half a battery", file=sys.stderr)
        return 130
    finally:
        dots.close()
    print(json.dumps(report.to_json(), indent=1) if args.json else report.table())
    return 0 if report.verdict == "pass" else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness.recall", description="ask a server what it should remember, and judge its answers"
    )
    parser.add_argument("url", metavar="URL", help="root of its API, such as http://127.0.0.1:8000/v1")
    parser.add_argument("model", metavar="MODEL", help="the name under which it serves the model")
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="the API key is its first line")
    parser.add_argument("--json", action="store_true", help="everything, as data")
    parser.add_argument(
        "--preset", choices=PRESETS, default="standard", help="what to ask, unless said otherwise below"
    )
    parser.add_argument("--contexts", type=_tokens, metavar="N,N", help="tokens of the documents, about")
    parser.add_argument("--pairs", type=_count, metavar="N", help="pairs of conversations for each context")
    parser.add_argument("--greedy", action="store_true", help="a second set without sampling, compared token by token")
    parser.add_argument("--no-tools", action="store_true", help="for a model that was taught none")
    parser.add_argument("--churn-tokens", type=_count, metavar="N", help="evicts everything; more than the cache holds")
    parser.add_argument("--restores", action="store_true", help="after the churn prefixes come back from a second tier")
    parser.add_argument("--concurrency", type=_count, metavar="N", help="conversations at the same time")
    parser.add_argument("--max-tokens", type=_count, metavar="N", help="of an answer, with its thought")
    parser.add_argument("--floor", type=_rate, metavar="RATE", help="that the intervals are held against")
    parser.add_argument("--tolerance", type=float, metavar="X", help="of logprobs, natural logarithm")
    parser.add_argument("--seed", type=int, metavar="N", help="to draw the markers of an earlier battery again")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def _tokens(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate between 0 and 1")
    return value


def _settings(args: argparse.Namespace) -> Settings:
    settings = PRESETS[args.preset]
    given = {name: getattr(args, name) for name in ("pairs", "churn_tokens", "concurrency", "max_tokens", "floor")}
    given["tolerance"] = args.tolerance
    settings = replace(settings, **{name: value for name, value in given.items() if value is not None})
    if args.contexts:
        shapes = (replace(shape, context_tokens=tokens) for tokens in args.contexts for shape in settings.shapes)
        settings = replace(settings, shapes=tuple(shapes))
    if args.no_tools:
        settings = replace(settings, tool_conversations=0)
    return replace(settings, greedy=args.greedy, restores=args.restores)


def _endpoint(args: argparse.Namespace) -> Endpoint:
    if args.key_file is None:
        return Endpoint(args.url, args.model)
    try:
        return Endpoint(args.url, args.model, args.key_file.read_text().partition("\n")[0].strip())
    except (OSError, ValueError) as fault:
        raise UsageError(
            Finding(
                f"the key file cannot be read: {fault}", "the key is its first line", "name a file that holds a key"
            )
        ) from fault


if __name__ == "__main__":
    sys.exit(main())
