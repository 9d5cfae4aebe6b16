"""From raw samples to the numbers of a receipt, and to the waves that a comparison draws from."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.raw import Raw
from harness.receipt import Point, Quantiles, ServerCounts, Setup
from harness.sample import Sample, in_flight
from harness.stats import median, quantile, spread

# From this share of the time to the first token on, that time tells of the queue and not of the engine.
QUEUE_SHARE = 0.5


@dataclass(frozen=True)
class Wave:
    """As many requests as were in flight together, which ended one after the other within one round.

    Args:
        tokens: of their answers.
        seconds: from the end of the wave before, or the start of the round, to the end of this one.
        ttft_s, tpot_s, e2e_s: of the requests.
    """

    tokens: int
    seconds: float
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    e2e_s: tuple[float, ...]


def points(setups: Iterable[tuple[Setup, ServerCounts]], raws: Sequence[Raw]) -> tuple[Point, ...]:
    """The numbers of each load, in the order of `setups`; what has no setup is not counted."""
    by_name: dict[str, list[Raw]] = defaultdict(list)
    for raw in raws:
        by_name[raw.point].append(raw)
    return tuple(point(setup, server, by_name[setup.name]) for setup, server in setups)


def point(setup: Setup, server: ServerCounts, raws: Sequence[Raw]) -> Point:
    """The numbers of one load.

    Args:
        setup: the load.
        server: what the server counted meanwhile.
        raws: its requests, warm-up included.
    """
    measured = [raw for raw in raws if raw.measured]
    samples = [raw.sample for raw in measured]
    counts = Counter(sample.outcome for sample in samples)
    good = [raw for raw in measured if raw.sample.outcome == "ok"]
    answers = [raw.sample for raw in good]
    rounds = by_round(measured)
    rates = tuple(rate for rate in map(tokens_per_s, rounds) if rate is not None)
    tpots = [value for value in (answer.tpot_s for answer in answers) if value is not None]
    flights = [in_flight(one) for one in rounds]
    times = [seconds(one) for one in rounds]
    slowest = quantile(tpots, 0.9) if tpots else 0.0
    cached = [answer.cached_tokens for answer in answers]
    return Point(
        setup=setup,
        server=server,
        rounds=len(rounds),
        warm_up=len(raws) - len(measured),
        sent=len(measured),
        ok=counts["ok"],
        failed=counts["failed"],
        rejected=counts["rejected"],
        void=counts["void"],
        retries=sum(sample.retries for sample in samples),
        prompt_tokens=sum(answer.prompt_tokens or 0 for answer in answers),
        prompt_tokens_asked=_total([raw.prompt_tokens_asked for raw in good]),
        output_tokens=sum(answer.completion_tokens or 0 for answer in answers),
        output_tokens_asked=_total([raw.output_tokens_asked for raw in good]),
        cached_tokens=_total(cached),
        seconds=sum(times),
        most_in_flight=max((most for most, _ in flights), default=0),
        mean_in_flight=_mean(flights, times),
        output_tokens_per_s=median(rates) if rates else None,
        round_output_tokens_per_s=rates,
        interactivity_p90=1 / slowest if slowest > 0 else None,
        ttft_ms=quantiles([answer.ttft_s for answer in answers]),
        itl_ms=quantiles([latency for answer in answers for latency in answer.itl_s]),
        tpot_ms=quantiles(tpots),
        e2e_ms=quantiles([answer.e2e_s for answer in answers]),
        noise=noise(rounds),
        notes=tuple(_notes(setup, server, answers)),
    )


def quantiles(seconds: Iterable[float | None]) -> Quantiles | None:
    """Of times in seconds, in milliseconds; None of no times."""
    values = [value * 1e3 for value in seconds if value is not None]
    if not values:
        return None
    p20, p50, p80, p99 = (quantile(values, part) for part in (0.2, 0.5, 0.8, 0.99))
    return Quantiles(p20=p20, p50=p50, p80=p80, p99=p99, count=len(values))


def by_round(raws: Iterable[Raw]) -> list[list[Sample]]:
    """The samples of each repetition, in the order of the repetitions."""
    found: dict[int, list[Sample]] = defaultdict(list)
    for raw in raws:
        found[raw.round].append(raw.sample)
    return [found[number] for number in sorted(found)]


def seconds(samples: Sequence[Sample]) -> float:
    """From the first request to the last end."""
    if not samples:
        return 0.0
    return max(sample.ended_s for sample in samples) - min(sample.asked_s for sample in samples)


def tokens_per_s(samples: Sequence[Sample]) -> float | None:
    """Output tokens a second of one round; None when nothing came."""
    tokens = sum(sample.completion_tokens or 0 for sample in samples if sample.outcome == "ok")
    elapsed = seconds(samples)
    return tokens / elapsed if tokens and elapsed > 0 else None


def noise(rounds: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """How far the rounds lie apart, by metric; see `stats.spread`."""
    found: dict[str, float] = {}
    metrics = {
        "throughput": [rate for rate in map(tokens_per_s, rounds) if rate is not None],
        "ttft": [value for value in (_median([one.ttft_s for one in _good(part)]) for part in rounds) if value],
        "inter-token": [value for value in (_median([one.tpot_s for one in _good(part)]) for part in rounds) if value],
    }
    for name, medians in metrics.items():
        apart = spread(medians)
        if apart is not None:
            found[name] = apart
    return found


def waves(raws: Iterable[Raw], in_flight_together: int) -> list[list[Wave]]:
    """Each round's answers in waves: requests of one wave shared the engine's steps, so they are drawn together.

    Args:
        raws: of one load.
        in_flight_together: requests of a wave.
    """
    return [_waves(part, max(1, in_flight_together)) for part in by_round(raw for raw in raws if raw.measured)]


def _waves(samples: Sequence[Sample], size: int) -> list[Wave]:
    answers = sorted((sample for sample in samples if sample.outcome == "ok"), key=lambda one: one.ended_s)
    before = min((sample.asked_s for sample in samples), default=0.0)
    found: list[Wave] = []
    for start in range(0, len(answers), size):
        part = answers[start : start + size]
        if len(part) < size and found:
            break  # of a wave that is not whole, rate and latency are those of a server that runs empty
        found.append(
            Wave(
                tokens=sum(one.completion_tokens or 0 for one in part),
                seconds=part[-1].ended_s - before,
                ttft_s=tuple(one.ttft_s for one in part if one.ttft_s is not None),
                tpot_s=tuple(one.tpot_s for one in part if one.tpot_s is not None),
                e2e_s=tuple(one.e2e_s for one in part if one.e2e_s is not None),
            )
        )
        before = part[-1].ended_s
    return found


def _notes(setup: Setup, server: ServerCounts, answers: Sequence[Sample]) -> Iterable[str]:
    """What the numbers are not what they seem for."""
    queued, first = server.queue_seconds, server.ttft_seconds
    if queued is not None and first and queued / first > QUEUE_SHARE:
        yield f"admission-bound: {queued / first:.0%} of the time to the first token was spent in the server's queue"
    elif setup.slots is not None and (setup.concurrency or 0) > setup.slots:
        yield f"admission-bound: {setup.concurrency} requests at once on {setup.slots} slots, so that some wait"
    refused = _median([answer.refused_s for answer in answers]) or 0.0
    ttft = _median([answer.ttft_s for answer in answers])
    if ttft is not None and refused > QUEUE_SHARE * (refused + ttft):
        yield "admission-bound: the median request was refused, or late, for longer than it then took to answer"


def _good(samples: Iterable[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.outcome == "ok"]


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _mean(flights: Sequence[tuple[int, float]], times: Sequence[float]) -> float:
    total = sum(times)
    return sum(mean * time for (_, mean), time in zip(flights, times, strict=True)) / total if total else 0.0


def _total(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
