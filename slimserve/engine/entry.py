"""Runs the engine's API server as a process that cannot outlive the one that started it.

    python -m slimserve.engine.entry ENGINE_ARGUMENT...

Seven things stand between this process and `python -m vllm.entrypoints.openai.api_server`, which it otherwise is:

- The kernel is told to kill it when its parent dies. The engine core and the workers are started with
  multiprocessing's `spawn`, which runs this module again in each of them as `__mp_main__`; so each is tied to its own
  parent in the same way, and the whole tree falls with the supervisor.
- A guard, a fork that sleeps until the leader is dead and then kills what is left. It is for the processes that run
  other code, such as compilers, and whatever those start.
- The kernel is asked for the use of AMX tiles. The engine's CPU attention uses them wherever the processor has them,
  and leaves the asking to whichever library came first; when none did, the first token ends in SIGILL.
- What was inherited from the supervisor, the endpoint's listening socket, is for this process alone: a compiler, or a
  worker that outlived us, would keep the port.
- The door in here and the supervisor are halves of one program: those of two versions are not started together.
- torchvision is made importable beside a CPU torch, here and in the process in which the engine inspects a model's
  class (`inspection`).
- What the engine says of a request is bounded before it searches that for paths (`messages`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

from slimserve import BUILD

PARENT = "SLIMSERVE_PARENT_PID"
SUPERVISOR = "SLIMSERVE_SUPERVISOR"
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_SYS_ARCH_PRCTL = 158  # on x86-64
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18
_GUARD_SECONDS = 30.0
_REGISTRY = "vllm.model_executor.models.registry"


def _prctl(option: int, value: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def tie_to_parent() -> None:
    """Have the kernel kill this process when its parent dies.

    The parent wrote its pid to SLIMSERVE_PARENT_PID; when that is not our parent any more, it died before the kernel
    was told, and we end here. Our own pid takes its place, for the processes that we start.

    Precisely, the signal comes when the thread that started this process ends; so those who start one do it from
    their main thread.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    expected = os.environ.get(PARENT)
    if expected is not None and expected != str(os.getppid()):
        os.kill(os.getpid(), signal.SIGKILL)
    os.environ[PARENT] = str(os.getpid())


def start_guard() -> None:
    """Fork the guard, which kills what is left of the engine once this process is dead.

    Call it before threads exist: only the thread that forks lives on in a fork.
    """
    leader = os.getpid()
    handle = os.pidfd_open(leader)
    if os.fork() != 0:
        os.close(handle)
        return
    try:
        # Whoever signals the group means the engine; the guard leaves when there is nobody left to guard.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        _prctl(_PR_SET_NAME, b"slimserve-guard")
        os.closerange(3, handle)
        os.closerange(handle + 1, os.sysconf("SC_OPEN_MAX"))
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        from slimserve.engine import descriptors, procfs

        descriptors.wait_readable([handle], None)
        procfs.end(leader, os.environ.get(procfs.TAG, ""), _GUARD_SECONDS)
    finally:
        os._exit(0)


def keep_descriptors() -> None:
    """Close what we have inherited, but for the standard streams, in every program that we start."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):  # that of the listing itself is gone already
                os.set_inheritable(int(name), False)


def arm() -> None:
    """Tie this process to its parent, keep its descriptors, and start its guard."""
    tie_to_parent()
    keep_descriptors()
    start_guard()


def main() -> None:
    """Run the engine with this process's arguments; returns when it has been stopped."""
    if os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") != "spawn":
        # A forked worker does not run this module again, and would not be tied to its parent.
        sys.exit(
            "VLLM_WORKER_MULTIPROC_METHOD is not `spawn`\n"
            "  why: a worker that is started otherwise can outlive the engine\n"
            "  do:  start the engine through `slimserve PROFILE --serve`, which sets it"
        )
    if (supervisor := os.environ.get(SUPERVISOR)) not in (None, BUILD):
        sys.exit(
            f"the supervisor is slimserve {supervisor}, and its engine would run slimserve {BUILD}\n"
            "  why: the two speak with each other, and only those of one version understand each other for certain\n"
            "  do:  stop the endpoint and start it again; run the slimserve that is installed beside the engine"
        )
    if "--headless" in sys.argv:
        _serve_headless()
        return
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


def _serve_headless() -> None:
    """Run this node's part of an engine whose API server is on another node, as the engine's own `serve` does."""
    from vllm.entrypoints.cli.serve import run_headless
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args()
    configure_logging_from_args(args)
    validate_parsed_serve_args(args)
    args.api_server_count = 0
    run_headless(args)


def permit_amx() -> bool:
    """Ask the kernel for the use of AMX tiles by this process and its forks; False where there are none to be had."""
    if os.uname().machine != "x86_64":
        return False
    asked = ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    return bool(asked == 0)


def prepare() -> None:
    """Ready an engine process: AMX, and import hooks, which cost nothing until what they are for is imported."""
    from slimserve.engine import import_hook, messages, torchvision_cpu

    permit_amx()
    torchvision_cpu.install()
    import_hook.install(_REGISTRY, after=_inspect_through_us)
    import_hook.install(messages.MODULE, after=messages.bound)


def _inspect_through_us() -> None:
    # The registry looks at a model's class in a process of its own, which needs torchvision and a parent as we do.
    sys.modules[_REGISTRY]._SUBPROCESS_COMMAND = [sys.executable, "-P", "-m", "slimserve.engine.inspection"]  # type: ignore[attr-defined]


if __name__ == "__main__":
    arm()
    prepare()
    main()
elif __name__ == "__mp_main__":
    tie_to_parent()
    prepare()
