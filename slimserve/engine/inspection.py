"""The process in which the engine inspects a model's class, tied to its parent and with torchvision importable.

Runs the engine's own `vllm.model_executor.models.registry` as its main module, which reads its order from stdin.
"""

from __future__ import annotations

import runpy

from slimserve.engine import entry, torchvision_cpu

if __name__ == "__main__":
    entry.tie_to_parent()
    torchvision_cpu.install()
    runpy.run_module("vllm.model_executor.models.registry", run_name="__main__", alter_sys=True)
