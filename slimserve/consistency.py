"""What a profile may not say beside itself, its model and its platform; and which variables it may set."""

from __future__ import annotations

import re
from collections.abc import Iterator

from quixicore import dispatch
from slimserve.profile import SCORES, Profile
from slimserve.shapes import Problem, nearest
from slimserve.subject import Subject

_MEBIBYTES = re.compile("[1-9][0-9]{0,8}")
# Beginnings of the variables that a profile may set.
CONFIGURING = tuple("VLLM_ NCCL_ GLOO_ OMP_ KMP_ MKL_ TORCH PYTORCH_ TRITON_ FLASHINFER_ CUDA_".split())


def check_environment(profile: Profile, reserved: frozenset[str]) -> Iterator[Problem]:
    """Every variable of a profile that is not its own to set, or that nothing would read as it is written.

    Args:
        profile: of the registry, or one with values replaced.
        reserved: variables that no profile may set.
    """
    for name, setting in profile.environment.items():
        loc = ("environment", name)
        if {"KEY", "TOKEN", "SECRET", "PASSWORD"} & set(name.split("_")):
            yield Problem(
                loc,
                f"environment.{name}",
                "a secret does not belong in a profile",
                "give it at the start, by environment",
            )
        elif name in reserved:
            yield Problem(loc, f"environment.{name}", "it is fixed for every profile by slimserve itself", "remove it")
        elif not name.startswith(CONFIGURING):
            why = f"it configures neither the engine nor a library of it: those begin with {', '.join(CONFIGURING)}"
            yield Problem(loc, f"environment.{name}", why, "remove it")
        elif name == SCORES and not _MEBIBYTES.fullmatch(setting.value):
            what, why = f"environment.{name} = {setting.value[:40]}", "it is not a whole number of MiB above 0"
            yield Problem((*loc, "value"), what, why, 'give one, such as "512"')


def check_consistency(subject: Subject) -> Iterator[Problem]:
    """Every way in which a profile contradicts itself, its model or its platform."""
    engine, model, platform = subject.profile.engine, subject.model, subject.platform
    if subject.profile.status == "measured" and not any(s.evidence.receipt for _, s in subject.profile.settings()):
        yield Problem(
            ("status",),
            "status = measured, but no setting cites a receipt",
            "measured is earned by receipts",
            "use unmeasured",
        )
    choice = {group: setting.value for group, setting in subject.profile.seats.items()}
    for group, what, why, do in dispatch.refusals(choice, model.architecture, on_cards=platform.gpus is not None):
        yield Problem(("seats", group) if group in choice else ("seats",), what, why, do)
    sizes = [key for key in ("gpu_memory_utilization", "kv_cache_memory_bytes") if getattr(engine, key) is not None]
    if len(sizes) != 1:
        yield Problem(
            ("engine",),
            f"{len(sizes)} of gpu_memory_utilization and kv_cache_memory_bytes are stated",
            "each of them sizes the KV cache",
            "state exactly one",
        )
    elif platform.kind == "cuda" and sizes[0] == "kv_cache_memory_bytes":
        yield Problem(
            ("engine", sizes[0]),
            f"engine.{sizes[0]} on a CUDA platform",
            "whether cards are free and large enough is judged by the share of their memory",
            "state gpu_memory_utilization",
        )
    elif platform.kind == "cpu" and sizes[0] == "gpu_memory_utilization":
        yield Problem(
            ("engine", sizes[0]),
            f"engine.{sizes[0]} on a CPU platform",
            "there is no GPU memory to use",
            "state kv_cache_memory_bytes",
        )
    if engine.max_model_len.value > model.geometry.max_position_embeddings:
        yield Problem(
            ("engine", "max_model_len", "value"),
            f"engine.max_model_len = {engine.max_model_len.value}",
            f"{model.id} was trained for {model.geometry.max_position_embeddings} positions",
            f"use at most {model.geometry.max_position_embeddings}",
        )
    tp = engine.tensor_parallel_size.value
    ranks = tp * (engine.data_parallel_size.value if engine.data_parallel_size else 1)
    legal = model.geometry.legal_tensor_parallel()
    if tp not in legal:
        yield Problem(
            ("engine", "tensor_parallel_size", "value"),
            f"engine.tensor_parallel_size = {tp} does not split the heads of {model.id}",
            f"{model.geometry.num_attention_heads} query heads must divide evenly, "
            f"{model.geometry.num_key_value_heads} KV heads divide or be replicated evenly",
            f"legal counts: {', '.join(map(str, legal))}",
        )
    available = (platform.gpus.count if platform.gpus else 1) * platform.nodes
    if ranks != available:
        yield Problem(
            ("engine", "tensor_parallel_size", "value"),
            f"the profile makes {ranks} ranks for {available} devices of {platform.id}",
            "each rank owns one device",
            f"make tensor_parallel_size x data_parallel_size = {available}",
        )
    yield from _check_nodes(subject)
    speculation = engine.speculative_config.value if engine.speculative_config else None
    if speculation is not None and speculation.model is not None and speculation.model not in model.drafters:
        yield Problem(
            ("engine", "speculative_config", "value", "model"),
            f"engine.speculative_config.model = {speculation.model} does not exist",
            f"{model.id} has no such drafter",
            nearest(speculation.model, model.drafters),
        )
    budget = engine.max_num_batched_tokens.value
    if not engine.enable_chunked_prefill.value and budget < engine.max_model_len.value:
        yield Problem(
            ("engine", "max_num_batched_tokens", "value"),
            f"engine.max_num_batched_tokens = {budget} < max_model_len = {engine.max_model_len.value}",
            "without chunked prefill a prompt must fit into one step",
            "turn chunked prefill on, or raise it",
        )
    if budget < engine.max_num_seqs.value:
        yield Problem(
            ("engine", "max_num_batched_tokens", "value"),
            f"engine.max_num_batched_tokens = {budget} < max_num_seqs = {engine.max_num_seqs.value}",
            "a decode step takes a token of each sequence",
            "raise it",
        )


def _check_nodes(subject: Subject) -> Iterator[Problem]:
    """The engine learns from two keys how many nodes there are and which replicas are this one's."""
    engine, nodes = subject.profile.engine, subject.platform.nodes
    replicas = engine.data_parallel_size.value if engine.data_parallel_size else 1
    wanted = {"nnodes": nodes, "data_parallel_size_local": replicas // nodes} if nodes > 1 else {}
    for name in ("nnodes", "data_parallel_size_local"):
        setting = getattr(engine, name)
        if (setting.value if setting else None) != wanted.get(name):
            yield Problem(
                ("engine", name) if setting else ("engine",),
                f"engine.{name} is {setting.value if setting else 'not stated'}",
                f"{subject.platform.id} has {nodes} nodes, over which {replicas} replicas are dealt out",
                f"state {wanted[name]}" if name in wanted else "remove it",
            )
    if nodes > 1 and replicas % nodes:
        yield Problem(
            ("engine", "data_parallel_size", "value") if engine.data_parallel_size else ("engine",),
            f"{replicas} replicas on {nodes} nodes",
            "a replica's attention stays within a node, whose links are those that can carry it",
            f"make data_parallel_size a multiple of {nodes}",
        )
