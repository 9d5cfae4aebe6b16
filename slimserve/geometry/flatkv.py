"""Packing of a two-level cache (FlatKV): equal slabs, each filled with small pages of one group.

Not what the pinned engine does: the engine makes attention blocks as large as a state (caches.py). Here a slab holds
either `attention_pages` pages of `page_tokens` tokens, or `state_pages` states, and K and V have a plane each.

Source: TokenSpeed, docs/design/cache-concepts.md and the Qwen recipe; semantics H.1 and H.2.
"""

from __future__ import annotations

import math

from slimserve.errors import Finding, Refused
from slimserve.geometry.caches import conv_state_bytes, kv_bytes_a_token, recurrent_state_bytes
from slimserve.geometry.layout import Layout, ceil_div
from slimserve.geometry.reading import check_layout, shape_of
from slimserve.model import Model
from slimserve.records import dataclass

_PLANES = 2  # K beside the recurrent state, V beside the convolution's


@dataclass(frozen=True)
class Packing:
    """How pages fill a slab.

    Args:
        attention_pages: pages of K and V in a slab, of each attention layer.
        state_pages: states in a slab, of each Gated DeltaNet layer of one group.
        slab_bytes: of all layers and both planes.
        state_bytes: of a slab that states fill; the rest is dead space.
    """

    attention_pages: int
    state_pages: int
    slab_bytes: int
    state_bytes: int


def packing(model: Model, layout: Layout, page_tokens: int = 128) -> Packing:
    """The packing factors of a hybrid model: pages and states share a plane exactly when both fill it.

    Args:
        model: with linear attention.
        layout: how it is run; without speculative rows, which FlatKV replays instead of storing.
        page_tokens: of an attention page (128 in the Qwen recipe).

    Raises:
        RegistryError: the geometry is incomplete or absurd.
        Refused: the model has no states, or the layout does not divide it.
    """
    shape = shape_of(model)
    check_layout(shape, layout)
    if shape.linear is None:
        why = "there is one kind of page, and nothing to pack beside it"
        raise Refused(Finding(f"{model.id} has no recurrent states", why, "use a hybrid model"))
    key_page = page_tokens * kv_bytes_a_token(shape.attention, layout) // _PLANES
    state = recurrent_state_bytes(shape.linear, layout)
    plane = math.lcm(key_page, state)
    attending = shape.attention.layers + (shape.drafter_layers if layout.drafter else 0)
    # Linear layers are split by their place between two attention layers: a group has one of each period.
    grouped = ceil_div(shape.linear.layers, shape.interval - 1)
    states = plane // state
    filled = grouped * states * (state + conv_state_bytes(shape.linear, layout))
    return Packing(plane // key_page, states, attending * _PLANES * plane, filled)
