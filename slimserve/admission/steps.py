"""The engine's steps, seen from its API server: a stat logger that keeps nothing but the time.

The engine reports statistics after each scheduler step, also after one that yields no token (a long prefill is many
such steps), so a step here means that the engine's loop turned. Loaded by the entry point group
`vllm.stat_logger_plugins`; a stat logger also switches those reports on should a profile have them off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.loggers import StatLoggerBase  # noqa: TID253 - only ever loaded by the engine

from slimserve.admission.progress import ENGINE

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Steps(StatLoggerBase):  # type: ignore[misc]  # the engine's types are not followed
    """Marks the engine's progress at each step."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        pass

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """One step was made."""
        ENGINE.mark()

    def log_engine_initialized(self) -> None:
        """The engine is there."""
        ENGINE.mark()
