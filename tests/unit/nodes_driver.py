"""A process of its own around one node: what it is comes as JSON on stdin, the reports go to stdout."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from slimserve.admission.config import Config
from slimserve.engine.supervisor import Launch, Supervisor
from slimserve.errors import SlimserveError
from slimserve.nodes import head, orders, worker
from slimserve.nodes.agreement import Claim
from slimserve.nodes.seat import Seat
from slimserve.shapes import build

SECRET = b"a-secret-of-the-tests-that-is-long-enough"


def main() -> int:
    order = json.load(sys.stdin)
    fields = order["launch"]
    paths = {name: Path(fields[name]) for name in ("run_folder", "control")}
    rebuilt = {"argv": tuple(fields["argv"]), "admission": build(Config, fields["admission"])}
    claim = build(Claim, order["claim"])
    seat = Seat(order["rank"], claim.nodes, "127.0.0.1", order["port"], "127.0.0.1", "lo")
    launch = Launch(**{**fields, **paths, **rebuilt, "node": str(seat)})
    secret = os.environ.get("SECRET", "").encode() or SECRET
    orders.TRY_SECONDS = 0.1
    head.JOIN_SECONDS = worker.JOIN_SECONDS = float(os.environ.get("JOIN_SECONDS", "60"))

    def report(line: str) -> None:
        print(line, flush=True)

    try:
        if order["rank"] == 0:
            return Supervisor(launch, report, lambda tick: None, head.Head(seat, claim, secret, report)).run()
        return worker.Worker(seat, launch, claim, secret, report, lambda tick: None).run()
    except SlimserveError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
