"""Compares what the engine says of a checkpoint with its definition, and with what it says under other circumstances.

The tolerance is not chosen: it is how far transformers in bfloat16 is from itself in float32 on the same tokens.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from harness.parity import checkpoint

Array = numpy.ndarray[Any, Any]
_SAID = 40
_LENGTHS = (1, 7, 66, 230, 240, 250)
_PLAIN: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 64 << 20,
}
CIRCUMSTANCES: Mapping[str, dict[str, Any]] = {
    "chunked": {"max_num_batched_tokens": 46},  # no multiple of the ratio, and below a page
    "preempted": {"kv_cache_memory_bytes": 4 << 20, "max_model_len": 512},
    "drafts": {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
}
"""What an engine has otherwise, whose answers are compared with the plain one's."""
NOISE_SHARE = 1.25
"""How much further from the definition than transformers' own bfloat16 the engine may be, by the mean: both are samples
of rounding, on a few hundred positions, and where experts are chosen by a hair their tails are single events."""
TIGHT_SHARE = 0.5
"""How far two circumstances may be apart, by the mean, as a share of that noise."""


@dataclass(frozen=True)
class Line:
    """One comparison.

    Args:
        checkpoint: its variant.
        what: is compared with what.
        tokens: positions that were compared.
        found: mean, 95th percentile and largest difference of log-probabilities, in nats.
        noise: the same of transformers' bfloat16 and float32, at the same positions.
        fault: what is wrong; empty: nothing.
    """

    checkpoint: str
    what: str
    tokens: int
    found: tuple[float, float, float]
    noise: tuple[float, float, float]
    fault: str


def compare(variant: str, folder: Path, circumstances: Sequence[str]) -> Iterator[Line]:
    """Compare one checkpoint.

    Args:
        variant: of `checkpoint.VARIANTS`.
        folder: to keep the checkpoint and each side's numbers in.
        circumstances: of CIRCUMSTANCES.

    Raises:
        subprocess.CalledProcessError: a side failed; its words are on standard error.
    """
    made = folder / variant
    if not made.exists():
        checkpoint.write(made, variant)
    prompts = _prompts()
    say = [{"tokens": tokens, "said": _SAID} for tokens in prompts]
    see = [{"tokens": tokens, "said": 0, "behind": [2, number]} for number, tokens in enumerate(prompts)]
    plain = _engine(made, {}, [say[-1:], say[-1:], say, see])
    told, seen = ([plain[f"{ask}-{number}"] for number in range(len(prompts))] for ask in (2, 3))
    whole = [tokens + plain[f"2-{number}-tokens"].tolist() for number, tokens in enumerate(prompts)]
    truth = _definition(made, whole)
    noise = [truth[f"bfloat16-{n}"][:-1] - truth[f"float32-{n}"][:-1] for n in range(len(whole))]
    floor = _spread(numpy.concatenate(noise))

    exact = [truth[f"float32-{n}"][:-1] for n in range(len(whole))]
    decoded = [slice(len(tokens) - 1, None) for tokens in prompts]
    yield _against(variant, "prompts, definition", seen, exact, noise)
    after = [[each[part] for each, part in zip(side, decoded, strict=True)] for side in (exact, noise)]
    yield _against(variant, "decoded, definition", told, *after)
    apart = [one - each[part] for one, each, part in zip(told, seen, decoded, strict=True)]
    yield _between(variant, "decoded, in a prompt", apart, floor)
    hit = plain["1-0"] - plain["0-0"]
    missed = "" if plain["1-0-cached"] else "nothing was found in the prefix cache"
    yield _between(variant, "prefix found, computed", [hit], floor, missed)
    together = f"2-{len(prompts) - 1}"
    alone, parted = _until_parted(plain, together, plain, "0-0", floor)
    yield _between(variant, "together, alone", [alone], floor, parted)
    for name in circumstances:
        asks = [say, say, [{"tokens": tokens, "said": 0} for tokens in whole]]
        yield from _under(variant, name, _engine(made, CIRCUMSTANCES[name], asks), plain, floor)


