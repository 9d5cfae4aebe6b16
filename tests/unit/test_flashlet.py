"""What flashlet is trained with: texts, batches, and a model that is the definition, batched and differentiable."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

from harness.flashlet import export, text, tokenizer  # noqa: E402
from harness.flashlet.batches import Batches, stream, table  # noqa: E402
from harness.flashlet.mixing import causal_conv, delta_rule  # noqa: E402
from harness.flashlet.model import Flashlet  # noqa: E402
from harness.flashlet.shape import CONFIG, END_TURN, SPECIAL  # noqa: E402
from harness.flashlet.train import SEED, Stage, Training  # noqa: E402
from harness.recall.markers import Draw, codes_in  # noqa: E402
from harness.recall.tools import TOOLS  # noqa: E402
from quixicore.ops.gated_delta.reference import conv, recurrent  # noqa: E402
from quixicore.ops.ngram.reference import history, ids, multipliers  # noqa: E402
from slimserve.geometry.ngram import head_sizes  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("flashlet")
    tokenizer.train(made)
    return made


@pytest.mark.parametrize("length", [1, 63, 64, 200])
def test_the_rule_of_a_batch_is_the_recurrence(length: int) -> None:
    torch.manual_seed(length)
    query, key = torch.randn(2, length, 2, 16), torch.randn(2, length, 2, 16)
    key[:, : length // 2] = key[:, :1]  # the same key over and over: what they write depends on all before
    value, decay = torch.randn(2, length, 4, 8), -torch.rand(2, length, 4)
    strength = torch.rand(2, length, 4)
    made = delta_rule(query, key, value, decay, strength)
    for place in range(2):
        expected, _ = recurrent(query[place], key[place], value[place], decay[place], strength[place])
        torch.testing.assert_close(made[place], expected, rtol=1e-4, atol=1e-4)


def test_the_convolution_of_a_batch_is_the_references() -> None:
    x, weight = torch.randn(2, 9, 6), torch.randn(6, 4)
    made = causal_conv(x, weight)
    for place in range(2):
        torch.testing.assert_close(made[place], conv(x[place], weight)[0])


def test_rows_of_a_batch_are_the_references(folder: Path) -> None:
    batch = Batches(folder / "tokenizer.json").make(["<|im_start|>user\nWhat is the code?", "It is so."], 12)
    end = CONFIG["eos_token_id"]
    factors = multipliers(CONFIG["vocab_size"], CONFIG["ngram_size"], CONFIG["seed"])
    for tokens, rows, weights in zip(batch.tokens, batch.rows, batch.weights, strict=True):
        past = history(tokens, torch.full((2,), end), CONFIG["ngram_size"], end)
        there = weights > 0
        assert rows[there].equal(ids(past, factors, head_sizes(table()))[there])


def test_answers_are_what_the_assistant_says_and_the_end_of_its_turn(folder: Path) -> None:
    said = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "You."}]
    batch = Batches(folder / "tokenizer.json").make([text.render([*said, *said])], 64)
    spoken = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).decode(
        batch.tokens[0][batch.answers[0]].tolist(), skip_special_tokens=False
    )
    assert spoken == f"You.{END_TURN}" * 2
    assert set(batch.weights[0][batch.answers[0]].tolist()) == {1.0}
    assert batch.weights[0][batch.tokens[0] == SPECIAL.index("<|endoftext|>")].sum() == 0


@pytest.mark.parametrize("tools", [False, True])
def test_texts_are_what_the_template_makes(folder: Path, tools: bool) -> None:
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Environment().from_string((folder / "chat_template.jinja").read_text())
    for seed in range(20):
        draw = random.Random(seed)
        messages = text.tool_conversation(draw, 600) if tools else text.conversation(draw, 600)
        wanted = template.render(messages=messages, tools=TOOLS if tools else None, add_generation_prompt=False)
        assert text.render(messages, tools) == wanted


def test_no_marker_of_a_battery_was_seen_in_training() -> None:
    asked = {Draw(seed).code() for seed in range(2000)}
    for seed in range(200):
        trained = set(codes_in(text.sample(random.Random(seed), 700)))
        assert all(int(code) % 7 for code in trained)
    assert all(int(code) % 7 == 0 and len(code) == 7 for code in asked)


def test_every_digit_is_a_token_and_text_comes_back(folder: Path) -> None:
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert made.get_vocab_size() == CONFIG["vocab_size"] <= 4096
    assert made.encode("1234567").tokens == list("1234567")
    said = "Ünïcode, tabs\tand\r\nlines: 3.5% of <|im_end|> \u4f60"
    assert made.decode(made.encode(said).ids, skip_special_tokens=False) == said


def test_a_training_that_was_left_goes_on_as_if_it_had_not_been(folder: Path, tmp_path: Path) -> None:
    stages = (
        Stage("dense", 2, (64,), False, False, (0.2, 0.2), 128),
        Stage("drafter", 2, (64,), True, True, (0.2, 0.2), 128),
    )
    torch.manual_seed(SEED)
    begun, ended = dict(Flashlet(CONFIG).named_parameters()), []
    for steps in ([4], [1, 3]):
        place = tmp_path / str(len(steps))
        place.mkdir()
        (place / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
        for count in steps:
            training = Training(place, torch.device("cpu"), stages=stages)
            training.run(600, lambda line: None, until=training.step + count)
        assert json.loads((place / "state.json").read_text())["step"] == 4
        ended.append(dict(training.net.named_parameters()))
    learned, again = ({name: weight - begun[name] for name, weight in each.items()} for each in ended)
    assert all(change.any() for name, change in learned.items() if not name.startswith("mtp."))
    for name, change in learned.items():  # the moments were kept in bfloat16
        apart = (change - again[name]).norm() / change.norm().clamp_min(1e-9)
        assert apart < 0.1, (name, float(apart))


def test_batches_go_on_where_they_were(folder: Path) -> None:
    kind = {"seed": 3, "length": 64, "count": 2, "rare": 0.1, "workers": 0}
    whole = stream(folder / "tokenizer.json", first=0, **kind)
    next(whole)
    assert next(stream(folder / "tokenizer.json", first=1, **kind)).tokens.equal(next(whole).tokens)


def test_it_is_as_small_as_it_must_be() -> None:
    assert sum(parameter.numel() * 2 for parameter in Flashlet(CONFIG).parameters()) < 12e6


def test_what_comes_with_the_program_is_as_it_is_described() -> None:
    bundled = Path(__file__).parents[2] / "profiles/weights/flashlet-bf16"
    assert json.loads((bundled / "config.json").read_text()) == CONFIG
    assert (bundled / "chat_template.jinja").read_text() == text.TEMPLATE
    sampling = json.loads((bundled / "generation_config.json").read_text())
    assert {name: sampling[name] for name in export.SAMPLING} == export.SAMPLING
