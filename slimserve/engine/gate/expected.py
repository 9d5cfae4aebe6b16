"""What the plan says that the engine must become, and in which of its processes. Pure; the engine is not imported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from slimserve.engine.gate.checks import ALL, CHECKS, Role
from slimserve.plan import Plan

PLUGIN = "slimserve"
"""name of every entry point of ours, and the only one that the engine loads"""


def planned(plan: Plan) -> dict[str, Any]:
    """What is compared for `plan`, by name, as JSON data."""
    values = ((check.name, check.planned(plan)) for check in CHECKS)
    return {name: value for name, value in values if value is not None}


def processes(plan: Plan, node: int = 0) -> tuple[str, ...]:
    """The processes of the engine of `plan` on one of its nodes: each of them has to give its word."""
    engine, nodes = plan.subject.profile.engine, plan.subject.platform.nodes
    replicas = engine.data_parallel_size.value if engine.data_parallel_size else 1
    here = range(node * (replicas // nodes), (node + 1) * (replicas // nodes))
    return tuple(_processes(here, engine.tensor_parallel_size.value, with_api=node == 0))


def _processes(replicas: Iterable[int], ranks: int, *, with_api: bool) -> Iterator[str]:
    if with_api:
        yield "api"
    for replica in replicas:
        yield f"core-{replica}"
        for rank in range(ranks):
            yield f"rank-{replica}-{rank}"


def role_of(process: str) -> Role:
    """The kind of a process by its name."""
    role = process.split("-", 1)[0]
    return next(one for one in ALL if one == role)
