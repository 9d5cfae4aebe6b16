"""Text of clients and servers is read in time that grows with its length, whatever it repeats.

Each case is a megabyte or so of what an expression would go through again and again if it shared out what it has taken.
It runs in a process of its own, which is ended after a time that no machine needs for a megabyte read once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60

CASES = {
    "repeats in a pattern": """
from slimserve.admission.grammars import check_grammars
size = (1 << 17) - 64
for begin, more in (("{", " "), ("{", "1"), ("{ ,", " "), ("{1", " "), ("", "{ "), ("", "{1,"), ("", "{,"),
                    ("~", " "), ("~1", " "), ("~1..", " "), ("", "~ "), ("", "~1 "), ("", "~1 .. "), ("{", "\\u2003")):
    for key in ("regex", "grammar"):
        check_grammars({"structured_outputs": {key: begin + (more * size)[:size]}})
""",
    "errors of the engine": """
import json
from slimserve.admission.replies import engine_refusal
size = 1 << 20
for more in (" ", "(parameter=", "(parameter=a, value=", "a", "(", "\\n", "1 validation error", "'loc': '", "/a",
             "'loc': 'a', 'msg': \\"", "a\\n  ", "This model's maximum context length is"):
    for begin in ("", "The model `", "2 validation errors:\\n", "1 validation error for A\\n"):
        for end in ("", "` does not exist.", " (parameter=a, value=1)"):
            for status in (400, 404, 500):
                message = begin + (more * size)[:size] + end
                engine_refusal(status, json.dumps({"error": {"message": message}}).encode())
""",
    "answers as they pass": """
from slimserve.admission.answers import Watch
from slimserve.admission.routes import Dialect
size = 1 << 20
for dialect in Dialect:
    for more in (b" ", b"\\\\n", b'"content":"', b'"content":" ', b'"choices":[{"index":', b'"text":', b"1"):
        for begin in (b"", b'data: {"choices":[{"index":0,"content":"', b'data: {"type":"text_delta","text":"'):
            watch = Watch(dialect, True)
            watch.feed(begin + (more * size)[:size] + b"\\n\\n")
            watch.exhausted
""",
    "types of a body": """
from slimserve.admission.bodies import check_type
from slimserve.admission.rejection import Rejected
for end in (b"", b";", b"; charset=", b"; charset=utf-8"):
    for more in (b" ", b";", b"; charset=utf-8", b"\\t;"):
        try:
            check_type([(b"content-type", b"application/json" + end + more * (1 << 18) + b"x")])
        except Rejected:
            pass
""",
    "an engine's last words": """
import pathlib, tempfile
from slimserve.engine.ending import last_words
size = 1 << 20
with tempfile.TemporaryDirectory() as folder:
    log = pathlib.Path(folder) / "engine.log"
    for more in ("ErrorInfo(", "ErrorInfo( code=4", "ERROR", " ", "[launcher.py:1", "Traceback (most recent call last"):
        log.write_text((more * size)[:size])
        last_words(log, 0)
""",
    "answers in a chat": """
import io
from slimserve.chat_terminal import Screen
from slimserve.chat_answer import LONE_SURROGATES
for more in (" ", "\\n", " \\n", "\\t \\n", "\\ud800", "\\x1b"):
    text = more * (1 << 19)
    LONE_SURROGATES.sub("", text)
    screen = Screen(io.StringIO(), io.StringIO(), colour=False)
    screen.words(text)
    screen.thoughts(text)
""",
    "answers to a battery": """
from harness.recall import known, markers
for more in ("1", "1,", "1 ", "a", " ", ",", "paris", "12345678"):
    text = more * (1 << 18)
    known.is_right(known.KNOWN[0][0], text)
    for found in (markers.codes_in, markers.labels_in):
        found(text)
""",
}


@pytest.mark.parametrize("case", CASES)
def test_a_megabyte_is_read_once(case: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = [sys.executable, "-c", CASES[case]]
    done = subprocess.run(code, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
