"""A receipt: what was measured, on what, with what, and where the raw samples lie. Its shape, and its reading.

`harness.recording` writes receipts, `harness.verify` proves them, `profiles/receipts/schema.json` is generated from
these shapes. A receipt is never changed: what is measured again is another one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from slimserve.errors import Finding, UsageError
from slimserve.machine import counted
from slimserve.profile import FileName, Id, Text
from slimserve.receipt_file import SCHEMA_NAME, Unreadable, read
from slimserve.shapes import Between, Matching, ShapeError, build

Sha256 = Annotated[str, Matching(r"[0-9a-f]{64}", "64 hexadecimal digits")]
ReceiptId = Annotated[str, Matching(r"[a-z0-9][a-z0-9.-]{0,159}", "lower-case letters, digits, dots and hyphens")]
Moment = Annotated[str, Matching(r"20[0-9]{2}-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9]:[0-5][0-9]Z", "UTC")]
Number = Annotated[int, Between(0, 1 << 60)]
Amount = Annotated[float, Between(0, 1e18)]
Share = Annotated[float, Between(0, 1)]

Outcome = Literal["whole", "void", "failed", "aborted"]
CacheLabel = Literal["cold", "warm"]
MEANING: dict[str, str] = {
    "whole": "everything that was sent was answered and counted; a profile may cite it",
    "void": "answers came that cannot be believed, or were lost; the numbers are not to be used",
    "failed": "the server broke off or was not there",
    "aborted": "it was interrupted, and holds what had come until then",
}
BatteryVerdict = Literal["pass", "fail", "inconclusive", "aborted"]
BATTERY_MEANING: dict[str, str] = {
    "pass": "every way of asking was answered right often enough",
    "fail": "answers are proved wrong: what was measured was fast, and not right",
    "inconclusive": "neither is proved, or the server could not be asked to the end",
    "aborted": "it was interrupted, and nothing is concluded from a part",
}


@dataclass(frozen=True, kw_only=True)
class Host:
    """The machine, as far as it decides how fast something is."""

    id: Sha256
    """of machine, processor, cores, memory and GPUs; receipts of different ones are never compared"""
    cpu: Text | None
    architecture: Text
    cores: Number
    """that this process may use, its cgroup's quota included"""
    memory_bytes: Number
    """of the host, or of the cgroup where that is less"""
    gpus: tuple[Text, ...]
    driver: Text | None
    kernel: Text


@dataclass(frozen=True, kw_only=True)
class Target:
    """The server that was asked."""

    kind: Literal["profile", "server"]
    """launched from a profile of the registry, or somebody else's at an address"""
    name: Text
    """of the profile, or the address without what may be secret in it"""
    model: Text
    """as requests name it"""
    api: Literal["completions", "chat"]


@dataclass(frozen=True, kw_only=True)
class ProfileFacts:
    """The profile as it was when it was measured."""

    id: Id
    sha256: Sha256
    """of the profile's file"""
    platform: Id
    model: Id
    quant: Id
    engine: Text
    """release of the engine"""
    settings: dict[Text, str]
    """every setting by key path, its value as JSON text"""


@dataclass(frozen=True, kw_only=True)
class WeightsFacts:
    """Which weights were served."""

    origin: Text
    """repository and revision, package and version, or what comes with slimserve"""
    manifest: Id | None
    manifest_sha256: Sha256 | None
    """of the list of files with their hashes"""


@dataclass(frozen=True, kw_only=True)
class WorkloadFacts:
    """What was asked."""

    name: Id
    sha256: Sha256
    """of the workload's file"""
    seed: Number
    scaled_down: bool = False
    """a smaller form for small machines, under a name of its own"""


@dataclass(frozen=True, kw_only=True)
class PromptFacts:
    """Which prompts were sent."""

    sha256: Sha256
    """of all prompts in the order in which they were made"""
    tokenizer_sha256: Sha256 | None
    """None where the server's tokenizer is not known"""
    corpus: Text


