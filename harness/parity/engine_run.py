"""What the engine says of a checkpoint, with our operations in its seats, in a process of its own.

python -m harness.parity.engine_run JOB OUT
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_PLUGINS": "",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def main(job: str, out: str) -> None:
    """Do what a job asks for, and write the log-probabilities.

    Args:
        job: JSON file: `checkpoint`, `engine` (arguments), and `asks`, a list of lists that are asked together; each of
            `tokens`; `said`: how many to say, 0 for what the engine makes of the tokens themselves; and `behind`:
            [n, m], the tokens and what was said in the m-th of the n-th list.
        out: npz to write: `N-M` is of the M-th of the N-th list: [tokens or said, V] fp32; `N-M-tokens` what was said,
            `N-M-cached` tokens that were found in the prefix cache; `preempted` how often a request had to make room.
    """
    os.environ.update(_SETTINGS)
    from slimserve.engine import torchvision_cpu

    torchvision_cpu.install()
    from quixicore import engine

    engine.take(engine.SEATS, _misfit)
    import numpy
    from vllm import LLM, SamplingParams

    given = json.loads(Path(job).read_text())
    llm = LLM(
        model=given["checkpoint"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        language_model_only=True,
        dtype="bfloat16",
        enable_prefix_caching=True,
        engram_config={"cpu_offload": False},
        max_logprobs=-1,
        disable_log_stats=False,
        **given["engine"],
    )
    vocab = llm.llm_engine.model_config.get_vocab_size()
    found: dict[str, Any] = {}
    for number, asks in enumerate(given["asks"]):
        wishes = [
            SamplingParams(
                temperature=0,
                max_tokens=max(ask["said"], 1),
                detokenize=False,
                ignore_eos=True,
                logprobs=-1 if ask["said"] else None,
                prompt_logprobs=None if ask["said"] else -1,
            )
            for ask in asks
        ]
        behind = [found["{}-{}-tokens".format(*ask["behind"])].tolist() if "behind" in ask else [] for ask in asks]
        prompts = [{"prompt_token_ids": ask["tokens"] + more} for ask, more in zip(asks, behind, strict=True)]
        for each, (ask, answer) in enumerate(zip(asks, llm.generate(prompts, wishes, use_tqdm=False), strict=True)):
            told = answer.outputs[0].logprobs if ask["said"] else answer.prompt_logprobs[1:]
            found[f"{number}-{each}"] = numpy.array([[row[token].logprob for token in range(vocab)] for row in told])
            found[f"{number}-{each}-tokens"] = numpy.array(answer.outputs[0].token_ids)
            found[f"{number}-{each}-cached"] = numpy.array(answer.num_cached_tokens or 0)
    counters = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    numpy.savez(out, preempted=counters["vllm:num_preemptions"], **found)


def _misfit(misfit: Exception) -> None:
    sys.exit(
        f"{misfit}\n  why: an operation of ours fits one source of the engine\n  do:  install the engine that is pinned"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
