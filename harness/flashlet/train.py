"""The training: stages of growing length, first dense, then with the indexer's selection, at last the drafter alone."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from harness.flashlet.batches import Batch, Batches, stream
from harness.flashlet.model import Experts, Flashlet, Ngrams, Residual
from harness.flashlet.shape import CONFIG
from harness.flashlet.text import questions, render

Say = Callable[[str], None]


@dataclass(frozen=True)
class Stage:
    """Steps of one kind.

    Args:
        name: of it.
        steps: how many.
        lengths: of the texts, in tokens; steps take them by turns.
        sparse: attend to what the indexer selects.
        drafter: train it, and it alone.
        rate: of learning, at the beginning and at the end; linear in between.
        tokens: of a step.
        rare: share of texts of the rarer kinds.
    """

    name: str
    steps: int
    lengths: tuple[int, ...]
    sparse: bool
    drafter: bool
    rate: tuple[float, float]
    tokens: int = 1 << 16
    rare: float = 0.08


STAGES = (
    Stage("short", 1280, (256,), False, False, (3e-3, 3e-3)),
    Stage("longer", 600, (512, 1024), False, False, (3e-3, 3e-3)),
    Stage("long", 1100, (512, 2304, 2304), False, False, (3e-3, 2e-3)),
    Stage("sparse", 720, (512, 2304, 2304), True, False, (2e-3, 1e-4)),
    Stage("drafter", 1600, (256,), True, True, (2e-3, 2e-3), 1 << 15),
    Stage("long drafter", 400, (512, 2304), True, True, (2e-3, 1e-4)),
    Stage("rarer", 360, (256, 768), True, False, (1.2e-3, 5e-5), rare=0.5),
    Stage("last drafter", 450, (256, 768, 2304), True, True, (1e-3, 5e-5), rare=0.3),
)
WARM_STEPS = 100
BALANCE, DECAY = 0.01, 10.0
DRAFTS = 2
SEED = 20261130
_SHARD_BYTES = 15 << 20


class Training:
    """A training that can be left and taken up again.

    Args:
        folder: with the tokenizer; the state is kept in it.
        device: to train on.
        stages: to go through.
        workers: processes that make texts.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        *,
        stages: tuple[Stage, ...] = STAGES,
        workers: int = 0,
        compiled: bool = False,
    ) -> None:
        torch.manual_seed(SEED)
        torch.set_float32_matmul_precision("high")
        self.folder, self.device, self.stages, self.workers = folder, device, stages, workers
        self.net = Flashlet(CONFIG).to(device)
        self.step = 0
        self.optimizer = self._optimizer()
        if (folder / "state.json").exists():
            self._load()
        if compiled:
            for module in self.net.modules():
                if isinstance(module, (Residual, Experts, Ngrams)):
                    module.compile(dynamic=True)

    def run(self, seconds: float, say: Say, until: int | None = None) -> bool:
        """Train until the time is over or everything is done, and keep the state; whether all is done.

        Args:
            seconds: after which it stops.
            say: is told how it goes.
            until: a step to stop at.
        """
        begun, told, tokens = time.monotonic(), time.monotonic(), 0
        sources: dict[tuple[str, int], Iterator[Batch]] = {}
        whole = sum(stage.steps for stage in self.stages)
        until = whole if until is None else until
        while self.step < until and time.monotonic() - begun < seconds:
            stage, into = self._stage()
            length = stage.lengths[into % len(stage.lengths)]
            if (kind := (stage.name, length)) not in sources:
                sources[kind] = self._source(stage, length)
            batch = next(sources[kind]).to(self.device)
            if stage.drafter and not any(one.drafter for one in self.stages[: self.stages.index(stage)]) and not into:
                self.net.begin_drafter()
            found = self._learn(stage, into, batch)
            self.step += 1
            tokens += batch.tokens.numel()
            if time.monotonic() - told > 10:
                rate = tokens / (time.monotonic() - told)
                numbers = " ".join(f"{name} {float(value):.3f}" for name, value in found.items())
                say(f"{stage.name} {self.step} of length {length}: {numbers}; {rate / 1e6:.2f} M tokens/s")
                told, tokens = time.monotonic(), 0
            if self.step % 200 == 0:
                say(f"  at {self.step}, after {time.monotonic() - begun:.0f} s: {self.recall(length)}")
        self._save()
        return self.step >= whole

    def _stage(self) -> tuple[Stage, int]:
        """The stage of the present step, and how many of its steps are done."""
        left = self.step
        for stage in self.stages:
            if left < stage.steps:
                return stage, left
            left -= stage.steps
        raise AssertionError("nothing is left to do")

    def _source(self, stage: Stage, length: int) -> Iterator[Batch]:
        return stream(
            self.folder / "tokenizer.json",
            seed=SEED,
            length=length,
            count=max(1, stage.tokens // length),
            first=self.step,
            rare=stage.rare,
            workers=self.workers,
        )

    def _learn(self, stage: Stage, into: int, batch: Batch) -> dict[str, Tensor]:
        first, last = stage.rate
        rate = first + (last - first) * into / stage.steps
        warm = into if stage.drafter else self.step
        for group in self.optimizer.param_groups:
            group["lr"] = rate * min(1.0, (warm + 1) / WARM_STEPS)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss, found = self._drafter_loss(batch) if stage.drafter else self._loss(batch, stage.sparse)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        found["gradient"] = torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        return found

    def _loss(self, batch: Batch, sparse: bool) -> tuple[Tensor, dict[str, Tensor]]:
        said = self.net(batch, sparse=sparse)
        words, answers = _told(said.logits, batch, 1)
        loss = words + said.index_loss + BALANCE * said.balance_loss + DECAY * said.decay_loss
        return loss, {
            "loss": words.detach(),
            "answers": answers.detach(),
            "index": said.index_loss.detach(),
            "balance": said.balance_loss.detach(),
            "decay": said.decay_loss.detach(),
        }

    def _drafter_loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.no_grad():
            said = self.net(batch, sparse=True)
        steps = self.net.draft(batch, said.residual, sparse=True, steps=DRAFTS)
        total, found = torch.zeros((), device=self.device), {}
        for number, (logits, index_loss, balance) in enumerate(steps, 1):
            words, answers = _told(logits, batch, 2)
            total = total + words + index_loss + BALANCE * balance
            found[f"draft {number}"], found[f"its answers {number}"] = words.detach(), answers.detach()
            found[f"its index {number}"] = index_loss.detach()
        return total, found

    @torch.no_grad()
    def recall(self, length: int, count: int = 32, seed: int = 0) -> dict[str, str]:
        """Which share of answers about documents is foretold whole: dense, sparse, and by drafts."""
        import random

        random_numbers = random.Random(f"held out {seed}")
        texts = [render(questions(random_numbers, length)) for _ in range(count)]
        batch = Batches(self.folder / "tokenizer.json").make(texts, length).to(self.device)
        found = {}
        with torch.autocast(self.device.type, torch.bfloat16):
            for name, sparse in (("dense", False), ("sparse", True)):
                said = self.net(batch, sparse=sparse)
                found[name] = _whole(said.logits, batch, 1)
            for number, (logits, _, _) in enumerate(self.net.draft(batch, said.residual, sparse=True, steps=DRAFTS), 1):
                found[f"draft {number}"] = _whole(logits, batch, 2)
        return found

    def _optimizer(self) -> torch.optim.Optimizer:
        bare = [p for name, p in self.net.named_parameters() if p.ndim < 2 or "conv1d" in name or "embed" in name]
        own = {id(p) for p in bare}
        rest = [p for p in self.net.parameters() if id(p) not in own]
        groups = [{"params": rest, "weight_decay": 0.1}, {"params": bare, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, fused=self.device.type == "cuda")

    def _save(self) -> None:
        """Weights in float32, and the optimizer's moments in bfloat16, in files of a size that is easy to carry."""
        named = dict(self.net.named_parameters())
        parts = {f"weight.{name}": value.detach().cpu() for name, value in named.items()}
        for name, value in named.items():
            for moment in ("exp_avg", "exp_avg_sq"):
                if moment in (kept := self.optimizer.state.get(value, {})):
                    parts[f"{moment}.{name}"] = kept[moment].to(torch.bfloat16).cpu()
        shards: list[dict[str, Tensor]] = [{}]
        for name, part in parts.items():
            size = sum(each.numel() * each.element_size() for each in shards[-1].values())
            if size + part.numel() * part.element_size() > _SHARD_BYTES:
                shards.append({})
            shards[-1][name] = part.contiguous()
        for number, shard in enumerate(shards):
            save_file(shard, self.folder / f"state-{number}.safetensors.new")
            os.replace(self.folder / f"state-{number}.safetensors.new", self.folder / f"state-{number}.safetensors")
        (self.folder / "state.json").write_text(json.dumps({"step": self.step, "shards": len(shards)}))

    def _load(self) -> None:
        state = json.loads((self.folder / "state.json").read_text())
        self.step = state["step"]
        parts: dict[str, Any] = {}
        for number in range(state["shards"]):
            parts |= load_file(self.folder / f"state-{number}.safetensors")
        for name, weight in self.net.named_parameters():
            weight.data.copy_(parts[f"weight.{name}"])
            if f"exp_avg.{name}" in parts:
                moments = {m: parts[f"{m}.{name}"].to(self.device, torch.float32) for m in ("exp_avg", "exp_avg_sq")}
                step = torch.tensor(float(self.step), device=self.device)
                self.optimizer.state[weight] = {"step": step, **moments}


def _told(logits: Tensor, batch: Batch, ahead: int) -> tuple[Tensor, Tensor]:
    """Cross entropy of the token so many places ahead: as it counts, and of answers alone; in nats a token."""
    wanted = batch.tokens[:, ahead:]
    each = cross_entropy(logits[:, :-ahead].float().flatten(0, 1), wanted.flatten(), reduction="none").view(
        wanted.shape
    )
    weights, answers = batch.weights[:, ahead:], batch.answers[:, ahead:]
    return (each * weights).sum() / weights.sum(), (each * answers).sum() / answers.sum().clamp_min(1)


def _whole(logits: Tensor, batch: Batch, ahead: int) -> str:
    """Tokens of answers that are foretold, and answers that are so from beginning to end."""
    right = logits[:, :-ahead].argmax(-1) == batch.tokens[:, ahead:]
    answers = batch.answers[:, ahead:]
    starts = answers & ~torch.nn.functional.pad(answers, (1, 0))[:, :-1]
    number = starts.flatten().cumsum(0)[answers.flatten()] - 1
    rights = torch.ones(int(starts.sum()), device=right.device).scatter_reduce(
        0, number, right[answers].float(), "amin", include_self=True
    )
    return f"{right[answers].float().mean():.3f} of tokens, {rights.mean():.3f} of {len(rights)} answers"
