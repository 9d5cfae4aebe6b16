"""Prints how true the engine is to Flash-Next's definition.

python -m harness.parity [CHECKPOINT...] [--keep FOLDER] [--write FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from harness.host import host, versions
from harness.parity import checkpoint
from harness.parity.comparison import CIRCUMSTANCES, Line, compare


def main() -> int:
    """Compare and print; 1 when something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m harness.parity", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="*", help=f"which; all of {', '.join(checkpoint.VARIANTS)} otherwise")
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="where checkpoints and numbers stay")
    parser.add_argument("--write", metavar="FILE", type=Path, help="where the numbers go as JSON")
    asked = parser.parse_args()
    if unknown := [name for name in asked.checkpoint if name not in checkpoint.VARIANTS]:
        parser.error(f"no checkpoint is called {unknown[0]}; there are {', '.join(checkpoint.VARIANTS)}")
    lines = []
    with tempfile.TemporaryDirectory() as spare:
        folder = asked.keep or Path(spare)
        folder.mkdir(parents=True, exist_ok=True)
        for number, variant in enumerate(asked.checkpoint or checkpoint.VARIANTS):
            # The first is looked at under all circumstances; what differs between checkpoints does not depend on them.
            for line in compare(variant, folder, tuple(CIRCUMSTANCES) if number == 0 else ()):
                lines.append(line)
                print(f"{line.checkpoint}: {line.what}: {line.fault or 'as it should be'}", file=sys.stderr)
    if asked.write is not None:
        told = {**host(), "versions": versions(), "lines": [asdict(line) for line in lines]}
        asked.write.write_text(json.dumps(told, indent=1) + "\n")
    Console(width=None if sys.stdout.isatty() else 120).print(table(lines))
    return int(any(line.fault for line in lines))


def table(lines: list[Line]) -> Table:
    """The lines, differences in thousandths of a nat."""
    shown = Table(title="log-probabilities apart, in thousandths of a nat: mean / 95% / most")
    for heading in ("checkpoint", "what", "positions", "apart", "noise of bfloat16", ""):
        shown.add_column(heading)
    for line in lines:
        spreads = (" / ".join(f"{1000 * value:.1f}" for value in each) for each in (line.found, line.noise))
        shown.add_row(line.checkpoint, line.what, str(line.tokens), *spreads, line.fault or "ok")
    return shown


if __name__ == "__main__":
    sys.exit(main())
