"""The engine with our references in its seats says what transformers says, within transformers' own rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.parity.comparison import CIRCUMSTANCES, compare


# The others differ in widths, which are tested by operation; harness/results has all of them.
@pytest.mark.parametrize("variant", ["small", "routed"])
def test_the_engine_is_true_to_the_definition_and_to_itself(variant: str, tmp_path: Path) -> None:
    circumstances = tuple(CIRCUMSTANCES) if variant == "small" else ()
    lines = list(compare(variant, tmp_path, circumstances))
    assert len(lines) == (9 if circumstances else 5)
    assert [line for line in lines if line.fault] == []
