"""Prompts: exactly as long as asked for, none like another, the same for the same seed."""

from __future__ import annotations

import hashlib
import itertools
import lzma
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from harness import corpus, prompts
from harness.prompts import OPENING, Prompt, PromptSource
from slimserve.errors import Failed

FEW = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
lengths = st.lists(st.integers(OPENING, 400), min_size=1, max_size=6)
forms = st.sampled_from(["ids", "text"])
seeds = st.integers(0, 1 << 32)


def train(kind: str) -> Tokenizer:
    """A tokenizer of its kind, as small as one is that joins letters to words at all."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=kind == "sentence"))
    if kind == "sentence":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>"]
    letters = sorted({letter for text in corpus.paragraphs("devil") for letter in text} | {"\n", "▁"})
    alphabet = letters if kind == "sentence" else pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus.paragraphs("devil")[:300], trainer)
    if kind != "bytes":
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    # What some repositories ship: it would cut and fill every prompt.
    tokenizer.enable_truncation(64)
    tokenizer.enable_padding(length=32, pad_token="</s>")
    return tokenizer


@pytest.fixture(scope="module", params=["bytes", "bytes with a beginning", "sentence"])
def tokenizer_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train(request.param).save(str(path))
    return path


def source(path: Path, seed: int = 1, form: prompts.Form = "ids") -> PromptSource:
    return PromptSource(path, seed, form, works=("devil",))


def take_all(taken_from: PromptSource, wanted: list[int]) -> list[Prompt]:
    return [prompt for tokens in wanted for prompt in taken_from.take(1, tokens)]


@FEW
@given(wanted=lengths, form=forms, seed=seeds)
def test_each_has_exactly_the_tokens_asked_for(
    tokenizer_path: Path, wanted: list[int], form: prompts.Form, seed: int
) -> None:  # H1
    taken = take_all(source(tokenizer_path, seed, form), wanted)
    assert [len(prompt.ids) for prompt in taken] == wanted
    if form == "text":  # by a tokenizer that is not the one that made it
        fresh = Tokenizer.from_file(str(tokenizer_path))
        fresh.no_truncation()
        fresh.no_padding()
        assert [tuple(fresh.encode(prompt.text).ids) for prompt in taken] == [prompt.ids for prompt in taken]


@FEW
@given(wanted=lengths, form=forms, seed=seeds)
def test_the_same_seed_gives_the_same_and_another_seed_others(
    tokenizer_path: Path, wanted: list[int], form: prompts.Form, seed: int
) -> None:
    first, again, other = (source(tokenizer_path, one, form) for one in (seed, seed, seed + 1))
    assert take_all(first, wanted) == take_all(again, wanted)
    assert first.sha256 == again.sha256
    # Past the first stretches of text, one of which two seeds may well have in common.
    for one in (first, other):
        one.take(4, 3000)
    take_all(other, wanted)
    assert other.sha256 != first.sha256


@FEW
@given(wanted=lengths, form=forms)
def test_no_two_begin_alike_and_no_text_comes_twice(
    tokenizer_path: Path, wanted: list[int], form: prompts.Form
) -> None:  # H3
    taken_from = source(tokenizer_path, form=form)
    taken = [*take_all(taken_from, wanted), *taken_from.take(5, 64)]
    assert taken_from.laps == 0
    for one, other in itertools.combinations(taken, 2):
        assert one.ids[:OPENING] != other.ids[:OPENING]
    # Whole lines of the corpus, which has none of them twice.
    decoded = [source_text(tokenizer_path, prompt) for prompt in taken]
    whole = [line for text in decoded for line in text.split("\n\n")[:-1] if len(line) >= 60]
    assert len(set(whole)) == len(whole)


def source_text(path: Path, prompt: Prompt) -> str:
    return prompt.text or prompts.load_tokenizer(path).decode(prompt.ids)


def test_prompts_are_the_text_of_the_works(tokenizer_path: Path) -> None:
    known = set(corpus.paragraphs("devil"))
    for form in ("ids", "text"):
        (prompt,) = source(tokenizer_path, form=form).take(1, 300)
        lines = [line for line in source_text(tokenizer_path, prompt).split("\n\n") if line]
        assert len(lines) >= 2
        assert set(lines[:-1]) <= known
        assert any(line.startswith(lines[-1].strip()) for line in known)


def test_the_hash_is_of_every_token_and_of_their_division(
    tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = source(tokenizer_path)
    (prompt,) = whole.take(1, 32)
    hashes = {whole.sha256}
    real = PromptSource._read
    for place in range(32):

        def changed(self: PromptSource, first: str, tokens: int, new: bool, place: int = place) -> Prompt:
            read = real(self, first, tokens, new)
            assert read is not None
            ids = list(read.ids)
            ids[place] ^= 1
            return Prompt(tuple(ids), "")

        with monkeypatch.context() as patch:
            patch.setattr(PromptSource, "_read", changed)
            other = source(tokenizer_path)
            other.take(1, 32)
        hashes.add(other.sha256)
    assert len(hashes) == 33
    divided = source(tokenizer_path)
    divided.take(1, 31)
    divided.go_on(1)
    assert divided.sha256 not in hashes
    assert len(prompt.ids) == 32


def test_what_begins_alike_is_left_out_until_nothing_is_left(
    tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = corpus.paragraphs("devil")[:40]
    monkeypatch.setattr(corpus, "paragraphs", lambda work: (*sample, *(text + " Again." for text in sample)))
    taken_from = source(tokenizer_path)
    openings = {prompt.ids[:OPENING] for prompt in taken_from.take(20, 40)}
    encode = prompts.load_tokenizer(tokenizer_path).encode
    there_are = {tuple(encode(text).ids[:OPENING]) for text in sample}
    for prompt in taken_from.take(len(there_are) - 20, 8):
        assert prompt.ids[:OPENING] not in openings
        openings.add(prompt.ids[:OPENING])
    assert openings == there_are
    with pytest.raises(Failed, match=r"no prompt of 8 tokens is left that begins like none before") as caught:
        taken_from.take(1, 8)
    assert f"{len(openings)} have been taken" in str(caught.value)
    assert taken_from.laps > 0
    assert len(taken_from.go_on(5).ids) == 5  # what follows another needs no beginning of its own


@pytest.mark.parametrize("tokens", [-1, 0, OPENING - 1, prompts.MAX_TOKENS + 1])
def test_lengths_that_mean_nothing_are_refused(tokenizer_path: Path, tokens: int) -> None:
    with pytest.raises(ValueError, match=f"{tokens} tokens: a prompt has"):
        source(tokenizer_path).take(1, tokens)
    if tokens != OPENING - 1:
        with pytest.raises(ValueError, match=f"{tokens} tokens: a continuation has"):
            source(tokenizer_path).go_on(tokens)


@pytest.mark.parametrize("content", [None, "", "{}", "not json"])
def test_no_tokenizer_is_said(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(Failed, match=r"tokenizer\.json is no tokenizer that can be used"):
        PromptSource(path, 1)


@pytest.mark.parametrize("work", corpus.WORKS)
def test_the_corpus_is_the_one_that_the_readme_tells_of(work: str) -> None:
    text = lzma.decompress((corpus.FOLDER / f"{work}.txt.xz").read_bytes()).decode()
    lines = corpus.paragraphs(work)
    assert "\n".join(lines) + "\n" == text
    assert hashlib.sha256(text.encode()).hexdigest() == corpus.SHA256[work]
    assert len(set(lines)) == len(lines)
    (row,) = [line for line in (corpus.FOLDER / "README.md").read_text().splitlines() if f"`{work}.txt.xz`" in line]
    assert row.split("|")[5:7] == [f" {len(lines):,} ", f" {len(text.encode()):,} "]


@pytest.mark.parametrize("content", [None, b"", b"\xfd7zXZ\x00", lzma.compress(b"One line.\n")])
def test_a_damaged_corpus_is_said(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "devil.txt.xz").write_bytes(content)
    with pytest.raises(Failed, match=r"devil\.txt\.xz cannot be used"):
        corpus.paragraphs("devil", tmp_path)


def test_the_corpus_stays_small() -> None:
    assert sum(path.stat().st_size for path in corpus.FOLDER.glob("*.xz")) < 2_000_000
