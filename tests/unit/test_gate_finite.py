"""Weights that are no numbers, in real tensors of every type that the engine loads."""

from __future__ import annotations

import gc
import math
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from slimserve.engine.gate import finite, observed  # noqa: E402

WIDE = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
NARROW = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]
# Shorter and longer than a vector of the processor, and with a rest behind the last one.
SIZES = [1, 3, 64, 1003]


def parameter(values: Any) -> Any:
    return torch.nn.Parameter(values, requires_grad=False)


class Layer(torch.nn.Module):  # type: ignore[misc]
    """A module with the parameters that it is given."""

    def __init__(self, **weights: Any) -> None:
        super().__init__()
        for name, values in weights.items():
            self.register_parameter(name, parameter(values))


class Model(torch.nn.Module):  # type: ignore[misc]
    """A module with the modules that it is given."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def told(*models: Any) -> list[str]:
    for model in models:
        finite.see(model)
    return finite.wrong(models)


def values(size: int, dtype: Any) -> Any:
    return torch.linspace(-3, 3, size).to(dtype)


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_value_is_found_wherever_it_is(dtype: Any, size: int, bad: float) -> None:
    for place in {0, size // 2, size - 1}:
        weight = values(size, dtype)
        weight[place] = bad
        assert told(Layer(weight=weight)) == [f"weight: 1 of {size} values"]


@pytest.mark.parametrize("dtype", [*WIDE, *NARROW], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_the_greatest_numbers_are_numbers(dtype: Any, size: int) -> None:
    limits = torch.finfo(dtype)
    for extreme in (limits.max, limits.min, limits.tiny):
        assert told(Layer(weight=torch.full((size,), extreme, dtype=torch.float64).to(dtype))) == []


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_code_of_a_byte_is_told_as_torch_tells_it(dtype: Any) -> None:
    ordinary = torch.tensor([0x38], dtype=torch.uint8)
    for code in range(256):
        codes = ordinary.repeat(67)
        codes[40] = code
        number = bool(torch.isfinite(codes.view(dtype).to(torch.float32)).all())
        assert told(Layer(weight=codes.view(dtype))) == ([] if number else ["weight: 1 of 67 values"]), code
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    count = int((~torch.isfinite(every.to(torch.float32))).sum())
    assert told(Layer(weight=every)) == [f"weight: {count} of 256 values"]


def test_packed_weights_have_nothing_to_look_for_and_their_scales_do() -> None:
    packed = torch.full((8, 8), 0xFF, dtype=torch.uint8)
    layer = Layer(weight=packed, qweight=torch.full((4,), -1, dtype=torch.int32), weight_scale=torch.ones(4, 2))
    assert told(layer) == []
    assert finite.tensors([layer]) == 1
    layer = Layer(weight=packed, weight_scale=torch.tensor([1.0, math.nan, math.inf]))
    assert told(layer) == ["weight_scale: 2 of 3 values"]


def test_what_has_no_values_and_what_lies_crosswise() -> None:
    crosswise = torch.zeros(3, 5)
    crosswise[2, 1] = math.nan
    layer = Layer(empty=torch.empty(0, dtype=torch.bfloat16), single=torch.tensor(math.inf), weight=crosswise.t())
    assert told(layer) == ["single: 1 of 1 values", "weight: 1 of 15 values"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_a_large_tensor_is_looked_at_in_pieces(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite, "_PIECE_BYTES", 16)
    weight = values(101, torch.float32)
    weight[[0, 50, 100]] = math.nan
    assert told(Layer(weight=weight.to(dtype))) == ["weight: 3 of 101 values"]


def test_the_first_are_named_and_the_others_counted() -> None:
    bad = torch.tensor([math.nan])
    model = Model(**{f"layer{n}": Layer(weight=bad, bias=torch.zeros(1)) for n in range(finite.NAMED + 2)})
    *named, rest = told(model)
    assert named == [f"layer{n}.weight: 1 of 1 values" for n in range(finite.NAMED)]
    assert rest == "2 more tensors"
    assert finite.tensors([model]) == 2 * (finite.NAMED + 2)


def test_a_buffer_may_hold_a_mask() -> None:
    layer = Layer(weight=torch.ones(2))
    layer.register_buffer("mask", torch.full((4, 4), -math.inf))
    layer.register_buffer("cache", torch.full((4, 4), math.nan), persistent=False)
    assert told(layer) == []


def test_tied_weights_are_looked_at_once() -> None:
    embedding, head = Layer(weight=torch.tensor([math.nan])), Layer()
    head.weight = embedding.weight
    model = Model(embed_tokens=embedding, lm_head=head)
    assert told(model) == ["embed_tokens.weight: 1 of 1 values"]
    assert finite.tensors([model]) == 1


def test_rows_of_padding_are_not_read_by_anybody() -> None:
    """The engine makes them without filling them."""
    padded = torch.ones(64, 2)
    padded[60:] = math.nan
    table = Layer(weight=padded)
    table.shard_indices = SimpleNamespace(num_org_elements=60)
    residual = Model(input_mix_weight_down_block_inject=Layer(weight=padded))
    residual.pad_size, residual.lora_rank, residual.hc_count = 4, 56, 4
    assert told(Model(table=table, residual=residual)) == []
    padded[59] = math.inf
    table, residual.input_mix_weight_down_block_inject = Layer(weight=padded), Layer(weight=padded)
    table.shard_indices = SimpleNamespace(num_org_elements=60)
    assert told(Model(table=table), residual) == [
        "table.weight: 2 of 120 values",
        "input_mix_weight_down_block_inject.weight: 2 of 120 values",
    ]


def test_what_is_packed_or_empty_by_now_is_still_known() -> None:
    layer = Layer(weight=torch.tensor([1.0, math.nan]))
    model = Model(layer=layer)
    finite.see(model)
    layer.weight = parameter(torch.empty(0))
    assert finite.wrong([model]) == ["layer.weight: 1 of 2 values"]
    drafter = Model(theirs=layer, own=Layer(weight=torch.ones(1)))
    assert told(drafter) == ["theirs.weight: 1 of 2 values"]
    assert finite.tensors([model, drafter]) == 2


def test_a_drafter_counts_with_what_it_has_in_the_end() -> None:
    """Its own embedding, which nothing was read into, makes room for the target's."""
    target = Model(embed_tokens=Layer(weight=torch.ones(2)), norm=Layer(weight=torch.ones(2)))
    drafter = Model(embed_tokens=Layer(weight=torch.tensor([math.nan])), fc=Layer(weight=torch.tensor([math.inf])))
    for model in (target, drafter):
        finite.see(model)
    drafter.embed_tokens = target.embed_tokens
    assert finite.wrong([target, drafter]) == ["fc.weight: 1 of 1 values"]
    assert finite.tensors([target, drafter]) == 3


