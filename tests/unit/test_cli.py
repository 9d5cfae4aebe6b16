"""The command as a program: exit status, where words go, what it imports."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import until

ROOT = Path(__file__).parent.parent.parent
MACHINES = Path(__file__).parent.parent / "machines"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "SLIMSERVE_CACHE": str(tmp_path / "cache"),
        "SLIMSERVE_STATE": str(tmp_path / "state"),
        "PYTHONPATH": str(ROOT),
    }


def slimserve(environment: dict[str, str], *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, "-m", "slimserve", *arguments],
        env=environment,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in result.stderr
    return result


def test_list_gives_every_profile_its_verdict(environment: dict[str, str]) -> None:
    result = slimserve(environment, "--list", "--machine", str(MACHINES / "rtx3090x8.yaml"))
    assert result.returncode == 0, result.stderr
    assert "qwen38fn-fp8-3090x8" in result.stdout
    assert "GPUs found: 8 x NVIDIA GeForce RTX 3090" in result.stdout  # why the H200 profile does not run there


def test_list_as_json(environment: dict[str, str]) -> None:
    result = slimserve(environment, "--list", "--json", "--on", "rtx3090x8")
    data = json.loads(result.stdout)
    runs = {row["id"]: row["runs"] for row in data["profiles"]}
    assert runs["qwen38fn-fp8-3090x8"] is True
    assert runs["qwen38fn-fp8-h200x2"] is False


def test_without_a_terminal_the_bare_command_lists(environment: dict[str, str]) -> None:
    assert "profiles run on" in slimserve(environment).stdout


@pytest.mark.parametrize("arguments", [["--list"], ["smollm2-135m-bf16-cpu", "--plan"], ["qwen38fn-fp8-8", "--serve"]])
def test_neither_torch_nor_the_engine_is_imported(environment: dict[str, str], arguments: list[str]) -> None:
    code = (
        "import sys\nfrom slimserve.cli import main\n"
        f"assert main({arguments!r}) == {3 if '--serve' in arguments else 0}\n"
        "heavy = {'torch', 'vllm', 'transformers', 'numpy', 'rich', 'httpx', 'huggingface_hub'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_a_listing_again_imports_no_parser(environment: dict[str, str]) -> None:
    """Once nothing of the registry and of the program has changed for a moment."""
    code = "import sys\nfrom slimserve.cli import main\nmain(['--list'])\nsys.exit('yaml' in sys.modules)"
    argv = [sys.executable, "-c", code]
    until(lambda: subprocess.run(argv, env=environment, stdout=subprocess.DEVNULL, timeout=60).returncode == 0)


def test_a_profile_for_other_hardware_is_refused_before_anything_is_fetched(environment: dict[str, str]) -> None:
    result = slimserve(environment, "qwen38fn-fp8-8", "--serve")
    assert result.returncode == 3
    assert "GPUs found: " in result.stderr
    assert "needed: 8 x NVIDIA GeForce RTX 3090" in result.stderr
    assert result.stdout == ""
    assert not (Path(environment["SLIMSERVE_CACHE"]) / "weights").exists()


def test_a_refusal_as_json(environment: dict[str, str]) -> None:
    result = slimserve(environment, "qwen38fn-fp8-8", "--plan", "--json", "--machine", str(MACHINES / "rtx3090x3.yaml"))
    assert result.returncode == 3
    data = json.loads(result.stdout)
    assert data["error"] == "refused"
    assert "3 x NVIDIA GeForce RTX 3090" in data["findings"][0]["what"]


@pytest.mark.parametrize("stand_in", [("--on", "cpu-x86-64"), ("--machine", str(MACHINES / "rtx3090x3.yaml"))])
def test_a_refusal_for_another_machine_points_to_the_listing_for_it(
    environment: dict[str, str], stand_in: tuple[str, str]
) -> None:
    result = slimserve(environment, "qwen38fn-fp8-8", "--plan", *stand_in)
    assert result.returncode == 3
    assert f"do:  use a profile for this machine: slimserve --list {shlex.join(stand_in)}\n" in result.stderr
    (refused,) = [
        one
        for one in json.loads(slimserve(environment, "--list", "--json", *stand_in).stdout)["profiles"]
        if one["id"] == "qwen38fn-fp8-3090x8"
    ]
    assert refused["refusals"][0]["do"].endswith(f"slimserve --list {shlex.join(stand_in)}")


def test_the_plan_for_another_machine_in_full(environment: dict[str, str]) -> None:
    result = slimserve(environment, "qwen38fn-fp8-8", "--plan", "--on", "rtx3090x8")
    assert result.returncode == 0, result.stderr
    for words in ("--tensor-parallel-size 8", "--enable-expert-parallel", "96]", "not carried", "reasoning_effort"):
        assert words in result.stdout
    data = json.loads(slimserve(environment, "qwen38fn-fp8-8", "--plan", "--on", "rtx3090x8", "--json").stdout)
    assert all(row["why"] and row["evidence"] for row in data["settings"])
    # What this machine's disk holds is nothing to a plan for another one.
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("  weights  ")]
    assert re.fullmatch(r"  weights   fetching them takes up to [0-9.]+ GiB of disk", line)
    assert (data["weights"]["folder"], data["weights"]["ready"]) == (None, None)
    assert data["weights"]["needed_bytes"] > 0


@pytest.mark.parametrize(
    ("machine", "profile"),
    [("rtx3090x8.yaml", "qwen38fn-fp8-3090x8"), ("h200x2.yaml", "qwen38fn-fp8-h200x2")],
)
def test_an_alias_means_what_fits_the_machine(environment: dict[str, str], machine: str, profile: str) -> None:
    result = slimserve(environment, "qwen38fn-fp8", "--plan", "--json", "--machine", str(MACHINES / machine))
    assert json.loads(result.stdout)["profile"] == profile, result.stderr


def test_an_alias_that_fits_nothing_names_what_it_stands_for(environment: dict[str, str]) -> None:
    result = slimserve(environment, "qwen38fn-fp8", "--plan", "--machine", str(MACHINES / "cpu-only.yaml"))
    assert result.returncode == 3
    assert "qwen38fn-fp8-3090x8" in result.stderr
    assert "qwen38fn-fp8-h200x2" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["qwen38fn-fp8-9", "--plan"], "did you mean qwen38fn-fp8-8?"),
        (["../etc/passwd"], "there is no profile '../etc/passwd'"),
        (["", "--plan"], "there is no profile ''"),
        (["--serve"], "--serve needs a profile"),
        (["--plan"], "--plan needs a profile"),
        (["--nonsense"], "--nonsense"),
        (["a", "b"], "unrecognized arguments: b"),
        (["a", "b"], "do:  slimserve a -p TEXT asks one question; see slimserve --help"),
        (["--lst"], "do:  did you mean --list? see slimserve --help"),
        (["--SERVE"], "did you mean --serve?"),
        (["--xyzzy"], "do:  see slimserve --help"),
        (["SmolLM2", "--plan"], "did you mean smollm2?"),
        (["smollm2-135m-bf16-cpu", "--serve", "--plan"], "not allowed with"),
        (["smollm2-135m-bf16-cpu", "--serve", "-p", "x"], "-p says nothing to --serve"),
        (["-p", "x"], "-p needs a profile"),
        (["smollm2-135m-bf16-cpu", "--port", "0"], "'0' is not a TCP port"),
        (["smollm2-135m-bf16-cpu", "--port", "65536"], "not a TCP port"),
        (["smollm2-135m-bf16-cpu", "--port", "http"], "not a TCP port"),
        (["--list", "--on", "rtx3090x9"], "did you mean rtx3090x8?"),
        (["--list", "--machine", "/nowhere.yaml"], "cannot be read"),
        (["smollm2-135m-bf16-cpu", "--serve", "--on", "cpu-x86-64"], "--on says nothing to --serve"),
        (["--list", "smollm2-135m-bf16-cpu"], "--list takes no profile"),
        (["x", "--policies"], "--policies takes no profile"),
        (["smollm2-135m-bf16-cpu", "--serve", "--system", "x"], "--system says nothing to --serve"),
        (["--list", "--port", "9"], "--port says nothing to --list"),
        (["smollm2-135m-bf16-cpu", "--serve", "--page-port", "8000"], "--page-port 8000 is the endpoint's own port"),
        (["smollm2-135m-bf16-cpu", "-p", " "], "the prompt is empty"),
    ],
)
def test_usage_errors(environment: dict[str, str], arguments: list[str], says: str) -> None:
    result = slimserve(environment, *arguments)
    assert result.returncode == 2
    assert says in result.stderr
    assert result.stdout == ""


def test_paths_that_are_no_text_are_refused_and_printed_escaped(environment: dict[str, str], tmp_path: Path) -> None:
    odd = {**environment, "SLIMSERVE_CACHE": f"{tmp_path}/\udcff", "PYTHONUTF8": "1"}
    result = slimserve(odd, "--list")
    assert result.returncode == 2
    assert "udcff' cannot be used" in result.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.1", ""])
def test_without_a_key_only_loopback_is_listened_on(environment: dict[str, str], host: str) -> None:
    result = slimserve(environment, "smollm2-135m-bf16-cpu", "--serve", "--host", host)
    assert result.returncode == 3
    assert "is not loopback, and there is no key" in result.stderr


def test_a_taken_port_is_found_before_anything_is_fetched(environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = slimserve(environment, "smollm2-135m-bf16-cpu", "--serve", "--port", str(port))
    assert result.returncode == 3
    assert f"port {port} on 127.0.0.1 is taken by process {os.getpid()}" in result.stderr
    assert not (Path(environment["SLIMSERVE_CACHE"]) / "weights").exists()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("free_bytes: 25", "free_bytes: 99", "gpus[0]: free_bytes"),
        ('capability: "8.6"', 'capability: "eight"', "gpus[0].capability"),
        ('  uuid: "GPU', '  uid: "GPU', "unknown key gpus[0].uid"),
        ("driver:", "drivr:", "unknown key drivr"),
        ("available_bytes:", "x_bytes:", "memory.available_bytes is missing"),
    ],
)
def test_a_machine_file_that_lies_or_lacks_a_field(
    environment: dict[str, str], tmp_path: Path, old: str, new: str, says: str
) -> None:
    text = (MACHINES / "rtx3090x8.yaml").read_text()
    assert old in text
    path = tmp_path / "machine.yaml"
    path.write_text(text.replace(old, new, 1))
    result = slimserve(environment, "--list", "--machine", str(path))
    assert result.returncode == 2
    assert says in result.stderr
    assert str(path) in result.stderr


def test_the_doctors_machine_can_be_read_back(environment: dict[str, str], tmp_path: Path) -> None:
    result = slimserve(environment, "--doctor", "--json")
    assert result.returncode == 0
    path = tmp_path / "machine.json"
    path.write_text(result.stdout)
    assert slimserve(environment, "--list", "--machine", str(path)).returncode == 0


def test_a_reader_that_goes_away_is_no_error_message(environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "slimserve", "qwen38fn-fp8-8", "--plan", "--on", "rtx3090x8"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=60)
    assert err == b""


def test_policies_are_printed(environment: dict[str, str]) -> None:
    assert "never-greedy" in slimserve(environment, "--policies").stdout


def test_an_unusable_key_is_refused_and_not_printed(environment: dict[str, str]) -> None:
    key = "line\nbreak-secret"
    result = slimserve({**environment, "SLIMSERVE_API_KEY": key}, "smollm2-135m-bf16-cpu", "-p", "hello")
    assert result.returncode == 2
    assert "SLIMSERVE_API_KEY is not a usable key" in result.stderr
    assert "secret" not in result.stderr


def test_closed_and_full_streams_give_no_traceback(environment: dict[str, str]) -> None:
    program = f"{sys.executable} -m slimserve"
    for line, status in (
        ("--list >/dev/full", 1),
        ("--list >&-", 1),
        ("--list >&- <&-", 1),
        ("--list <&-", 0),
        ("nope --plan 2>/dev/full", 2),
        ("nope --plan 2>&-", 2),
        ("nope --plan --json >/dev/full", 2),
        ("qwen38fn-fp8-8 --serve 2>&-", 3),
        ("--policies >/dev/full 2>&-", 1),
    ):
        result = subprocess.run(
            ["sh", "-c", f"{program} {line}"], env=environment, capture_output=True, text=True, timeout=60
        )
        assert result.returncode == status, (line, result.stderr)
        assert "Traceback" not in result.stderr
        assert "Exception ignored" not in result.stderr


@pytest.mark.parametrize("stdout", [">/dev/full", ">&-"])
@pytest.mark.parametrize(
    "action",
    [
        "--list",
        "--list --json",
        "--doctor",
        "--policies",
        "--policies --json",
        "--status",
        "--receipts",
        "--list-keys",
        "qwen38fn-fp8-8 --plan --on rtx3090x8",
        "--version",
        "--help",
    ],
)
def test_an_answer_that_finds_no_way_out_is_told(action: str, stdout: str, environment: dict[str, str]) -> None:
    command = f"{sys.executable} -m slimserve {action} {stdout}"
    done = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("slimserve: the output cannot be used: ")
    assert done.stderr.count("slimserve: ") == 1


def test_an_error_in_json_that_finds_no_way_out_is_told_in_words(environment: dict[str, str]) -> None:
    for stdout in (">/dev/full", ">&-"):
        command = f"{sys.executable} -m slimserve nope --plan --json {stdout}"
        done = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert done.stderr.startswith("slimserve: ")
        assert "nope" in done.stderr


def test_an_error_in_json_is_json_on_any_stdout(environment: dict[str, str]) -> None:
    for encoding in ("ascii", "latin-1", "utf-8", "cp1252"):
        command = [sys.executable, "-m", "slimserve", "n\u00e9\u20ac\udcff", "--plan", "--json"]
        done = subprocess.run(
            command, env={**environment, "PYTHONIOENCODING": encoding}, capture_output=True, timeout=60
        )
        assert done.returncode == 2
        assert "n\u00e9\u20ac" in json.loads(done.stdout)["findings"][0]["what"]


def test_a_folder_of_state_that_can_never_be_is_refused(environment: dict[str, str]) -> None:
    result = slimserve({**environment, "SLIMSERVE_STATE": "/tmp/" + "a" * 300}, "--status")
    assert (result.returncode, "File name too long" in result.stderr) == (2, True)


def test_folders_that_cannot_be_used_are_named(environment: dict[str, str], tmp_path: Path) -> None:
    for name, value in (
        ("SLIMSERVE_CACHE", "/tmp/" + "a" * 300),
        ("SLIMSERVE_PROFILES", "/tmp/" + "a" * 300),
        ("SLIMSERVE_PROFILES", str(tmp_path / "nowhere")),
    ):
        result = slimserve({**environment, name: value}, "--list")
        assert value in result.stdout + result.stderr  # a refusal of each profile, or an error of the registry
