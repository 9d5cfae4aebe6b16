"""Whether a comparison of receipts sees what is there, and nothing else: against a server whose speed is known.

    python -m harness.compare_check [--tries 20] [--slower 1.1]

The fake server (tests/fakes/model_server.py) is measured three times a try: twice at one speed, and once with all its
times longer by a tenth. Each run goes through client, samples, receipt and comparison as `--bench` does. The two alike
must come out as no difference in every try, and so must a receipt and itself; the slower one must lose in every try.
Prints JSON; exit 1 when one try came out otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.client import Target, drive, run
from harness.compare import compare
from harness.host import commit, fingerprint, host, versions
from harness.receipt import PromptFacts, Receipt, Setup, WorkloadFacts, find
from harness.receipt import Target as Asked
from harness.recording import Facts, begin
from harness.sample import Conversation, Job
from slimserve.probe import read_machine

SERVER = Path(__file__).resolve().parent.parent / "tests" / "fakes" / "model_server.py"
SPEED = {"delay": 0.04, "interval": 0.005, "jitter": 0.05}
CONCURRENCY = 4
ROUNDS = 3
WAVES = 4
TOKENS = 32
DEADLINE_SECONDS = 30.0


@contextlib.contextmanager
def server(slower: float) -> Iterator[str]:
    """The fake server at a speed; gives its address."""
    command = [sys.executable, str(SERVER), "--set", json.dumps(SPEED | {"slower": slower})]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("listening on "):
                sys.exit(f"the fake server did not start: {line!r}")
            yield f"http://127.0.0.1:{int(line.split()[-1])}/v1"
        finally:
            process.terminate()


def measure(folder: Path, url: str, name: str) -> Receipt:
    """A receipt of one run."""
    recording = begin(folder, name, "compare-check")
    setup = Setup(name=f"c{CONCURRENCY}", concurrency=CONCURRENCY)
    recording.add_point(setup)
    target = Target(url, "fake")

    async def rounds() -> None:
        for number in range(-1, ROUNDS):  # the first one warms up
            count = CONCURRENCY * (WAVES if number >= 0 else 1)
            jobs = [_job(f"{number}-{place}", "measure" if number >= 0 else "warm-up") for place in range(count)]
            by_id = {job.id: job for job in jobs}
            for sample in await drive(target, [Conversation((job,)) for job in jobs], concurrency=CONCURRENCY):
                recording.add(setup.name, max(number, 0), by_id[sample.job], sample)

    run(rounds())
    facts = Facts(
        commit=commit(),
        command=tuple(sys.argv),
        host=fingerprint(read_machine(folder, {})),
        versions=versions(),
        target=Asked(kind="server", name=url, model="fake", api="completions"),
        profile=None,
        weights=None,
        resolved_sha256=None,
        workload=WorkloadFacts(name="compare-check", sha256="0" * 64, seed=0),
        prompts=PromptFacts(sha256="0" * 64, tokenizer_sha256=None, corpus="token ids without a meaning"),
    )
    recording.close("whole", (), facts)
    return find(folder, recording.id)


def _job(name: str, phase: Any) -> Job:
    return Job(
        id=name, phase=phase, max_tokens=TOKENS, prompt_ids=tuple(range(1, 65)), asked_prompt_tokens=64, ignore_eos=True
    )


def main() -> int:
    """Run the check with this process's arguments; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--slower", type=float, default=1.1)
    args = parser.parse_args()
    verdicts: dict[str, Counter[str]] = {"itself": Counter(), "repeated": Counter(), "slower": Counter()}
    unexpected: list[Any] = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        server(1.0) as url,
        server(args.slower) as slow_url,
    ):
        folder = Path(scratch)
        for number in range(args.tries):
            first, again = (measure(folder, url, name) for name in ("first", "again"))
            pairs = {"itself": first, "repeated": again, "slower": measure(folder, slow_url, "slower")}
            for name, other in pairs.items():
                result = compare(first, other, folder, folder)
                verdicts[name][result.verdict] += 1
                if result.verdict != ("a" if name == "slower" else "none"):
                    told = [f"{one.metric}: {one.verdict}, {one.ratio}, {one.why}" for one in result.compared]
                    unexpected.append({"try": number, "against": name, "compared": told})
            print(f"try {number}: { ({name: dict(found) for name, found in verdicts.items()}) }", file=sys.stderr)
    result_json = {
        **host(),
        "tries": args.tries,
        "slower": args.slower,
        "server": SPEED,
        "load": {"concurrency": CONCURRENCY, "rounds": ROUNDS, "waves": WAVES, "tokens": TOKENS},
        "verdicts": {name: dict(found) for name, found in verdicts.items()},
        "unexpected": unexpected,
    }
    print(json.dumps(result_json, indent=1))
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
