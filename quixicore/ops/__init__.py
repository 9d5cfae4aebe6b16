"""The operations of the models, a folder each: `reference.py` says in plain torch what is right."""

from __future__ import annotations

from typing import Literal

Rounding = Literal["hf", "fused"]
"""Where values are rounded to the type of the activations: `hf` after each operation, as transformers computes eagerly;
`fused` once at the end of what the engine's kernels do in one launch, in fp32 until then."""
