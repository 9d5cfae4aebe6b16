"""Whether all weights are numbers: one that is NaN or infinite makes noise of every answer that it reaches.

A model is looked at when it has been read and before its kernels get it: they repack weights, on a CPU every linear
layer into what nobody can read any more. What is found is told later, of those modules alone that are part of the
rank's models when all are loaded: a drafter gives up embeddings of its own, which nothing was read into, for the
target's.

Parameters are looked at. Buffers are not: the engine computes them, and a mask of -inf is right. Nor are integers,
which are packed values of which each is legal; the scales beside them are parameters of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

NAMED = 4
"""tensors that are named; of the others the number is told"""
_PIECE_BYTES = 256 << 20
# Of each type of one byte the first code without a sign that is no finite number: from there on, none is.
_NOT_FINITE = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7C, "float8_e8m0fnu": 0xFF}
# Module of the engine -> its own parameters that were looked at, each with how many of its values are not finite.
_seen: weakref.WeakKeyDictionary[Any, dict[str, tuple[int, int]]] = weakref.WeakKeyDictionary()


def see(model: Any) -> None:
    """Look at every parameter of `model`, a module of torch, on the device where most of it lies."""
    device = next((one.device for one in model.parameters() if one.device.type != "cpu"), None)
    rows, tied = _rows(model), set()
    for module in model.modules():
        if module in _seen:  # of a model that was loaded before, and is packed by now
            continue
        found = _seen.setdefault(module, {})
        for name, weight in module.named_parameters(recurse=False):
            if weight.dtype.is_floating_point and id(weight) not in tied:
                tied.add(id(weight))
                values = weight.data[: rows[module]] if module in rows and name == "weight" else weight.data
                found[name] = (sum(_wrong(piece) for piece in _pieces(values, device)), values.numel())


def tensors(models: Iterable[Any]) -> int:
    """How many tensors of `models` were looked at.

    Raises:
        LookupError: one of the models was not.
    """
    return sum(1 for _ in _found(models))


def wrong(models: Iterable[Any]) -> list[str]:
    """The first tensors of `models` with values that are not finite, and how many others there are.

    Raises:
        LookupError: one of the models was not looked at.
    """
    told = [f"{name}: {count} of {size} values" for name, count, size in _found(models) if count]
    return told[:NAMED] + ([f"{len(told) - NAMED} more tensors"] if len(told) > NAMED else [])


def _found(models: Iterable[Any]) -> Iterator[tuple[str, int, int]]:
    """Name, values that are not finite, and all values, of each tensor that was looked at."""
    told = set()
    for model in models:
        for place, module in model.named_modules():
            if not place and module not in _seen:
                raise LookupError(f"{type(module).__name__} was loaded in another way, which nobody has looked at")
            if module not in told:
                told.add(module)
                for name, (count, size) in _seen.get(module, {}).items():
                    yield f"{place}.{name}" if place else name, count, size


def _rows(model: Any) -> dict[Any, int]:
    """Modules whose weight ends with rows of padding, which nothing was read into and nothing reads: those before."""
    found = {}
    for module in model.modules():
        if (shard := getattr(module, "shard_indices", None)) is not None:
            found[module] = shard.num_org_elements
        # vllm 0.32, models/qwen4_exp/nvidia/hyperconnection.py
        if getattr(module, "pad_size", 0) and hasattr(module, "input_mix_weight_down_block_inject"):
            found[module.input_mix_weight_down_block_inject] = module.lora_rank + module.hc_count
    return found


def _pieces(values: Any, device: Any) -> Iterator[Any]:
    """All values, a piece at a time: what the host holds for a card is looked at by the card."""
    for piece in values.flatten().split(_PIECE_BYTES // values.element_size()):
        yield piece if device is None else piece.to(device)


def _wrong(values: Any) -> int:
    """How many of `values` are not finite; nothing is copied to find out that all are."""
    import torch

    if values.numel() == 0:
        return 0
    first = _NOT_FINITE.get(str(values.dtype).removeprefix("torch."))
    if first is None:
        low, high = torch.aminmax(values)  # both NaN where any value is
        whole = bool(torch.isfinite(low) & torch.isfinite(high))
        return 0 if whole else int((~torch.isfinite(values)).sum())
    codes = values.view(torch.uint8)
    # With a sign these codes are the greatest of all, and without one the greatest of those that are positive as int8.
    if int(codes.view(torch.int8).amax()) < first and int(codes.amax()) < first | 0x80:
        return 0
    return int(((codes & 0x7F if first < 0x80 else codes) >= first).sum())
