"""What an answer is, what a rate proves, what two answers have in common: without a server."""

from __future__ import annotations

import itertools

import pytest

from harness.recall.asking import Answer, Call, Token
from harness.recall.conversation import Question, Shape, build_pair
from harness.recall.identity import compare_first, compare_text
from harness.recall.known import KNOWN, is_right
from harness.recall.markers import LABELS, MARKER_SPACE, Draw, Fact, codes_in, labels_in
from harness.recall.scoring import judge_rate, outcome_of, outcome_of_slip, wilson
from harness.recall.settings import MEDIUM
from harness.recall.tools import round_trip, wrong_call

MILL, INN = Fact("mill", "1234567", 0.5), Fact("inn", "7654321", None)
OWN, OTHERS = frozenset({"1234567", "7654321", "1111111"}), frozenset({"9999999"})
ASKED, BEFORE = Question("code", MILL), Question("code", INN)


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("1234567", "right"),
        ("The code of the mill is **1,234,567**.", "right"),
        ("123-4567", "right"),
        ("The code of the inn was asked before; that of the mill is 1234567.", "right"),
        ("7654321", "previous"),
        ("1111111", "other"),
        ("8888888", "other"),
        ("12345678", "none"),
        ("1234567 or 7654321", "several"),
        ("9999999", "leak"),
        ("1234567, or perhaps 9999999", "leak"),
        ("I do not know.", "none"),
        ("!!!!!!!!!!!!", "repeats"),
        (" \n", "empty"),
    ],
)
def test_what_an_answer_about_a_code_is(text: str, outcome: str) -> None:
    assert outcome_of(text, ASKED, BEFORE, OWN, OTHERS) == outcome


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("The Mill.", "right"),
        ("mill or inn", "several"),
        ("the inn", "other"),
        ("the windmill", "other"),
        ("1234567", "none"),
        ("7654321", "previous"),
    ],
)
def test_what_an_answer_about_a_place_is(text: str, outcome: str) -> None:
    assert outcome_of(text, Question("place", MILL), BEFORE, OWN, OTHERS) == outcome


def test_the_answer_before_counts_as_such_only_where_it_is_wrong() -> None:
    assert outcome_of("the inn", ASKED, Question("place", INN), OWN, OTHERS) == "previous"
    assert outcome_of("7654321", ASKED, None, OWN, OTHERS) == "other"


def test_what_an_answer_about_a_slip_is() -> None:
    own = OWN | {"2222222"}
    assert outcome_of_slip("The locker 1234567 held 2222222.", "2222222", own, OTHERS) == "right"
    assert outcome_of_slip("It held 1234567.", "2222222", own, OTHERS) == "other"
    assert outcome_of_slip("It held 9999999.", "2222222", own, OTHERS) == "leak"
    assert outcome_of_slip("", "2222222", own, OTHERS) == "empty"


def test_wilsons_interval() -> None:
    # Newcombe, Statistics in Medicine 17 (1998), table I, method 3: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
    for right, asked, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)):
        assert wilson(right, asked) == pytest.approx((low, high), abs=5e-5)
    assert wilson(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)
    assert wilson(20, 20) == pytest.approx((1 - 0.1611, 1.0), abs=5e-5)
    assert wilson(0, 0) == (0.0, 1.0)


def test_a_rate_passes_only_with_its_whole_interval() -> None:
    assert judge_rate(20, 20, 0.7) == "pass"
    assert judge_rate(15, 20, 0.7) == "inconclusive"
    assert judge_rate(5, 20, 0.7) == "fail"
    assert judge_rate(3, 3, 0.7) == "inconclusive"


def test_markers_and_places_are_found_whole() -> None:
    assert MARKER_SPACE == 1_285_714
    assert codes_in("1234567 12345678 1234567 7654321") == ["1234567", "7654321"]
    assert codes_in("1 234 567") == ["1234567"]
    assert labels_in("Windmill, mill") == ["windmill", "mill"]
    assert len(set(LABELS)) == len(LABELS)


def test_the_two_of_a_pair_differ_in_digits_of_the_second_half_alone() -> None:
    shape = Shape(1000)
    one, two = build_pair("x", shape, 700, Draw(1), shift=2)
    assert len(one.document) == len(two.document)
    differing = [index for index, pair in enumerate(zip(one.document, two.document, strict=True)) if len(set(pair)) > 1]
    assert differing[0] > len(one.document) * 0.4
    assert all(one.document[index].isdigit() for index in differing)
    assert [question.fact.label for question in one.questions] == [question.fact.label for question in two.questions]
    assert one.facts[:2] == two.facts[:2]
    assert not {fact.code for fact in one.facts[2:]} & {fact.code for fact in two.facts[2:]}
    assert not {fact.code for fact in one.notes} & {fact.code for fact in two.notes}


def test_facts_stand_where_their_depth_says() -> None:
    for words, near in ((700, 0.06), (60, 0.2)):
        for seed in range(20):
            shape = Shape(1000, depths=(0.0, 0.5, 1.0), distractors=0)
            one, _ = build_pair("x", shape, words, Draw(seed), shift=0)
            for fact in one.facts:
                assert fact.depth is not None
                assert one.document.index(fact.code) / len(one.document) == pytest.approx(fact.depth, abs=near)


def test_each_depth_is_asked_for_equally_often_and_no_fact_twice_in_a_row() -> None:
    shape = Shape(300)
    draw = Draw(1)
    pairs = [build_pair("x", shape, 200, draw, shift=shift) for shift in range(len(shape.depths))]
    for turn in (0, 2, 4):
        assert sorted(one.questions[turn].fact.depth or 0.0 for one, _ in pairs) == list(shape.depths)
    for one, _ in pairs:
        asked = [question.fact for question in one.questions]
        assert all(before != after for before, after in itertools.pairwise(asked))


