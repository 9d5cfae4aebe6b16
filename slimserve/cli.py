"""Parse, call, print, exit code; nothing else."""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import io
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from slimserve import __version__
from slimserve.errors import Failed, Finding, Refused, SlimserveError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from slimserve.profile import Profile
    from slimserve.session import Session

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
ACTIONS = (
    "serve",
    "bench",
    "plan",
    "fetch",
    "list",
    "doctor",
    "policies",
    "status",
    "add_key",
    "remove_key",
    "list_keys",
    "receipts",
)
NOT_UNDERSTOOD = "the command line is not understood"
ABOUT_A_PROFILE = ("serve", "bench", "plan", "fetch", "chat")
# Which options say something to which actions; anywhere else they would be dropped in silence.
FITS = {
    "prompt": ("chat",),
    "system": ("chat",),
    "host": ("serve", "chat"),
    "port": ("serve", "chat"),
    "origin": ("serve",),
    "page_port": ("serve",),
    "node": ("serve", "plan"),
    "head": ("serve", "plan"),
    "node_port": ("serve", "plan"),
    "workload": ("bench",),
    "against": ("bench",),
    "model": ("bench",),
    "seed": ("bench",),
    "recall": ("bench",),
    "on": ("plan", "list", "doctor"),
    "machine": ("plan", "list", "doctor"),
    "set": ("plan",),
    "json": ("plan", "list", "doctor", "policies", "status", "list_keys", "receipts"),
}


class _Parser(argparse.ArgumentParser):
    def _print_message(self, message: str, file: Any = None) -> None:
        print(message, end="", flush=True)  # which fails where that cannot be read; argparse's own says nothing

    def error(self, message: str) -> NoReturn:
        raise UsageError(Finding(message, NOT_UNDERSTOOD, "see slimserve --help"))

    def refuse(self, words: Sequence[str], profile: str | None) -> NoReturn:
        """Refuse words that no option takes, with what may have been meant."""
        from slimserve.shapes import nearest

        do = f"slimserve {profile or 'PROFILE'} -p TEXT asks one question; see slimserve --help"
        if (first := words[0].partition("=")[0]).startswith("-"):
            near, _, _ = nearest(first, self._option_string_actions).rpartition("valid:")
            do = f"{near}see slimserve --help"
        raise UsageError(Finding(f"unrecognized arguments: {' '.join(words)}", NOT_UNDERSTOOD, do))


