"""The OpenAI Agents SDK: an agent over responses and over chat completions, whole and streamed."""

from __future__ import annotations

import asyncio
import os

import pytest
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
SCRIPTED = os.environ["CLIENT_SCRIPTED"]


@pytest.mark.parametrize("model", [OpenAIResponsesModel, OpenAIChatCompletionsModel])
def test_an_agent(model: type) -> None:
    """Two turns of a conversation, then a streamed one."""

    async def go() -> list[str]:
        async with AsyncOpenAI(base_url=os.environ["CLIENT_URL"], api_key=os.environ["CLIENT_KEY"]) as client:
            agent = Agent(
                name="Echo", instructions="Do as you are told.", model=model(model=SCRIPTED, openai_client=client)
            )
            first = await Runner.run(agent, "say one")
            second = await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "say two"}])
            streamed = Runner.run_streamed(agent, "say three")
            deltas = [
                event.data.delta
                async for event in streamed.stream_events()
                if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
            ]
            return [first.final_output, second.final_output, streamed.final_output, "".join(deltas)]

    assert asyncio.run(go()) == ["one", "two", "three", "three"]


def test_an_agent_goes_on_from_a_response() -> None:
    """The server keeps the conversation: only the new input is sent."""

    async def go() -> list[str]:
        async with AsyncOpenAI(base_url=os.environ["CLIENT_URL"], api_key=os.environ["CLIENT_KEY"]) as client:
            agent = Agent(name="Echo", model=OpenAIResponsesModel(model=SCRIPTED, openai_client=client))
            first = await Runner.run(agent, "say one")
            second = await Runner.run(agent, "say two", previous_response_id=first.last_response_id)
            return [first.final_output, second.final_output]

    assert asyncio.run(go()) == ["one", "two"]
