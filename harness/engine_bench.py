"""What a profile's engine does alone, in one process: decode steps and their kernels; prompts cold, found, evicted.

    python -m harness.engine_bench PROFILE OUT.json [--decode] [--resume]

The engine is the profile's, with the arguments that the plan gives it; nothing of the appliance runs. `--decode` times
a step at each batch as the difference between long and short answers, and has the profiler add up its kernels: time on
the device is what repeats, a step seen from outside holds the host's work as well. `--resume` gives the engine a small
cache and its own offload to the host's memory, and asks for one prompt cold, again, and after others pushed it out.

Both may run in one command, each in a process of its own. OUT.json is written anew after each.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.host import host
from harness.plan_check import machine
from slimserve.engine import command, door
from slimserve.engine.variables import GATE_VARIABLE
from slimserve.plan import Plan
from slimserve.session import Session, open_session

BATCHES = (1, 8, 32)
CONTEXT_TOKENS = 16_000
STEPS = 128
PROFILED_TOKENS = 40
KERNELS = 24
RESUMED_TOKENS = 42_000
CHURN = 8
CHURN_TOKENS = 40_000
POOL_BYTES = 1 << 30
TIER_BYTES = 32 << 30
OFFLOAD = {
    "kv_connector": "SimpleCPUOffloadConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": TIER_BYTES},
}
# The profiler sees the kernels of its own process.
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# Of a vocabulary, ids that no tokenizer has made special.
_TOKENS = range(1000, 200_000)

Kernels = dict[str, tuple[float, int]]
"""microseconds and calls of each kernel, by name"""
Asked = Callable[[list[list[int]], int], tuple[float, list[int]]]
"""Answers of so many tokens to prompts: seconds that all took, and the tokens of each prompt found in a cache."""


def main() -> None:
    """Measure what is asked for, each in a process of its own, or what this process is to measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("profile")
    parser.add_argument("out", type=Path)
    parts: dict[str, Callable[[Asked, dict[str, Any]], None]] = {"decode": decode, "resume": resume}
    for part in parts:
        parser.add_argument(f"--{part}", action="store_true", help="this one; all, unless some are named")
    parser.add_argument("--rounds", type=int, default=3, help="of each figure; the medians count")
    parser.add_argument("--inside", choices=parts, help=argparse.SUPPRESS)
    args = parser.parse_args()
    session = open_session(os.environ)
    plan = session.plan(session.resolve(args.profile))
    if args.inside is not None:
        result: dict[str, Any] = {"rounds": args.rounds}
        try:
            parts[args.inside](engine(session, plan, args.inside), result)
        finally:
            args.out.write_text(json.dumps(result))
        return
    whole: dict[str, Any] = {"host": host(), **machine(session), "profile": args.profile}
    failed = []
    for part in [name for name in parts if getattr(args, name)] or parts:
        own = args.out.with_suffix(f".{part}")
        own.unlink(missing_ok=True)
        words = [sys.executable, "-m", "harness.engine_bench", args.profile, str(own), "--inside", part]
        done = subprocess.run([*words, "--rounds", str(args.rounds)], env=environment(session, plan), check=False)
        if done.returncode:
            failed.append(part)
        if own.exists():
            whole[part] = json.loads(own.read_text())
            own.unlink()
        args.out.write_text(json.dumps(whole, indent=1) + "\n")
    sys.exit(f"harness.engine_bench: {' and '.join(failed)} did not end well" if failed else 0)


def built(session: Session, plan: Plan) -> command.Command:
    """The plan's command; nothing is at its socket."""
    admission = door.configure(plan, control=Path("/nowhere/engine.sock"))
    return command.build(plan, admission, cache=session.cache, user_environment=session.environment)


def environment(session: Session, plan: Plan) -> dict[str, str]:
    """Of the engine's process; without the gate, since `resume` is to differ from the plan."""
    env = {name: value for name, value in built(session, plan).env.items() if name != GATE_VARIABLE}
    # The engine's own caches lie elsewhere; registry and weights are those of this session.
    ours = {"SLIMSERVE_CACHE": str(session.cache), "SLIMSERVE_PROFILES": str(session.registry.folder)}
    return {**env, **IN_PROCESS, **ours}


def engine(session: Session, plan: Plan, part: str) -> Asked:
    """The plan's engine in this process; for `resume`, with a small cache and the engine's own offload."""
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs.from_cli_args(parsed(built(session, plan)))
    arguments.disable_log_stats = True
    if part == "resume":
        arguments.kv_cache_memory_bytes, arguments.kv_transfer_config = POOL_BYTES, _offload()
        arguments.max_num_seqs = 8
    llm = LLM.from_engine_args(arguments)

    def asked(prompts: list[list[int]], tokens: int) -> tuple[float, list[int]]:
        sampling = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        answers = llm.generate([{"prompt_token_ids": one} for one in prompts], sampling, use_tqdm=False)
        return time.perf_counter() - begun, [answer.num_cached_tokens or 0 for answer in answers]

    return asked