def _under(
    variant: str, name: str, other: dict[str, Array], plain: dict[str, Array], floor: tuple[float, float, float]
) -> Iterator[Line]:
    """What is said under other circumstances, the second time, when prefixes are there."""
    apart, whole = [], []
    fault = "no request had to make room" if name == "preempted" and not other["preempted"] else ""
    for number in range(len(_LENGTHS)):
        found, parted = _until_parted(other, f"1-{number}", plain, f"2-{number}", floor)
        apart.append(found)
        whole.append(other[f"2-{number}"] - plain[f"3-{number}"])
        fault = parted or fault
    yield _between(variant, f"{name}, plain", apart, floor, fault)
    if name == "chunked":
        yield _between(variant, "prompts in chunks, whole", whole, floor)


def _until_parted(
    one: dict[str, Array], its: str, other: dict[str, Array], others: str, floor: tuple[float, float, float]
) -> tuple[Array, str]:
    """How far two greedy texts are apart as far as they are one text, and what is wrong where they part.

    Only a near-tie may part them; behind it they speak of other texts.
    """
    same = int((one[f"{its}-tokens"] == other[f"{others}-tokens"]).cumprod().sum())
    apart = one[its][: same + 1] - other[others][: same + 1]
    if same < len(other[others]):
        best = numpy.sort(other[others][same])[::-1]
        if best[0] - best[1] > floor[2]:
            return apart, f"another token after {same}, by {best[0] - best[1]:.3f} nats"
    return apart, ""


def _against(variant: str, what: str, said: Sequence[Array], exact: Sequence[Array], noise: Sequence[Array]) -> Line:
    """The engine and the definition: no further apart than rounding explains, and the same first choice beyond it."""
    ours, theirs, rounding = (numpy.concatenate(each) for each in (said, exact, noise))
    found, own = _spread(ours - theirs), _spread(rounding)
    ordered = numpy.sort(theirs, -1)
    margin = ordered[:, -1] - ordered[:, -2]
    other = (ours.argmax(-1) != theirs.argmax(-1)) & (margin > own[2])
    fault = ""
    if other.any():
        fault = f"another first choice at {int(other.sum())} positions, beyond the noise"
    elif found[0] > NOISE_SHARE * own[0]:
        fault = f"further apart than {NOISE_SHARE} times the noise"
    return Line(variant, what, len(ours), found, own, fault)


def _between(
    variant: str,
    what: str,
    apart: Sequence[Array],
    floor: tuple[float, float, float],
    fault: str = "",
) -> Line:
    all_apart = numpy.concatenate(apart)
    found = _spread(all_apart)
    if not fault and found[0] > TIGHT_SHARE * floor[0]:
        fault = f"apart by more than {TIGHT_SHARE} of the noise"
    return Line(variant, what, len(all_apart), found, floor, fault)


def _spread(values: Array) -> tuple[float, float, float]:
    size = abs(values)
    return float(size.mean()), float(numpy.quantile(size, 0.95)), float(size.max())


def _prompts() -> list[list[int]]:
    """Seeded tokens; here and there an end of text, which n-grams do not reach behind."""
    chance = random.Random(3)
    tokens = [checkpoint.END, *range(3, checkpoint.VOCAB)]
    weights = [10, *[1] * (checkpoint.VOCAB - 3)]
    return [chance.choices(tokens, weights, k=length) for length in _LENGTHS]


def _engine(made: Path, otherwise: dict[str, Any], asks: Any) -> dict[str, Array]:
    job = {"checkpoint": str(made), "engine": {**_PLAIN, **otherwise}, "asks": asks}
    return _side("harness.parity.engine_run", made.parent, json.dumps(job))


def _definition(made: Path, sequences: Sequence[Sequence[int]]) -> dict[str, Array]:
    return _side("harness.parity.definition", made.parent, json.dumps(sequences), str(made))


def _side(module: str, folder: Path, given: str, *before: str) -> dict[str, Array]:
    job, out = folder / "job.json", folder / "out.npz"
    job.write_text(given)
    command = [sys.executable, "-m", module, *before, str(job), str(out)]
    done = subprocess.run(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(done.stderr[-4000:])
        done.check_returncode()
    with numpy.load(out) as numbers:
        return dict(numbers)
