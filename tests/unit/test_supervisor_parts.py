from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from supervisor_support import ROOT

from slimserve import BUILD
from slimserve.engine import ending, entry, import_hook, ports, procfs, supervisor
from slimserve.engine.control import has_token
from slimserve.engine.process import EngineProcess
from slimserve.engine.record import RunFolder, StartRecord, leftovers
from slimserve.errors import Failed, Finding, Refused

ENV = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "exit status 0"),
        (3, "exit status 3"),
        (-9, "signal 9 (SIGKILL)"),
        (-4, "signal 4 (SIGILL)"),
        (-99, "signal 99"),
    ],
)
def test_status_in_words(status: int, words: str) -> None:
    assert ending.status_in_words(status) == words


@pytest.mark.parametrize(
    ("groups", "path", "name"),
    [
        ("0::/a/b\n", "a/b/memory.events", "our control group"),
        ("4:cpu,memory:/a:b\n0::/\n", "memory/a:b/memory.oom_control", "our memory control group"),
    ],
)
def test_out_of_memory_counters_of_both_versions(tmp_path: Path, groups: str, path: str, name: str) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroups"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(groups)
    (proc / "vmstat").write_text("nr_free_pages 7\noom_kill 12\n")
    place = cgroups / path
    place.parent.mkdir(parents=True)
    place.write_text("oom 2\noom_kill 5\noom_group_kill 0\n")
    assert ending.oom_counters(proc, cgroups) == {"this machine": 12, name: 5}
    assert ending.oom_counters(tmp_path / "none", tmp_path / "none") == {}


def test_memory_verdict() -> None:
    assert "struck meanwhile (its counter of this machine rose)" in ending.memory_verdict(
        -9, {"this machine": 1}, {"this machine": 2}
    )
    assert "struck" in ending.memory_verdict(1, {"this machine": 1}, {"this machine": 2})  # a worker's end is enough
    assert "not the kernel's" in ending.memory_verdict(-9, {"this machine": 1}, {"this machine": 1})
    assert "probably" in ending.memory_verdict(-9, {}, {})
    assert ending.memory_verdict(1, {"this machine": 1}, {"this machine": 1}) == ""


def test_the_tail_is_the_end_without_control_characters(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"old\n" + b"x" * 200_000 + b"\nred \x1b[31mtext\xff\nlast")
    assert ending.tail(log, lines=2) == ["red [31mtext�", "last"]
    assert ending.tail(log, start=log.stat().st_size - 4) == ["last"]


def test_the_tail_leaves_the_list_of_routes_out(tmp_path: Path) -> None:
    log = tmp_path / "log"
    head = "(APIServer pid=7) INFO 11-30 03:18:08 [launcher.py:{}] "
    routes = [head.format(186) + "Available routes are:"]
    routes += [head.format(195) + f"Route: /v1/{number}, Methods: GET" for number in range(40)]
    log.write_text("\n".join(["the reason", *routes, "Route: of somebody else's", "the end"]))
    assert ending.tail(log, lines=3) == ["the reason", "Route: of somebody else's", "the end"]


def test_the_last_words_hold_the_first_error_and_the_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    head = "(EngineCore pid=7) {} 11-30 03:18:08 [core.py:1] "
    before = head.format("ERROR") + "of the start before\n"
    lines = [head.format("INFO") + "well", head.format("ERROR") + "the cause"]
    lines += [head.format("ERROR") + f"what follows {number}" for number in range(200)]
    log.write_text(before + "\n".join([*lines, "the end"]))
    words = ending.last_words(log, len(before))
    assert len(words) == ending.TAIL_LINES
    assert words[0].endswith("the cause")
    assert words[-1] == "the end"
    assert "..." in words
    asked = head.format("ERROR") + "Error with model error=ErrorInfo(message='no `x`', type='NotFoundError', code=404)"
    log.write_text("\n".join([asked, *lines, "the end"]))
    assert ending.last_words(log, 0) == words  # what a client asked for wrongly is no cause
    log.write_text("\n".join(lines[:20]))
    assert ending.last_words(log, 0) == tuple(lines[:20])
    assert ending.last_words(tmp_path / "nowhere", 0) == ()


