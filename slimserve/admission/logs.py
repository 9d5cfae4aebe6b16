"""The door's own lines in the log of the engine, and one line where the engine would print a traceback for a client."""

from __future__ import annotations

import logging
import sys

_ENGINE = "vllm"
_OURS = "slimserve"
# It prints one for whatever it answers, and that is mostly what a client got wrong.
_TALKATIVE = "vllm.entrypoints.anthropic.api_router"


class ClientErrors(logging.Filter):
    """Takes the traceback from the engine's word on a request that it refused."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass, some of them shortened."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, Exception) and _is_refusal(error):
            record.exc_info = record.exc_text = None
            record.levelno, record.levelname = logging.INFO, "INFO"
        return True


def _is_refusal(error: Exception) -> bool:
    """Whether the engine answers this with a 4xx."""
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

    status: int = create_error_response(error).error.code
    return status < 500


def install() -> None:
    """Have the door's log where the engine's is: without a handler only warnings would be seen, and no notes."""
    ours = logging.getLogger(_OURS)
    ours.setLevel(logging.INFO)
    if not ours.handlers:
        for handler in logging.getLogger(_ENGINE).handlers or [logging.StreamHandler()]:
            ours.addHandler(handler)
    if _ENGINE in sys.modules:
        logging.getLogger(_TALKATIVE).addFilter(ClientErrors())