class _Words(argparse.Action):
    """Words of which there may be none: then what they would say by themselves."""

    def __call__(
        self, parser: argparse.ArgumentParser, args: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(args, self.dest, values or ["list"])


def parser() -> _Parser:
    """The command line."""
    result = _Parser(
        prog="slimserve",
        description="Serve one of the registry's profiles, and refuse everything else with a reason.",
        epilog="exit status: 0 done; 1 it broke while running; 2 usage, or a profile that is wrong; 3 refused",
        allow_abbrev=False,
    )
    result.add_argument("profile", nargs="?", metavar="PROFILE", help="id or alias of a profile; alone: chat with it")
    result.add_argument("--version", action="version", version=f"slimserve {__version__}")
    actions = result.add_argument_group("what to do").add_mutually_exclusive_group()
    actions.add_argument("--serve", action="store_true", help="run the OpenAI-compatible endpoint in the foreground")
    actions.add_argument("--bench", action="store_true", help="measure, and write a receipt of it")
    actions.add_argument("--plan", action="store_true", help="print what would run, with the reason of every setting")
    actions.add_argument("--fetch", action="store_true", help="download and verify the weights")
    actions.add_argument("--list", action="store_true", help="every profile with its verdict on this machine")
    actions.add_argument("--doctor", action="store_true", help="what this machine has, what is wrong, how to mend it")
    actions.add_argument("--policies", action="store_true", help="the rules that hold for every profile")
    actions.add_argument("--status", action="store_true", help="the endpoints that run here, and where they stand")
    actions.add_argument("--add-key", type=_key_name, metavar="NAME", help="make an API key and print it, this once")
    actions.add_argument("--remove-key", type=_key_name, metavar="NAME", help="take an API key away, at once")
    actions.add_argument("--list-keys", action="store_true", help="the names of the API keys")
    actions.add_argument(
        "--receipts",
        nargs="*",
        action=_Words,
        metavar="WORD",
        help="what was measured: list [PROFILE], show ID, verify [ID ...], compare ID ID, report [ID ...]",
    )
    chat = result.add_argument_group("chat")
    chat.add_argument("-p", "--prompt", metavar="TEXT", help="one question: the answer alone goes to stdout")
    chat.add_argument("--system", metavar="TEXT", help="system prompt of the conversation")
    measured = result.add_argument_group("bench")
    measured.add_argument("--workload", metavar="NAME", help="another than those for the profile's platform, or a file")
    measured.add_argument(
        "--against", action="append", metavar="URL", help="measure this server instead (repeatable: in turn)"
    )
    measured.add_argument("--model", action="append", metavar="NAME", help="the model's name there (one for each)")
    measured.add_argument("--seed", type=_seed, metavar="N", help="of prompts and sampling (default 1)")
    measured.add_argument("--recall", metavar="BATTERY", help="small, medium, standard or none (default: by model)")
    place = result.add_argument_group("where")
    place.add_argument("--port", type=_port, metavar="N", help=f"TCP port of the endpoint (default {DEFAULT_PORT})")
    place.add_argument("--host", metavar="ADDRESS", help="address to listen on (default 127.0.0.1; others take a key)")
    place.add_argument("--page-port", type=_page_port, metavar="N", help="of the operator page; 0: none (default 8001)")
    place.add_argument(
        "--origin", action="append", metavar="URL", help="origin of web pages that may call (repeatable)"
    )
    place.add_argument("--node", type=_rank, metavar="RANK", help="of a profile of several nodes: which one this is")
    place.add_argument("--head", metavar="ADDRESS", help="of node 0, in the private network between the nodes")
    place.add_argument("--node-port", type=_node_port, metavar="N", help="where node 0 waits for others (default 8010)")
    stand_in = place.add_mutually_exclusive_group()
    stand_in.add_argument("--on", metavar="PLATFORM", help="judge for a machine of that platform instead of this one")
    stand_in.add_argument(
        "--machine", type=Path, metavar="FILE", help="judge for the machine that FILE describes (see --doctor --json)"
    )
    result.add_argument(
        "--set", action="append", metavar="KEY=VALUE", help="plan with another value of a key (repeatable)"
    )
    result.add_argument("--json", action="store_true", help="machine-readable output, of refusals and errors too")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit status.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # A listing lives for a seventh of a second; collecting what its imports leave behind would be a tenth of that.
    gc.disable()
    _open_streams()
    try:
        status = _run(_parsed(arguments))
        sys.stdout.flush()
    except SlimserveError as error:
        status = _tell(error, "--json" in arguments)
    except KeyboardInterrupt:
        status = 1
    except BrokenPipeError:
        status = 1  # the reader went away, and wants no words about it
    except OSError as error:
        where, why = error.filename or "the output", error.strerror or str(error)
        failed = Failed(Finding(f"{where} cannot be used: {why}", "the system says so", "mend that, and try again"))
        status = _tell(failed, "--json" in arguments)
    gc.freeze()
    gc.enable()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # what is buffered has nowhere to go, and the interpreter would complain about it at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return status


def _parsed(arguments: list[str]) -> argparse.Namespace:
    try:
        understood = parser()
        args, others = understood.parse_known_args(arguments, argparse.Namespace(words=tuple(arguments)))
        if others:
            understood.refuse(others, args.profile)
        return args
    except SystemExit:  # of --help and --version, whose words may still find nowhere to go
        sys.stdout.flush()
        raise


def _open_streams() -> None:
    """Stand in for standard streams that the caller closed, and let them take paths that are no text.

    What a child writes to a closed stdout is dropped; what the command itself has to say there fails as on a full disk.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        if getattr(sys, name) is None:
            own = os.open(os.devnull, os.O_RDONLY) if name == "stdout" else number
            setattr(sys, name, open(own, "w" if number else "r", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _tell(error: SlimserveError, as_json: bool) -> int:
    """Print what went wrong; that nobody can read it changes nothing about what it is."""
    with contextlib.suppress(OSError):
        try:
            _print_error(error, as_json)
            sys.stdout.flush()
        except BrokenPipeError:
            pass
        except OSError:  # stdout takes nothing, and stderr has heard nothing yet if this was JSON
            if as_json:
                _print_error(error, as_json=False)
    return error.exit_code


def _run(args: argparse.Namespace) -> int:
    _check_usage(args)
    if args.policies:
        return _policies(args)
    if args.status:
        return _status(args)
    if args.add_key or args.remove_key or args.list_keys:
        return _keys(args)
    if args.receipts:
        return _receipts(args)
    from slimserve.session import open_session

    session = open_session(os.environ, args.machine, args.on)
    if args.doctor:
        from slimserve import doctor

        report = doctor.examine(session.machine, session.here, session.environment)
        return _emit(args, report.to_json(), report.render)
    if args.list:
        return _list(args, session)
    if args.plan:
        return _plan(args, session, session.resolve(args.profile))
    from slimserve import run

    gc.enable()
    if args.profile is None:
        return run.pick_and_chat(session, args.host, args.port, args.system)
    profile = session.resolve(args.profile)
    if args.fetch:
        return run.fetch(session, profile)
    if args.bench:
        return _bench(args, session, profile)
    if args.serve:
        node = (args.node, args.head, args.node_port)
        return run.serve(session, profile, args.host, args.port, args.origin, args.page_port, node)
    return run.chat(session, profile, args.host, args.port, args.system, args.prompt)


def _check_usage(args: argparse.Namespace) -> None:
    """Options that contradict each other, or that nothing would read."""
    action = next((name for name in ACTIONS if getattr(args, name)), "chat")
    if action == "chat" and args.profile is None and not sys.stdin.isatty() and args.prompt is None:
        action, args.list = "list", True  # nobody is there to choose one
    if action not in ABOUT_A_PROFILE and args.profile is not None:
        why = "it speaks of this machine" if action == "doctor" else "it speaks of all of them"
        do = f"slimserve --receipts list {args.profile}" if action == "receipts" else f"leave {args.profile} out"
        raise UsageError(Finding(f"{_flag(action)} takes no profile", why, do))
    lacking = ("chat",) if args.prompt is not None else ()
    if args.profile is None and action in ("serve", "bench", "plan", "fetch", *lacking):
        option = _flag("prompt" if action == "chat" else action)
        raise UsageError(Finding(f"{option} needs a profile", "it acts on one", "see slimserve --list"))
    for option, actions in FITS.items():
        value = getattr(args, option)
        if value is not None and value is not False and action not in actions:
            goes = " or ".join(_flag(name) for name in actions)
            what = f"{_flag(option)} says nothing to {_flag(action)}"
            raise UsageError(Finding(what, f"it goes with {goes}", "leave it out"))
    if args.host is not None and action == "chat":
        from slimserve.exposure import is_loopback

        if not is_loopback(args.host):
            why = "a chat talks to this machine, and starts an endpoint for itself where there is none"
            raise Refused(Finding(f"--host {args.host} is not loopback", why, "leave it out, or use --serve"))
    if args.node:
        from slimserve.nodes import seat

        seat.usage({_flag(name): getattr(args, name) for name in ("host", "port", "page_port", "origin")})
    args.host = DEFAULT_HOST if args.host is None else args.host
    args.port = DEFAULT_PORT if args.port is None else args.port
    if args.page_port == args.port:
        what = f"--page-port {args.page_port} is the endpoint's own port"
        raise UsageError(Finding(what, "the page listens beside it", "give it another one, or 0 for no page"))
    if args.origin is not None:
        from slimserve.exposure import check_origins

        args.origin = check_origins(args.origin)


def _flag(name: str) -> str:
    """An option or action as it is typed."""
    return {"chat": "a chat", "prompt": "-p"}.get(name, "--" + name.replace("_", "-"))


def _key_name(text: str) -> str:
    from slimserve.admission.keys import is_name

    if not is_name(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name: lower-case letters, digits, dots, hyphens, at most 64")
    return text


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a TCP port (1 to 65535)")
    return int(text)


def _node_port(text: str) -> int:
    if _port(text) > 65533:
        raise argparse.ArgumentTypeError(f"{text} has no two ports after it, which the engine takes")
    return int(text)


def _rank(text: str) -> int:
    if not text.isdecimal() or len(text) > 4:
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a node (0, 1, ...)")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at most nine digits")
    return int(text)


def _page_port(text: str) -> int:
    return 0 if text == "0" else _port(text)


def _bench(args: argparse.Namespace, session: Session, profile: Profile) -> int:
    from harness import bench_command

    against, models = tuple(args.against or ()), tuple(args.model or ())
    seed = 1 if args.seed is None else args.seed
    command = ("slimserve", *args.words)
    asked = bench_command.Asked(args.workload, against, models, seed, command, args.recall)
    return bench_command.main(session, profile, asked)


def _list(args: argparse.Namespace, session: Session) -> int:
    from slimserve import show

    verdicts = session.verdicts()
    data = {"machine": session.machine.source, "profiles": [verdict.to_json() for verdict in verdicts]}
    return _emit(args, data, lambda: show.list_text(verdicts, session.machine.source))


def _plan(args: argparse.Namespace, session: Session, profile: Profile) -> int:
    from slimserve import paths, show, show_room
    from slimserve.engine import command, door
    from slimserve.engine.record import control_path
    from slimserve.plan import NoRoom

    try:
        plan, changes = session.what_if(profile, args.set) if args.set else (session.plan(profile), ())
    except NoRoom as refused:
        if not args.json:  # by how much it does not fit is what is asked
            print("\n".join(show_room.room_lines(refused.room)), flush=True)
        raise
    # The folder of a run is named by its start; keys, origins and the listening socket come with a launch.
    control = control_path(paths.runs_folder(session.environment) / profile.id)
    admission = door.configure(plan, control=control)
    build = functools.partial(command.build, cache=session.cache, user_environment=session.environment)
    if plan.subject.platform.nodes == 1 and (args.node, args.head, args.node_port) == (None, None, None):
        built = build(plan, admission)
        return _emit(args, show.plan_json(plan, built, changes), lambda: show.plan_text(plan, built, changes))
    from slimserve.nodes import seat

    seats = seat.planned(plan.subject, args.node, args.head, args.node_port)
    first, *others = (build(plan, admission, seat=one) for one in seats)
    nodes = dict(zip((one.rank for one in seats), (first, *others), strict=True))
    return _emit(args, show.plan_json(plan, first, changes, nodes), lambda: show.plan_text(plan, first, changes, nodes))


def _policies(args: argparse.Namespace) -> int:
    from slimserve.policies import POLICIES

    data = [
        {"id": one.id, "sentence": one.sentence, "reason": one.reason, "exception": one.exception} for one in POLICIES
    ]

    def text() -> str:
        lines = []
        for one in POLICIES:
            lines.append(f"{one.id:<20} {one.sentence} {one.reason}")
            lines += [f"{'':<20} except: {one.exception}"] if one.exception else []
        return "\n".join(lines)

    return _emit(args, data, text)


def _status(args: argparse.Namespace) -> int:
    from slimserve import status_command

    data = status_command.look(os.environ)
    return _emit(args, data, lambda: status_command.render(data, time.time()))


def _receipts(args: argparse.Namespace) -> int:
    from harness import receipts_command
    from slimserve.session import open_registry

    data, text = receipts_command.answer(open_registry(os.environ), args.receipts)
    if args.receipts[0] == "report" and not args.json and sys.stdout.isatty():
        do = "give it a file: slimserve --receipts report > report.html"
        raise UsageError(Finding("a report is a page of HTML", "a terminal shows none", do))
    return _emit(args, data, text)


def _keys(args: argparse.Namespace) -> int:
    from slimserve import keys_command

    if args.add_key:
        return keys_command.add(os.environ, args.add_key)
    if args.remove_key:
        return keys_command.remove(os.environ, args.remove_key)
    keys = keys_command.listed(os.environ)
    data = [{"name": name, "sha256_prefix": digits} for name, digits in keys.items()]
    text = "\n".join(f"{digits}  {name}" for name, digits in keys.items())
    return _emit(args, data, lambda: text or keys_command.without(os.environ))


def _emit(args: argparse.Namespace, data: Any, text: Callable[[], str]) -> int:
    print(json.dumps(data, indent=2) if args.json else text())
    sys.stdout.flush()
    return 0


def _print_error(error: SlimserveError, as_json: bool) -> None:
    if as_json:
        kind = {1: "failed", 2: "invalid", 3: "refused"}[error.exit_code]
        print(json.dumps({"error": kind, "findings": [finding.to_json() for finding in error.findings]}, indent=2))
        return
    print("\n".join(f"slimserve: {finding}" for finding in error.findings), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
