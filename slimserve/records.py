"""Frozen dataclasses without generated code.

`dataclasses` writes and compiles the text of six methods for each class, which for the hundred classes of the registry
and its plans takes 40% of the time of a listing. Here all classes share the six, which look up the fields instead.
Type checkers take `dataclass` for the standard one, and to `fields`, `replace` and `asdict` its classes are the same;
but there is `frozen` and `kw_only` and no other switch, fields have no `init`, `hash` or `InitVar`, and a class with
an `__eq__` of its own has a `__hash__` of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(*, frozen: bool, kw_only: bool = False) -> Callable[[type], type]:
        """A decorator as `dataclasses.dataclass` is, for classes that are frozen."""
        assert frozen

        def decorate(cls: type) -> type:
            made = dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only)(cls)
            assert all(field.init and field.hash is None for field in dataclasses.fields(made)), cls
            assert ("__eq__" in cls.__dict__) == (cls.__dict__.get("__hash__") is not None), cls
            for method in _METHODS:
                if method.__name__ not in cls.__dict__:
                    setattr(made, method.__name__, method)
            return made

        return decorate


class _Layout(NamedTuple):
    """The fields of a class, as its methods need them."""

    names: tuple[str, ...]
    positional: tuple[str, ...]
    compared: Callable[[Any], Any]
    defaults: dict[str, Any]
    factories: dict[str, Callable[[], Any]]


def _layout(cls: Any) -> _Layout:
    found: _Layout | None = cls.__dict__.get("__layout__")
    if found is None:
        fields = dataclasses.fields(cls)
        missing = dataclasses.MISSING
        found = _Layout(
            tuple(field.name for field in fields),
            tuple(field.name for field in fields if not field.kw_only),
            attrgetter(*[field.name for field in fields if field.compare] or ["__class__"]),
            {field.name: field.default for field in fields if field.default is not missing},
            {field.name: field.default_factory for field in fields if field.default_factory is not missing},
        )
        cls.__layout__ = found
    return found


def __init__(self: Any, *args: Any, **given: Any) -> None:
    cls = type(self)
    layout = _layout(cls)
    if len(args) > len(layout.positional):
        raise TypeError(f"{cls.__qualname__}() takes {len(layout.positional)} positional arguments, not {len(args)}")
    values = dict(zip(layout.positional, args, strict=False))
    for name in given:
        if name in values or name not in layout.names:
            how = "twice" if name in values else "and has no such field"
            raise TypeError(f"{cls.__qualname__}() was given {name!r} {how}")
    values.update(given)
    for name in layout.names:
        if name not in values:
            if name in layout.defaults:
                values[name] = layout.defaults[name]
            elif name in layout.factories:
                values[name] = layout.factories[name]()
            else:
                raise TypeError(f"{cls.__qualname__}() was not given {name!r}")
    self.__dict__.update(values)
    if after := getattr(self, "__post_init__", None):
        after()


def __repr__(self: Any) -> str:
    shown = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def __eq__(self: Any, other: object) -> bool:
    if type(self) is not type(other):
        return NotImplemented
    compared = _layout(type(self)).compared
    return bool(compared(self) == compared(other))


def __hash__(self: Any) -> int:
    return hash(_layout(type(self)).compared(self))


def __setattr__(self: Any, name: str, value: Any) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def __delattr__(self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


_METHODS = (__init__, __repr__, __eq__, __hash__, __setattr__, __delattr__)
