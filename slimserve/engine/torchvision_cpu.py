"""Makes the package index's torchvision importable beside a CPU torch.

That torchvision is built for CUDA. Beside a torch without CUDA its extension does not load, so the schemas of its
C++ operators do not exist, and its Python half, which registers shape functions for two of them, fails to import.
Models need its image transforms, which are Python: declaring the two schemas is enough.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_kept: list[Any] = []


def declare() -> None:
    """Declare the schemas of `torchvision::nms` and `torchvision::qnms` where torch has no CUDA and they are missing."""
    import torch

    if torch.version.cuda is not None:
        return  # the extension fits this torch and brings its own
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in SCHEMAS:
        if not hasattr(torch.ops.torchvision, schema.partition("(")[0]):
            library.define(schema)
    _kept.append(library)  # torch takes the schemas back when their library is collected


class _Loader(Loader):
    """torchvision's own loader, with the declaration ahead of it."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        declare()
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)


class _Finder(MetaPathFinder):
    """Hands out torchvision with our loader. Only an import runs it: looking for the spec must not import torch."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torchvision":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def install() -> None:
    """Have the schemas declared when torchvision is first imported. Costs nothing until then; twice is as once."""
    if "torchvision" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
