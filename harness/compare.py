"""Two receipts: which server is faster, by how much, and whether that can be said at all.

Drawn are rounds, and within each round waves of requests, since requests that share the engine's steps are slow or fast
together: a bootstrap of single requests would call every mood of the machine a difference. A difference is claimed when
the interval excludes "none" and it is larger than the rounds of either side differ among themselves; "no difference"
when the interval lies close around none; everything else is inconclusive, and nobody's loss. Few rounds make intervals
wide, as they should: three of them say little about a fourth. Rounds of servers that were asked in turn within one run
are drawn in pairs, so that a mood of the machine that hit both cancels out.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from harness.raw import Raw, read_samples
from harness.receipt import BATTERY_MEANING, Point, Receipt
from harness.stats import CONFIDENCE, Floats, Interval, interval, median, spread, widening
from harness.summary import Wave, waves
from slimserve.errors import Finding, Refused, UsageError
from slimserve.machine import counted
from slimserve.receipt_file import Unreadable

Rounds = list[list[Wave]]
Verdict = Literal["a", "b", "none", "inconclusive"]

DRAWS = 2_000
# Of two runs of one thing on one machine, medians differ by as much.
SMALLEST_EFFECT = 0.04
# Rounds that lie further apart than this are those of a machine that was doing something else.
NOISY = 0.10
# "No difference" is said only where one of this size would have been seen.
PRECISE = 0.10
# A client on one core resolves no more: below it a difference is the clock's.
RESOLUTION_S = {"ttft": 0.0005, "inter-token": 0.00005}
FEWEST_WAVES = 4


@dataclass(frozen=True)
class Metric:
    """Something that is compared.

    Args:
        name: of it.
        unit: of its values.
        higher_is_better: what a larger number means.
        values: of a wave, of which the median is taken; None: tokens a second, of all waves together.
    """

    name: str
    unit: str
    higher_is_better: bool
    values: Callable[[Wave], Sequence[float]] | None = None

    def of(self, waves: Sequence[Wave]) -> float | None:
        """Its value over some waves; None where they do not have it."""
        if self.values is None:
            seconds = sum(wave.seconds for wave in waves)
            return sum(wave.tokens for wave in waves) / seconds if seconds > 0 else None
        found = [value for wave in waves for value in self.values(wave)]
        return median(found) if found else None


METRICS = (
    Metric("throughput", "tokens/s", True),
    Metric("ttft", "s", False, lambda wave: wave.ttft_s),
    Metric("inter-token", "s", False, lambda wave: wave.tpot_s),
)


@dataclass(frozen=True)
class Compared:
    """One metric of one load.

    Args:
        point, metric: which.
        unit: of `a` and `b`.
        a, b: its values.
        ratio: b / a with its interval; None where a side has too little.
        verdict: which side is better; "none": no difference; "inconclusive".
        why: of the verdict, in words.
    """

    point: str
    metric: str
    unit: str
    a: float | None
    b: float | None
    ratio: Interval | None
    verdict: Verdict
    why: str


@dataclass(frozen=True)
class Comparison:
    """Two receipts, metric by metric.

    Args:
        a, b: their ids.
        compared: what was.
        notes: what else differs between the runs, or was in only one of them.
    """

    a: str
    b: str
    compared: tuple[Compared, ...]
    notes: tuple[str, ...]

    @property
    def verdict(self) -> Literal["a", "b", "none", "mixed", "inconclusive"]:
        """Of all together: a side that wins something and loses nothing; none, where nothing differs."""
        found = {one.verdict for one in self.compared}
        if {"a", "b"} <= found:
            return "mixed"
        return "a" if "a" in found else "b" if "b" in found else "none" if found == {"none"} else "inconclusive"


def compare(a: Receipt, b: Receipt, folder_a: Path, folder_b: Path) -> Comparison:
    """Compare two receipts by their raw samples.

    Args:
        a, b: the receipts.
        folder_a, folder_b: where each one's samples lie.

    Raises:
        Refused: they are of different machines, workloads or prompts, or one is not whole.
        UsageError: samples cannot be read, or are not those of the receipt.
    """
    refusals = list(_refusals(a, b))
    if refusals:
        raise Refused(*refusals)
    samples_a, samples_b = samples_of(a, folder_a), samples_of(b, folder_b)
    compared: list[Compared] = []
    notes = list(_notes(a, b))
    paired = a.together is not None and a.together == b.together
    same = a.samples.sha256 == b.samples.sha256
    for point in a.points:
        other = b.point(point.setup.name)
        # Slots are the server's affair, and of some servers not known.
        if other is None or replace(other.setup, slots=None) != replace(point.setup, slots=None):
            notes.append(f"{point.setup.name} was measured by {a.id} alone, or otherwise")
            continue
        if same:
            compared += [_same(point.setup.name, metric, _of_point(samples_a, point)) for metric in METRICS]
            continue
        sides = _of_point(samples_a, point), _of_point(samples_b, other)
        compared += [_metric(point.setup.name, metric, *sides, paired) for metric in METRICS]
    notes += [f"{one.setup.name} was measured by {b.id} alone" for one in b.points if a.point(one.setup.name) is None]
    if not compared:
        raise Refused(Finding("the two receipts have no load in common", "; ".join(notes), "measure the same loads"))
    return Comparison(a.id, b.id, tuple(compared), tuple(notes))


def samples_of(receipt: Receipt, folder: Path) -> list[Raw]:
    """The raw samples of a receipt.

    Raises:
        UsageError: they cannot be read, or are not those of the receipt.
    """
    path = folder / receipt.samples.file
    try:
        packed, raws = read_samples(path)
        if hashlib.sha256(packed).hexdigest() != receipt.samples.sha256:
            raise Unreadable("their hash is not the one that the receipt states")
    except Unreadable as error:
        what = f"the raw samples of {receipt.id} cannot be used"
        raise UsageError(Finding(what, str(error), "restore the file from where it was committed", str(path))) from None
    return raws


def _refusals(a: Receipt, b: Receipt) -> list[Finding]:
    found = []
    for receipt in (a, b):
        if receipt.outcome != "whole":
            what = f"{receipt.id} is {receipt.outcome}"
            found.append(Finding(what, "; ".join(receipt.reasons), "measure again, and compare whole receipts"))
    if a.host.id != b.host.id:
        what = f"{a.id} and {b.id} were taken on different machines"
        why = f"{_machine(a)}, and {_machine(b)}: what differs is the machine before it is the server"
        found.append(Finding(what, why, "measure both on one machine, best in turn: --against URL"))
    if (a.workload.name, a.workload.sha256) != (b.workload.name, b.workload.sha256):
        what = f"{a.id} ran {a.workload.name}, and {b.id} ran {b.workload.name}"
        why = (
            "other questions take other times" if a.workload.name != b.workload.name else "its file changed in between"
        )
        found.append(Finding(what, why, "measure both with one workload"))
    return found


def _machine(receipt: Receipt) -> str:
    host = receipt.host
    gpus = f", {len(host.gpus)} x {host.gpus[0]}" if host.gpus else ""
    return f"{host.cpu or host.architecture}, {counted(host.cores, 'core')}{gpus} ({host.id[:8]})"


def _notes(a: Receipt, b: Receipt) -> list[str]:
    """Answers that are not proved right, and facts beside the server itself that are not the same."""
    wrong = [
        f"{one.id}: recall {one.battery.verdict}, {BATTERY_MEANING[one.battery.verdict]}"
        for one in (a, b)
        if one.battery is not None and one.battery.verdict != "pass"
    ]
    pairs = {
        "commit": (a.commit, b.commit),
        "GPU driver": (a.host.driver, b.host.driver),
        "kernel": (a.host.kernel, b.host.kernel),
        "prompts": (a.prompts.sha256[:12], b.prompts.sha256[:12]),
        "seed": (a.workload.seed, b.workload.seed),
        "resolved configuration": (_short(a.resolved_sha256), _short(b.resolved_sha256)),
    }
    pairs |= {name: (a.versions.get(name), b.versions.get(name)) for name in sorted({*a.versions, *b.versions})}
    if a.profile and b.profile and a.profile.id == b.profile.id:
        keys = sorted({*a.profile.settings, *b.profile.settings})
        pairs |= {key: (a.profile.settings.get(key), b.profile.settings.get(key)) for key in keys}
    differing = [f"{name}: {_said(one)}, then {_said(other)}" for name, (one, other) in pairs.items() if one != other]
    return [*wrong, *differing]


def _short(digest: str | None) -> str | None:
    return digest and digest[:12]


def _said(value: object) -> str:
    return "none" if value is None else str(value)


def _of_point(raws: Sequence[Raw], point: Point) -> Rounds:
    """The waves of a load by round; a single round is cut in three, so that there is something to be noise."""
    size = point.setup.concurrency or max(1, round(point.mean_in_flight))
    rounds = [part for part in waves([raw for raw in raws if raw.point == point.setup.name], size) if part]
    if len(rounds) != 1:
        return rounds
    whole = rounds[0]
    ends = [len(whole) * part // 3 for part in range(4)]
    return [whole[start:end] for start, end in itertools.pairwise(ends) if end > start]


def _same(point: str, metric: Metric, rounds: Rounds) -> Compared:
    """Of a run with itself nothing needs to be drawn."""
    value = metric.of([wave for part in rounds for wave in part])
    ratio = Interval(1.0, 1.0, 1.0)
    return Compared(point, metric.name, metric.unit, value, value, ratio, "none", "both are the same samples")


def _metric(point: str, metric: Metric, a: Rounds, b: Rounds, paired: bool) -> Compared:
    first, second = (metric.of([wave for part in side for wave in part]) for side in (a, b))

    def told(verdict: Verdict, why: str, ratio: Interval | None = None) -> Compared:
        return Compared(point, metric.name, metric.unit, first, second, ratio, verdict, why)

    if not first or not second:
        return told("inconclusive", "a side has no such number")
    fewest = min(sum(map(len, side)) for side in (a, b))
    if fewest < FEWEST_WAVES or min(len(a), len(b)) < 2:
        return told("inconclusive", f"{fewest} waves of requests are too few to draw from: {FEWEST_WAVES} are needed")
    pairs = paired and len(a) == len(b)
    ratio = _ratio(metric, a, b, second / first, pairs)
    noise = _noise(metric, a, b, pairs)
    effect, within = abs(ratio.estimate - 1), max(abs(ratio.low - 1), abs(ratio.high - 1))
    if abs(second - first) <= RESOLUTION_S.get(metric.name, 0.0):
        return told("none", "they differ by less than a client resolves", ratio)
    if not ratio.contains(1.0) and effect > max(SMALLEST_EFFECT, noise):
        better: Verdict = "b" if (ratio.estimate > 1) == metric.higher_is_better else "a"
        return told(better, f"more than the rounds differ among themselves ({noise:.1%})", ratio)
    if noise > NOISY:
        return told("inconclusive", f"the rounds of one side lie {noise:.0%} apart", ratio)
    if within > PRECISE:
        return told("inconclusive", f"a difference of {PRECISE:.0%} could hide in this interval", ratio)
    return told("none", f"less than {SMALLEST_EFFECT:.0%}, or than the rounds differ among themselves", ratio)


def _noise(metric: Metric, a: Rounds, b: Rounds, pairs: bool) -> float:
    """How far rounds lie apart that should be alike; of pairs, their ratios."""
    values = [[metric.of(part) for part in side] for side in (a, b)]
    if pairs:
        values = [[other / one for one, other in zip(*values, strict=True) if one and other]]
    return max(spread([value for value in side if value]) or 0.0 for side in values)


def _ratio(metric: Metric, a: Rounds, b: Rounds, estimate: float, pairs: bool) -> Interval:
    """b / a over rounds drawn with replacement, and over waves drawn within each.

    Args:
        estimate: the ratio of all waves.
        pairs: the sides' rounds belong together, one by one, and are drawn together.
    """
    rng = np.random.default_rng(0)
    chosen_a = rng.integers(0, len(a), (DRAWS, len(a)))
    chosen_b = chosen_a if pairs else rng.integers(0, len(b), (DRAWS, len(b)))
    drawn = _draw(metric, b, chosen_b, rng) / _draw(metric, a, chosen_a, rng)
    freedom = len(a) - 1 if pairs else len(a) + len(b) - 2
    wide = estimate + (drawn - estimate) * widening(freedom, CONFIDENCE)
    return interval(estimate, wide, CONFIDENCE)


def _draw(metric: Metric, rounds: Rounds, chosen: NDArray[np.int64], rng: np.random.Generator) -> Floats:
    """The metric of each draw; `chosen` holds its rounds, the waves are drawn here."""
    lengths = np.array([len(part) for part in rounds])
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    flat = [wave for part in rounds for wave in part]
    longest = int(lengths.max())
    luck = rng.random((*chosen.shape, longest))
    places = starts[chosen][..., None] + (luck * lengths[chosen][..., None]).astype(np.int64)
    # A shorter round fills no more places than it has waves.
    there = np.arange(longest) < lengths[chosen][..., None]
    places, there = places.reshape(DRAWS, -1), there.reshape(DRAWS, -1)
    if metric.values is None:
        tokens, seconds = np.array([wave.tokens for wave in flat]), np.array([wave.seconds for wave in flat])
        return np.asarray((tokens[places] * there).sum(axis=1) / (seconds[places] * there).sum(axis=1))
    values = [metric.values(wave) for wave in flat]
    table = np.full((len(flat), max(map(len, values))), np.nan)
    for row, own in zip(table, values, strict=True):
        row[: len(own)] = own
    if there.all() and not np.isnan(table).any():
        return np.asarray(np.median(table[places].reshape(DRAWS, -1), axis=1))
    return np.array([_known_median(table[place[is_there]]) for place, is_there in zip(places, there, strict=True)])


def _known_median(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else float("nan")


def render(comparison: Comparison) -> str:
    """The comparison for a person."""
    sides = {"a": comparison.a, "b": comparison.b}
    words = {"none": "no difference", "inconclusive": "inconclusive", "mixed": "each side wins something"}
    lines = [f"A  {comparison.a}", f"B  {comparison.b}", ""]
    for one in comparison.compared:
        says = words.get(one.verdict) or f"{one.verdict.upper()} is better by {_by(one)}"
        lines.append(f"{one.point}  {one.metric:<12} A {_value(one.a, one.unit)}  B {_value(one.b, one.unit)}  {says}")
        if one.ratio is not None:
            low, high = one.ratio.low, one.ratio.high
            lines.append(f"    B / A = {one.ratio.estimate:.3f}, 95% interval {low:.3f} to {high:.3f}: {one.why}")
        else:
            lines.append(f"    {one.why}")
    lines += [f"note: {note}" for note in comparison.notes]
    verdict = comparison.verdict
    whole = words.get(verdict) or f"{sides[verdict]} ({verdict.upper()}) wins, and loses nothing"
    return "\n".join([*lines, "", f"verdict: {whole}"])


def _by(one: Compared) -> str:
    """How much better the better side is, with the interval, in percent of the other side."""
    if one.ratio is None:
        return "nothing that is known"
    found = (one.ratio.estimate, one.ratio.low, one.ratio.high)
    shares = sorted(abs(value - 1) for value in found[1:])
    return f"{abs(found[0] - 1):.1%} ({shares[0]:.1%} to {shares[1]:.1%})"


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.2f} ms" if unit == "s" else f"{value:.1f} {unit}"
