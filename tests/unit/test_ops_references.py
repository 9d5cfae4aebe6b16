"""The references of operations against their published vectors, against transformers, and against themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quixicore.ops.gated_delta import reference as delta
from quixicore.ops.gated_residual import reference as residual
from quixicore.ops.ngram import reference as ngram
from quixicore.ops.norm import reference as norm
from slimserve.engine import torchvision_cpu
from slimserve.geometry.ngram import head_sizes
from slimserve.geometry.shape import Ngram

BF16 = torch.bfloat16
END = 248_044


@pytest.fixture(scope="module")
def hf() -> Any:
    """The module of transformers in which the model is defined."""
    torchvision_cpu.install()
    return pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")


def noise(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


# n-grams


def flash_next_sizes() -> tuple[int, ...]:
    return head_sizes(
        Ngram(layer_ids=(1,), embed=2560, heads_per_ngram=8, base=20_000_000, divisor=128, kernel=4, size=3)
    )


def test_multipliers_of_flash_next() -> None:
    """Semantics D.1, recomputed there against the checkpoint's buffers."""
    assert ngram.multipliers(248_320, 3, seed=1234) == (23703573157769, 20109073645365, 8052911324071)


@pytest.mark.parametrize(
    ("before", "token", "rows"),
    [
        (
            (END, END),
            100,
            "5727835 21884476 43702108 66434789 84094509 104112171 134886528 157314943 "
            "162363667 189466439 200618315 232121522 258547276 266199001 289022207 305180972",
        ),
        (
            (5, 6),
            7,
            "9319853 32980418 54810932 61373850 95570932 100303321 137402047 146866965 "
            "160487518 192851935 200610520 228493582 254676383 260859079 296253588 313224935",
        ),
    ],
)
def test_ids_of_flash_next(before: tuple[int, int], token: int, rows: str) -> None:
    """Semantics D.2, two vectors."""
    past = ngram.history(torch.tensor([token]), torch.tensor(before), 3, END)
    factors = ngram.multipliers(248_320, 3, seed=1234)
    assert ngram.ids(past, factors, flash_next_sizes())[0].tolist() == [int(row) for row in rows.split()]


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ((1, 2, 3), (3, 2, 1)),
        ((1, END, 3), (3, END, END)),
        ((END, 2, 3), (3, 2, END)),
        ((1, 2, END), (END, 2, 1)),  # an end does not cut off its own past
        ((1, END, END), (END, END, END)),
    ],
)
def test_an_end_cuts_off_what_lies_behind_it(seen: tuple[int, ...], expected: tuple[int, ...]) -> None:
    past = ngram.history(torch.tensor(seen[2:]), torch.tensor(seen[:2]), 3, END)
    assert tuple(past[0].tolist()) == expected


