"""The official clients of other dialects, through the door, against the real engine."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import openai
import pytest
from server_support import KEY, PROFILE, Server

QUESTION = "Explain what a hash table is in two sentences."


@pytest.fixture
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key=KEY, max_retries=0) as one:
        yield one


def test_a_message(client: anthropic.Anthropic) -> None:
    message = client.messages.create(
        model=PROFILE, max_tokens=24, messages=[{"role": "user", "content": QUESTION}], system="Answer in English."
    )
    assert [block.type for block in message.content] == ["text"]
    assert message.stop_reason in ("max_tokens", "end_turn")
    assert 0 < message.usage.output_tokens <= 24
    counted = client.messages.count_tokens(
        model=PROFILE, messages=[{"role": "user", "content": QUESTION}], system="Answer in English."
    )
    assert counted.input_tokens == message.usage.input_tokens


def test_a_message_in_a_stream(client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        model=PROFILE, max_tokens=24, messages=[{"role": "user", "content": QUESTION}]
    ) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text
    assert message.content[0].type == "text"
    assert message.content[0].text == text
    assert 0 < message.usage.output_tokens <= 24


def test_refusals_are_the_client_s_own_exceptions(server: Server, client: anthropic.Anthropic) -> None:
    ask = {"model": PROFILE, "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
    stranger = client.with_options(api_key="wrong")
    with pytest.raises(anthropic.AuthenticationError, match="asks for a key"):
        stranger.messages.create(**ask)  # type: ignore[call-overload]
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(**ask | {"model": "nope"})  # type: ignore[call-overload]
    with pytest.raises(anthropic.BadRequestError, match="context"):
        client.messages.create(**ask | {"max_tokens": 10_000})  # type: ignore[call-overload]


def test_a_response_of_the_newer_form(server: Server) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEY, max_retries=0) as one:
        response = one.responses.create(model=PROFILE, input=QUESTION, max_output_tokens=24)
        assert response.output_text
        assert response.usage is not None
        assert 0 < response.usage.output_tokens <= 24
        text, final = "", None
        for event in one.responses.create(model=PROFILE, input=QUESTION, max_output_tokens=24, stream=True):
            if event.type == "response.output_text.delta":
                text += event.delta
            final = event
        assert text
        assert final is not None
        assert final.type in ("response.completed", "response.incomplete")
