"""`--bench` with the real engine: launched, measured, stopped, and a receipt of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from server_support import PROFILE, ROOT, environment_of

from harness.raw import read_samples
from harness.receipt import find

WORKLOAD = """\
id: sessions
title: Two sessions of three turns
why: to see what the cache answers for
works: [devil]
rounds: 2
warm_up_output_tokens: 2
agent:
  shared_tokens: 256
  turns: 3
  adds: [128]
  answers: [4]
  gaps_s: [0]
loads:
  - {concurrency: 2, conversations: 2}
"""


def test_a_launch_is_measured_and_leaves_a_receipt(tmp_path: Path, smollm2_folder: Path) -> None:
    registry = tmp_path / "registry"
    shutil.copytree(ROOT / "profiles", registry)
    (tmp_path / "sessions.yaml").write_text(WORKLOAD)
    before = {path.name for path in (registry / "receipts").glob("2*.json")}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "slimserve",
            PROFILE,
            "--bench",
            "--recall",
            "none",
            "--workload",
            str(tmp_path / "sessions.yaml"),
        ],
        env=environment_of(tmp_path, key=None) | {"SLIMSERVE_PROFILES": str(registry)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (name,) = {path.name for path in (registry / "receipts").glob("2*.json")} - before
    receipt = find(registry / "receipts", name)
    assert (receipt.outcome, receipt.target.kind, receipt.workload.name) == ("whole", "profile", "sessions")
    assert receipt.profile is not None
    assert receipt.profile.id == PROFILE
    (resolved,) = (tmp_path / "state").glob("runs/*/resolved.json")
    assert receipt.resolved_sha256 == json.loads(resolved.read_text())["sha256"]
    (point,) = receipt.points
    assert (point.setup.slots, point.setup.cache, point.sent, point.ok, point.warm_up) == (8, "warm", 12, 12, 4)
    # Prompts of 384, 516 and 648 tokens, in blocks of 128. The warm-up has left the 256 that all share; a later turn
    # finds what the turn before left, and no session what another one did.
    _, raws = read_samples(registry / "receipts" / receipt.samples.file)
    cached = {raw.sample.job: raw.sample.cached_tokens for raw in raws if raw.measured}
    places = [(number, place) for number in range(2) for place in range(2)]
    turns = {
        f"c2/{number}/{place}.{turn}": found for number, place in places for turn, found in enumerate((256, 384, 512))
    }
    assert cached == turns
    assert point.server.cache_hits == point.cached_tokens == sum(turns.values())
    assert point.server.cache_queries == point.prompt_tokens == point.prompt_tokens_asked == 4 * (384 + 516 + 648)
    assert point.output_tokens == point.output_tokens_asked == 12 * 4
    assert receipt.battery is None
    assert "stopped after" in done.stderr.splitlines()[-1]