@dataclass(frozen=True, kw_only=True)
class ServerCounts:
    """What the server counted meanwhile: its metrics after a point minus those before."""

    cache_queries: Amount | None = None
    """prompt tokens that were looked up in the prefix cache"""
    cache_hits: Amount | None = None
    """prompt tokens that were found there"""
    queue_seconds: Amount | None = None
    """that all requests together waited for a slot"""
    ttft_seconds: Amount | None = None
    """that all requests together waited for the first token, the queue included"""
    drafts: Amount | None = None
    """steps that verified drafts"""
    accepted_tokens: Amount | None = None
    """draft tokens that were kept"""

    @property
    def acceptance_length(self) -> float | None:
        """Tokens of a step with drafts, the one included that the model adds itself; None where nothing was drafted."""
        if self.accepted_tokens is None or not self.drafts:
            return None
        return 1 + self.accepted_tokens / self.drafts


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One load of a workload."""

    name: Id
    """of the point within the receipt, such as c8"""
    concurrency: Annotated[int, Between(1, 1 << 20)] | None
    """requests in flight together, of a closed loop"""
    rate_per_s: Amount | None = None
    """requests a second, of an open loop"""
    slots: Annotated[int, Between(1, 1 << 20)] | None = None
    """decode slots of the server, where they are known"""
    cache: CacheLabel = "cold"
    """whether the prompts, or their beginnings, were asked before on purpose"""


@dataclass(frozen=True, kw_only=True)
class Quantiles:
    """Of one kind of time, in milliseconds."""

    p20: Amount
    p50: Amount
    p80: Amount
    p99: Amount
    count: Annotated[int, Between(1, 1 << 40)]
    """values that these are the quantiles of"""


@dataclass(frozen=True, kw_only=True)
class Point:
    """What came of one load. Warm-up is in no number but its own."""

    setup: Setup
    server: ServerCounts
    rounds: Number
    """repetitions of the same load"""
    warm_up: Number
    """requests before the measurement"""
    sent: Number
    ok: Number
    failed: Number
    rejected: Number
    void: Number
    retries: Number
    """answers of 429 that were followed by another try"""
    prompt_tokens: Number
    """as the server counted them"""
    prompt_tokens_asked: Number | None
    """of the same requests; None where the number was not exact"""
    output_tokens: Number
    output_tokens_asked: Number | None
    """of the same requests; None where an answer may end by itself"""
    cached_tokens: Number | None
    """prompt tokens that the server says came from its cache; None if it does not say"""
    seconds: Amount
    """of all rounds"""
    most_in_flight: Number
    mean_in_flight: Amount
    output_tokens_per_s: Amount | None
    """the median of the rounds; None when nothing came"""
    round_output_tokens_per_s: tuple[Amount, ...]
    interactivity_p90: Amount | None
    """tokens a second of the user at the 90th percentile: one over that percentile of the requests' inter-token
    latencies, the first token apart"""
    ttft_ms: Quantiles | None
    """to the first token, of requests"""
    itl_ms: Quantiles | None
    """between tokens, of tokens; None where the server does not prove how many tokens its chunks had"""
    tpot_ms: Quantiles | None
    """mean time of a token after the first, of requests"""
    e2e_ms: Quantiles | None
    """to the last token, of requests"""
    noise: dict[Id, Amount]
    """how far the rounds' medians lie apart, as a share of their median, by metric; empty of a single round"""
    notes: tuple[Text, ...] = ()
    """what a reader has to know before the numbers, such as that they are those of a queue"""


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Right answers of a battery, with the 95% interval of their rate."""

    right: Number
    asked: Annotated[int, Between(1, 1 << 40)]
    low: Share
    high: Share


@dataclass(frozen=True, kw_only=True)
class Battery:
    """The recall battery of a run, and what it said of the answers; they are no part of the outcome."""

    preset: Id
    """which of the batteries"""
    seed: Number
    """of its markers"""
    verdict: BatteryVerdict
    findings: tuple[Text, ...]
    """what kept it from passing"""
    server: ServerCounts = field(default_factory=ServerCounts)
    """of all its questions together; nothing is known where they were not asked to the end"""

    def __post_init__(self) -> None:
        if (self.verdict == "pass") != (not self.findings):
            raise ValueError("a battery that did not pass says why, and one that did has no findings")


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The raw samples, in a file beside the receipt."""

    file: FileName
    sha256: Sha256
    bytes: Number
    count: Number


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """One run of one workload on one server."""

    schema: Literal[1]
    id: ReceiptId
    """the name of its file"""
    written: Moment
    outcome: Outcome
    reasons: tuple[Text, ...]
    """why it is not whole; empty of one that is"""
    commit: Text
    """of slimserve, with -dirty when files had changed"""
    command: tuple[Text, ...]
    host: Host
    versions: dict[Text, Text]
    """of the engine, and of the libraries that decide how fast it is"""
    target: Target
    profile: ProfileFacts | None
    """None of a server that was not launched from one"""
    weights: WeightsFacts | None
    resolved_sha256: Sha256 | None
    """of the configuration that all processes of the engine resolved to"""
    start_seconds: dict[Id, Amount] = field(default_factory=dict)
    """of the engine that a profile launched, by state: loading, then warming to a first real token"""
    memory_bytes: Number | None = None
    """proportional set size of its processes on this machine, after the last request; None of somebody else's server"""
    workload: WorkloadFacts
    prompts: PromptFacts
    together: ReceiptId | None
    """shared by receipts of servers that were asked in turn within one run"""
    points: tuple[Point, ...]
    recall: dict[Id, Rate] = field(default_factory=dict)
    """right answers of the recall battery, by way: cold, on a hit, after eviction"""
    battery: Battery | None = None
    """None where none was asked"""
    samples: Samples
    sha256: Sha256
    """of everything else here"""

    def __post_init__(self) -> None:
        if (self.outcome == "whole") != (not self.reasons):
            raise ValueError("a receipt that is not whole says why, and one that is has no reasons")
        if (self.target.kind == "profile") != (self.profile is not None):
            raise ValueError("profile is given exactly when the server was launched from one")
        names = [point.setup.name for point in self.points]
        if len(set(names)) != len(names):
            raise ValueError("two points have one name")

    @property
    def recall_verdict(self) -> BatteryVerdict | None:
        """Of the recall battery; None where none was asked."""
        return None if self.battery is None else self.battery.verdict

    def point(self, name: str) -> Point | None:
        """The point of that name."""
        return next((point for point in self.points if point.setup.name == name), None)


