"""A document and a shape give an object, or every problem with file, line and key path."""

from __future__ import annotations

from typing import TypeVar

from slimserve.errors import Finding, RegistryError
from slimserve.shapes import ShapeError, build, called, expected
from slimserve.yaml_source import Document

T = TypeVar("T")


def validate(shape: type[T], document: Document) -> T:
    """Check `document` against `shape`.

    Args:
        shape: the dataclass that the file must have the keys of.
        document: what `read_document` returned.

    Raises:
        RegistryError: with all problems, each with file, line, key path and the valid set where there is one.
    """
    if not isinstance(document.data, dict):
        holds, wanted = f"holds {called(document.data)}", f"give {expected(shape)}"
        raise RegistryError(Finding(holds, "keys and values are expected", wanted, document.where()))
    try:
        return build(shape, document.data)
    except ShapeError as error:
        raise RegistryError(
            *(Finding(problem.what, problem.why, problem.do, document.where(problem.loc)) for problem in error.problems)
        ) from None
