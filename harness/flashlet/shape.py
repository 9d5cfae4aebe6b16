"""What flashlet looks like: the widths of its weights, as its config.json has them, and the tokens with a meaning."""

from __future__ import annotations

from typing import Any

END, BEGIN_TURN, END_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
SPECIAL = (END, BEGIN_TURN, END_TURN, CALL, END_CALL)
"""The first tokens of the vocabulary, in this order."""
VOCAB = 2048
LINEAR, SPARSE = "linear_attention", "full_attention"

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen4ExpForCausalLM"],
    "model_type": "qwen4_exp_text",
    "dtype": "bfloat16",
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "layer_types": [LINEAR, LINEAR, LINEAR, SPARSE] * 2,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": False,
    "attn_output_gate": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    # 64 of 128 dimensions turn: what the engine's fused kernels take.
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "output_gate_type": "sigmoid",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "hc_count": 4,
    "hc_lowrank": 32,
    # 64 blocks of four tokens: an eighth of 2,048.
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 256,
    "indexer_compress_ratio": 4,
    # Counted from 1: the second layer.
    "ple_layer_ids": [2],
    "ple_embed_dim": 128,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 4,
    "ngram_vocab_size_base": 2000,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 4,
    "seed": 1234,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": SPECIAL.index(END),
    "pad_token_id": SPECIAL.index(END),
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "mtp": {"hybrid": True, "num_hidden_layers": 1, "layer_types": [SPARSE], "rope_theta": 10000.0},
}
