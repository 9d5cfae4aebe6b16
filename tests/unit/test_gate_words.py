"""The words of the engine's processes: given, waited for, and written down; and the ends of those that do not pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from supervisor_support import Fake, fake_fixture

from slimserve.engine.gate import words
from slimserve.engine.gate.expected import PLUGIN
from slimserve.engine.gate.plugin import GATE_STATUS
from slimserve.engine.gate.words import RESOLVED_NAME, Words
from slimserve.engine.supervisor import Supervisor
from slimserve.engine.variables import GATE_VARIABLE, OWNED, WORDS_VARIABLE
from slimserve.errors import Finding, Refused

ROOT = Path(__file__).parents[2]
PROCESSES = ("api", "core-0")


def given(folder: Path, process: str, tag: str = "tag", findings: tuple[Finding, ...] = (), blocks: int = 7) -> None:
    config = {"cache_config": {}} if process.startswith("core") else None
    words.write(folder, process, tag, findings, {"dtype": "bfloat16", "cache_blocks": blocks}, config)


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    yield from fake_fixture(tmp_path)


@pytest.fixture
def told(tmp_path: Path) -> Words:
    one = Words(tmp_path, PROCESSES, "tag")
    one.prepare()
    return one


def test_a_word_that_is_missing_is_a_start_that_failed(told: Words) -> None:
    given(told.folder, "api")
    with pytest.raises(Refused, match="the gate has not run in core-0"):
        told.close()
    given(told.folder, "core-0", tag="of the start before")
    with pytest.raises(Refused, match="the gate has not run in core-0"):
        told.close()
    given(told.folder, "core-0")
    assert told.missing() == []
    assert len(told.close()) == 64


def test_words_of_an_earlier_start_are_forgotten(told: Words) -> None:
    given(told.folder, "api")
    told.resolved_path.write_text("{}")
    told.prepare()
    assert list(told.folder.iterdir()) == []
    assert not told.resolved_path.exists()


def test_a_setting_that_differs_in_many_processes_is_one_line(told: Words) -> None:
    for process in PROCESSES:
        given(told.folder, process, findings=(Finding(f"dtype: planned a, resolved b in {process}", "why", "do"),))
    assert [finding.what for finding in told.differences()] == ["dtype: planned a, resolved b in api"]
    with pytest.raises(Refused):
        told.check()


def test_a_torn_word_is_none(told: Words) -> None:
    given(told.folder, "api")
    (told.folder / "core-0.json").write_text('{"tag": "tag", "proc')
    assert told.missing() == ["core-0"]


def test_the_hash_is_of_the_configuration_and_not_of_the_moment(told: Words) -> None:
    digests = []
    for blocks in (7, 8):
        for process in PROCESSES:
            given(told.folder, process, blocks=blocks)
        digests.append(told.close())
    assert digests[0] == digests[1]
    written = json.loads(told.resolved_path.read_text())
    assert written["sha256"] == digests[1]
    assert written["measured"]["core-0"] == {"cache_blocks": 8}
    assert written["resolved"]["settings"]["core-0"] == {"dtype": "bfloat16"}
    words.write(told.folder, "api", "tag", [], {"dtype": "float16"}, None)
    assert told.close() != digests[0]


def test_an_engine_that_never_passed_the_gate_does_not_come_up(fake: Fake) -> None:
    """It loads and answers, and nobody has looked at it."""
    said: list[str] = []
    launch = replace(fake.launch(), processes=PROCESSES)
    with pytest.raises(Refused, match="the gate has not run in api, core-0"), Supervisor(launch, said.append):
        pass
    assert not any(line.startswith(("warming", "ready")) for line in said)


def test_a_difference_ends_the_start_at_once_though_the_process_hangs(fake: Fake) -> None:
    finding = Finding("dtype: planned a, resolved b in core-0", "why", "do")
    script = f"""
import os, time
from pathlib import Path
from slimserve.engine.gate import words
from slimserve.errors import Finding
folder, tag = Path(os.environ[{WORDS_VARIABLE!r}]), os.environ["SLIMSERVE_ENGINE_TAG"]
words.write(folder, "core-0", tag, [{finding!r}], {{}}, None)
time.sleep(600)
"""
    launch = fake.launch(load_seconds=100.0)
    launch = replace(launch, argv=(sys.executable, "-c", script), processes=PROCESSES)
    with pytest.raises(Refused) as refused, Supervisor(launch, lambda line: None):
        pass
    assert refused.value.findings == (finding,)


def test_an_engine_that_passed_says_so(fake: Fake) -> None:
    """The fake, and beside it the words of the processes that it does not have."""
    script = f"""
