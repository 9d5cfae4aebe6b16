"""Makes the package index's torchvision importable beside a CPU torch.

That torchvision is built for CUDA. Beside a torch without CUDA its extension does not load, so the schemas of its
C++ operators do not exist, and its Python half, which registers shape functions for two of them, fails to import.
Models need its image transforms, which are Python: declaring the two schemas is enough.
"""

from __future__ import annotations

from typing import Any

from slimserve.engine import import_hook

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_kept: list[Any] = []


def declare() -> None:
    """Declare the schemas of torchvision's `nms` and `qnms` where torch has no CUDA and they are missing."""
    import torch

    if torch.version.cuda is not None:
        return  # the extension fits this torch and brings its own
    library: Any = torch.library
    fragment = library.Library("torchvision", "FRAGMENT")
    for schema in SCHEMAS:
        if not hasattr(torch.ops.torchvision, schema.partition("(")[0]):
            fragment.define(schema)
    _kept.append(fragment)  # torch takes the schemas back when it is collected


def install() -> None:
    """Have the schemas declared when torchvision is first imported. Costs nothing until then; twice is as once.

    Raises:
        RuntimeError: torchvision is imported already.
    """
    import_hook.install("torchvision", before=declare)
