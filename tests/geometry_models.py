"""Models that geometry tests speak of: two of the registry's own, and two whose files do not exist yet."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from slimserve.geometry import Layout
from slimserve.model import Checkpoint, Geometry, HuggingFace, Model, Parsers, Quantisation, QuantisedTensor
from slimserve.profile import Sampling
from slimserve.registry_files import load_registry

REGISTRY = load_registry(Path(__file__).parent.parent / "profiles")
FLASH_NEXT = REGISTRY.models["qwen38-flash-next"]
SMOLLM2 = REGISTRY.models["smollm2-135m-instruct"]


def model(id: str, architecture: str, geometry: Geometry, checkpoints: dict[str, Checkpoint] | None = None) -> Model:
    return Model(
        id=id,
        title=id,
        architecture=architecture,
        traits=(),
        geometry=geometry,
        sampling=Sampling(temperature=1.0),
        parsers=Parsers(),
        checkpoints=checkpoints or {"bf16": checkpoint()},
    )


def checkpoint(quantisation: Quantisation | None = None, host_bytes: int = 0) -> Checkpoint:
    return Checkpoint(
        huggingface=HuggingFace(repo="owner/name", revision="0" * 40),
        licence="none",
        manifest="none",
        bytes=1 << 50,
        host_bytes=host_bytes,
        quantisation=quantisation,
    )


def drafting(k: int, **settings: Any) -> Layout:
    """A layout in which the model's own MTP layers draft k tokens; none for 0."""
    return Layout(speculative_tokens=k, drafter=k > 0, **settings)


def experts(method: Any, block: tuple[int, int], hidden: int, inner: int, *, drafter: bool) -> Quantisation:
    """Routed experts quantised, and nothing else."""
    tensors = [
        QuantisedTensor(name=f"{owner}mlp.experts.{name}", shape=shape, sharded=sharded, fused=fused, experts=True)
        for owner in (("", "mtp.") if drafter else ("",))
        for name, shape, sharded, fused in (
            ("gate_up_proj", (2 * inner, hidden), "out", 2),
            ("down_proj", (hidden, inner), "in", 1),
        )
    ]
    return Quantisation(method=method, block=block, tensors=tuple(tensors))


def broken(subject: Model, geometry: Geometry, architecture: str | None = None) -> Model:
    """A model whose file would not have passed: the registry's own checks are not the geometry's."""
    copy = object.__new__(Model)
    for name in Model.__dataclass_fields__:
        object.__setattr__(copy, name, getattr(subject, name))
    object.__setattr__(copy, "geometry", geometry)
    object.__setattr__(copy, "architecture", architecture or subject.architecture)
    return copy


# Semantics G.2.
A95B = model(
    "qwen38-2.4t-a95b",
    "Qwen3_5MoeForCausalLM",
    Geometry(
        hidden_size=8192,
        num_hidden_layers=92,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=256,
        vocab_size=248320,
        max_position_embeddings=262144,
        tie_word_embeddings=False,
        full_attention_interval=4,
        linear_num_key_heads=16,
        linear_num_value_heads=128,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        mamba_ssm_dtype="float32",
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=2048,
        shared_expert_intermediate_size=2048,
        mtp_num_hidden_layers=1,
    ),
    {
        "bf16": checkpoint(),
        "fp8": checkpoint(experts("fp8", (128, 128), 8192, 2048, drafter=True)),
        "nvfp4": checkpoint(experts("nvfp4", (1, 16), 8192, 2048, drafter=True)),
    },
)

HYBRID = model(
    "small-hybrid",
    "Qwen3_5ForCausalLM",
    Geometry(
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=1000,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        intermediate_size=512,
        full_attention_interval=4,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        mamba_ssm_dtype="float32",
    ),
)

# Every kind of cache of Flash-Next, with the heads and rotations that its path carries, and small otherwise.
FLAGSHIP = model(
    "small-flagship",
    "Qwen4ExpForConditionalGeneration",
    Geometry(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=256,
        vocab_size=512,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        full_attention_interval=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        mamba_ssm_dtype="float32",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        hc_count=4,
        hc_lowrank=32,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=128,
        indexer_budget=64,
        indexer_compress_ratio=4,
        ple_layer_ids=(2,),
        ple_embed_dim=128,
        ple_conv_kernel_size=4,
        ngram_size=3,
        heads_per_ngram=4,
        ngram_vocab_size_base=2000,
        make_ngram_vocab_size_divisible_by=128,
        mtp_num_hidden_layers=1,
    ),
    {"bf16": checkpoint(host_bytes=16_256 * 16 * 2)},
)


def config_json(subject: Model) -> dict[str, Any]:
    """A config.json of this geometry, its fields under the names that the geometry has for them."""
    kinds = {
        "LlamaForCausalLM": "llama",
        "Qwen3_5ForCausalLM": "qwen3_5_text",
        "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
        "Qwen4ExpForConditionalGeneration": "qwen4_exp_text",
    }
    fields = {name: value for name, value in asdict(subject.geometry).items() if value is not None}
    interval = subject.geometry.full_attention_interval
    if interval is not None:
        names = ("full_attention", "linear_attention")
        fields["layer_types"] = [names[(i + 1) % interval > 0] for i in range(subject.geometry.num_hidden_layers)]
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    return {
        **fields,
        # The text half of a model that also sees is a class of its own.
        "architectures": [subject.architecture.replace("ForConditionalGeneration", "ForCausalLM")],
        "model_type": kinds[subject.architecture],
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "norm_topk_prob": True,
        "attn_output_gate": True,
        "output_gate_type": "sigmoid",
        "eos_token_id": 2,
        "bos_token_id": 1,
    }


def fp8_experts_alone(subject: Model) -> dict[str, Any]:
    """The quantisation of the FP8 checkpoint, in the words of config.json: all that stays bf16, by its full name."""
    parts = [f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")]
    parts += [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "indexer.index_qk_proj")]
    parts += [f"mlp.{name}" for name in ("gate", "shared_expert_gate")]
    parts += [f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")]
    parts += ["ple.key_proj", "ple.value_proj"]
    layers = [f"model.layers.{layer}" for layer in range(subject.geometry.num_hidden_layers)]
    layers += [f"mtp.layers.{layer}" for layer in range(subject.geometry.mtp_num_hidden_layers or 0)]
    whole = [f"{layer}.{part}" for layer in layers for part in parts]
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head", "mtp.fc_embedding", "mtp.fc_hidden", *whole],
    }
