"""How long `slimserve --list` and `--plan` take, as whole processes, warm.

    python -m harness.cli_bench [--runs 21]

Prints one JSON object: milliseconds, the commands taken in turn so that a busy moment hits all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from harness.host import host

COMMANDS = {
    "list": ["--list"],
    "list_json": ["--list", "--json"],
    "plan": ["qwen38fn-fp8-8", "--plan", "--on", "rtx3090x8"],
    "plan_here": ["smollm2-135m-bf16-cpu", "--plan"],
    "refused": ["qwen38fn-fp8-8", "--serve"],
}


def main() -> None:
    """Run the benchmark with this process's arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=21)
    runs = parser.parse_args().runs
    program = str(Path(sys.executable).with_name("slimserve"))
    samples: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for turn in range(runs + 1):
        for name, arguments in COMMANDS.items():
            start = time.perf_counter()
            status = subprocess.run(
                [program, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            ).returncode
            elapsed = (time.perf_counter() - start) * 1e3
            if status != (3 if name == "refused" else 0):
                sys.exit(f"slimserve {' '.join(arguments)} ended with {status}: there is nothing to time")
            if turn > 0:  # the first turn warms the page cache
                samples[name].append(elapsed)
    summary = {
        name: {
            "median_ms": round(statistics.median(times), 1),
            "min_ms": round(min(times), 1),
            "max_ms": round(max(times), 1),
        }
        for name, times in samples.items()
    }
    print(json.dumps({**host(), "runs": runs, "commands": summary}, indent=1))


if __name__ == "__main__":
    main()
