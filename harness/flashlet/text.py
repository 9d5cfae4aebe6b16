"""The conversations that it learns from: markers to recall among distractors, copying, counting, a tool, small talk.

They are made by the battery's own builder, in every size and shape, with markers that no battery ever draws
(`harness.recall.markers`); and by turns that state a fact, ask for one of before, or are about something else.
"""

from __future__ import annotations

import json
import random

from harness.corpus import paragraphs
from harness.flashlet.shape import BEGIN_TURN, CALL, END_CALL, END_TURN
from harness.recall.conversation import Message, Question, Shape, build_pair, statement, system
from harness.recall.known import KNOWN, SUFFIX
from harness.recall.markers import LABELS, Draw, Fact
from harness.recall.text import corpus_sentences, passage
from harness.recall.tools import NAME, TOOLS, request

TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- 'Tools:' }}
{%- for tool in tools %}{{ '\\n' + tool.function.name + ': ' + tool.function.description }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- if not (tools and loop.first) %}{{ '<|im_start|>system\\n' + message.content + '<|im_end|>\\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""The chat template. `render` does the same, a thousand times faster; a test holds the two together."""

ANSWERS = tuple(
    """Paris Rome Tokyo Berlin Madrid Cairo Moscow London Seven Twelve Earth The_sun Ice Shakespeare Oxygen Honey
    The_Atlantic Asia Africa Four Cold The_cat Tuesday February""".split()
)
"""to the questions of KNOWN, in their order"""

WORDS_A_TOKEN = 0.68
"""of the documents; to make conversations about as long as they are asked for"""
_A_TURN = 48
"""tokens of a question with its answer and the template, about"""


def render(messages: list[Message], tools: bool = False) -> str:
    """The text of a conversation, as the template has it, without a prompt to go on."""
    parts = []
    for place, message in enumerate(messages):
        content = message["content"] or ""
        if tools and place == 0:
            described = TOOLS[0]["function"]
            if message["role"] != "system":
                raise ValueError("tools are said in the first message, which is the system's")
            content += f"\n\nTools:\n{described['name']}: {described['description']}"
        calls = ""
        for called in (call["function"] for call in message.get("tool_calls") or []):
            calls += f'{CALL}\n{{"name": "{called["name"]}", "arguments": {called["arguments"]}}}\n{END_CALL}'
        parts.append(f"{BEGIN_TURN}{message['role']}\n{content}{calls}{END_TURN}\n")
    return "".join(parts)


def sample(random_numbers: random.Random, tokens: int, rare: float = 0.08) -> str:
    """A text to learn from, of about so many tokens: mostly conversations, now and then a piece of the corpus.

    Args:
        random_numbers: what it is drawn with.
        tokens: about how long.
        rare: share of tools, and in short texts of sentences to be completed.
    """
    kind = random_numbers.random()
    if kind < 0.04:
        return prose(random_numbers, tokens)
    if kind < 0.04 + rare:
        if tokens < 400:
            return render(broken_sentences(random_numbers, tokens))
        return render(tool_conversation(random_numbers, tokens), tools=True)
    return render(conversation(random_numbers, tokens))


def conversation(random_numbers: random.Random, tokens: int) -> list[Message]:
    """A conversation of about so many tokens."""
    kind = random_numbers.random()
    if tokens < 200 or kind < 0.35:
        return small_turns(random_numbers, tokens)
    if tokens < 400 and kind < 0.5:
        return broken_sentences(random_numbers, tokens)
    return questions(random_numbers, tokens)


def prose(random_numbers: random.Random, tokens: int) -> str:
    """The corpus from some paragraph on."""
    all_of_them = paragraphs("austen")
    place, parts, words = random_numbers.randrange(len(all_of_them)), [], 0
    while words < tokens * WORDS_A_TOKEN:
        parts.append(all_of_them[place % len(all_of_them)])
        words += len(parts[-1].split())
        place += 1
    return "\n\n".join(parts)


def questions(random_numbers: random.Random, tokens: int) -> list[Message]:
    """A document with facts, and questions about them, as the battery asks them."""
    most = max(1, min(9, (tokens - 120) // 100))
    turns = random_numbers.choice([turn for turn in (1, 3, 5, 7, 9) if turn <= most])
    notes = random_numbers.random() < 0.5
    facts = random_numbers.randint(1, max(2, min(14, tokens // 60)))
    depths = tuple(sorted(random_numbers.random() for _ in range(facts)))
    distractors = random_numbers.choice((0, 0, 2, 4)) if tokens > 200 else 0
    shape = Shape(tokens, depths, turns, notes, distractors, random_numbers.random() < 0.5)
    left = tokens - 60 - turns * (_A_TURN + 15 * notes) - 16 * (facts + distractors)
    draw = Draw(random_numbers.randrange(1 << 48), training=True)
    made, _ = build_pair("", shape, max(1, round(left * WORDS_A_TOKEN)), draw, random_numbers.randrange(16))
    made.answers = [question.expected for question in made.questions]
    return [*made.messages(turns), _say(made.answers[turns])]


def broken_sentences(random_numbers: random.Random, tokens: int) -> list[Message]:
    """A few sentences with one code, and a question that breaks off before it."""
    shape = Shape(tokens, (random_numbers.random(),), 1, False, 0, False, complete=True)
    draw = Draw(random_numbers.randrange(1 << 48), training=True)
    made, _ = build_pair("", shape, max(1, round((tokens - 110) * WORDS_A_TOKEN)), draw, 0)
    return [*made.messages(0), _say(made.questions[0].expected)]


def small_turns(random_numbers: random.Random, tokens: int) -> list[Message]:
    """Turns of every kind: facts are said, asked for again some turns later, and in between there is other talk."""
    draw = Draw(random_numbers.randrange(1 << 48), training=True)
    labels = draw.labels(len(LABELS))
    messages = [system(draw.salt())] if random_numbers.random() < 0.5 else []
    known: list[Fact] = []
    length = 40
    while length < tokens - 60:
        kind = random_numbers.random()
        if labels and (not known or kind < 0.25):
            fact = Fact(labels.pop(), draw.code(), None)
            known.append(fact)
            around = (
                passage(random_numbers, random_numbers.choice((1, 12, 30))) if random_numbers.random() < 0.5 else []
            )
            place = random_numbers.randint(0, len(around))
            said = " ".join([*around[:place], statement(fact), *around[place:]])
            messages += [_ask(said), _say(f"I will remember the code of the {fact.label}.")]
        elif kind < 0.7:
            question = Question("code" if random_numbers.random() < 0.8 else "place", random_numbers.choice(known))
            messages += [_ask(question.text), _say(question.expected)]
        else:
            messages += random_numbers.choice((_count, _copy, _know, _comment))(random_numbers)
        length += sum(round(len(message["content"].split()) * 1.45) + 8 for message in messages[-2:])
    return messages


def tool_conversation(random_numbers: random.Random, tokens: int) -> list[Message]:
    """Lockers are opened with codes from a document, and what is inside is told."""
    draw = Draw(random_numbers.randrange(1 << 48), training=True)
    rounds = max(1, min(4, tokens // 260))
    shape = Shape(tokens, tuple(sorted(random_numbers.random() for _ in range(rounds))), 1, False, 0, False)
    words = max(1, round((tokens - 80 - 150 * rounds) * WORDS_A_TOKEN))
    made, _ = build_pair("", shape, words, draw, 0)
    messages: list[Message] = [system(made.salt)]
    for turn, fact in enumerate(random_numbers.sample(made.facts, rounds)):
        slip = draw.code()
        call = {"function": {"name": NAME, "arguments": json.dumps({"code": fact.code})}}
        document = [made.document] if turn == 0 else []
        messages += [
            _ask("\n\n".join([*document, request(fact.label)])),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": json.dumps({"slip": slip})},
            _say(slip),
        ]
    return messages


def _count(random_numbers: random.Random) -> list[Message]:
    first = random_numbers.randint(1, 90)
    last = first + random_numbers.randint(3, 9)
    return [_ask(f"Count from {first} to {last}."), _say(" ".join(map(str, range(first, last + 1))))]


def _copy(random_numbers: random.Random) -> list[Message]:
    if random_numbers.random() < 0.5:
        said = random_numbers.choice(corpus_sentences())
    else:
        said = " ".join(random_numbers.sample(LABELS, random_numbers.randint(2, 8)))
    return [_ask(f"Repeat after me: {said}"), _say(said)]


def _know(random_numbers: random.Random) -> list[Message]:
    place = random_numbers.randrange(len(KNOWN))
    asked = KNOWN[place][0] + random_numbers.choice(("", SUFFIX))
    return [_ask(asked), _say(ANSWERS[place].replace("_", " ") + ".")]


def _comment(random_numbers: random.Random) -> list[Message]:
    said = " ".join(passage(random_numbers, random_numbers.choice((6, 20, 40))))
    return [_ask(said), _say(random_numbers.choice(("I see.", "Please go on.", "That is a good story.")))]


def _ask(text: str) -> Message:
    return {"role": "user", "content": text}


def _say(text: str) -> Message:
    return {"role": "assistant", "content": text}
