"""Plans that are started on the real engine, without the command around them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from geometry_models import config_json
from server_support import ROOT, free_port

from slimserve.engine import command, door
from slimserve.engine.attempt import Launch
from slimserve.engine.gate.words import RESOLVED_NAME
from slimserve.engine.supervisor import Supervisor
from slimserve.errors import Refused
from slimserve.model import Model
from slimserve.plan import Plan

SECONDS = 250.0


@dataclass
class Endpoint:
    """A supervisor of a launch that may differ from its plan, and what it said."""

    launch: Launch
    said: list[str]

    def serve(self) -> None:
        """Start it, see it ready, and stop it."""
        with Supervisor(self.launch, self.said.append):
            pass

    def refusals(self) -> list[str]:
        """What the start was refused for."""
        with pytest.raises(Refused) as refused:
            self.serve()
        assert not any(line.startswith("ready") for line in self.said)
        return [finding.what for finding in refused.value.findings]

    @property
    def resolved(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.launch.run_folder / RESOLVED_NAME).read_text())
        return found


def checkpoint_folder(folder: Path, model: Model) -> Path:
    """A checkpoint without weights: what the engine needs to make them up, and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "config.json").write_text(json.dumps(config_json(model)))
    return folder


def endpoint(plan: Plan, home: Path, *more: str, **variables: str) -> Endpoint:
    """What `plan` starts, with further arguments and variables that it knows nothing of."""
    control = home / "runs/run/engine.sock"
    admission = door.configure(plan, control=control)
    user = {"PATH": os.environ["PATH"], "HOME": str(home)}
    built = command.build(plan, admission, cache=home / "cache", user_environment=user)
    serve = plan.subject.profile.serve
    launch = Launch(
        argv=(*built.argv, *more),
        env={**built.env, "PYTHONPATH": str(ROOT), **variables},
        admission=admission,
        control=control,
        host="127.0.0.1",
        port=free_port(),
        model_name=plan.subject.profile.id,
        run_folder=home / "runs/run",
        load_seconds=SECONDS,
        warmup_seconds=60.0,
        drain_seconds=serve.drain_seconds.value,
        stall_seconds=serve.stall_seconds.value,
        stop_seconds=serve.stop_seconds.value,
        profile_id=plan.subject.profile.id,
        processes=built.processes,
    )
    return Endpoint(launch, [])
