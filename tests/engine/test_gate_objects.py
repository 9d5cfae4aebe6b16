"""What the gate reads, on the pinned engine's own classes, without starting one."""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
from plan_support import REGISTRY

from slimserve.engine import torchvision_cpu
from slimserve.engine.gate import checks, observed, plugin, verdict

# Those of our profiles import a package that the CPU lane leaves out.
PARSERS = [("deepseek_r1", "hermes"), ("step3", "llama4_json")]


@pytest.fixture(scope="module", autouse=True)
def importable() -> None:
    torchvision_cpu.install()


@pytest.mark.parametrize("seat", plugin.SEATS, ids=lambda seat: seat.role)
def test_the_gates_place_is_there(seat: plugin.Seat) -> None:
    *classes, name = seat.path.split(".")
    owner: Any = functools.reduce(getattr, classes, importlib.import_module(seat.module))
    assert callable(vars(owner)[name])


@pytest.mark.parametrize(("reasoning", "tools"), PARSERS)
def test_parsers_are_known_by_their_names(reasoning: str, tools: str) -> None:
    from vllm.parser import ParserManager

    used = ParserManager.get_parser(tool_parser_name=tools, reasoning_parser_name=reasoning, enable_auto_tools=True)
    chat = SimpleNamespace(parser_cls=used)
    assert verdict.agrees({"named": reasoning}, observed._parser_names(chat, "reasoning"))
    assert verdict.agrees({"named": tools}, observed._parser_names(chat, "tool"))
    assert not verdict.agrees({"named": "qwen3"}, observed._parser_names(chat, "reasoning"))
    assert observed._parser_names(SimpleNamespace(parser_cls=None), "tool") == "none"


def test_models_with_breakable_graphs_are_those_of_the_engine() -> None:
    from vllm.config.vllm import DEFAULT_BREAKABLE_CUDAGRAPH_ARCHITECTURES

    ours = {model.architecture for model in REGISTRY.models.values()}
    assert ours & DEFAULT_BREAKABLE_CUDAGRAPH_ARCHITECTURES == ours & checks.BREAKABLE
    assert checks.BREAKABLE <= DEFAULT_BREAKABLE_CUDAGRAPH_ARCHITECTURES


def test_a_cache_is_read_group_by_group() -> None:
    """A packed group holds several specs, a ring is no attention, and a window has no recurrent state."""
    import torch
    from vllm.v1.kv_cache_interface import (
        CircularBufferSpec,
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        UniformTypeKVCacheSpecs,
    )

    main = FullAttentionSpec(block_size=1600, num_kv_heads=1, head_size=256, dtype=torch.bfloat16)
    draft = FullAttentionSpec(block_size=1600, num_kv_heads=1, head_size=256, dtype=torch.uint8)
    ring = CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=128, dtype=torch.float32)
    state = MambaSpec(block_size=1600, shapes=((3, 4), (2, 2)), dtypes=(torch.bfloat16, torch.float32))
    window = MambaSpec(block_size=1600, shapes=((3, 4),), dtypes=(torch.bfloat16,))
    packed = UniformTypeKVCacheSpecs(block_size=1600, kv_cache_specs={"a": main, "b": draft})
    groups = [KVCacheGroupSpec([name], spec) for name, spec in (("s", state), ("w", window), ("r", ring))]
    groups.append(KVCacheGroupSpec(["a", "b"], packed))
    laid = KVCacheConfig(num_blocks=5, kv_cache_tensors=[], kv_cache_groups=groups)
    assert observed.read(observed._cache(laid)) == {
        "cache_groups": [["state", 1600], ["state", 1600], ["ring", 8], ["attention", 1600]],
        "kv_stored": ["bfloat16", "uint8"],
        "mamba_ssm_cache_dtype": "float32",
        "cache_blocks": 5,
    }


def test_what_the_engine_no_longer_has_is_said_and_differs() -> None:
    values = observed.read({"dtype": lambda: SimpleNamespace().dtype})
    assert values == {"dtype": "unreadable: AttributeError: 'types.SimpleNamespace' object has no attribute 'dtype'"}
    assert not verdict.agrees("bfloat16", values["dtype"])


def test_the_configuration_is_written_without_secrets_and_places() -> None:
    from vllm.config import LoadConfig

    text = str(observed.plain(LoadConfig(download_dir="/home/somebody/cache")))
    assert "somebody" not in text
    assert "load_format" in text
    assert observed.plain({"hf_token": "hf_secret", "dtype": 1}) == {"dtype": 1}
