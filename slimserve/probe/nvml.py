"""Ask the driver library about every GPU and print the answers: `python -m slimserve.probe.nvml`.

It runs as a process of its own, because a driver that hangs or crashes must not take the caller with it. It prints
one JSON object a line: `{"at": [call, gpu]}` before each call, so that the last line names the call that hung, and
`{"answer": ...}` at the end. It imports no more than it needs: it is started while a person waits.

The answer: `driver` (text or null), `missing` (true when the Python binding is not installed), `failures` (list of
`{call, gpu, code, error}`; `gpu` is null for calls about no GPU) and `cards` (list, in the library's order). A card
is `index, name, uuid, capability, memory_bytes, free_bytes, mig, bar1_bytes, pcie_generation, pcie_generation_now,
pcie_generation_card, pcie_width, pcie_width_max, persistence, clock_mhz, clock_max_mhz, throttled_by, bus_id,
processes, peers, instances`, each null when it could not be read. An instance is `name, uuid, memory_bytes,
free_bytes, instance` (its two numbers, or null).
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

# Values of the library's own enumerations. The Python binding has some of the P2P ones wrong (as tuples).
NOT_SUPPORTED = 3
NOT_FOUND = 6
NOT_IN_THIS_DRIVER = 13
_P2P_READ, _P2P_WRITE, _P2P_NVLINK = 0, 1, 2
_P2P_OK, _P2P_UNKNOWN = 0, 6
_SM_CLOCK = 1
# Bits of the clock event reasons, in words. 1, an idle card, holds nobody up.
_THROTTLES = {
    0x2: "set clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "heat",
    0x40: "heat, in hardware",
    0x80: "power brake",
    0x100: "display clocks",
}

Note = Callable[[str, int | None], None]


class Reader:
    """Calls the library, one guarded call at a time.

    Args:
        nvml: the binding, or anything with its functions and its `NVMLError`.
        note: told of each call before it is made, with the GPU's number.
    """

    def __init__(self, nvml: Any, note: Note) -> None:
        self.nvml = nvml
        self.note = note
        self.failures: list[dict[str, Any]] = []

    def ask(self, call: str, gpu: int | None, *arguments: Any, answers: tuple[int, ...] = ()) -> Any:
        """The call's result, or None with a failure noted.

        Args:
            call: name of the library's function.
            gpu: the GPU that it is about.
            arguments: what it is called with.
            answers: error codes that are an answer ("there is no such thing here"), for which None is the truth.
        """
        self.note(call, gpu)
        try:
            result = getattr(self.nvml, call)(*arguments)
        except Exception as error:
            # Whatever a foreign library throws, from its own errors to text that does not decode, costs this one fact.
            code = getattr(error, "value", None)
            if code not in answers or code is None:
                text = str(error) or type(error).__name__
                self.failures.append({"call": call, "gpu": gpu, "code": code, "error": text})
            return None
        return result.decode("utf-8", "replace") if isinstance(result, bytes) else result


def read(nvml: Any, note: Note) -> dict[str, Any]:
    """All that the library says, as plain data; see the module's text. It never raises.

    Args:
        nvml: the binding, or anything with its functions.
        note: told of each call before it is made.
    """
    reader = Reader(nvml, note)
    answer: dict[str, Any] = {"driver": None, "missing": False, "failures": reader.failures, "cards": []}
    reader.ask("nvmlInit", None)
    if reader.failures:
        return answer
    answer["driver"] = reader.ask("nvmlSystemGetDriverVersion", None)
    count = reader.ask("nvmlDeviceGetCount", None) or 0
    handles = [reader.ask("nvmlDeviceGetHandleByIndex", index, index) for index in range(count)]
    for index, handle in enumerate(handles):
        answer["cards"].append({"index": index} if handle is None else _card(reader, index, handle, handles))
    return answer


def _card(reader: Reader, index: int, handle: Any, handles: list[Any]) -> dict[str, Any]:
    def ask(call: str, *arguments: Any, answers: tuple[int, ...] = ()) -> Any:
        return reader.ask(call, index, handle, *arguments, answers=answers)

    absent = (NOT_SUPPORTED,)
    capability = ask("nvmlDeviceGetCudaComputeCapability")
    bar1 = ask("nvmlDeviceGetBAR1MemoryInfo", answers=absent)
    bus = ask("nvmlDeviceGetPciInfo", answers=absent)
    mig = _mig(reader, index, handle)
    return {
        "index": index,
        **_named(reader, index, handle),
        "capability": f"{capability[0]}.{capability[1]}" if capability else None,
        "mig": mig,
        "bar1_bytes": bar1.bar1Total or None if bar1 else None,
        # The current generation falls when a card idles; the width does not, and tells of a riser with few lanes.
        "pcie_generation": ask("nvmlDeviceGetMaxPcieLinkGeneration", answers=absent) or None,
        "pcie_width": ask("nvmlDeviceGetCurrPcieLinkWidth", answers=absent) or None,
        **_pace(reader, index, handle),
        "bus_id": _text(bus.busId) if bus else None,
        "processes": _processes(reader, index, handle),
        "peers": {
            other: _link(reader, index, handle, peer)
            for other, peer in enumerate(handles)
            if other != index and peer is not None
        },
        "instances": _instances(reader, index, handle) if mig == "on" else [],
    }


def _pace(reader: Reader, index: int, handle: Any) -> dict[str, Any]:
    """What tells a card that runs as fast as it can from one that does not."""

    def ask(call: str, *arguments: Any) -> Any:
        # A card may lack the notion, and a driver of some years ago the question.
        return reader.ask(call, index, handle, *arguments, answers=(NOT_SUPPORTED, NOT_IN_THIS_DRIVER))

    persistence = ask("nvmlDeviceGetPersistenceMode")
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    return {
        "pcie_generation_now": ask("nvmlDeviceGetCurrPcieLinkGeneration") or None,
        "pcie_generation_card": ask("nvmlDeviceGetGpuMaxPcieLinkGeneration") or None,
        "pcie_width_max": ask("nvmlDeviceGetMaxPcieLinkWidth") or None,
        "persistence": None if persistence is None else bool(persistence),
        "clock_mhz": ask("nvmlDeviceGetClockInfo", _SM_CLOCK),
        "clock_max_mhz": ask("nvmlDeviceGetMaxClockInfo", _SM_CLOCK),
        "throttled_by": None if reasons is None else [text for bit, text in _THROTTLES.items() if reasons & bit],
    }


def _named(reader: Reader, index: int, handle: Any) -> dict[str, Any]:
    """What a card and a MIG instance are both asked."""
    memory = reader.ask("nvmlDeviceGetMemoryInfo", index, handle)
    return {
        "name": reader.ask("nvmlDeviceGetName", index, handle),
        "uuid": reader.ask("nvmlDeviceGetUUID", index, handle),
        "memory_bytes": memory.total if memory else None,
        "free_bytes": memory.free if memory else None,
    }


def _mig(reader: Reader, index: int, handle: Any) -> str:
    before = len(reader.failures)
    mode = reader.ask("nvmlDeviceGetMigMode", index, handle, answers=(NOT_SUPPORTED,))
    if len(reader.failures) > before:
        return "unknown"
    return "on" if mode and mode[0] else "off"  # a card without the feature answers "not supported"


def _instances(reader: Reader, index: int, handle: Any) -> list[dict[str, Any]]:
    found = []
    for place in range(reader.ask("nvmlDeviceGetMaxMigDeviceCount", index, handle) or 0):
        # Places without an instance answer "not found".
        instance = reader.ask("nvmlDeviceGetMigDeviceHandleByIndex", index, handle, place, answers=(NOT_FOUND,))
        if instance is None:
            continue
        numbers = [
            reader.ask(call, index, instance)
            for call in ("nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId")
        ]
        found.append({**_named(reader, index, instance), "instance": None if None in numbers else numbers})
    return found


def _processes(reader: Reader, index: int, handle: Any) -> list[dict[str, Any]]:
    used: dict[int, int | None] = {}
    for call in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
        for process in reader.ask(call, index, handle) or []:
            # A program that computes and draws is in both lists, each time with all that it holds.
            used[process.pid] = max(used.get(process.pid) or 0, process.usedGpuMemory or 0) or None
    found = []
    for pid, held in used.items():
        # In a container the process may be out of sight; the number then stays without a name.
        before = len(reader.failures)
        name = reader.ask("nvmlSystemGetProcessName", index, pid)
        del reader.failures[before:]
        found.append({"pid": pid, "name": _text(name) or None, "used_bytes": held})
    return found


def _link(reader: Reader, index: int, handle: Any, peer: Any) -> str:
    read, write, nvlink = (
        reader.ask("nvmlDeviceGetP2PStatus", index, handle, peer, capability)
        for capability in (_P2P_READ, _P2P_WRITE, _P2P_NVLINK)
    )
    if any(state not in (_P2P_OK, _P2P_UNKNOWN, None) for state in (read, write)):
        return "none"
    if read != _P2P_OK or write != _P2P_OK or nvlink in (None, _P2P_UNKNOWN):
        return "unknown"
    return "nvlink" if nvlink == _P2P_OK else "p2p"


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")


def main() -> None:
    """Print the answer of the real library."""

    def put(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)

    # Whoever started this kills it when it hangs. Should that process be gone by then, this ends it all the same.
    signal.alarm(60)
    try:
        import pynvml
    except ImportError:
        put({"answer": {"driver": None, "missing": True, "failures": [], "cards": []}})
        return
    put({"answer": read(pynvml, lambda call, gpu: put({"at": [call, gpu]}))})
    # The answer is out; the library's own shutdown is one more thing that could hang.
    os._exit(0)


if __name__ == "__main__":
    main()
