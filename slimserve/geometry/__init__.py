"""What a model takes on one rank: weights, caches, blocks a request. Pure arithmetic over a model file and a layout.

    Model --> reading.shape_of --> Shape     every needed number, or an error that names the field
    Shape x Layout x Checkpoint --> weights.weights --> Weights     parts in bytes, on the device or on the host
    ... x tokens a step --> buffers.buffers --> Parts     what is allocated beside the weights
    Shape x Layout --> caches.caches --> Caches     groups, block size, slab bytes, blocks and slots
    Shape x Layout --> flatkv.packing --> Packing     the same caches in a two-level layout, to compare with

Bytes are whole numbers and of one rank, everywhere. The figures are those of the pinned engine, vllm 0.32.0.
"""

from __future__ import annotations

from slimserve.geometry.buffers import buffers
from slimserve.geometry.caches import Caches, Group, caches
from slimserve.geometry.flatkv import Packing, packing
from slimserve.geometry.layout import Layout
from slimserve.geometry.reading import check_layout, shape_of
from slimserve.geometry.shape import Shape
from slimserve.geometry.weights import Part, Weights, weights

__all__ = [
    "Caches",
    "Group",
    "Layout",
    "Packing",
    "Part",
    "Shape",
    "Weights",
    "buffers",
    "caches",
    "check_layout",
    "packing",
    "shape_of",
    "weights",
]
