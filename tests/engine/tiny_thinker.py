"""A thinking model of a few hundred kilobytes with random weights, and an engine of its own that serves it.

What it says is noise; what counts is its chat template, which knows three words for the effort, raises on any other,
and renders every choice at a length of its own, so that the prompt's token count in `usage` tells what reached it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any

from server_support import ROOT, free_port

from slimserve.admission.config import Config
from slimserve.engine.variables import ADMISSION_VARIABLE

NAME = "tiny-thinker"
MAX_MODEL_LEN = 512
EFFORT_TOKENS = {"low": 2, "medium": 5, "xhigh": 9}
OFF_TOKENS = 20
END_OF_THOUGHT = 260

TEMPLATE = """\
{%- set lengths = EFFORT_TOKENS -%}
{%- set word = reasoning_effort | default("low") -%}
{%- if word not in lengths -%}{{ raise_exception("no such effort") }}{%- endif -%}
{{- "<|pad|>" * lengths[word] -}}
{%- for message in messages -%}
{{- "<|im_start|>" + message.role + "\n" -}}
{%- if message.role == "assistant" -%}
{{- "<think>" + (message.reasoning_content or message.reasoning or "") + "</think>" -}}
{%- endif -%}
{{- message.content + "<|im_end|>" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- "<|im_start|>assistant\n<think>" -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{ "</think>" * OFF_TOKENS }}{%- endif -%}
{%- endif -%}
""".replace("EFFORT_TOKENS", str(EFFORT_TOKENS)).replace("OFF_TOKENS", str(OFF_TOKENS))


def make(folder: Path) -> None:
    """Write the model and its tokenizer to `folder`; the weights are the same each time."""
    from slimserve.engine import torchvision_cpu

    torchvision_cpu.install()  # transformers imports it beside every model

    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
    )
    # Thoughts are told apart by tokens, and those must not be dropped from the text as special ones are.
    fast.add_tokens(["<think>", "</think>"])
    assert fast.convert_tokens_to_ids("</think>") == END_OF_THOUGHT
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=288,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=True,
        initializer_range=0.05,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


@dataclass
class Answer:
    """What came back; the keys of `headers` are in lower case."""

    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found

    @property
    def prompt_tokens(self) -> int:
        """As each dialect calls it."""
        usage = self.data["usage"]
        return int(usage["prompt_tokens"] if "prompt_tokens" in usage else usage["input_tokens"])


class Engine:
    """An engine behind the door, on a port of loopback, by the name and the key that it serves for."""

    def __init__(self, port: int, log: Path, model: str = NAME, key: str | None = None) -> None:
        self._port = port
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self.log = log
        self.model = model

    def post(self, path: str, body: object, seconds: float = 120.0) -> Answer:
        """Send JSON, wait for the whole answer."""
        url = f"http://127.0.0.1:{self._port}{path}"
        request = urllib.request.Request(url, json.dumps(body).encode(), self._headers)
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                return Answer(answer.status, answer.read(), _lower(answer.headers))
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.read(), _lower(error.headers))


def _lower(headers: Message) -> dict[str, str]:
    return {name.lower(): ", ".join(headers.get_all(name, [])) for name in headers}


@contextmanager
def serving(model: Path, home: Path, door: Config, *arguments: str, seconds: float = 300.0) -> Iterator[Engine]:
    """An engine that serves `model` behind `door`, once it answers; its log is in `home`."""
    port = free_port()
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",  # threads would wait for each other longer than they compute with so small a model
        "VLLM_CPU_KVCACHE_SPACE": "1",
        ADMISSION_VARIABLE: door.to_text(),
    }
    command = [sys.executable, "-P", "-m", "slimserve.engine.entry", "--model", str(model)]
    command += ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += ["--max-num-seqs", "4"]
    command += ["--middleware", "slimserve.admission.middleware.Admission", *arguments]
    log = home / "engine.log"
    with log.open("wb") as words:
        process = subprocess.Popen(command, env=environment, stdout=words, stderr=words, cwd=home)
    try:
        _wait(process, port, time.monotonic() + seconds, log)
        yield Engine(port, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], port: int, deadline: float, log: Path) -> None:
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"the engine did not come up:\n{log.read_text(errors='replace')[-4000:]}")
