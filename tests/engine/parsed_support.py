"""Every profile's command, and what the pinned engine's own argument parser makes of it."""

from __future__ import annotations

import functools
from argparse import Namespace
from pathlib import Path
from typing import Any

from slimserve.engine import command, door, torchvision_cpu, variables
from slimserve.plan import WeightsOnDisk, describe, make_plan
from slimserve.profile import Profile
from slimserve.registry import Registry
from slimserve.registry_files import load_registry

PROFILES = Path(__file__).parent.parent.parent / "profiles"
CONTROL = Path("/run/slimserve/engine.sock")
NAMES = sorted(path.stem for path in PROFILES.glob("*.yaml") if path.stem != "sources")


@functools.cache
def registry() -> Registry:
    return load_registry(PROFILES, variables.OWNED)


@functools.cache
def parser() -> Any:
    """The engine's parser: building it is most of what reading one command takes."""
    torchvision_cpu.install()
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def parse(profile_id: str) -> tuple[Profile, command.Command, Namespace]:
    """A profile, its command where the machine fits, and the engine's reading of the command; the last one is new."""
    profile = registry().profiles[profile_id]
    subject = registry().subject(profile)
    weights = WeightsOnDisk(Path("/cache/weights"), ready=True, needed_bytes=0)
    plan = make_plan(subject, describe(subject.platform, 1 << 50), weights)
    admission = door.configure(plan, control=CONTROL)
    built = command.build(plan, admission, cache=Path("/cache"), user_environment={})
    arguments = list(built.argv[built.argv.index(command.ENTRY) + 1 :])
    return profile, built, parser().parse_args(arguments)
