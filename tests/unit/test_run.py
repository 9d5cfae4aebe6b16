"""What stands between a verdict and a start: weights that are damaged, caches that cannot be written."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from harness.recording import profile_facts
from slimserve import preparing, run
from slimserve.engine import command, variables
from slimserve.errors import Refused, SlimserveError
from slimserve.model import Geometry
from slimserve.nodes.seat import Seat
from slimserve.plan import describe
from slimserve.profile import RequestPolicy
from slimserve.registry_files import load_registry
from slimserve.session import Session
from slimserve.shapes import plain

GOOD = Path(__file__).parent.parent / "registry"


def safetensors(values: int) -> bytes:
    header = json.dumps({"weight": {"dtype": "BF16", "shape": [values], "data_offsets": [0, 2 * values]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(2 * values)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    """The toy's complete weights in a cache, and a registry whose manifest is theirs."""
    import shutil

    folder = tmp_path / "registry"
    shutil.copytree(GOOD, folder)
    registry = load_registry(folder, variables.OWNED)
    geometry: Geometry = registry.models["tiny"].geometry
    files = {"model.safetensors": safetensors(32), "config.json": json.dumps(plain(geometry, nulls=False)).encode()}
    lines = [f"sha256:{hashlib.sha256(data).hexdigest()}  {len(data)}  {name}" for name, data in files.items()]
    (folder / "weights/tiny-bf16.manifest").write_text("\n".join(lines) + "\n")
    made = Session(registry, describe(registry.platforms["box"], 1 << 30), True, tmp_path / "cache", os.environ)
    target = made.weights(registry.subject(registry.default)).folder
    target.mkdir(parents=True)
    for name, data in files.items():
        (target / name).write_bytes(data)
    return made


def prepare(session: Session) -> Path:
    preparing.prepare(session, session.plan(session.registry.default), lambda done, total, name: None)
    return session.plan(session.registry.default).weights.folder


def refusal(session: Session) -> str:
    with pytest.raises(Refused) as caught:
        prepare(session)
    return str(caught.value)


def test_whole_weights_are_verified_once_and_taken(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    folder = prepare(session)
    assert (folder / ".verified.json").is_file()
    assert "verifying" in capsys.readouterr().err
    prepare(session)
    assert capsys.readouterr().err == ""


def test_a_missing_shard_is_named_and_nothing_is_fetched_unasked(session: Session) -> None:  # B7
    folder = prepare(session)
    (folder / "model.safetensors").unlink()
    text = refusal(session)
    assert "model.safetensors is not there" in text
    assert "--fetch" in text
    assert (folder / "config.json").exists()


def test_a_truncated_shard_is_named(session: Session) -> None:  # B7
    folder = prepare(session)
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    assert "model.safetensors is" in refusal(session)


def test_a_changed_byte_is_found_before_the_engine_reads_it(session: Session) -> None:
    folder = prepare(session)
    shard = folder / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    assert "model.safetensors" in refusal(session)


def test_another_models_config_is_refused(session: Session) -> None:  # A12
    prepare(session)
    model = session.registry.models["tiny"]
    other = replace(model, geometry=replace(model.geometry, num_hidden_layers=3))
    session.registry.models["tiny"] = other
    assert "num_hidden_layers = 2, the model file says 3" in refusal(session)


def test_a_cache_that_cannot_be_written_is_found_before_the_start(session: Session) -> None:  # B11
    blocked = command.engine_cache(session.cache, "tiny-bf16-box")
    blocked.parent.mkdir(parents=True)
    blocked.write_text("a file where a folder belongs")
    with pytest.raises(SlimserveError, match=r"the engine's cache .* cannot be written"):
        prepare(session)


def test_a_profile_for_comparing_engines_is_not_served(session: Session) -> None:
    profile = session.registry.default
    greedy = replace(profile.admission.max_in_flight, value="verification")
    comparing = replace(profile, policy=RequestPolicy(greedy=greedy))
    with pytest.raises(Refused, match=r"policy\.greedy: verification"):
        run.launch(session, comparing, "127.0.0.1", 8999)
    with pytest.raises(Refused, match=r"policy\.greedy: verification"):
        run._worker(session, comparing, Seat(1, 2, "127.0.0.1", 1, "127.0.0.1", "lo"))
    launched = run.launch(session, comparing, "127.0.0.1", 8999, measured=True)  # as `--bench` does
    assert launched._launch.admission.greedy == "verification"
    facts = profile_facts(session.registry.subject(comparing), Path(__file__), "0")
    assert facts.settings["policy.greedy"] == '"verification"'


def test_caches_are_made_private(session: Session) -> None:  # B11
    told: list[str] = []
    preparing.prepare(session, session.plan(session.registry.default), lambda done, total, name: told.append(name))
    own = command.engine_cache(session.cache, "tiny-bf16-box")
    assert sorted(path.name for path in own.iterdir()) == sorted(variables.CACHES.values())
    assert all(path.stat().st_mode & 0o077 == 0 for path in own.iterdir())
    assert any("model.safetensors" in name for name in told)


def test_a_launch_starts_nothing(session: Session) -> None:
    supervisor = run.launch(session, session.registry.default, "127.0.0.1", 8999)
    assert supervisor.base_url == "http://127.0.0.1:8999/v1"
    assert not supervisor.log_path.parent.exists()


def test_the_page_shows_what_the_door_is_told(session: Session, tmp_path: Path) -> None:  # not the engine's own origins
    named = replace(session, environment={**os.environ, "SLIMSERVE_KEYS": str(tmp_path / "keys")})
    profile = session.registry.default
    supervisor = run.launch(named, profile, "127.0.0.1", 8999, ("https://chat.example.org",), page_port=None)
    source, port = supervisor._page or pytest.fail("no page")
    assert port is None
    values = {row["key"]: row["value"] for row in source.plan()["settings"]}
    assert values["door.origins"] == source.reach.to_json()["origins"] == ["https://chat.example.org"]
    assert (values["door.listens"], values["door.asks_for_key"]) == ("127.0.0.1:8999", False)
    assert values["admission.max_in_flight"] == profile.admission.max_in_flight.value


def test_the_page_s_plan_says_what_the_disk_holds_by_now(session: Session) -> None:
    plan = session.plan(session.registry.default)
    assert run._as_it_is(session, plan) == plan
    assert plan.weights.ready
    for path in plan.weights.folder.iterdir():
        path.unlink()
    now = run._as_it_is(session, plan)
    assert (now.weights.ready, now.weights.needed_bytes > 0) == (False, True)
    assert replace(now, weights=plan.weights) == plan
