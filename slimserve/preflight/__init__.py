"""Before a launch: what is wrong with a machine, and which launches that stands in the way of.

Facts become concerns here and nowhere else: `--doctor`, the operator page, the plan and the launch all take theirs from
`concerns`. Only what was seen is judged: a fact that is unknown gives no concern, except that GPUs could not be read.
`slimserve.preflight.exchange` is the one test that runs on the GPUs themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from slimserve.machine import Gpu, Machine
from slimserve.platform import Platform
from slimserve.preflight import cards, host, traffic
from slimserve.preflight.concern import Concern


def concerns(machine: Machine) -> tuple[Concern, ...]:
    """What is wrong here, the GPUs first; empty when nothing is."""
    return (
        *cards.reading(machine),
        *cards.load(machine),
        *traffic.links(machine),
        *_of_cards(machine),
        *host.memory(machine),
        *host.disk(machine),
        *_of_the_host(machine),
    )


def blocking(machine: Machine, platform: Platform) -> Iterator[Concern]:
    """Why no profile of `platform` may be launched, beside what the plan itself counts: cards, memory, room on disk."""
    own = (*_of_cards(machine), *_of_the_host(machine), *host.loadable(machine))
    return (concern for concern in own if concern.stops(platform))


def warnings(machine: Machine, gpus: tuple[Gpu, ...]) -> Iterator[Concern]:
    """What makes a launch on these GPUs slower than it need be, beside what the plan itself says."""
    return (concern for concern in _of_cards(replace(machine, gpus=_alone(gpus))) if concern.blocks == "nothing")


def _of_cards(machine: Machine) -> Iterator[Concern]:
    yield from traffic.on_the_way(machine)
    yield from cards.pace(machine)


def _of_the_host(machine: Machine) -> Iterator[Concern]:
    yield from host.limits(machine)
    yield from host.folders(machine)
    yield from host.in_the_way(machine)


def _alone(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """These GPUs as if there were no others."""
    known = {gpu.index for gpu in gpus}
    return tuple(replace(gpu, peers={i: link for i, link in gpu.peers.items() if i in known}) for gpu in gpus)