def parsed(asked: command.Command) -> argparse.Namespace:
    """A command as the engine reads it."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    words = list(asked.argv[asked.argv.index(command.ENTRY) + 1 :])
    namespace: argparse.Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    return namespace


def _offload() -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(**OFFLOAD)


def decode(asked: Asked, result: dict[str, Any]) -> None:
    """A step of each batch: from outside, on the device, and what it is made of."""
    from torch.profiler import ProfilerActivity, profile

    rng = random.Random(0)
    common = rng.choices(_TOKENS, k=CONTEXT_TOKENS - 8)

    def prompts(count: int) -> list[list[int]]:
        return [common + rng.choices(_TOKENS, k=8) for _ in range(count)]

    result["context_tokens"] = CONTEXT_TOKENS
    result["batches"] = {}
    for count in BATCHES:
        asked(prompts(count), 8)  # the common part is in the cache, and the kernels are compiled
        steps = []
        for _ in range(result["rounds"]):
            short, _ = asked(prompts(count), 8)
            long, _ = asked(prompts(count), 8 + STEPS)
            steps.append((long - short) / STEPS * 1e3)
        short_kernels: Kernels = {}
        long_kernels: Kernels = {}
        for kernels, tokens in ((short_kernels, 8), (long_kernels, 8 + PROFILED_TOKENS)):
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                asked(prompts(count), tokens)
            kernels.update(
                {
                    event.key: (event.self_device_time_total, event.count)
                    for event in profiled.key_averages()
                    if event.self_device_time_total > 0
                }
            )
        result["batches"][str(count)] = {
            "step_ms": round(statistics.median(steps), 3),
            "step_ms_samples": [round(step, 3) for step in steps],
            **made_of(short_kernels, long_kernels),
        }
        print(f"decode {count}: {json.dumps(result['batches'][str(count)])[:300]}", flush=True)


def made_of(short: Kernels, long: Kernels) -> dict[str, Any]:
    """The kernels of one step, from an answer and a longer one, so that what is not decoding cancels out.

    Args:
        short: of an answer of a few tokens.
        long: of one that is `PROFILED_TOKENS` longer.
    """
    table: list[tuple[float, float, str]] = []
    for name, (micros, calls) in long.items():
        before_micros, before_calls = short.get(name, (0.0, 0))
        if calls > before_calls:
            more = (micros - before_micros) / PROFILED_TOKENS, (calls - before_calls) / PROFILED_TOKENS
            table.append((*more, name[:120]))
    table.sort(reverse=True)
    return {
        "device_ms": round(sum(micros for micros, _, _ in table) / 1e3, 3),
        "kernels_a_step": round(sum(calls for _, calls, _ in table), 1),
        "kernels": [
            {"kernel": name, "us": round(micros, 2), "calls": round(calls, 2)}
            for micros, calls, name in table[:KERNELS]
        ],
    }


def resume(asked: Asked, result: dict[str, Any]) -> None:
    """Seconds to the 16th token of a long prompt: cold, on a hit on the card, after eviction; and what was found."""
    rng = random.Random(0)
    result |= {"prompt_tokens": RESUMED_TOKENS, "pool_bytes": POOL_BYTES, "tier_bytes": TIER_BYTES}
    for size in (2_000, RESUMED_TOKENS):  # kernels are compiled for what comes
        asked([rng.choices(_TOKENS, k=size)], 16)
    kinds: dict[str, list[tuple[float, int]]] = {"cold": [], "found": [], "evicted": []}
    for _ in range(result["rounds"]):
        prompt = rng.choices(_TOKENS, k=RESUMED_TOKENS)
        for kind, seen in kinds.items():
            if kind == "evicted":
                for _ in range(CHURN):
                    asked([rng.choices(_TOKENS, k=CHURN_TOKENS)], 16)
            seconds, found = asked([prompt], 16)
            seen.append((round(seconds, 4), found[0]))
            print(f"resume {kind}: {seconds:.3f} s, {found[0]} tokens found", flush=True)
    for kind, seen in kinds.items():
        result[kind] = {
            "seconds": round(statistics.median(seconds for seconds, _ in seen), 4),
            "seconds_samples": [seconds for seconds, _ in seen],
            "found_tokens": [found for _, found in seen],
        }


if __name__ == "__main__":
    main()
