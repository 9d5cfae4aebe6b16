"""The entry point `vllm.general_plugins`: every process of the engine passes the gate on its way, or ends there.

The engine loads it in all of its processes. It hangs a look at the process's own objects on one call that each kind of
process makes when its configuration is resolved and its caches lie:

- the API server: before it serves its app, for which the engine core has to be ready;
- an engine core: after its scheduler is made;
- a worker: after its caches are laid out, before anything is compiled or captured. Weights are looked at before that:
  as soon as a model is read, and judged when all are loaded.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from quixicore import dispatch, engine
from slimserve.engine import import_hook, procfs
from slimserve.engine.gate import verdict, words
from slimserve.engine.gate.checks import DO, Role
from slimserve.engine.variables import GATE_VARIABLE, SEATS_VARIABLE, WORDS_VARIABLE
from slimserve.errors import Finding

GATE_STATUS = 78
"""exit status of a process that did not pass; sysexits.h calls it a wrong configuration"""


@dataclass(frozen=True, slots=True)
class Seat:
    """A call of the engine on which the gate hangs.

    Args:
        role: the kind of process that makes it.
        module: of the engine.
        path: name of the function there, or of a class and its method.
        first: look before the call rather than after it.
        part: what of the process is looked at there (a function of `observed`); empty: all, and its word is written.
    """

    role: Role
    module: str
    path: str
    first: bool
    part: str = ""


SEATS = (
    Seat("api", "vllm.entrypoints.launchers.api_server.entry", "serve_http", first=True),
    Seat("core", "vllm.v1.engine.core", "EngineCore._initialize_effective_attention_block_size", first=False),
    Seat(
        "rank",
        "vllm.model_executor.model_loader.base_loader",
        "process_weights_after_loading",
        first=True,
        part="weights",
    ),
    Seat("rank", "vllm.v1.worker.gpu_worker", "Worker.load_model", first=False, part="loaded"),
    Seat("rank", "vllm.v1.worker.worker_base", "WorkerWrapperBase.initialize_from_config", first=False),
)


def install() -> None:
    """Seat our operations in this process and hang the gate on it; nothing where no supervisor has planned anything."""
    if GATE_VARIABLE not in os.environ:
        return
    # Before anything is looked at: what sits in the engine is part of what it is.
    engine.take(dispatch.ours(json.loads(os.environ.get(SEATS_VARIABLE, "{}"))), _refuse_misfit)
    for seat in SEATS:
        if seat.module in sys.modules:
            hang(seat)
        else:
            import_hook.install(seat.module, after=functools.partial(hang, seat))


def hang(seat: Seat) -> None:
    """Put the look around the call of `seat`; a call that the engine does not have any more is a failed gate."""
    *classes, name = seat.path.split(".")
    try:
        owner: Any = functools.reduce(getattr, classes, sys.modules[seat.module])
        real = vars(owner)[name]
    except (AttributeError, KeyError):
        what = f"the gate's place in the engine is gone: {seat.module} has no {seat.path}"
        do = "install the engine that the profile was made for; `--doctor` shows what is installed"
        refuse(seat.role, [Finding(what, "a process could serve without having been looked at", do)])
    if not hasattr(real, "passes_gate"):  # the engine may load its plugins again
        setattr(owner, name, _watched(seat, real))


def _watched(seat: Seat, real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def call(subject: Any, *args: Any, **named: Any) -> Any:
        if seat.first:
            look(seat, subject)
        result = real(subject, *args, **named)
        if not seat.first:
            look(seat, subject)
        return result

    call.passes_gate = True  # type: ignore[attr-defined]
    return call


def look(seat: Seat, subject: Any) -> None:
    """Compare this process with the plan and write its word; end the process when they differ.

    Args:
        seat: whose call it was.
        subject: the object whose call it was: the app, the engine core, the worker's wrapper, or a part of that.
    """
    from slimserve.engine.gate import observed

    planned = json.loads(os.environ[GATE_VARIABLE])
    try:
        seen = getattr(observed, seat.part or seat.role)(subject)
        if seen is None:
            return
        process, values, config = seen
        if seat.part:
            planned = {name: value for name, value in planned.items() if name in values}
        findings = verdict.compare(process, planned, values)
        values = json.loads(words.canonical(values))
    except Exception as error:  # what cannot be looked at has not passed
        what = f"the engine's {seat.role} process cannot be looked at: {type(error).__name__}: {error}"
        refuse(seat.role, [Finding(what, "its objects are not those of the engine that is pinned", DO)])
    if findings:
        refuse(process, findings, values, config)
    if not seat.part:
        _write(process, [], values, config)


def refuse(
    process: str, findings: Sequence[Finding], values: dict[str, Any] | None = None, config: Any = None
) -> NoReturn:
    """Say what differs, in the log and to the supervisor, and end this process at once."""
    for finding in findings:
        print(f"gate: {finding}", file=sys.stderr)
    sys.stderr.flush()
    try:
        _write(process, findings, values or {}, config)
    except OSError as error:
        print(f"gate: the word of {process} cannot be written: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(GATE_STATUS)


def _refuse_misfit(misfit: engine.MisfitError) -> None:
    why = "an operation of ours fits the source of one engine, and is put into no other"
    do = "install the engine that the profile was made for; `--doctor` shows what is installed"
    refuse(f"process-{os.getpid()}", [Finding(str(misfit), why, do)])


def _write(process: str, findings: Sequence[Finding], values: dict[str, Any], config: Any) -> None:
    tag = os.environ.get(procfs.TAG, "")
    words.write(Path(os.environ[WORDS_VARIABLE]), process, tag, findings, values, config)