def test_what_cannot_be_made_of_an_end_is_told() -> None:
    told = supervisor._crash(OSError(errno.EMFILE, "Too many open files"))
    assert "Too many open files" in str(told)
    known = Failed(Finding("what", "why", "do"))
    assert supervisor._crash(known) is known


def test_a_process_name_may_hold_anything() -> None:
    name = "a) R (b"
    rename = f"import ctypes, sys; ctypes.CDLL(None).prctl(15, {name.encode()!r}, 0, 0, 0)"
    code = f"{rename}; print(flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        process = procfs.read(child.pid)
        assert process is not None
        assert (process.name, process.parent, process.session) == (name, os.getpid(), os.getsid(0))
        child.kill()
        child.stdout.read()
    assert procfs.read(child.pid) is None


def test_a_process_with_a_recycled_number_is_not_killed() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    with child:
        process = procfs.read(child.pid)
        assert process is not None
        procfs.kill(replace(process, start_ticks=process.start_ticks - 1))
        assert child.poll() is None
        procfs.kill(process)
        assert child.wait(5) == -signal.SIGKILL
    procfs.kill(process)


def test_a_record_whose_number_was_given_to_another_process_is_no_leftover(tmp_path: Path) -> None:
    own = procfs.read(os.getpid())
    assert own is not None
    leader = subprocess.Popen(
        [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, start_new_session=True
    )
    with leader:
        now = procfs.read(leader.pid)
        assert now is not None
        scratch = tmp_path / "slimserve-scratch"
        (scratch / "deep").mkdir(parents=True)
        record = StartRecord(
            "p", 1, leader.pid, now.start_ticks, "tag", own.pid, own.start_ticks - 1, ("x",), str(scratch)
        )
        folder = RunFolder(tmp_path / "run", tmp_path / "run/engine.sock")
        folder.prepare()
        folder.write(record)
        (found,) = leftovers(tmp_path)
        assert [process.pid for process in found.processes] == [leader.pid]
        assert scratch.is_dir()
        folder.write(replace(record, start_ticks=now.start_ticks - 1))
        assert leftovers(tmp_path) == []
        assert not (tmp_path / "run/engine.json").exists()
        assert not scratch.exists()
        leader.kill()


@pytest.mark.parametrize("kind", ["pipe", "read pipe", "socket", "device", "folder"])
@pytest.mark.timeout(30)
def test_a_log_that_is_no_plain_file_is_refused_and_not_waited_for(tmp_path: Path, kind: str) -> None:
    folder = RunFolder(tmp_path, tmp_path / "engine.sock")
    log = folder.log_path
    with contextlib.ExitStack() as stack:
        if kind in ("pipe", "read pipe"):
            os.mkfifo(log)
            if kind == "read pipe":
                stack.callback(os.close, os.open(log, os.O_RDONLY | os.O_NONBLOCK))
        elif kind == "socket":
            stack.enter_context(socket.socket(socket.AF_UNIX)).bind(str(log))
        elif kind == "device":
            log.symlink_to("/dev/null")
        else:
            log.mkdir()
        with pytest.raises(Refused, match="cannot write in the run folder"):
            folder.prepare()
        with pytest.raises(OSError):  # noqa: PT011 (each kind has a word of its own)
            EngineProcess([sys.executable, "-c", ""], {}, log)
        with pytest.raises(OSError):  # noqa: PT011
            ending.tail(log)
        assert ending.last_words(log, 0) == ()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"argv": []}', "\udcff"])
