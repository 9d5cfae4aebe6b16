"""Runs something of ours just before or just after a module of somebody else's is first imported.

The place for what a module needs of the process that imports it, where importing it ourselves would cost seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

Hook = Callable[[], None]


class _Loader(Loader):
    """A module's own loader with the hooks around it."""

    def __init__(self, inner: Loader, before: Hook | None, after: Hook | None) -> None:
        self._inner, self._before, self._after = inner, before, after

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if self._before is not None:
            self._before()
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner  # whoever looks for the module's resources asks its loader
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        if self._after is not None:
            self._after()


class _Finder(MetaPathFinder):
    """Hands out one module with hooks. Only an import runs them: looking for the spec does not."""

    def __init__(self, name: str, before: Hook | None, after: Hook | None) -> None:
        self.name, self._before, self._after = name, before, after

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._before, self._after)
        return spec


def install(name: str, *, before: Hook | None = None, after: Hook | None = None) -> None:
    """Have `before` and `after` run around the first import of `name`. A second call for a name does nothing.

    Raises:
        RuntimeError: the module is imported already.
    """
    if any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
        return
    if name in sys.modules:
        raise RuntimeError(f"{name} is imported already: a hook around its import would never run")
    sys.meta_path.insert(0, _Finder(name, before, after))
