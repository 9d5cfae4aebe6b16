"""Frozen dataclasses without generated code.

`dataclasses` writes and compiles the text of six methods for each class, which for the hundred classes of the registry
and its plans takes 40% of the time of a listing. Here all classes share the six, which look up the fields instead. To
type checkers `dataclass` is the standard one, and so it is to `fields`, `replace` and `asdict`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(*, frozen: bool, kw_only: bool = False) -> Callable[[type], type]:
        """A decorator as `dataclasses.dataclass` is, for classes that are frozen."""
        assert frozen

        def decorate(cls: type) -> type:
            made = dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only)(cls)
            for method in _METHODS:
                if method.__name__ not in cls.__dict__:
                    setattr(made, method.__name__, method)
            return made

        return decorate


class _Layout(NamedTuple):
    """The fields of a class, as its methods need them."""

    names: tuple[str, ...]
    positional: tuple[str, ...]
    compared: tuple[str, ...]
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
            tuple(field.name for field in fields if field.compare),
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


def _compared(one: Any) -> tuple[Any, ...]:
    return tuple([getattr(one, name) for name in _layout(type(one)).compared])


def __eq__(self: Any, other: object) -> bool:
    return _compared(self) == _compared(other) if type(self) is type(other) else NotImplemented


def __hash__(self: Any) -> int:
    return hash(_compared(self))


def __setattr__(self: Any, name: str, value: Any) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def __delattr__(self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


_METHODS = (__init__, __repr__, __eq__, __hash__, __setattr__, __delattr__)
