"""What a person and a program see of the registry and of a plan: plain text and JSON of the same data."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slimserve.machine import counted, gib
from slimserve.plan import Plan, Verdict
from slimserve.show_room import room_lines

if TYPE_CHECKING:
    from slimserve.engine.command import Command
    from slimserve.planner.what_if import Change

WIDTH = 110


def list_text(verdicts: Sequence[Verdict], source: str) -> str:
    """Every profile with its verdict, those that run first."""
    lines: list[str] = []
    ordered = sorted(
        verdicts, key=lambda verdict: (bool(verdict.refusals), not verdict.profile.default, verdict.profile.id)
    )
    width = max(len(verdict.profile.id) for verdict in ordered)
    for verdict in ordered:
        profile = verdict.profile
        mark = "runs   " if not verdict.refusals else "refused"
        lines.append(f"{profile.id:<{width}}  {mark}  {profile.title} [{profile.status}]")
        if profile.aliases:
            lines.append(f"{'':<{width}}           also: {', '.join(profile.aliases)}")
        lines += [
            f"{'':<{width}}           {line}"
            for finding in verdict.refusals
            for line in _wrapped(finding.what, WIDTH - width)
        ]
        if not verdict.refusals and not verdict.weights_ready:
            lines.append(f"{'':<{width}}           {_missing(verdict)}")
    running = sum(not verdict.refusals for verdict in ordered)
    lines.append(f"{running} of {len(ordered)} profiles run on {source}")
    return "\n".join(lines)


def _missing(verdict: Verdict) -> str:
    """How weights that are not in the cache get there."""
    if not verdict.fetchable:
        return "weights cannot be fetched, so that it can be planned alone: --fetch says why"
    if verdict.bundled:
        return "weights come with slimserve; they are copied at the first start, or with --fetch"
    return "weights are fetched at the first start, or with --fetch"


def plan_text(
    plan: Plan, command: Command, changes: Sequence[Change] = (), nodes: Mapping[int, Command] | None = None
) -> str:
    """The launch, how it fills the machine, and the reason of every setting.

    Args:
        command: of the first node that is shown, or of the only one.
        nodes: of a profile of several nodes: the command of each that is shown.
    """
    subject = plan.subject
    profile, model, platform = subject.profile, subject.model, subject.platform
    checkpoint = model.checkpoints[profile.quant]
    devices = ", ".join(f"GPU {gpu.index} {gpu.name}" for gpu in plan.gpus) or counted(plan.machine.cpu.cores, "core")
    lines = [
        f"{profile.id}: {profile.title}",
        f"  model     {model.title} ({model.architecture}), {profile.quant}, {checkpoint.origin}",
        f"  licence   {checkpoint.licence}",
        f"  platform  {platform.title}",
        f"  machine   {plan.machine.source}: {devices}",
        f"  weights   {_weights(plan)}",
        f"  status    {profile.status}",
        *(f"  what if   {one.key} = {json.dumps(one.after)}, the profile: {json.dumps(one.before)}" for one in changes),
        "",
        *room_lines(plan.room),
        "",
        *_launch_lines(command, nodes),
        "",
        "settings",
    ]
    for row in command.rows:
        lines.append(f"  {row.key} = {row.value if isinstance(row.value, str) else json.dumps(row.value)}")
        lines += [f"      {line}" for line in _wrapped(row.why, WIDTH - 6)]
        lines += [
            f"      [{line}" if index == 0 else f"       {line}"
            for index, line in enumerate(_wrapped(f"{row.evidence}]", WIDTH - 7))
        ]
    if profile.options:
        lines += ["", "off (--set shows what it would take)"]
        for name, option in profile.options.items():
            lines.append(f"  {name}")
            lines += [f"      --set {shlex.quote(one)}" for one in option.set]
            lines += [f"      {line}" for line in _wrapped(option.why, WIDTH - 6)]
            lines += [f"      {line}" for line in _wrapped(f"[{option.evidence}]", WIDTH - 6)]
    if profile.not_carried:
        lines += ["", "not carried"]
        for item in profile.not_carried:
            lines += [f"  {line}" for line in _wrapped(f"{item.what}: {item.why}", WIDTH - 2)]
    for note in (*plan.notes, *command.notes):
        lines += ["", *_wrapped(f"note: {note}", WIDTH)]
    return "\n".join(lines)


def plan_json(
    plan: Plan, command: Command, changes: Sequence[Change] = (), nodes: Mapping[int, Command] | None = None
) -> dict[str, Any]:
    """The same as a JSON object."""
    profile = plan.subject.profile
    several = {
        "nodes": [
            {"node": rank, "argv": list(one.argv), "environment": one.shown_env(), "processes": list(one.processes)}
            for rank, one in (nodes or {}).items()
        ]
    }
    return {
        **(several if nodes else {}),
        "profile": profile.id,
        "title": profile.title,
        "status": profile.status,
        "runs": True,
        "model": plan.subject.model.id,
        "platform": plan.subject.platform.id,
        "machine": plan.machine.source,
        "gpus": [gpu.uuid for gpu in plan.gpus],
        "weights": {
            "folder": str(plan.weights.folder) if plan.weights.here else None,
            "ready": plan.weights.ready if plan.weights.here else None,
            "needed_bytes": plan.weights.needed_bytes,
        },
        "what_if": [{"key": one.key, "profile": one.before, "value": one.after} for one in changes],
        "memory": [budget.to_json() for budget in plan.room.memory],
        "capacity": plan.room.capacity.to_json(),
        "largest": plan.room.largest,
        "argv": list(command.argv),
        "environment": command.shown_env(),
        "settings": [
            {"key": row.key, "value": row.value, "argv": list(row.argv), "why": row.why, "evidence": row.evidence}
            for row in command.rows
        ],
        "options": {
            name: {"set": list(one.set), "why": one.why, "evidence": str(one.evidence)}
            for name, one in profile.options.items()
        },
        "not_carried": [{"what": item.what, "why": item.why} for item in profile.not_carried],
        "notes": [*plan.notes, *command.notes],
    }


def _launch_lines(command: Command, nodes: Mapping[int, Command] | None) -> Iterator[str]:
    """Command and environment; of several nodes the environment once, with what is each one's own below."""
    titled = {f"command of node {rank}": one for rank, one in (nodes or {}).items()} or {"command": command}
    for title, one in titled.items():
        yield title
        yield from _command_lines(one.argv)
        yield ""
    shared = set(command.shown_env().items())
    for one in (nodes or {}).values():
        shared &= set(one.shown_env().items())
    yield "environment that slimserve sets (of yours only PATH, HOME, language and the like are passed on)"
    yield from (f"  {name}={shlex.quote(value)}" for name, value in sorted(shared))
    for rank, one in (nodes or {}).items():
        own = sorted(set(one.shown_env().items()) - shared)
        yield from (f"  {name}={shlex.quote(value)}  (node {rank})" for name, value in own)


def _weights(plan: Plan) -> str:
    checkpoint = plan.subject.model.checkpoints[plan.subject.profile.quant]
    fetchable = checkpoint.is_fetchable
    way = "they come with slimserve, and copying" if checkpoint.bundled is not None else "fetching"
    disk = f"{way} them takes up to {gib(plan.weights.needed_bytes)} of disk"
    if not plan.weights.here:  # a folder and a disk of this machine, and the plan is for another
        return disk if fetchable else "they cannot be fetched: --fetch says why"
    if plan.weights.ready:
        return f"{plan.weights.folder} (there)"
    missing = f"not there; {disk}" if fetchable else "not there, and they cannot be fetched: --fetch says why"
    return f"{plan.weights.folder} ({missing})"


def _command_lines(argv: Sequence[str]) -> list[str]:
    """A command line that can be pasted, one flag a line."""
    words = [[]]  # type: list[list[str]]
    for part in argv:
        if part.startswith("--"):
            words.append([])
        words[-1].append(shlex.quote(part))
    return ["  " + " ".join(group) + (" \\" if index + 1 < len(words) else "") for index, group in enumerate(words)]


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 40), break_long_words=False, break_on_hyphens=False) or [""]
