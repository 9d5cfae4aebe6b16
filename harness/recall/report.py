"""What a battery found: data for a receipt, a verdict with its reasons, and a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from harness.recall.identity import Comparison
from harness.recall.scoring import Probe, Verdict, groups_of, judge_rate, rates_of, tokens_of, wilson

SCHEMA = "recall/1"
COLD_SHARE = 0.05
"""Of a cold prompt's tokens: a template's first block may be everybody's."""
HALF = 0.5
"""More than this share of the tokens of what is resumed come from a cache if a server restores, and fewer if not: the
second of a pair finds what they have in common where the first has just left it."""


@dataclass(frozen=True)
class Report:
    """A battery's result.

    Args:
        model: as it was asked for.
        settings: of the battery, as JSON.
        seed: with it and the settings the same markers are drawn again.
        probes: one for each question.
        comparisons: of answers to the same request.
        greedy_holds: whether an open question asked again and again without sampling got the same text each time; None
            when greedy was not asked for.
        notes: what was not asked, and why.
        seconds: that it took.
    """

    model: str
    settings: dict[str, Any]
    seed: int
    probes: list[Probe]
    comparisons: list[Comparison]
    greedy_holds: bool | None
    notes: list[str]
    seconds: float

    @property
    def findings(self) -> list[tuple[Verdict, str]]:
        """Everything that keeps it from passing, with what each of them makes of it."""
        return list(self._findings())

    @property
    def verdict(self) -> Verdict:
        """`fail` if anything is proved wrong, `pass` if everything required is proved right."""
        verdicts = [verdict for verdict, _ in self.findings]
        return "fail" if "fail" in verdicts else "inconclusive" if verdicts else "pass"

    def _findings(self) -> Iterator[tuple[Verdict, str]]:
        floor, ceiling = self.settings["floor"], self.settings["previous_ceiling"]
        for group in groups_of(self.probes, floor):
            if group.verdict == "fail" or (group.required and group.verdict == "inconclusive"):
                interval = f"{group.low:.3f} to {group.high:.3f}"
                what = f"{group.name}: {group.right} of {group.asked} right ({interval}, floor {floor:g})"
                yield group.verdict, what
        previous, asked = self.previous
        if asked and wilson(previous, asked)[0] > ceiling:
            yield "fail", f"{previous} of {asked} later turns got the answer to the turn before (ceiling {ceiling:g})"
        if leaks := [probe for probe in self.probes if probe.outcome == "leak"]:
            first = leaks[0]
            where = f"{first.conversation}, turn {first.turn}, {first.path}: {first.text[:40]!r}"
            yield "fail", f"{len(leaks)} answers hold a marker of another conversation; the first in {where}"
        if differing := [each for each in self.comparisons if each.outcome == "different"]:
            one = differing[0]
            where = f"{one.conversation}, {' and '.join(one.paths)}, {one.what}: {one.reason}"
            yield "fail", f"{len(differing)} of {len(self.comparisons)} comparisons differ; the first in {where}"
        if self.greedy_holds is False:
            yield "inconclusive", "greedy was asked for and is not in force: the same question got different texts"
        yield from self._unproved()

    def _unproved(self) -> Iterator[tuple[Verdict, str]]:
        paths = tokens_of(self.probes)
        for path in ("cold", "hit"):
            if path not in paths:
                yield "inconclusive", f"nothing was asked {path}"
        shares = {
            path: tokens["cached_tokens"] / tokens["prompt_tokens"]
            for path, tokens in paths.items()
            if tokens["prompt_tokens"] and tokens["cached_tokens"] is not None
        }
        if shares.get("cold", 0) > COLD_SHARE:
            yield "inconclusive", f"asked cold, {shares['cold']:.0%} of the prompt tokens came from a cache"
        if shares.get("hit") == 0:
            yield "inconclusive", "not one prompt token came from a cache, so that no prefix hit was tested"
        if "resumed" in shares and (shares["resumed"] > HALF) is not self.settings["restores"]:
            why = "nothing was restored" if self.settings["restores"] else "the churn did not evict"
            yield "inconclusive", f"after the churn {shares['resumed']:.0%} of the tokens came from a cache: {why}"

    @property
    def previous(self) -> tuple[int, int]:
        """How often a later turn got the answer to the turn before, and how many later turns there were."""
        later = [probe for probe in self.probes if probe.kind in ("code", "place") and probe.turn > 0]
        return sum(probe.outcome == "previous" for probe in later), len(later)

    def to_json(self) -> dict[str, Any]:
        """The whole of it; `probes` and `comparisons` are raw data, the rest is derived from them."""
        recall = [probe for probe in self.probes if probe.kind in ("code", "place")]
        right = sum(probe.outcome == "right" for probe in recall)
        low, high = wilson(right, len(recall))
        previous, later = self.previous
        return {
            "schema": SCHEMA,
            "model": self.model,
            "verdict": self.verdict,
            "findings": [{"verdict": verdict, "what": what} for verdict, what in self.findings],
            "recall": {
                "right": right,
                "asked": len(recall),
                "rate": round(right / len(recall), 4) if recall else None,
                "low": round(low, 4),
                "high": round(high, 4),
                "verdict": judge_rate(right, len(recall), self.settings["floor"]),
            },
            "rates": {
                name: {"right": group.right, "asked": group.asked, "low": group.low, "high": group.high}
                for name, group in rates_of(self.probes).items()
            },
            "groups": [asdict(group) for group in groups_of(self.probes, self.settings["floor"])],
            "outcomes": dict(sorted(Counter(probe.outcome for probe in self.probes).items())),
            "previous": {"count": previous, "later_turns": later, "low": round(wilson(previous, later)[0], 4)},
            "compared": dict(sorted(Counter(f"{each.what}: {each.outcome}" for each in self.comparisons).items())),
            "paths": tokens_of(self.probes),
            "greedy_holds": self.greedy_holds,
            "notes": self.notes,
            "seed": self.seed,
            "settings": self.settings,
            "seconds": round(self.seconds, 1),
            "comparisons": [asdict(comparison) for comparison in self.comparisons],
            "probes": [asdict(probe) for probe in self.probes],
        }

    def table(self) -> str:
        """For a terminal."""
        data = self.to_json()
        lines = [f"{'':32}{'right':>12}   95% interval   against a floor of {self.settings['floor']:g}"]
        for group in groups_of(self.probes, self.settings["floor"]):
            counts, interval = f"{group.right} of {group.asked}", f"{group.low:.2f} to {group.high:.2f}"
            name = f"{group.name}{' *' if group.required else ''}"
            lines.append(f"{name:32}{counts:>12}   {interval}   {group.verdict}")
        for path, tokens in data["paths"].items():
            cached = "not told by usage" if tokens["cached_tokens"] is None else f"{tokens['cached_tokens']:,} cached"
            lines.append(f"asked {path}: prompts of {tokens['prompt_tokens'] or 0:,} tokens in all, {cached}")
        if data["compared"]:
            compared = ", ".join(f"{count} {what}" for what, count in data["compared"].items())
            lines.append(f"the same request on two paths: {compared}")
        lines.append("answers: " + ", ".join(f"{count} {what}" for what, count in data["outcomes"].items()))
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"{verdict}: {what}" for verdict, what in self.findings]
        lines.append(f"recall: {data['verdict']} (seed {self.seed}, {self.seconds:.0f} s; * required)")
        return "\n".join(lines)