@dataclass(frozen=True)
class Unusable:
    """A file among the receipts that is none: its name, and a sentence."""

    name: str
    problem: str


def parse(data: dict[str, Any]) -> Receipt:
    """The receipt of plain data that `receipt_file.read` took.

    Raises:
        Unreadable: it lacks something, or has what nobody reads.
    """
    try:
        return build(Receipt, data)
    except ShapeError as error:
        first, others = error.problems[0], len(error.problems) - 1
        more = f" ({others} more of the kind)" if others else ""
        raise Unreadable(f"{first.what}: {first.why}{more}") from None


def all_in(folder: Path) -> tuple[list[Receipt], list[Unusable]]:
    """Every receipt of a folder, oldest first, and every file among them that is none."""
    receipts: list[Receipt] = []
    unusable: list[Unusable] = []
    names = sorted(folder.glob("*.json")) if folder.is_dir() else []
    for path in names:
        if path.name == SCHEMA_NAME or path.name.startswith("."):
            continue
        try:
            receipts.append(_named(path))
        except Unreadable as error:
            unusable.append(Unusable(path.name, str(error)))
    return sorted(receipts, key=lambda one: (one.written, one.id)), unusable


def find(folder: Path, name: str) -> Receipt:
    """The receipt of that id, of that beginning of an id, or of that file's path.

    Raises:
        UsageError: there is none, there are several, or it cannot be read.
    """
    path = Path(name)
    if path.suffix == ".json" and path.name != name:
        return _usable(path)
    stem = name.removesuffix(".json")
    paths = [path for path in (folder.glob("*.json") if folder.is_dir() else ()) if path.name != SCHEMA_NAME]
    exact = [path for path in paths if path.stem == stem]
    found = exact or [path for path in paths if stem and path.stem.startswith(stem)]
    if len(found) == 1:
        return _usable(found[0])
    if found:
        listed = ", ".join(sorted(path.stem for path in found)[:8])
        raise UsageError(Finding(f"{name} begins {len(found)} ids", f"they are {listed}", "give more of the id"))
    why = (
        f"{folder} holds {counted(len(paths), 'receipt')}, and none of that id" if paths else f"{folder} holds none yet"
    )
    raise UsageError(Finding(f"there is no receipt {name!r}", why, "see slimserve --receipts"))


def _usable(path: Path) -> Receipt:
    try:
        return _named(path)
    except Unreadable as error:
        do = "restore the file from where it was committed, or measure again"
        raise UsageError(Finding(f"{path.name} is no usable receipt", str(error), do, str(path))) from None


def _named(path: Path) -> Receipt:
    receipt = parse(read(path))
    if receipt.id != path.stem:
        raise Unreadable(f"the receipt is {receipt.id}, and its file has another name")
    return receipt
