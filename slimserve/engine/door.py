"""A plan becomes what the door is told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimserve.admission.config import Config
from slimserve.plan import Plan

if TYPE_CHECKING:
    from slimserve.exposure import Keys


def configure(
    plan: Plan,
    *,
    control: Path,
    keys: Keys | None = None,
    origins: Sequence[str] = (),
) -> Config:
    """The door of one launch; the listening socket is added when there is one.

    Args:
        plan: the verdict.
        control: the engine's unix socket.
        keys: those that are asked for; None: none ever is.
        origins: origins of web pages that may call.
    """
    profile, model = plan.subject.profile, plan.subject.model
    automatic = profile.engine.enable_auto_tool_choice
    admission, policy = profile.admission, profile.policy
    optional = {
        "fair_share": admission.fair_share,
        "queue": admission.queue,
        "max_body_bytes": admission.max_body_bytes,
        "greedy": policy.greedy,
    }
    stated: dict[str, Any] = {name: setting.value for name, setting in optional.items() if setting is not None}
    if "thinking" in model.traits:
        stated["thinking"] = policy.thinking.value if policy.thinking else "keep"
    return Config(
        max_in_flight=admission.max_in_flight.value,
        max_model_len=profile.engine.max_model_len.value,
        tools=automatic is not None and automatic.value,
        efforts=model.reasoning_effort.table() if model.reasoning_effort else {},
        keys_file=None if keys is None or keys.file is None else str(keys.file),
        keys_file_awaited=keys is not None and keys.awaited,
        key_hashes={} if keys is None else dict(keys.hashes),
        origins=tuple(origins),
        control=str(control),
        **stated,
    )
