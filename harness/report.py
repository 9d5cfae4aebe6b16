"""Receipts as one HTML file that needs nothing else: charts, tables, and what it takes to repeat them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

from harness import charts, tables
from harness.receipt import MEANING, Point, Quantiles, Receipt
from slimserve.errors import Finding, UsageError
from slimserve.machine import counted

STYLE = Path(__file__).with_name("report.css")
# Nothing may be loaded, run or sent, whatever a receipt holds.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def html(receipts: Sequence[Receipt]) -> str:
    """The page.

    Args:
        receipts: what it shows, in its order; those of one workload share their charts.

    Raises:
        UsageError: there are none.
    """
    if not receipts:
        do = "slimserve PROFILE --bench writes one; slimserve --receipts lists what there is"
        raise UsageError(Finding("there is no receipt to draw", "a report shows what was measured", do))
    by_workload: dict[str, list[Receipt]] = defaultdict(list)
    for receipt in receipts:
        by_workload[receipt.workload.name].append(receipt)
    title = "Receipts: " + ", ".join(dict.fromkeys(receipt.target.name for receipt in receipts))
    body = "\n".join(_workload(name, group) for name, group in by_workload.items())
    count = "one run" if len(receipts) == 1 else f"{len(receipts)} runs"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(title)}</title>
<style>
{STYLE.read_text("utf-8")}</style>
</head>
<body>
<main>
<header><h1>{escape(title)}</h1>
<p class="quiet">What {count} measured, drawn from the receipts alone. Tokens are those that the servers counted; times
are the client's. A bar reaches from p20 to p80, its mark is the median, the tick beyond it p99.</p></header>
{body}
{"".join(_facts(receipt) for receipt in receipts)}
</main>
</body>
</html>
"""


def _workload(name: str, receipts: Sequence[Receipt]) -> str:
    legend = "".join(
        f'<li><svg viewBox="0 0 14 14" aria-hidden="true">{charts.mark(number, 7, 7)}</svg>'
        f"{escape(one.target.name)} <span class=quiet>{escape(one.written[:10])}</span>{_warning(one)}</li>"
        for number, one in enumerate(receipts)
    )
    found = "\n".join(_charts(receipts))
    return (
        f'<section><h2>{escape(name)}</h2>\n<ul class="legend">{legend}</ul>\n'
        f'<div class="charts">{found or "<p>Nothing was measured.</p>"}</div>\n{_table(receipts)}</section>'
    )


def _charts(receipts: Sequence[Receipt]) -> Iterator[str]:
    numbered = list(enumerate(receipts))
    series = [
        [
            charts.Dot(point.interactivity_p90, point.output_tokens_per_s, _short(point))
            for point in one.points
            if point.interactivity_p90 is not None and point.output_tokens_per_s is not None
        ]
        for one in receipts
    ]
    if any(series):
        title, words = (
            "Throughput against interactivity",
            "each point a load: how many requests were in flight together",
        )
        drawn = charts.scatter(title, "tokens/s of a user (P90 interactivity)", "output tokens/s, all users", series)
        yield _figure(title, words, drawn)
    latencies: tuple[tuple[str, str, Callable[[Point], Quantiles | None]], ...] = (
        ("Time to the first token", "by load; further left is better", lambda point: point.ttft_ms),
        ("Time between tokens", "by load, the first token apart", lambda point: point.itl_ms or point.tpot_ms),
    )
    for title, words, pick in latencies:
        rows = [
            _span(_short(point), number, times)
            for number, one in numbered
            for point in one.points
            if (times := pick(point)) is not None and times.p99 > 0
        ]
        if rows:
            yield _figure(title, words, charts.spans(title, "milliseconds", rows))
    shares = [
        charts.Bar(_short(point), number, share)
        for number, one in numbered
        for point in one.points
        if (share := tables.hits(point)) is not None
    ]
    if shares:
        title = "Prompt tokens from the cache"
        yield _figure(title, "as the server counted them", charts.bars(title, "of all prompt tokens", shares))