import os, sys
from pathlib import Path
from slimserve.engine.gate import words
folder, tag = Path(os.environ[{WORDS_VARIABLE!r}]), os.environ["SLIMSERVE_ENGINE_TAG"]
for process in {PROCESSES!r}:
    words.write(folder, process, tag, [], {{"weight_tensors": 7}}, None)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
    said: list[str] = []
    launch = fake.launch()
    launch = replace(launch, argv=(sys.executable, "-c", script, *launch.argv[1:]), processes=PROCESSES)
    with Supervisor(launch, said.append):
        digest = json.loads((launch.run_folder / RESOLVED_NAME).read_text())["sha256"]
    assert f"gate: 2 processes are as planned, configuration {digest[:12]}" in said
    assert "gate: 14 tensors of weights hold finite numbers alone" in said


def run_in_a_process(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` where an engine's process would load the plugin; `fake` is a module of that engine."""
    head = """
import sys, types
from slimserve.engine.gate import plugin
from slimserve.engine.gate.plugin import Seat
fake = sys.modules["fake"] = types.ModuleType("fake")
class Core:
    def method(self): return "done"
fake.Core = Core
"""
    env = {**os.environ, GATE_VARIABLE: "{}", WORDS_VARIABLE: str(folder), "SLIMSERVE_ENGINE_TAG": "tag"}
    command = [sys.executable, "-c", head + code]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_a_place_of_the_gate_that_is_gone_ends_the_process(told: Words) -> None:
    done = run_in_a_process(told.folder, 'plugin.hang(Seat("core", "fake", "Core.renamed", first=False))')
    assert done.returncode == GATE_STATUS
    assert "the gate's place in the engine is gone: fake has no Core.renamed" in done.stderr
    assert [finding.what for finding in told.differences()] == [
        "the gate's place in the engine is gone: fake has no Core.renamed"
    ]


def test_objects_that_cannot_be_read_end_the_process(told: Words) -> None:
    code = 'plugin.hang(Seat("core", "fake", "Core.method", first=False)); print(Core().method())'
    done = run_in_a_process(told.folder, code)
    assert done.returncode == GATE_STATUS
    assert done.stdout == ""
    (finding,) = told.differences()
    assert "core process cannot be looked at: AttributeError" in finding.what


def test_a_process_that_cannot_give_its_word_ends_too(told: Words) -> None:
    told.folder.rmdir()
    done = run_in_a_process(told.folder, 'plugin.hang(Seat("core", "fake", "Core.renamed", first=False))')
    assert done.returncode == GATE_STATUS
    assert "the word of core cannot be written" in done.stderr


@pytest.mark.parametrize(("wrong", "status"), [([], 0), (["a.weight: 1 of 2 values"], GATE_STATUS)])
def test_a_part_is_compared_alone_and_gives_no_word_of_its_own(told: Words, wrong: list[str], status: int) -> None:
    code = f"""
import os
from slimserve.engine.gate import observed
observed.weights = lambda model: None
observed.loaded = lambda worker: ("rank-0-0", {{"not_finite_weights": {wrong!r}, "weight_tensors": 7}}, None)
os.environ[{GATE_VARIABLE!r}] = '{{"dtype": "bfloat16", "not_finite_weights": []}}'
for part in ("weights", "loaded"):
    fake.Core.method.__dict__.pop("passes_gate", None)
    plugin.hang(Seat("rank", "fake", "Core.method", first=part == "weights", part=part))
print(Core().method())
"""
    done = run_in_a_process(told.folder, code)
    assert done.returncode == status
    assert done.stdout == ("" if wrong else "done\n")
    assert [path.name for path in told.folder.iterdir()] == (["rank-0-0.json"] if wrong else [])
    assert [finding.what for finding in told.differences()] == [
        f"not_finite_weights: planned [], resolved {json.dumps(wrong)} in rank-0-0" for _ in wrong
    ]


def test_a_module_that_is_imported_later_is_hung_then(told: Words, tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("class Core:\n    pass\n")
    code = f"""
sys.path.insert(0, {str(tmp_path)!r})
plugin.SEATS = (Seat("core", "late", "Core.gone", first=False),)
plugin.install()
print("installed", flush=True)
import late
print("imported")
"""
    done = run_in_a_process(told.folder, code)
    assert done.stdout == "installed\n"
    assert done.returncode == GATE_STATUS


def test_without_a_plan_nothing_is_hung(told: Words) -> None:
    code = f"""
import os
del os.environ[{GATE_VARIABLE!r}]
plugin.SEATS = (Seat("core", "fake", "Core.renamed", first=False),)
plugin.install()
"""
    assert run_in_a_process(told.folder, code).returncode == 0


def test_the_engine_finds_the_plugin_and_no_profile_can_replace_it() -> None:
    (found,) = [one for one in metadata.entry_points(group="vllm.general_plugins") if one.name == PLUGIN]
    assert found.value == "slimserve.engine.gate.plugin:install"
    assert {GATE_VARIABLE, WORDS_VARIABLE, "VLLM_PLUGINS"} <= OWNED
