"""The process that asks the driver: a hang, a crash and nonsense end there, and leave nothing behind."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from slimserve.probe.child import COMMAND, ask_driver
from slimserve.probe.gpus import read_gpus

PID = "import os, sys, signal, time\nopen({pid!r}, 'w').write(str(os.getpid()))\n"
AT = """print('{"at": ["nvmlDeviceGetMemoryInfo", 3]}', flush=True)\n"""
ANSWER = """print('{"answer": {"driver": "1", "missing": false, "failures": [], "cards": []}}', flush=True)\n"""
HANG = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(60)\n"


def run(tmp_path: Path, script: str, deadline_seconds: float = 60.0) -> tuple[dict[str, object], str]:
    pid = tmp_path / "pid"
    answer, problem = ask_driver((sys.executable, "-c", PID.format(pid=str(pid)) + script), deadline_seconds)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    return answer, problem.what if problem else ""


def test_a_driver_that_hangs_is_named_and_ended(tmp_path: Path) -> None:
    began = time.monotonic()
    answer, problem = run(tmp_path, AT + HANG, 3.0)
    assert time.monotonic() - began < 30
    assert answer == {}
    assert problem == "GPUs cannot be read: the driver did not answer within 3 s in nvmlDeviceGetMemoryInfo of GPU 3"


def test_an_answer_counts_though_the_library_hangs_on_its_way_out(tmp_path: Path) -> None:
    assert run(tmp_path, AT + ANSWER + HANG, 3.0) == (
        {"driver": "1", "missing": False, "failures": [], "cards": []},
        "",
    )


def test_a_process_that_cannot_be_ended_is_left_behind(tmp_path: Path) -> None:
    # One that is stuck in the driver keeps the pipe open after the kill; here its own child does.
    holder = tmp_path / "holder"
    fork = f"import subprocess\nwith open({str(holder)!r}, 'w') as file:\n    "
    fork += "file.write(str(subprocess.Popen((sys.executable, '-c', 'import time; time.sleep(600)')).pid))\n"
    try:
        answer, problem = run(tmp_path, fork + AT + HANG, 3.0)
    finally:
        os.kill(int(holder.read_text()), 9)
    assert answer == {}
    assert problem.endswith("did not answer within 3 s in nvmlDeviceGetMemoryInfo of GPU 3")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (AT + "os.kill(os.getpid(), signal.SIGSEGV)", "died of SIGSEGV in nvmlDeviceGetMemoryInfo of GPU 3"),
        ("os.abort()", "died of SIGABRT"),
        ("sys.exit(7)", "ended with code 7"),
        ("print('a greeting'); print('[1]'); print('{\"answer\": 5}'); print('{\"at\": 5}')", "ended with code 0"),
        ("sys.stdout.buffer.write(b'\\xff\\x00{')", "ended with code 0"),
    ],
)
def test_a_crash_or_nonsense_is_a_problem(tmp_path: Path, script: str, said: str) -> None:
    answer, problem = run(tmp_path, script)
    assert answer == {}
    assert problem == f"GPUs cannot be read: the process that asks the driver {said}"


def test_a_greeting_before_the_answer_does_no_harm(tmp_path: Path) -> None:
    assert run(tmp_path, "print('WARNING: persistence mode is off')\n" + ANSWER)[1] == ""


def test_a_command_that_is_not_there_is_a_problem() -> None:
    answer, problem = ask_driver(("/nowhere/python",), 60.0)
    assert answer == {}
    assert problem is not None
    assert "did not start: No such file or directory" in problem.what


def with_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, binding: str) -> Path:
    """A root with a device file, and a binding that the real child will import."""
    (tmp_path / "root/dev").mkdir(parents=True)
    (tmp_path / "root/dev/nvidia0").touch()
    (tmp_path / "site").mkdir()
    (tmp_path / "site/pynvml.py").write_text(binding)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path / "root"


def test_the_real_child_reads_a_binding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Path(__file__).with_name("nvml_fake.py").read_text()
    root = with_driver(
        tmp_path,
        monkeypatch,
        fake + "\n\ndef __getattr__(name):\n    return getattr(FAKE, name)\n\nFAKE = FakeNvml(Card())\n",
    )
    found = read_gpus(root, {}, deadline_seconds=60.0)
    assert found.gpu_problem is None
    assert [gpu.name for gpu in found.gpus] == ["NVIDIA GeForce RTX 3090"]


def test_the_real_child_names_the_call_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = with_driver(tmp_path, monkeypatch, "import time\ndef nvmlInit():\n    time.sleep(600)\n")
    found = read_gpus(root, {}, deadline_seconds=3.0)
    assert found.gpu_problem is not None
    assert found.gpu_problem.what.endswith("did not answer within 3 s in nvmlInit")


def test_a_binding_that_cannot_be_imported_is_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = with_driver(tmp_path, monkeypatch, "raise ImportError\n")
    found = read_gpus(root, {}, deadline_seconds=60.0)
    assert found.gpu_problem is not None
    assert "nvidia-ml-py is not installed" in found.gpu_problem.what


def test_a_module_in_the_working_directory_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    answer, problem = ask_driver(COMMAND, 60.0)
    assert problem is None
    # Wherever this runs, the real library gives GPUs, a failure, or is not installed; it is never silent.
    assert answer["missing"] or answer["failures"] or answer["cards"]