def _span(label: str, series: int, times: Quantiles) -> charts.Span:
    # Tokens of one chunk arrive together: their latency is 0, which no logarithmic axis has.
    least = times.p99 / 1e4
    p20, p50, p80 = (max(value, least) for value in (times.p20, times.p50, times.p80))
    return charts.Span(label, series, p20, p50, p80, times.p99)


def _figure(title: str, words: str, drawn: str) -> str:
    return f"<figure><figcaption><b>{escape(title)}</b> <span>{escape(words)}</span></figcaption>\n{drawn}</figure>"


def _table(receipts: Sequence[Receipt]) -> str:
    drafts = tables.drafted(point for one in receipts for point in one.points)
    head = (
        "served", "load", "tokens/s", "P90 tokens/s of a user", "TTFT ms p50", "p99", "ms a token p50", "p99",
        *(["acceptance length"] if drafts else []), "in flight", "from cache", "ok / sent", "noise",
    )  # fmt: skip
    rows = []
    for one in receipts:
        for point in one.points:
            cells = (
                one.target.name,
                tables.load(point),
                tables.amount(point.output_tokens_per_s),
                tables.amount(point.interactivity_p90),
                *_two(point.ttft_ms),
                *_two(point.tpot_ms),
                *([tables.length(point.server)] if drafts else []),
                tables.amount(point.mean_in_flight),
                tables.share(tables.hits(point)),
                f"{point.ok} / {point.sent}",
                tables.share(point.noise.get("throughput")),
            )
            rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
            rows += [f'<tr class="note"><td colspan="{len(head)}">{escape(note)}</td></tr>' for note in point.notes]
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "\n".join(rows)
    return (
        f'<div class="wide" tabindex="0"><table><thead><tr>{names}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
    )


def _two(times: Quantiles | None) -> tuple[str, str]:
    return ("-", "-") if times is None else (tables.amount(times.p50), tables.amount(times.p99))


def _facts(receipt: Receipt) -> str:
    host = receipt.host
    gpus = f"{len(host.gpus)} x {host.gpus[0]}, driver {host.driver}" if host.gpus else "none"
    facts = {
        "outcome": f"{receipt.outcome}: {MEANING[receipt.outcome]}",
        **({"why": "; ".join(receipt.reasons)} if receipt.reasons else {}),
        "right answers": "; ".join(line.strip() for line in tables.recall(receipt)),
        "command": " ".join(receipt.command),
        "commit": receipt.commit,
        "when": receipt.written,
        "machine": f"{host.cpu or host.architecture}, {counted(host.cores, 'core')}, "
        f"{host.memory_bytes / (1 << 30):.1f} GiB; GPUs: {gpus}; {host.kernel}",
        "software": ", ".join(f"{name} {version}" for name, version in receipt.versions.items()),
        "model": f"{receipt.target.model}" + (f", {receipt.weights.origin}" if receipt.weights else ""),
        "prompts": f"{receipt.prompts.corpus}; seed {receipt.workload.seed}; {receipt.prompts.sha256}",
        "resolved configuration": receipt.resolved_sha256 or "not known",
        "start": ", ".join(f"{state} {seconds:g} s" for state, seconds in receipt.start_seconds.items()) or "not known",
        "memory": f"{receipt.memory_bytes / (1 << 30):.2f} GiB" if receipt.memory_bytes else "not known",
        "samples": f"{receipt.samples.count} in {receipt.samples.file}",
    }  # fmt: skip
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    mark = " open" if _warning(receipt) else ""
    return f"<details{mark}><summary>{escape(receipt.id)}</summary><dl>{rows}</dl></details>\n"


def _warning(receipt: Receipt) -> str:
    """What must not be overlooked: numbers that are not to be used, and answers that are not proved right."""
    words: list[str] = [] if receipt.outcome == "whole" else [receipt.outcome]
    words += [] if receipt.recall_verdict in (None, "pass") else [f"recall {receipt.recall_verdict}"]
    return f' <b class="bad">{", ".join(words)}</b>' if words else ""


def _short(point: Point) -> str:
    rate = point.setup.rate_per_s
    return str(point.setup.concurrency) if point.setup.concurrency is not None else f"{tables.amount(rate)}/s"