@given(st.lists(st.sampled_from([3, 4, 5, END]), min_size=1, max_size=12), st.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_a_history_does_not_depend_on_where_the_text_is_cut(tokens: list[int], cut: int) -> None:
    whole, start = torch.tensor(tokens), torch.full((2,), END)
    cut = min(cut, len(tokens))
    first = ngram.history(whole[:cut], start, 3, END)
    rest = ngram.history(whole[cut:], torch.cat([start, whole[:cut]])[-2:], 3, END)
    assert torch.cat([first, rest]).tolist() == ngram.history(whole, start, 3, END).tolist()


def ngram_layer(hf: Any) -> Any:
    config = SimpleNamespace(
        hidden_size=16, hc_count=4, ple_embed_dim=16, ple_conv_kernel_size=4, ngram_size=3, heads_per_ngram=2,
        vocab_size=64, ngram_vocab_size_base=50, make_ngram_vocab_size_divisible_by=16, seed=7, eos_token_id=9,
        rms_norm_eps=1e-6,
    )  # fmt: skip
    torch.manual_seed(0)
    layer = hf.Qwen4ExpTextPLELayer(config, 0, 0).to(BF16)
    for weight in (layer.norm_key.weight, layer.norm_query.weight, layer.norm_conv.weight):
        torch.nn.init.normal_(weight, std=0.3)
    return layer


@torch.no_grad()
def test_the_n_gram_layer_is_that_of_transformers(hf: Any) -> None:
    layer, tokens = ngram_layer(hf), torch.tensor([3, 9, 4, 4, 60, 1, 9, 9, 2, 5, 6, 7, 8])
    stream = noise(len(tokens), 64, seed=1)
    expected = layer(stream[None], tokens[None], None)[0]
    past = ngram.history(tokens, torch.full((2,), 9), 3, 9)
    sizes = head_sizes(Ngram(layer_ids=(0,), embed=16, heads_per_ngram=2, base=50, divisor=16, kernel=4, size=3))
    rows = ngram.ids(past, ngram.multipliers(64, 3, seed=7), sizes)
    embedded = layer.ple_embedding.ngram_embedding.weight[rows].flatten(-2)
    keys, values = layer.key_proj(embedded), layer.value_proj(embedded)
    gated = ngram.gated_values(stream, keys, values, layer.norm_query.weight, layer.norm_key.weight)
    weights = {"norm": layer.norm_conv.weight, "weight": layer.conv1d.weight[:, 0], "streams": 4, "dilation": 3}
    found, window = ngram.with_context(gated, **weights)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
    first, between = ngram.with_context(gated[:5], **weights)
    second, after = ngram.with_context(gated[5:], window=between, **weights)
    assert torch.equal(torch.cat([first, second]), found)
    assert torch.equal(after, window)


# Norms


@torch.no_grad()
@pytest.mark.parametrize("groups", [1, 4])
def test_the_norm_is_that_of_transformers(hf: Any, groups: int) -> None:
    layer = hf.Qwen4ExpTextRMSNorm(64, group_size=64 // groups)
    torch.nn.init.normal_(layer.weight)
    x = noise(5, 64)
    assert torch.equal(norm.gemma_norm(x, layer.weight, groups=groups), layer(x))


@torch.no_grad()
@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
def test_the_gated_norm_is_that_of_transformers(hf: Any, activation: Literal["sigmoid", "silu"]) -> None:
    layer = hf.Qwen4ExpTextRMSNormGated(32, activation=activation).to(BF16)
    torch.nn.init.normal_(layer.weight)
    x, gate = noise(7, 32), noise(7, 32, seed=1)
    found = norm.gated_norm(x, layer.weight, gate, activation=activation, rounding="hf")
    assert torch.equal(found, layer(x, gate))
    exact = norm.gated_norm(x.double(), layer.weight.double(), gate.double(), activation=activation, rounding="fused")
    fused = norm.gated_norm(x, layer.weight, gate, activation=activation, rounding="fused")
    torch.testing.assert_close(fused.double(), exact.double(), rtol=4e-3, atol=2e-3)


# Gated residual


def mixer_of(layer: Any) -> residual.Mixer:
    return residual.Mixer(
        streams=layer.hc_count,
        norm=layer.hc_norm.weight,
        down=layer.input_mix_weight_down.weight,
        up=layer.input_mix_weight_up.weight,
        inject=layer.block_inject_weight.weight,
    )


@torch.no_grad()
def test_the_gated_residual_is_that_of_transformers(hf: Any) -> None:
    torch.manual_seed(0)
    layer = hf.Qwen4ExpTextGatedResidual(SimpleNamespace(hc_count=4, hidden_size=32, hc_lowrank=8, rms_norm_eps=1e-6))
    torch.nn.init.normal_(layer.hc_norm.weight, std=0.3)
    layer = layer.to(BF16)
    streams, output = noise(6, 128), noise(6, 32, seed=1)
    mixed, before, injection = (*layer(streams)[:2], layer(streams)[2])
    found, logits = residual.mix(streams, mixer_of(layer), "hf")
    assert torch.equal(found, mixed)
    assert logits is not None
    assert torch.equal(2 * torch.sigmoid(logits / 4), injection)
    expected = before + (injection.unsqueeze(-1) * output.unsqueeze(-2)).flatten(-2)
    assert torch.equal(residual.combine(streams, output, logits, "hf"), expected)
    wide = residual.Mixer(**{
        name: value.double() if isinstance(value, Tensor) else value for name, value in vars(mixer_of(layer)).items()
    })  # fmt: skip
    exact, _ = residual.mix(streams.double(), wide, "hf")
    for rounding in ("hf", "fused"):
        close, _ = residual.mix(streams, mixer_of(layer), rounding)  # type: ignore[arg-type]
        torch.testing.assert_close(close.double(), exact, rtol=2e-2, atol=1e-2)


def test_a_stream_that_nothing_is_injected_into_stays() -> None:
    streams, output = noise(3, 64), noise(3, 16, seed=1)
    injection = torch.full((3, 4), -torch.inf, dtype=BF16)
    assert torch.equal(residual.combine(streams, output, injection, "fused"), streams)
    after, normed = residual.combine_norm(streams, output, injection, noise(64, seed=2), "fused")
    assert torch.equal(after, streams)
    assert torch.equal(normed, norm.gemma_norm(streams, noise(64, seed=2), groups=4))


# Gated DeltaNet


def tokens_of(count: int, seed: int = 0, heads: int = 2, groups: int = 3, dim: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(count, heads * groups, generator=generator) for _ in range(2))
    decay, strength = delta.gates(a, b, torch.zeros(heads * groups), torch.zeros(heads * groups), "fused")
    return {
        "query": torch.randn(count, heads, dim, generator=generator),
        "key": torch.randn(count, heads, dim, generator=generator),
        "value": torch.randn(count, heads * groups, dim + 1, generator=generator),
        "decay": decay,
        "strength": strength,
    }


@given(st.integers(1, 40), st.integers(1, 17), st.integers(0, 40), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_chunks_of_any_size_say_what_single_steps_say(count: int, chunk: int, cut: int, seed: int) -> None:
    """Semantics B.6: equal to the recurrence; within 1e-4, from any state, cut anywhere."""
    inputs, cut = tokens_of(count, seed), min(cut, count)
    stepped, state = delta.recurrent(**inputs)
    first, between = delta.chunked(**{name: x[:cut] for name, x in inputs.items()}, chunk=chunk)
    second, after = delta.chunked(**{name: x[cut:] for name, x in inputs.items()}, state=between, chunk=chunk)
    torch.testing.assert_close(torch.cat([first, second]), stepped, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after, state, rtol=1e-4, atol=1e-4)


def test_keys_and_values_are_not_exchanged() -> None:
    """A state that holds one pair gives back the value for the key, in which dimension whatever."""
    key, value = torch.eye(4)[None, :1].expand(1, 1, 4), torch.arange(1.0, 7.0).reshape(1, 1, 6)
    none, all_of_it = torch.zeros(1, 1), torch.ones(1, 1)
    output, state = delta.recurrent(key, key, value, none, all_of_it)
    assert state.shape == (1, 4, 6)
    torch.testing.assert_close(state[0, 0], value[0, 0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(output[0, 0], value[0, 0] / 2, rtol=1e-4, atol=1e-4)  # the query is over the root of 4


@torch.no_grad()
def test_the_recurrence_is_that_of_transformers(hf: Any) -> None:
    inputs = tokens_of(19)
    repeated = {name: inputs[name].repeat_interleave(3, 1) for name in ("query", "key")}
    expected, state = hf.torch_recurrent_gated_delta_rule(
        *(x[None] for x in (repeated["query"], repeated["key"], inputs["value"])),
        g=inputs["decay"][None],
        beta=inputs["strength"][None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    found, after = delta.recurrent(**inputs)
    torch.testing.assert_close(found, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(after, state[0], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_convolution_is_that_of_transformers_and_goes_on_anywhere(hf: Any) -> None:
    inputs, weight = noise(11, 6), noise(6, 4, seed=1)
    expected = hf.causal_conv1d_fn(inputs.T[None].float(), weight.float(), activation="silu")[0].T
    found, state = delta.conv(inputs, weight)
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)
    first, between = delta.conv(inputs[:2], weight)
    second, after = delta.conv(inputs[2:], weight, between)
    assert torch.equal(torch.cat([first, second]), found)
    assert torch.equal(after, state)


@pytest.mark.parametrize("accepted", range(5))
def test_refused_drafts_leave_no_trace_in_the_window(accepted: int) -> None:
    inputs, weight = noise(7, 6), noise(6, 4, seed=1)
    _, before = delta.conv(inputs[:3], weight)
    _, expected = delta.conv(inputs[: 3 + accepted], weight)
    assert torch.equal(delta.window_after(inputs[3:], before, accepted), expected)