def test_a_torn_record_is_passed_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/engine.json").write_text(text, errors="surrogateescape")
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80/v1"),
        ("0.0.0.0", "http://127.0.0.1:80/v1"),
        ("", "http://127.0.0.1:80/v1"),
        ("::", "http://[::1]:80/v1"),
        ("localhost", "http://localhost:80/v1"),
    ],
)
def test_base_url(host: str, url: str) -> None:
    assert ports.url(host, 80) == url


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b'{"choices": [{"text": ""}], "usage": {"completion_tokens": 1}}', True),
        (b'{"choices": [{"text": "x"}], "usage": {"completion_tokens": 0}}', False),
        (b'{"choices": [], "usage": {"completion_tokens": 1}}', False),
        (b'{"choices": [{"text": "x"}]}', False),
        (b"[]", False),
        (b"\xff", False),
    ],
)
def test_a_token_is_counted_not_read(answer: bytes, expected: bool) -> None:
    assert has_token(answer) is expected


def test_an_engine_is_started_from_the_main_thread_only(tmp_path: Path) -> None:
    caught: list[BaseException] = []

    def start() -> None:
        try:
            EngineProcess(["true"], {}, tmp_path / "log")
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert caught
    assert not (tmp_path / "log").exists()


def test_the_entry_ends_when_its_parent_is_not_the_one_that_started_it() -> None:
    code = "from slimserve.engine import entry; entry.tie_to_parent(); print('alive')"
    for parent, status, said in ((str(os.getpid()), 0, "alive\n"), ("1", -signal.SIGKILL, "")):
        env = {**ENV, entry.PARENT: parent}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=30)
        assert (done.returncode, done.stdout) == (status, said)


def test_the_entry_ties_a_spawned_worker_to_its_own_parent() -> None:
    code = (
        "import os; from slimserve.engine import entry; entry.tie_to_parent();"
        f"assert os.environ[{entry.PARENT!r}] == str(os.getpid())"
    )
    subprocess.run([sys.executable, "-c", code], env=ENV, check=True, timeout=30)


def test_the_entry_refuses_workers_that_it_could_not_tie() -> None:
    argv = [sys.executable, "-m", "slimserve.engine.entry", "--model", "x"]
    done = subprocess.run(argv, env=ENV, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert done.stderr.startswith("VLLM_WORKER_MULTIPROC_METHOD is not `spawn`\n  why: ")


def test_the_entry_refuses_the_supervisor_of_another_version() -> None:
    argv = [sys.executable, "-m", "slimserve.engine.entry", "--model", "x"]
    env = {**ENV, "VLLM_WORKER_MULTIPROC_METHOD": "spawn", entry.SUPERVISOR: "0.0.1 in /elsewhere/slimserve"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"the supervisor is slimserve 0.0.1 in /elsewhere/slimserve, and its engine would run slimserve {BUILD}\n"
    )


def test_amx_is_asked_for_where_the_processor_has_it() -> None:
    # In a process of its own: the permission cannot be handed back. 0x1022 asks which are granted; tile data is bit 18.
    code = (
        "import ctypes; from slimserve.engine import entry; asked = entry.permit_amx(); granted = ctypes.c_uint64();"
        "ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(granted)); print(asked, bool(granted.value >> 18 & 1))"
    )
    has = " amx_tile" in Path("/proc/cpuinfo").read_text()
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, timeout=30)
    assert done.stdout == f"{has} {has}\n", done.stderr


def test_supervising_imports_nothing_that_costs() -> None:
    code = (
        "import sys, slimserve.engine.supervisor, slimserve.engine.entry;"
        "print(sorted({'torch', 'vllm', 'httpx', 'numpy', 'transformers', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, timeout=30)
    assert done.stdout == "[]\n", done.stderr


def test_import_hooks_run_around_the_import_and_not_at_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hooked_by_a_test.py").write_text("from slimserve_test_log import log\nlog.append('module')\n")
    (tmp_path / "slimserve_test_log.py").write_text("log = []\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    log = importlib.import_module("slimserve_test_log").log
    name = "hooked_by_a_test"
    for _ in range(2):
        import_hook.install(name, before=lambda: log.append("before"), after=lambda: log.append("after"))
    assert importlib.util.find_spec(name) is not None
    assert log == []
    module = importlib.import_module(name)
    assert log == ["before", "module", "after"]
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if not hasattr(finder, "name")])
    with pytest.raises(RuntimeError, match="imported already"):
        import_hook.install(name)