def test_a_note_is_given_before_it_is_asked_for() -> None:
    one, _ = build_pair("x", Shape(300), 200, Draw(1), shift=0)
    for turn, question in enumerate(one.questions):
        one.answers.append("x")
        if question.fact.depth is None:
            said = [message["content"] for message in one.messages(turn)]
            assert question.fact.code in "".join(said[:-1])
            assert question.fact.code not in said[-1]


def test_another_beginning_shares_nothing() -> None:
    draw = Draw(1)
    one, _ = build_pair("x", Shape(300), 200, draw, shift=0)
    first, second = one.messages(0)[0]["content"], one.messages(0, draw.salt())[0]["content"]
    assert first[:4] != second[:4]
    assert first[16:] == second[16:]


def answer(*tokens: tuple[str, dict[str, float]]) -> Answer:
    listed = tuple(Token(text, top.get(text, -50.0), top) for text, top in tokens)
    return Answer(text="".join(text for text, _ in tokens), tokens=listed)


def test_first_tokens_are_compared_within_the_tolerance() -> None:
    paths = ("cold", "hit")
    one = answer(("a", {"a": -0.5, "b": -1.0, "c": -9.0}))
    near = answer(("b", {"a": -0.6, "b": -0.9, "c": -7.0}))
    assert compare_first("x", paths, one, near, 0.3).outcome == "same"
    assert compare_first("x", paths, one, near, 0.3).difference == pytest.approx(0.1)
    far = answer(("a", {"a": -0.5, "b": -1.4}))
    assert compare_first("x", paths, one, far, 0.3).outcome == "different"
    # What is likely in one must be among the likeliest of the other, whichever of the two it is.
    without = answer(("b", {"b": -0.9, "c": -7.0}))
    assert compare_first("x", paths, one, without, 0.3).outcome == "different"
    assert compare_first("x", paths, without, one, 0.3).outcome == "different"
    for nothing in (Answer(), answer(("a", {}))):
        assert compare_first("x", paths, one, nothing, 0.3).outcome == "not compared"


def test_texts_may_part_at_a_near_tie_only() -> None:
    paths = ("cold", "hit")
    one = answer(("a", {"a": -0.1}), ("b", {"b": -0.7, "c": -0.8}), ("x", {"x": -0.1}))
    tie = answer(("a", {"a": -0.1}), ("c", {"c": -0.7, "b": -0.75}), ("y", {"y": -0.1}))
    wrong = answer(("a", {"a": -0.1}), ("c", {"c": -0.1, "b": -5.0}))
    short = answer(("a", {"a": -0.1}))
    assert compare_text("x", paths, one, one, 0.3).outcome == "same"
    assert compare_text("x", paths, one, tie, 0.3).outcome == "near-tie"
    assert compare_text("x", paths, one, wrong, 0.3).outcome == "different"
    assert compare_text("x", paths, one, short, 0.3).outcome == "different"
    assert compare_text("x", paths, one, Answer(error="gone"), 0.3).outcome == "not compared"


@pytest.mark.parametrize(
    ("call", "finish", "wrong"),
    [
        (Call("1", "open_locker", '{"code": "1234567"}'), "tool_calls", ""),
        (Call("1", "open_locker", '{"code": 1234567}'), "tool_calls", ""),
        (None, "stop", "no tool was called"),
        (Call("1", "open", '{"code": "1234567"}'), "tool_calls", "the tool called is 'open'"),
        (Call("1", "open_locker", '{"code": "1234576"}'), "tool_calls", "the code is '1234576' instead of '1234567'"),
        (Call("1", "open_locker", '{"code": "1234567"'), "tool_calls", "the arguments are no JSON"),
        (Call("1", "open_locker", '["1234567"]'), "tool_calls", "the arguments are not those of the tool"),
        (Call("1", "open_locker", '{"code": "1234567", "x": 1}'), "tool_calls", "the arguments are not those"),
        (Call("1", "open_locker", '{"code": "1234567"}'), "stop", "finish_reason is 'stop' instead of 'tool_calls'"),
    ],
)
def test_what_is_wrong_with_a_call(call: Call | None, finish: str, wrong: str) -> None:
    found = wrong_call(Answer(calls=(call,) if call else (), finish_reason=finish), "1234567")
    assert found.startswith(wrong)
    assert bool(found) == bool(wrong)


def test_two_calls_are_one_too_many_and_a_result_refers_to_its_call() -> None:
    call = Call("abc", "open_locker", '{"code": "1234567"}')
    assert wrong_call(Answer(calls=(call, call), finish_reason="tool_calls"), "1234567") == "2 calls instead of one"
    said, result = round_trip(Answer(calls=(call,)), "7654321")
    assert said["tool_calls"][0]["id"] == result["tool_call_id"] == "abc"
    assert "7654321" in result["content"]


def test_the_medium_battery_fits_into_the_context_of_a_small_model() -> None:
    assert 2048 < MEDIUM.longest_tokens <= 4096


def test_known_answers_are_told_from_others() -> None:
    assert is_right("What is the capital of France?", "It is Paris, of course.")
    assert not is_right("What is the capital of France?", "It is Rome.")
    assert not any(is_right(question, "!!!! 1234567") for question, _ in KNOWN)
    assert len(dict(KNOWN)) == len(KNOWN)
