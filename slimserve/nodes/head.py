"""Node 0's side of an endpoint of many nodes: who has come, whether all agree, when they start, and who was lost.

gather      wait until every node is there and all agree              Refused: with each node's value
idle        wait until each has its weights and no engine
start       tell them to start theirs; from here on a loss or a failure of one is raised by `check`
passed      wait until the gate has passed all of their processes
heed        from now on no node's wish for the end is news
ready, halt, leave      tell them so
close       wait until they have gone
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from slimserve.engine import stop_signals, waiting
from slimserve.engine.stop_signals import Stopped
from slimserve.errors import Failed, Finding, Refused, SlimserveError
from slimserve.nodes import wire
from slimserve.nodes.agreement import Claim, differences, strange
from slimserve.nodes.arrivals import Arrivals
from slimserve.nodes.seat import Seat
from slimserve.nodes.wire import Broken, Link, Message
from slimserve.shapes import ShapeError, build

# Nodes are started by people and by schedulers: the first waits so long for the last, and for one that was lost.
JOIN_SECONDS = 600.0
LEAVE_SECONDS = 30.0
_LOOK_SECONDS = 0.5
_MOST_LETTERS = 4000


@dataclass(slots=True)
class Member:
    """A node that has come.

    Args:
        link: to it.
        claim: what it says of itself.
        stage: what it has last said that it is: joined, idle, started, passed.
        words: what it says it is doing.
        gate: hash of the configuration that its processes resolved.
    """

    link: Link
    claim: Claim
    stage: str = "joined"
    words: str = "has come"
    gate: str = ""
    welcome: bool = field(default=False)


class Head:
    """The rendezvous of one endpoint; it listens from `open` to `leave`.

    Args:
        seat: of this node.
        claim: what this node says of itself.
        secret: of the nodes.
        report: called with one line for each thing worth telling, from any thread.
    """

    def __init__(self, seat: Seat, claim: Claim, secret: bytes, report: Callable[[str], None]) -> None:
        self._seat, self._claim, self._secret, self._report = seat, claim, secret, report
        self._changed = threading.Condition()
        self._members: dict[int, Member] = {}
        self._round = 0
        self._running = False
        self._trouble: SlimserveError | None = None
        self._asked = ""
        self._ending = False
        self._left = False
        self._arrivals: Arrivals | None = None
        self._alarm, self._alarmer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def fileno(self) -> int:
        """A descriptor that is readable while `check` has something to say."""
        return self._alarm

    def check(self) -> None:
        """Look whether the nodes go on.

        Raises:
            Failed, Refused: one was lost, or its engine failed, or is not what was planned.
            Stopped: one was told to stop, and asks for the end of all. It is raised once: others that ask are too late.
        """
        with self._changed:
            asked, self._asked = self._asked, ""
            self._ending = self._ending or bool(asked)
            trouble = self._trouble
            if trouble is None:
                self._calm()
        if asked:
            self._report(f"{asked} was told to stop, and with it all stop")
            raise Stopped
        if trouble is not None:
            raise trouble

    def open(self) -> None:
        """Listen for the other nodes.

        Raises:
            Refused: the port cannot be had.
        """
        self._arrivals = Arrivals(self._seat, self._secret, self._join, self._report)
        others = ", ".join(str(rank) for rank in self._ranks)
        self._report(f"waits for node {others} at {self._seat.head}:{self._seat.port}")

    def gather(self, signals: stop_signals.Counter | None, amend: Callable[[str], None]) -> None:
        """Wait until every node is there, and see that all agree.

        Args:
            amend: told what is waited for.

        Raises:
            Refused: one did not come, or they differ.
            Stopped: a signal came, or a node asks for the end.
        """
        if not self._until(self._absent, signals, amend, JOIN_SECONDS):
            absent = self._absent()
            each = [Finding(what, f"{JOIN_SECONDS:g} s were given", _where(self._seat)) for what in absent]
            raise Refused(*each, *self._differences())
        if found := self._differences():
            raise Refused(*found)
        with self._changed:
            self._running = True
        for member in self._present():
            if not member.welcome:
                member.welcome = True
                self._tell([member], {"do": "welcome"})

    def idle(self, signals: stop_signals.Counter | None, amend: Callable[[str], None]) -> None:
        """Wait until each node has its weights and no engine; how long that takes is each node's own to judge.

        Raises:
            Failed, Refused: one was lost, or cannot.
            Stopped: a signal came, or a node asks for the end.
        """
        with self._changed:
            lost = [rank for rank in self._ranks if rank not in self._members]
            if lost:
                self._fail(_lost(lost[0], "an address that is gone", "it hung up"))
        self._until(self._busy, signals, amend, None)

    def start(self) -> None:
        """Have every node start its engine."""
        with self._changed:
            self._round += 1
            for member in self._members.values():
                member.stage, member.gate = "started", ""
        self._tell(self._present(), {"do": "start", "round": self._round})

    def passed(self, cancelled: threading.Event) -> bool:
        """Wait until the gate has passed every node's processes; False when it was cancelled first."""
        with self._changed:
            while not all(rank in self._members and self._members[rank].stage == "passed" for rank in self._ranks):
                if cancelled.is_set():
                    return False
                self._changed.wait(_LOOK_SECONDS)
        for member in self._present():
            self._report(f"gate: node {member.claim.rank} is as planned, configuration {member.gate[:12]}")
        return True

    def heed(self) -> None:
        """Take note that the end has begun: `check` does not raise what nodes ask for after this."""
        with self._changed:
            self._ending, self._asked = True, ""

    def ready(self) -> None:
        """Tell the nodes that the endpoint is ready."""
        self._tell(self._present(), {"do": "ready"})

    def halt(self, reason: str) -> None:
        """Have every node end its engine and wait for the next start."""
        with self._changed:
            self._running, self._trouble = False, None
            self._calm()
            halted = [member for member in self._members.values() if member.stage in ("started", "passed")]
            for member in halted:
                member.stage = "halting"
        self._tell(halted, {"do": "halt", "reason": reason[:1000]})

    def leave(self, error: SlimserveError | None, status: int) -> None:
        """Tell every node to end what it runs, and to end; `close` waits for that.

        Args:
            error: why, if it is one.
            status: the exit status of this node.
        """
        with self._changed:
            self._running, self._left = False, True
            self._changed.notify_all()
        self._tell(self._present(), {"do": "leave", "status": status, "findings": short(error)})

    def close(self) -> None:
        """Wait until each node has gone, and listen no more."""
        arrivals, self._arrivals = self._arrivals, None
        if arrivals is None:
            return
        if not self._left:
            self.leave(None, 1)
        deadline = time.monotonic() + LEAVE_SECONDS
        with self._changed:
            while self._members and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            late = list(self._members)
        for rank in late:
            self._report(f"node {rank} has not said that it stopped within {LEAVE_SECONDS:g} s")
        arrivals.close()
        with self._changed:
            members, self._members = list(self._members.values()), {}
        for member in members:
            member.link.close()

    @property
    def _ranks(self) -> range:
        return range(1, self._seat.count)

    def _present(self) -> list[Member]:
        with self._changed:
            return [self._members[rank] for rank in sorted(self._members)]

    def _absent(self) -> list[str]:
        with self._changed:
            return [f"node {rank} has not come" for rank in self._ranks if rank not in self._members]

    def _busy(self) -> list[str]:
        with self._changed:
            return [f"node {rank} {one.words}" for rank, one in self._members.items() if one.stage != "idle"]

    def _differences(self) -> list[Finding]:
        return differences({0: self._claim} | {one.claim.rank: one.claim for one in self._present()})

    def _until(
        self,
        waits_for: Callable[[], list[str]],
        signals: stop_signals.Counter | None,
        amend: Callable[[str], None],
        seconds: float | None,
    ) -> bool:
        """Wait until nothing is waited for; False when that took longer than `seconds`."""
        begun, said = time.monotonic(), ""
        while names := waits_for():
            if seconds is not None and time.monotonic() - begun >= seconds:
                return False
            words = f"waits: {', '.join(names)}"
            if words != said:
                said = words
                amend(words)

            def changed(cancelled: threading.Event, before: list[str] = names) -> None:
                with self._changed:
                    while waits_for() == before and not cancelled.is_set():
                        self._changed.wait(_LOOK_SECONDS)

            with waiting.Question(changed) as question:
                waiting.wait(question, None, signals, _LOOK_SECONDS, self)
        self.check()
        return True

    def _fail(self, trouble: SlimserveError) -> None:
        """Take note of the first trouble of a start. With the lock held."""
        if self._running and self._trouble is None:
            self._trouble = trouble
            self._alert()

    def _alert(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._alarmer, b".")

    def _calm(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._alarm, 1 << 16)

    def _tell(self, members: Iterable[Member], message: Message) -> None:
        for member in members:
            with contextlib.suppress(Broken):  # its reader tells that it is lost
                member.link.send(message)

    def _join(self, link: Link, claim: Claim) -> None:
        rank = claim.rank
        refusal = strange(self._claim, claim)
        if refusal is None:
            self._await_rank(link, claim)
        with self._changed:
            if self._left:
                refusal = Finding("node 0 is ending", "it was told to stop, or cannot go on", "start all nodes anew")
            before = self._members.get(rank)
            if refusal is None and before is not None and self._is_taken(claim):
                what = f"rank {rank} is taken by a node at {before.link.peer}"
                do = f"start this one with another --node, or stop that one; it is node {rank}"
                refusal = Finding(what, "each rank is one node", do)
            if refusal is None:
                if before is not None:  # its end of the old link broke before ours
                    before.link.close()
                    self._fail(_lost(rank, link.peer, "it has come again"))
                member = self._members[rank] = Member(link, claim)
                self._changed.notify_all()
        if refusal is not None:
            self._report(f"a node at {link.peer} is turned away: {refusal.what}")
            with contextlib.suppress(Broken):
                link.send({"do": "leave", "status": Refused.exit_code, "findings": short(Refused(refusal))})
                link.receive(time.monotonic() + wire.HELLO_SECONDS)  # it hangs up once it has read that
            link.close()
            return
        self._report(f"node {rank} has come from {link.peer}")
        link.keep(dict, lambda message: self._hear(member, message), lambda reason: self._lose(member, reason))

    def _is_taken(self, claim: Claim) -> bool:
        """Whether another program holds the rank that is claimed. With the lock held."""
        holder = self._members.get(claim.rank)
        return holder is not None and holder.claim.instance != claim.instance

    def _await_rank(self, link: Link, claim: Claim) -> None:
        """Wait while another holds the rank, a little longer than one that died without a word takes to be lost."""
        deadline = time.monotonic() + wire.SILENT_SECONDS + wire.BEAT_SECONDS
        while True:
            with self._changed:
                seconds = max(0.0, min(wire.BEAT_SECONDS, deadline - time.monotonic()))
                if self._changed.wait_for(lambda: self._left or not self._is_taken(claim), seconds):
                    return
            if time.monotonic() >= deadline:
                return
            with contextlib.suppress(Broken):  # who has gone meanwhile is lost as soon as it is in
                link.send({"beat": {}})

    def _hear(self, member: Member, message: Message) -> None:
        """A message of a node."""
        rank, kind, late = member.claim.rank, message.get("is"), False
        with self._changed:
            if self._members.get(rank) is not member:
                return
            current = message.get("round") == self._round
            if isinstance(beat := message.get("beat"), dict):
                member.words = str(beat.get("words", ""))[:200]
            elif kind == "idle":
                member.stage = "idle"
            elif kind == "passed" and current and member.stage == "started":
                member.stage, member.gate = "passed", str(message.get("gate", ""))[:64]
            elif kind == "failed" and (current or member.stage == "joined"):
                self._fail(_failure(rank, message))
            elif message.get("ask") == "stop":
                late = self._ending
                if not late:
                    self._asked = f"node {rank}"
                    self._alert()
            self._changed.notify_all()
        if late:
            self._report(f"node {rank} was told to stop too")

    def _lose(self, member: Member, reason: str) -> None:
        """A node's link is at its end."""
        rank = member.claim.rank
        with self._changed:
            if self._members.get(rank) is not member:
                return
            del self._members[rank]
            self._fail(_lost(rank, member.link.peer, reason))
            self._changed.notify_all()
        self._report(f"node {rank} is gone: {reason}")


