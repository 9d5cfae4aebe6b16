"""What is judged before anything is started: seats, secrets, claims, and the commands of several nodes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from nodes_support import claim
from plan_support import REGISTRY

from slimserve import cli
from slimserve.errors import Refused
from slimserve.nodes import agreement, seat, secret
from slimserve.nodes.agreement import MUST_AGREE
from slimserve.subject import Subject

TWO, FOUR, ONE = "qwen38max-fp8-b200x8-nodes2", "qwen38max-fp8-gb300x4-nodes4", "smollm2-135m-bf16-cpu"


def subject(name: str) -> Subject:
    return REGISTRY.subject(REGISTRY.profiles[name])


def refusal(call: object, *args: object) -> str:
    with pytest.raises(Refused) as refused:
        call(*args)  # type: ignore[operator]
    return str(refused.value)


def test_a_profile_of_one_node_takes_no_seat() -> None:
    assert seat.chosen(subject(ONE), None, None, None) is None
    for rank, head, port, option in ((0, None, None, "--node"), (None, "10.0.0.1", None, "--head")):
        assert f"{option} is for profiles of several nodes" in refusal(seat.chosen, subject(ONE), rank, head, port)


@pytest.mark.parametrize(("rank", "head"), [(None, None), (0, None), (None, "10.0.0.1")])
def test_without_a_seat_it_is_said_what_to_type_on_which_node(rank: int | None, head: str | None) -> None:
    said = refusal(seat.chosen, subject(FOUR), rank, head, None)
    for node in range(4):
        assert f"{node}: slimserve {FOUR} --serve --node {node} --head {head or 'ADDRESS_OF_NODE_0'}" in said


@pytest.mark.parametrize(
    ("head", "says"),
    [
        ("8.8.8.8", "is no private address"),
        ("0.0.0.0", "is no private address"),
        ("100.64.0.1", "is no private address"),
        ("172.32.0.1", "is no private address"),
        ("::1", "is an address of IPv6"),
        ("fd00::1", "is an address of IPv6"),
        ("no such host.invalid", "has no address"),
    ],
)
def test_a_head_beyond_private_networks_is_refused(head: str, says: str) -> None:
    assert says in refusal(seat.chosen, subject(TWO), 1, head, None)


@pytest.mark.parametrize("head", ["10.1.2.3", "172.31.255.1", "192.168.0.9", "169.254.1.1", "127.0.0.1"])
def test_private_addresses_are_taken(head: str) -> None:
    assert seat.private_address(head) == head


def test_node_0_is_where_its_address_is() -> None:
    assert "is no address of this node" in refusal(seat.chosen, subject(TWO), 0, "10.254.253.252", None)
    assert seat.chosen(subject(TWO), 0, "127.0.0.1", 9000) == seat.Seat(0, 2, "127.0.0.1", 9000, "127.0.0.1", "lo")


def test_a_rank_that_is_not_there_names_those_that_are() -> None:
    assert "there is no node 2\n  why: " in refusal(seat.chosen, subject(TWO), 2, "127.0.0.1", None)
    assert "give one of 0, 1" in refusal(seat.chosen, subject(TWO), 2, "127.0.0.1", None)


def test_the_secret_comes_from_the_environment_or_a_private_file(tmp_path: Path) -> None:
    good = "s" * 40
    file = tmp_path / "secret"
    file.write_text(f"{good}\n")
    file.chmod(0o600)
    assert secret.load({secret.VARIABLE: good}) == secret.load({secret.FILE_VARIABLE: str(file)}) == good.encode()
    file.chmod(0o640)
    assert "is not for this user alone" in refusal(secret.load, {secret.FILE_VARIABLE: str(file)})
    assert "cannot be read: No such file" in refusal(secret.load, {secret.FILE_VARIABLE: str(tmp_path / "none")})
    assert "are both set" in refusal(secret.load, {secret.FILE_VARIABLE: str(file), secret.VARIABLE: good})
    assert "there is no secret of the nodes" in refusal(secret.load, {})
    short = refusal(secret.load, {secret.VARIABLE: "too-short-to-be-one"})
    assert "has 19 bytes" in short
    assert "too-short-to-be-one" not in short


def test_those_who_agree_have_no_differences() -> None:
    assert agreement.differences({rank: claim(rank) for rank in range(3)}) == []


@pytest.mark.parametrize("name", MUST_AGREE)
def test_each_difference_is_named_with_each_value(name: str) -> None:
    (found,) = agreement.differences({0: claim(0), 1: claim(1, **{name.replace(" ", "_"): "other"})})
    assert found.what == f"the nodes differ in {name}: node 0 has the same, node 1 has other"


def test_what_another_version_does_not_say_is_a_difference() -> None:
    (found,) = agreement.differences({0: claim(0), 1: claim(1, firmware="7")})
    assert found.what == "the nodes differ in firmware: node 0 has nothing, node 1 has 7"


def test_a_profile_hash_follows_profile_model_and_platform() -> None:
    from dataclasses import replace

    one = subject(TWO)
    changed = [
        replace(one, profile=replace(one.profile, title="another")),
        replace(one, model=replace(one.model, title="another")),
        replace(one, platform=replace(one.platform, title="another")),
    ]
    assert len({agreement.profile_hash(each) for each in (one, *changed)}) == 4
    assert agreement.profile_hash(one) == agreement.profile_hash(subject(TWO))


def plan(*arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert cli.main([TWO, "--plan", "--on", "b200x8-nodes2", "--json", *arguments]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_a_plan_shows_each_nodes_command(capsys: pytest.CaptureFixture[str]) -> None:
    nodes: list[dict[str, object]] = plan(capsys=capsys)["nodes"]  # type: ignore[assignment]
    first, second = ([str(part) for part in node["argv"]] for node in nodes)  # type: ignore[attr-defined]
    assert "--headless" in second
    assert not {"--uds", "--middleware", "--api-server-count"} & set(second)
    assert {"--uds", "--middleware", "--api-server-count"} <= set(first)
    for argv, rank in ((first, "0"), (second, "1")):
        assert argv[argv.index("--node-rank") + 1] == rank
        assert argv[argv.index("--data-parallel-address") + 1] == "ADDRESS_OF_NODE_0"
        assert argv[argv.index("--master-addr") + 1] == "ADDRESS_OF_NODE_0"
        assert argv[argv.index("--data-parallel-rpc-port") + 1] == "8011"
        assert argv[argv.index("--master-port") + 1] == "8012"
    assert nodes[0]["processes"] == ["api", "core-0", *(f"rank-0-{rank}" for rank in range(8))]
    assert nodes[1]["processes"] == ["core-1", *(f"rank-1-{rank}" for rank in range(8))]


def test_a_plan_of_one_node_shows_it_alone(capsys: pytest.CaptureFixture[str]) -> None:
    (node,) = plan("--node", "1", "--head", "10.0.0.1", "--node-port", "9000", capsys=capsys)["nodes"]  # type: ignore[misc]
    assert "10.0.0.1" in node["argv"]
    assert "9001" in node["argv"]
    assert node["environment"]["VLLM_HOST_IP"] == "ADDRESS_OF_NODE_1"
    assert "SLIMSERVE_ADMISSION" not in node["environment"]


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        ([ONE, "--serve", "--node", "0", "--head", "127.0.0.1"], 3, "--node is for profiles of several nodes"),
        ([ONE, "--plan", "--head", "127.0.0.1"], 3, "--head is for profiles of several nodes"),
        ([TWO, "--serve"], 3, "spans 2 nodes, and one command starts one"),
        ([TWO], 3, "spans 2 nodes, and one command starts one"),
        ([TWO, "--serve", "--node", "1", "--head", "127.0.0.1", "--port", "80"], 2, "--port is for node 0 alone"),
        ([TWO, "--serve", "--node", "-1", "--head", "127.0.0.1"], 2, ""),
        ([TWO, "--plan", "--node", "2", "--on", "b200x8-nodes2"], 3, "there is no node 2"),
        ([TWO, "--node", "1"], 2, "--node says nothing to a chat"),
        (["--list", "--node", "1"], 2, "--node says nothing to --list"),
        ([TWO, "--serve", "--node", "0", "--head", "127.0.0.1", "--node-port", "65535"], 2, "no two ports after it"),
    ],
)
def test_command_lines_that_cannot_be(
    arguments: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "COLUMNS": "200"})
    assert cli.main(arguments) == status
    assert says in capsys.readouterr().err
