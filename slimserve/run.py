"""The commands that act: fetch, serve, chat. Each goes the same way: plan, weights, launch."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from slimserve import paths, weights
from slimserve.engine import command
from slimserve.engine.supervisor import Launch, Supervisor
from slimserve.errors import Finding, Refused, UsageError, raise_if_any
from slimserve.plan import Plan
from slimserve.profile import Profile
from slimserve.session import Session
from slimserve.weights.meter import Meter

KEY_VARIABLE = "SLIMSERVE_API_KEY"


def say(text: str) -> None:
    """The tool's own words go to stderr, so that stdout holds the model's alone."""
    print(f"slimserve: {text}", file=sys.stderr, flush=True)


def fetch(session: Session, profile: Profile) -> int:
    """Download and verify the weights of `profile`; what is damaged is fetched again."""
    plan = session.plan(profile)
    _fetch(session, plan)
    _check(session, plan)
    say(f"{profile.id}: weights are complete in {plan.weights.folder}")
    return 0


def serve(session: Session, profile: Profile, host: str, port: int) -> int:
    """Run the endpoint in the foreground until it is told to stop.

    Returns:
        0 when it was stopped while serving, 1 when before it was ready.
    """
    return launch(session, profile, host, port).run()


def chat(session: Session, profile: Profile, port: int, system: str | None, prompt: str | None) -> int:
    """Talk to `profile`: through the endpoint that serves it on `port`, or one that lives as long as the talk."""
    from slimserve import chat as terminal

    endpoint = terminal.Endpoint(f"http://127.0.0.1:{port}/v1", profile.id, _key(session))

    def talk() -> int:
        if prompt is not None:
            return terminal.ask(endpoint, prompt, system=system, out=sys.stdout, err=sys.stderr)
        return terminal.chat(endpoint, system=system, stdin=sys.stdin, out=sys.stdout, err=sys.stderr)

    if terminal.is_serving(endpoint):
        return talk()
    with launch(session, profile, "127.0.0.1", port):
        return talk()


def pick_and_chat(session: Session, port: int, system: str | None) -> int:
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
        return chat(session, runnable[int(choice) - 1], port, system, None)
    return chat(session, session.resolve(choice), port, system, None)


def launch(session: Session, profile: Profile, host: str, port: int) -> Supervisor:
    """Judge, fetch what is missing, and put the launch together; nothing is started yet.

    Raises:
        Refused: it must not run here.
        Failed: the weights could not be fetched.
    """
    plan = session.plan(profile, port)
    for note in plan.notes:
        say(note)
    prepare_weights(session, plan)
    key = _key(session)
    built = command.build(
        plan, host=host, port=port, cache=session.cache, user_environment=session.environment, api_key=key
    )
    for note in built.notes:
        say(note)
    _make_caches(session, profile)
    deadlines = profile.serve
    runs = paths.state_folder(session.environment) / "runs"
    started = Launch(
        argv=built.argv,
        env=built.env,
        host=host,
        port=port,
        model_name=profile.id,
        api_key=key,
        run_folder=runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{profile.id}-{os.getpid()}",
        load_seconds=deadlines.load_seconds.value,
        warmup_seconds=deadlines.warmup_seconds.value,
        stop_seconds=deadlines.stop_seconds.value,
        profile_id=profile.id,
    )
    return Supervisor(started, say)


def prepare_weights(session: Session, plan: Plan) -> Path:
    """Have the weights of `plan` complete, whole and of the right shape.

    What is not there is fetched. What is there and damaged is refused: a start is not the time to download it again
    unasked, and a disk that loses files wants to be looked at.

    Returns:
        Their folder.

    Raises:
        Refused, Failed: they could not be had, or what is there is not what the model file says.
    """
    if not plan.weights.folder.is_dir():
        _fetch(session, plan)
    _check(session, plan)
    return plan.weights.folder


def _fetch(session: Session, plan: Plan) -> None:
    checkpoint = plan.subject.model.checkpoints[plan.subject.profile.quant]
    meter = Meter(sys.stderr)
    try:
        weights.fetch(checkpoint, plan.weights.folder, session.manifest(plan.subject), meter, session.environment)
    finally:
        meter.close()


def _check(session: Session, plan: Plan) -> None:
    folder, files = plan.weights.folder, session.manifest(plan.subject)
    findings = [*weights.check(folder, files), *weights.check_config(folder, plan.subject.model.geometry)]
    if not findings and weights.state(folder, files).kind != "verified":
        meter = Meter(sys.stderr)
        try:
            findings = weights.verify(folder, files, meter)
        except OSError as error:
            why = "without it every start would read all of the weights again"
            raise Refused(
                Finding(f"the stamp of {folder} cannot be written: {error.strerror}", why, "make it writable once")
            ) from None
        finally:
            meter.close()
    raise_if_any(Refused, findings)


def _key(session: Session) -> str | None:
    key = session.environment.get(KEY_VARIABLE)
    if key is not None and (not key.strip() or not key.isascii() or not key.isprintable()):
        raise UsageError(
            Finding(
                f"{KEY_VARIABLE} is not a usable key",
                "it travels in an HTTP header",
                "use printable ASCII, or unset it",
            )
        )
    return key


def _make_caches(session: Session, profile: Profile) -> None:
    """Make the engine's private caches before it starts: it would fail on them minutes later, or share another's."""
    for name in command.CACHES.values():
        folder = command.engine_cache(session.cache, profile.id) / name
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = folder / f".writable-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise Refused(
                Finding(
                    f"the engine's cache {folder} cannot be written: {error.strerror}",
                    "compiled kernels are kept there",
                    "mend its permissions, or give SLIMSERVE_CACHE a folder that can be written",
                )
            ) from None
