"""Enumerations that speak to both: a word for programs, a sentence for people."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Worded(StrEnum):
    """Base of an enumeration whose members are written `NAME = "word", "sentence"`; the word is the value."""

    text: str
    """the sentence"""

    def __new__(cls, value: str, text: str) -> Self:
        """A member with both."""
        member = str.__new__(cls, value)
        member._value_, member.text = value, text
        return member
