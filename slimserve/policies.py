"""The policies: what holds for every profile, whoever wrote it.

A policy is an id that evidence can cite, a sentence, the reason, the one exception that it allows, and a check of one
profile with its model and platform. The registry runs every check when it loads, so a profile that breaks one cannot
even be listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from slimserve import policy_checks as checks
from slimserve.policy_checks import GREEDY_TEMPERATURE, GREEDY_TOP_P
from slimserve.records import dataclass
from slimserve.shapes import Problem
from slimserve.subject import Subject

__all__ = ["BY_ID", "GREEDY_TEMPERATURE", "GREEDY_TOP_P", "POLICIES", "Policy", "broken"]


@dataclass(frozen=True)
class Policy:
    """One rule.

    Args:
        id: what evidence cites.
        sentence: the rule.
        reason: why it exists.
        check: yields a problem for each way in which a subject breaks it. None: the rule is not in the profile's
            hands, since `engine/command.py` fixes the value for all of them.
        exception: the one case that it allows, if any.
    """

    id: str
    sentence: str
    reason: str
    check: Callable[[Subject], Iterator[Problem]] | None = None
    exception: str | None = None


POLICIES: tuple[Policy, ...] = (
    Policy(
        "prefix-caching",
        "Prefix caching is stated and on, for a hybrid with states kept at block boundaries (align).",
        "Agents resend their whole history with each turn.",
        checks.prefix_caching,
    ),
    Policy(
        "sparse-states",
        "A hybrid keeps the states at the ends of what it has read, and none in between (retention interval 0).",
        "The plan counts one state for each conversation that waits; denser ones push others out of the same pool.",
    ),
    Policy(
        "exact-kv",
        "The main KV cache is bf16.",
        "A compressed cache was seen to change answers without garbling them.",
        checks.exact_kv,
        "A model without the trait exact_kv may have a quantised one, which cites a published source or a receipt.",
    ),
    Policy(
        "graphs-cover-decode",
        "The graph mode is stated and its sizes contain (k+1) x max_num_seqs.",
        "Batches beyond the captured sizes run eager, in silence, at half the speed.",
        checks.graphs,
        "On a CPU, which has no graphs, a profile is eager and says so.",
    ),
    Policy(
        "shards-tile",
        "A quantised shard tiles its scale grid, or experts stay whole.",
        "A shard cut through a scale block gives wrong answers rather than an error.",
        checks.shards_tile,
    ),
    Policy(
        "tool-calling",
        "Tool calling is automatic; tool and reasoning parsers are a tested pair.",
        "A wrong pair turns calls into prose and answers into null.",
        checks.tool_calling,
        "A model that was taught neither tools nor thinking states no parsers.",
    ),
    Policy(
        "thinking-on",
        "Thinking models are served thinking.",
        "Effort is a dial; off is another model.",
        checks.thinking,
    ),
    Policy(
        "never-greedy",
        "Nothing is sampled greedily by default.",
        "Greedy decoding loops.",
        checks.never_greedy,
        "policy.greedy: verification, which compares engines token by token and is never served.",
    ),
    Policy(
        "marlin-below-sm89",
        "FP8 experts run on Marlin below capability 8.9.",
        "There is no FP8 hardware there, and the paths that want it crash.",
        checks.marlin,
    ),
    Policy(
        "in-flight-cap",
        "Generation requests in flight are capped, at no less than the decode slots.",
        "Beyond the decode slots a request only waits; an endless line keeps clients that have long given up.",
        checks.in_flight,
    ),
    Policy(
        "real-weights",
        "A profile serves the weights of the checkpoint that it names.",
        "Random weights are as fast as real ones, so that only the name tells a measurement of the model from one of "
        "its shapes.",
        checks.real_weights,
        "A slice, which has dummy weights and is called a slice in id and title.",
    ),
    Policy(
        "loopback",
        "The endpoint listens on loopback, and CORS admits no origin that is not named.",
        "A port without a key serves whoever finds it.",
        exception="With API keys it listens where it is told to.",
    ),
    Policy(
        "private-nodes",
        "The nodes of one endpoint know one secret, and speak with each other over a private network.",
        "The engine's own ports between nodes ask nobody who they are.",
    ),
    Policy(
        "one-api-server",
        "There is one API server process.",
        "Counts and caps are exact in one process and approximate in several.",
    ),
    Policy(
        "pinned-revision",
        "Weights come from a 40-hex revision, an exact version or slimserve itself, and bring no code.",
        "A branch moves, and with it the weights behind a name.",
        exception="A checkpoint that is marked unlisted may have no revision: it is planned with and never fetched.",
    ),
    Policy(
        "nothing-unread",
        "No key and no variable is given that nothing reads.",
        "A misspelt setting is lost in silence, and the default wins.",
    ),
    Policy(
        "one-grammar-backend",
        "One backend follows the grammars of requests.",
        "Another that takes over in silence was seen to use up the memory for what the first had refused.",
    ),
    Policy("telemetry-off", "The engine reports to nobody.", "It runs on hardware people own."),
)

BY_ID = {policy.id: policy for policy in POLICIES}


def broken(subject: Subject) -> Iterator[Problem]:
    """Every way in which `subject` breaks a policy."""
    for policy in POLICIES:
        if policy.check is not None:
            for problem in policy.check(subject):
                yield Problem(problem.loc, problem.what, f"{problem.why} (policy {policy.id})", problem.do)