def _lost(rank: int, address: str, reason: str) -> Failed:
    why = "the engine cannot go on without the ranks of that node, and is started anew when it is there again"
    return Failed(
        Finding(f"node {rank} at {address} is lost: {reason}", why, f"see what node {rank} says, and its log")
    )


def _failure(rank: int, message: Message) -> SlimserveError:
    """What a node tells of its own failure, as an error of this node."""
    findings = read_findings(message) or [Finding("its engine failed", "it did not say why", "see its log")]
    kind = Refused if message.get("refused") is True else Failed
    return kind(*(Finding(f"node {rank}: {one.what}", one.why, one.do) for one in findings))


def read_findings(message: Message) -> list[Finding]:
    """The findings in a message; what has another shape is left out."""
    given = message.get("findings")
    found = []
    for one in given if isinstance(given, list) else []:
        with contextlib.suppress(ShapeError):
            found.append(build(Finding, one))
    return found


def short(error: SlimserveError | None) -> list[dict[str, str]]:
    """The findings of an error as far as they fit a line; one can quote a log."""
    kept: list[dict[str, str]] = []
    for finding in error.findings if error is not None else ():
        one = {name: text[:_MOST_LETTERS] for name, text in finding.to_json().items()}
        if len(wire.encode({"": [*kept, one]})) > wire.MOST_BYTES // 2:
            break
        kept.append(one)
    return kept


def _where(seat: Seat) -> str:
    return f"start it with --node RANK --head {seat.head}, and see that port {seat.port} can be reached from there"
