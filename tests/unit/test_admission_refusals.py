"""What the engine answers instead of a result, in the words and forms of this endpoint; and its log of that."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from slimserve.admission import logs
from slimserve.admission.progress import Progress
from slimserve.admission.replies import engine_refusal, error_body, status_of

DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
TOO_LONG = "This model's maximum context length is 512 tokens. However, your prompt contains 600 input tokens."
CHECKED = """2 validation errors:
  {'type': 'literal_error', 'loc': 'body.output_config.effort', 'msg': "Input should be 'low' or 'high'", 'input': 'x'}
  {'type': 'string_type', 'loc': 'body.system', 'msg': 'Input should be a valid string', 'input': 3}"""
CONVERTED = """1 validation error for ChatCompletionRequest
tools.0.function
  Field required [type=missing, input_value={}, input_type=dict]
    For further information visit https://errors.pydantic.dev/2.12/v/missing"""


def error(message: str, **more: Any) -> bytes:
    return json.dumps({"error": {"message": message, "type": "BadRequestError", "code": 400, **more}}).encode()


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (400, error("n is wrong", param="n"), (400, "refused_by_engine", "n")),
        (400, error(TOO_LONG, param="input_tokens"), (400, "context_length_exceeded", None)),
        (404, error("The model `x` does not exist."), (404, "model_not_found", None)),
        (404, error("Not Found"), (404, "refused_by_engine", None)),
        (400, error(CHECKED, param="body.output_config.effort"), (400, "refused_by_engine", "output_config.effort")),
        (400, error(CONVERTED), (400, "refused_by_engine", "tools.0.function")),
        (400, error("x", param=["a"]), (400, "refused_by_engine", None)),
        (500, error("Internal server error"), (500, "engine_error", None)),
        (503, error("come back"), (503, "engine_error", None)),
        (503, b"", (503, "engine_error", None)),
        (400, error(DEAD), (503, "engine_died", None)),
        (500, error(DEAD), (503, "engine_died", None)),
        (400, error("2 validation errors for ChatCompletionStreamResponse\nid\n"), (500, "engine_error", None)),
        (422, b'{"detail": []}', (422, "refused_by_engine", None)),
        (400, b'{"error": "x"}', (400, "refused_by_engine", None)),
        (400, b"\xff", (400, "refused_by_engine", None)),
    ],
)
def test_each_error_of_the_engine(status: int, body: bytes, expected: tuple[int, str, str | None]) -> None:
    refusal = engine_refusal(status, body)
    assert (refusal.status, refusal.code, refusal.param) == expected
    assert refusal.message
    for inner in ("EngineCore", "ChatCompletionStreamResponse", "'loc'", "Internal server error"):
        assert inner not in refusal.message


def test_what_the_engine_says_of_a_request_stays() -> None:
    assert engine_refusal(400, error(TOO_LONG)).message == TOO_LONG
    assert engine_refusal(400, error(f"{TOO_LONG} (parameter=input_tokens, value=600)")).message == TOO_LONG
    said = engine_refusal(400, error(CHECKED)).message
    assert said == "output_config.effort: Input should be 'low' or 'high'; system: Input should be a valid string"
    assert engine_refusal(400, error(CONVERTED)).message == "tools.0.function: Field required"
    assert engine_refusal(400, error("1 validation error:\n  none that is known")).message.endswith("is known")


@pytest.mark.parametrize("grammar", [None, "text.format"])
def test_what_is_cut_off_by_a_stop_is_nobody_s_fault(grammar: str | None) -> None:
    for status, message in ((500, "Internal server error"), (500, DEAD)):
        refusal = engine_refusal(status, error(message), grammar, stopping=True)
        assert (refusal.status, refusal.code) == (503, "endpoint_stopped")
        assert int(refusal.headers["Retry-After"]) > 0
    assert engine_refusal(400, error(TOO_LONG), grammar, stopping=True).code == "context_length_exceeded"


def test_a_failure_at_a_grammar_is_the_grammar_s() -> None:
    refusal = engine_refusal(500, error("Internal server error"), "text.format")
    assert (refusal.status, refusal.code, refusal.param) == (400, "invalid_grammar", "text.format")
    assert refusal.message.startswith("text.format: ")
    assert error_body(refusal, "/v1/messages")["error"]["type"] == "invalid_request_error"
    for status, message in ((500, DEAD), (503, "come back")):
        assert engine_refusal(status, error(message), "text.format").status == 503
    assert engine_refusal(404, error("The model `x` does not exist."), "text.format").status == 404


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (error("x", code=404), 404),
        (error("x", code="model_not_found"), 500),
        (error("x", code=7), 500),
        (b'{"type": "error", "error": {"type": "internal_error", "message": "x"}}', 500),
        (b"[]", 500),
        (b"{", 500),
    ],
)
def test_the_status_of_an_error_in_a_stream(data: bytes, status: int) -> None:
    assert status_of(data) == status


class Waits:
    since: float | None = 0.0


def test_what_has_not_come_to_the_core_is_no_stall_of_it() -> None:
    now = [0.0]
    progress = Progress(lambda: now[0])
    working = [True]
    progress.has_work = lambda: working[0]
    progress.waiting.add(Waits())
    now[0] = 100.0
    assert progress.stalled_seconds == 100
    working[0] = False  # the text of what waits is being turned into tokens
    assert progress.stalled_seconds == 0
    now[0] = 200.0
    assert progress.stalled_seconds == 0
    working[0] = True  # and has come to the core, which does not move
    now[0] = 230.0
    assert progress.stalled_seconds == 30


@pytest.fixture
def loggers() -> Iterator[tuple[logging.Logger, logging.Logger]]:
    """The engine's logger and ours, as they were before afterwards."""
    engine, ours = logging.getLogger("vllm"), logging.getLogger("slimserve")
    before = [(each, list(each.handlers), each.level) for each in (engine, ours)]
    yield engine, ours
    for each, handlers, level in before:
        each.handlers[:] = handlers
        each.setLevel(level)


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(logging.Formatter("%(levelname)s %(message)s").format(record))


def test_our_lines_are_in_the_engine_s_log(loggers: tuple[logging.Logger, logging.Logger]) -> None:
    engine, ours = loggers
    kept = Kept()
    engine.handlers[:], ours.handlers[:] = [kept], []
    logs.install()
    logs.install()
    logging.getLogger("slimserve.admission.middleware").info("a note")
    assert kept.lines == ["INFO a note"]


def test_what_a_client_got_wrong_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_is_refusal", lambda error: isinstance(error, ValueError))
    kept, log = Kept(), logging.getLogger("tests.refusals")
    log.addHandler(kept)
    log.addFilter(logs.ClientErrors())
    for kind in (ValueError, RuntimeError):
        try:
            raise kind("as told")
        except Exception as error:
            log.exception("Error: %s", error)
    assert kept.lines[0] == "INFO Error: as told"
    assert kept.lines[1].startswith("ERROR Error: as told\nTraceback")
