"""The pinned engine on the CPU, started for its own word on its cache.

planner_driver.py CASES ANSWERS     two JSON files: a list of cases, read; a list of answers, written
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> None:
    from slimserve.engine import torchvision_cpu

    torchvision_cpu.install()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's objects are then at hand
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()  # a class is looked at here, not by one process for each
    cases, answers = map(Path, sys.argv[1:])
    answers.write_text(json.dumps([answer(case) for case in json.loads(cases.read_text())]))


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """Start an engine, and ask for the layout of its cache and for the memory that it allocated."""
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        if case["config"] is not None:
            (Path(folder) / "config.json").write_text(json.dumps(case["config"]))
        engine = LLM(
            model=case["folder"] or folder,
            skip_tokenizer_init=True,
            load_format="dummy" if case["config"] is not None else "auto",
            enforce_eager=True,
            disable_log_stats=True,
            **case["settings"],
        )
        core = engine.llm_engine.engine_core.engine_core
        laid = core.scheduler.kv_cache_config
        allocated = engine.collective_rpc(allocated_bytes)
        engine.llm_engine.engine_core.shutdown()  # its worker, before the next one starts
    return {
        "blocks": laid.num_blocks,
        "allocated": allocated[0],
        "groups": [
            {"layers": len(group.layer_names), "block_tokens": group.kv_cache_spec.block_size}
            for group in laid.kv_cache_groups
        ],
    }


def allocated_bytes(worker: Any) -> int:
    """Bytes of the tensors that the worker's cache lies in, each counted once."""
    tensors: list[Any] = []
    for cache in worker.model_runner.kv_caches:
        tensors += cache if isinstance(cache, list | tuple) else [cache]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


if __name__ == "__main__":
    main()
