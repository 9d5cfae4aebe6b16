"""One rank of the test of what GPUs exchange: `python -m slimserve.preflight.rank`, started by `exchange`.

There is one such process for each GPU. They meet through a file, sum what they know the sum of, send each other bytes
that they know, and the first of them copies bytes between any two GPUs by itself. What arrives is compared exactly.

It prints one JSON object a line: `{"step": N, "at": TEXT}` before each step, so that the last line names the step that
hung; at the end `{"done": {"checked": COUNT, "wrong": [TEXT, ...]}}`, or `{"lacks": TEXT}` where nothing can be tried.
Then it waits until its standard input ends: a process that left while another still answers would break that one's
connection.

Every rank counts every step, also those in which it has no part: the one with the lowest number keeps others waiting.

On the CPU, with gloo, the same steps run over plain tensors; pinned memory is then ordinary memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Elements of a sum. NCCL sends little, more and much by protocols of their own; odd counts end in part of a packet.
SIZES = (1, 1_000, 65_537, 1 << 22)
ROUNDS = 2
# Of a copy: more than one packet and one page, and no multiple of either.
COPY_BYTES = (1 << 22) + 3
PINNED_BYTES = (1 << 25) + 3
# Making random bytes takes longer than sending them: each copy has those that start so many further on.
_SHIFT = 257
# bfloat16 counts to 256 without rounding: as long as no sum is larger, the order of adding does not matter.
EXACT = 256

Note = Callable[[str], None]


class Lacking(Exception):
    """What is installed cannot try anything; the text says what is missing."""


class Check:
    """What one rank finds.

    Args:
        rank: its number.
        names: of the GPUs, in the order of the ranks, for words.
        kind: "cuda" or "cpu".
        note: told of each step before it begins.
    """

    def __init__(self, rank: int, names: Sequence[str], kind: str, note: Note) -> None:
        self.rank, self.names, self.kind, self.note = rank, names, kind, note
        self.world = len(names)
        self._pool: torch.Tensor | None = None
        self.checked = 0
        self.wrong: list[str] = []

    def run(self, store: str, seconds: float) -> None:
        """Every step, in the same order on every rank.

        Args:
            store: file through which the ranks meet; it must not exist before the first of them comes.
            seconds: after this long a rank that waits for another gives up by itself.

        Raises:
            Lacking: there is no torch, or none for these devices.
        """
        self.note("load torch")
        try:
            import torch
        except ModuleNotFoundError as error:
            raise Lacking(f"{error.name} is not installed") from None
        if self.kind == "cuda" and torch.version.cuda is None:
            raise Lacking(f"torch {torch.__version__} is built without CUDA")
        self.note(f"open {self._name(self.rank)}")
        device = self._device(self.rank)
        if self.kind == "cuda":
            torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        self._round_trip(device)
        if self.world == 1:
            return
        import torch.distributed as dist

        self.note(f"meet ({', '.join(map(self._name, range(self.world)))})")
        dist.init_process_group(
            "nccl" if self.kind == "cuda" else "gloo",
            init_method=f"file://{store}",
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=seconds),
        )
        for name in ("float32", "bfloat16"):
            for size in SIZES:
                for turn in range(ROUNDS):
                    self._sum(getattr(torch, name), size, turn, device)
        for sender, receiver in _pairs(self.world):
            self._send(sender, receiver, device)
        self._copies()
        self.note("wait for the others")
        dist.barrier()

    def _sum(self, dtype: torch.dtype, size: int, turn: int, device: str) -> None:
        import torch
        import torch.distributed as dist

        what = f"all-reduce of {size:,} {str(dtype).removeprefix('torch.')}"
        self.note(what)
        mine = pattern(self.rank, self.world, size, turn, device).to(dtype)
        dist.all_reduce(mine)
        wanted = torch.zeros(size, device=device)
        for rank in range(self.world):
            wanted += pattern(rank, self.world, size, turn, device)
        self._compare(f"{what} on {self._name(self.rank)}", mine.float(), wanted)

    def _send(self, sender: int, receiver: int, device: str) -> None:
        import torch
        import torch.distributed as dist

        what = f"send from {self._name(sender)} to {self._name(receiver)}"
        self.note(what)
        if self.rank == sender:
            data = self._bytes(sender * self.world + receiver).to(device)
            operation = dist.P2POp(dist.isend, data, receiver)
        elif self.rank == receiver:
            data = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
            operation = dist.P2POp(dist.irecv, data, sender)
        else:
            return
        for request in dist.batch_isend_irecv([operation]):
            request.wait()
        if self.rank == receiver:
            self._compare(what, data.cpu(), self._bytes(sender * self.world + receiver))

    def _copies(self) -> None:
        """Copies from GPU to GPU within the process of the first rank, as the driver does them."""
        import torch

        for sender, receiver in _pairs(self.world):
            what = f"copy from {self._name(sender)} to {self._name(receiver)}"
            self.note(what)
            if self.rank != 0:
                continue  # noted all the same: whoever waits for the first rank is to be a step further than it
            wanted = self._bytes((self.world + sender) * self.world + receiver)
            there = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=self._device(receiver))
            there.copy_(wanted.to(self._device(sender)))
            self._compare(what, there.cpu(), wanted)

    def _bytes(self, number: int) -> torch.Tensor:
        """uint8 [COPY_BYTES] in host memory, others for each number below 2 x world x world, alike in every rank."""
        if self._pool is None:
            self._pool = random_bytes(0, COPY_BYTES + 2 * self.world**2 * _SHIFT)
        return self._pool[number * _SHIFT :][:COPY_BYTES]

    def _round_trip(self, device: str) -> None:
        import torch

        what = f"copy from pinned memory to {self._name(self.rank)} and back"
        self.note(what)
        pinned = self.kind == "cuda"
        out = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=pinned)
        wanted = random_bytes(self.rank, PINNED_BYTES)
        out.copy_(wanted)
        back = torch.zeros(PINNED_BYTES, dtype=torch.uint8, pin_memory=pinned)
        back.copy_(out.to(device, non_blocking=True), non_blocking=True)
        if pinned:
            torch.cuda.synchronize()
        self._compare(what, back, wanted)

    def _compare(self, what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
        self.checked += 1
        differs = found != wanted  # NaN differs from everything, itself too
        count = int(differs.sum())
        if count:
            first = int(differs.nonzero()[0])
            self.wrong.append(
                f"{what}: {count:,} of {found.numel():,} values are wrong, the first at {first:,}: "
                f"{found[first].item():g} in the place of {wanted[first].item():g}"
            )

    def _device(self, rank: int) -> str:
        return f"cuda:{rank}" if self.kind == "cuda" else "cpu"

    def _name(self, rank: int) -> str:
        return self.names[rank]


def pattern(rank: int, world: int, size: int, turn: int, device: str) -> torch.Tensor:
    """What `rank` adds to a sum: float32 [size] of whole numbers, other ones at each place, rank and turn.

    The sum over all ranks is below 256.
    """
    import torch

    places = torch.arange(size, dtype=torch.int64, device=device)
    return ((places * 31 + rank * 17 + turn * 7) % (EXACT // world)).float()


def random_bytes(seed: int, size: int) -> torch.Tensor:
    """The same uint8 [size] for the same seed, in every process, in host memory."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def _pairs(world: int) -> Iterator[tuple[int, int]]:
    """Every ordered pair: each two of them both ways."""
    return ((a, b) for a in range(world) for b in range(world) if a != b)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one rank and print what it finds."""
    from slimserve.engine.entry import tie_to_parent

    tie_to_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--names", required=True, help="JSON list, in the order of the ranks")
    parser.add_argument("--kind", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args(arguments)
    steps = 0

    def put(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)

    def note(text: str) -> None:
        nonlocal steps
        steps += 1
        put({"step": steps, "at": text})

    check = Check(args.rank, json.loads(args.names), args.kind, note)
    try:
        check.run(args.store, args.seconds)
        put({"done": {"checked": check.checked, "wrong": check.wrong}})
    except Lacking as lacking:
        put({"lacks": str(lacking)})
    except BaseException:
        # On the way out through the interpreter NCCL can wait for its peers, and the error would pass for a hang.
        with contextlib.suppress(OSError):
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)
    sys.stdin.buffer.read()
    # The answer is out; what the libraries do on their way out is one more thing that could hang.
    os._exit(0)


if __name__ == "__main__":
    main()
