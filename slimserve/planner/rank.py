"""Memory of one rank, sized as the pinned engine sizes it.

The engine asks for a share of what CUDA shows of the card, takes off what loading and a profiled step hold at their
peak, and what captured graphs will hold, and gives all the rest to the cache.

Source: vllm 0.32, v1/worker/gpu_worker.py `init_device` and `determine_available_memory`, v1/worker/utils.py
`request_memory`, v1/worker/gpu/cudagraph_utils.py `profile_cudagraph_memory`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from slimserve.geometry import Caches, Layout, Part, Shape, Weights, buffers, caches, shape_of, weights
from slimserve.machine import Gpu
from slimserve.planner.activations import Activations, Step, activations, decode_bytes, sampling_state
from slimserve.planner.budget import Budget, Line
from slimserve.planner.layout import layout_of
from slimserve.platform import Reserve
from slimserve.profile import SCORES
from slimserve.records import dataclass
from slimserve.subject import Subject

MIB = 1 << 20
_SCORES_UNSET = 512  # vllm/envs.py

CACHE = "KV cache"
LEFT = "left free"
_WEIGHTS = {"ngram_table": "n-gram table", "routed_experts": "routed experts", "routed_scales": "routed experts"}


@dataclass(frozen=True)
class Sizes:
    """The settings that change memory without changing what is loaded.

    Named as in the profile's `engine`; `score_mib` is the environment's `SCORES`.
    """

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    score_mib: int


@dataclass(frozen=True)
class Rank:
    """One rank of a profile; what does not depend on `Sizes` is worked out once.

    Args:
        subject: the profile with its model and platform.
        card_bytes: of its card, as the driver counts them; None on a CPU.
        taken_bytes: of the card, what other programs hold.
    """

    subject: Subject
    card_bytes: int | None
    taken_bytes: int
    layout: Layout
    shape: Shape
    held: Weights
    caches: Caches

    @property
    def sizes(self) -> Sizes:
        """What the profile states."""
        engine = self.subject.profile.engine
        share, scores = engine.gpu_memory_utilization, self.subject.profile.environment.get(SCORES)
        return Sizes(
            engine.max_num_seqs.value,
            engine.max_model_len.value,
            engine.max_num_batched_tokens.value,
            share.value if share else 0.0,
            int(scores.value) if scores is not None else _SCORES_UNSET,
        )

    def shown_bytes(self, reserve: Reserve) -> int:
        """What CUDA shows of the card."""
        return (self.card_bytes or 0) - reserve.driver_bytes.value

    def activations(self, sizes: Sizes) -> Activations:
        """Peaks of the longest step."""
        return activations(self.shape, self.layout, self._step(sizes, sizes.max_num_batched_tokens), self._topk)

    def buffers(self, sizes: Sizes) -> tuple[Part, ...]:
        """What is allocated beside the weights, by the longest step."""
        model, quant = self.subject.model, self.subject.profile.quant
        return buffers(model, model.checkpoints[quant], self.layout, sizes.max_num_batched_tokens)

    def cache_bytes(self, sizes: Sizes) -> int:
        """What the cache gets; below zero when not even the rest fits."""
        stated = self.subject.profile.engine.kv_cache_memory_bytes
        if stated is not None:
            return stated.value
        return self._requested(sizes) - sum(line.bytes for line in self._inside(sizes))

    def left_bytes(self, sizes: Sizes) -> int:
        """What is left of the card beside the engine's share; below zero when a long prompt would not fit."""
        reserve = self._reserve()
        beyond = self.activations(sizes).beyond_bytes
        outside = reserve.startup_bytes.value + self.taken_bytes + beyond
        return self.shown_bytes(reserve) - self._requested(sizes) - outside

    def budget(self, sizes: Sizes) -> Budget | None:
        """The whole card; None on a CPU, whose memory is the host's."""
        if self.card_bytes is None:
            return None
        reserve, inside = self._reserve(), self._inside(sizes)
        cache, step = self.cache_bytes(sizes), self.activations(sizes)
        blocks = self.caches.pool_blocks(max(cache, 0)) * self.caches.slab_bytes
        tokens = f"{sizes.max_num_batched_tokens:,} tokens"
        return Budget(
            f"memory of each rank, gpu_memory_utilization {sizes.gpu_memory_utilization:g}",
            self.card_bytes,
            (
                *inside,
                Line(CACHE, blocks if cache >= 0 else cache, f"whole blocks of {self.caches.slab_bytes:,} B"),
                Line("rest of a block", cache - blocks if cache >= 0 else 0, "too little for one block more"),
                Line("driver", reserve.driver_bytes.value, str(reserve.driver_bytes.evidence)),
                Line("context, collectives", reserve.startup_bytes.value, str(reserve.startup_bytes.evidence)),
                Line("other programs", self.taken_bytes, "as the driver counts them"),
                Line("long prompts", step.beyond_bytes, f"attention of {tokens}, which profiling leaves out"),
                Line(LEFT, self.left_bytes(sizes), "beside the engine's share"),
            ),
        )

    def _inside(self, sizes: Sizes) -> list[Line]:
        """The engine's share without the cache."""
        reserve, step = self._reserve(), self.activations(sizes)
        held: dict[str, int] = {}
        for part in self.held.parts:
            if not part.on_host:
                name = "drafter" if part.name.startswith("drafter") else _WEIGHTS.get(part.name, "other weights")
                held[name] = held.get(name, 0) + part.bytes
        quant = self.subject.profile.quant
        lines = [Line(name, size, f"weights, {quant}") for name, size in held.items()]
        beside = self.buffers(sizes)
        words = ", ".join(part.name for part in beside) or "none"
        lines.append(Line("buffers", sum(part.bytes for part in beside), words))
        state = sampling_state(self.shape, sizes.max_num_seqs)
        lines.append(Line("sampling tables", state, f"penalties of {sizes.max_num_seqs} requests"))
        peak = f"{step.widest} of {sizes.max_num_batched_tokens:,} tokens"
        lines.append(Line("activations", step.profiled_bytes, peak))
        lines.append(self._graphs(sizes, reserve))
        lines.append(Line("runtime", reserve.runtime_bytes.value, str(reserve.runtime_bytes.evidence)))
        return lines

    def _graphs(self, sizes: Sizes, reserve: Reserve) -> Line:
        """Captured graphs: what each keeps, the drafter's by its layers, and the pool that they share.

        Per graph the engine counts at least 1 MiB.
        """
        setting = self.subject.profile.engine.compilation_config
        if setting is None or setting.value.cudagraph_mode == "NONE":
            return Line("CUDA graphs", 0, "none are captured")
        captured = setting.value.cudagraph_capture_sizes
        each = reserve.graph_bytes.value
        if self.layout.drafts:
            own = self.layout.draft_model
            layers = own.num_hidden_layers if own else self.shape.drafter_layers
            each += max(MIB, each * layers // self.shape.layers)
        rounds = 2 if setting.value.cudagraph_mode == "FULL_AND_PIECEWISE" else 1
        pool = decode_bytes(self.shape, self.layout, self._step(sizes, max(captured)), self._topk)
        why = f"{rounds * len(captured)} x {each:,} B, and a step of {max(captured)} tokens"
        return Line("CUDA graphs", rounds * len(captured) * each + pool, why)

    def _requested(self, sizes: Sizes) -> int:
        return math.ceil(self.shown_bytes(self._reserve()) * sizes.gpu_memory_utilization)

    def _reserve(self) -> Reserve:
        gpus = self.subject.platform.gpus
        if gpus is None:
            raise TypeError("a CPU's memory is the host's")
        return gpus.reserve

    def _step(self, sizes: Sizes, tokens: int) -> Step:
        return Step(tokens, sizes.max_num_seqs, sizes.max_model_len, sizes.score_mib * MIB)

    @property
    def _topk(self) -> int:
        return self.subject.model.geometry.num_experts_per_tok or 0


def rank_of(subject: Subject, gpus: Sequence[Gpu]) -> Rank:
    """Work out one rank of `subject`: the one that has least.

    Args:
        subject: the profile with its model and platform.
        gpus: the cards that its ranks run on; none on a CPU.

    Raises:
        RegistryError: the geometry or the checkpoint is incomplete or contradicts itself.
        Refused: the layout does not divide the model.
    """
    model, layout = subject.model, layout_of(subject)
    held = weights(model, model.checkpoints[subject.profile.quant], layout)
    kind = subject.platform.gpus
    card = min(gpu.memory_bytes for gpu in gpus) if gpus else None
    kept = kind.reserve.driver_bytes.value if kind else 0
    taken = max((max(0, gpu.memory_bytes - kept - gpu.free_bytes) for gpu in gpus), default=0)
    return Rank(subject, card, taken, layout, shape_of(model), held, caches(model, layout))