def test_a_model_that_nobody_has_looked_at_has_not_passed() -> None:
    for look in (finite.wrong, finite.tensors):
        with pytest.raises(LookupError, match="Layer was loaded in another way"):
            look([Layer(weight=torch.ones(1))])


def test_nothing_is_kept_alive_for_it() -> None:
    layer = Layer(weight=torch.ones(1))
    finite.see(layer)
    gone = weakref.ref(layer)
    del layer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("name", ["speculator", "drafter"])
def test_a_rank_tells_of_all_of_its_models(name: str) -> None:
    target, drafter = Layer(weight=torch.ones(2)), Layer(weight=torch.tensor([math.nan]))
    for model in (target, drafter):
        observed.weights(model)
    runner = SimpleNamespace(model=target, **{name: SimpleNamespace(model=drafter)})
    parallel = SimpleNamespace(data_parallel_index=1, world_size=2)
    worker = SimpleNamespace(model_runner=runner, rank=3, vllm_config=SimpleNamespace(parallel_config=parallel))
    expected = {"not_finite_weights": ["weight: 1 of 1 values"], "weight_tensors": 2}
    assert observed.loaded(worker) == ("rank-1-1", expected, None)
    runner.model = Layer(weight=torch.ones(1))
    unseen = observed.loaded(worker)[1]["not_finite_weights"]
    assert unseen.startswith("unreadable: LookupError: Layer was loaded in another way")
