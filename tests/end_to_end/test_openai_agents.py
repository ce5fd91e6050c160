"""The openai-agents SDK over `/v1/responses`: a real server and store, an engine that follows a script."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import openai
import pytest
from pydantic import BaseModel

from emberkeep.backend.local import LocalBackend
from emberkeep.config.settings import Config
from helpers.conversing import TEMPLATE, ScriptedEngine
from helpers.scripted_backend import fake_backend
from helpers.scripted_server import running

pytestmark = pytest.mark.slow

agents = pytest.importorskip("agents")

T = TypeVar("T")


class Town(BaseModel):
    name: str
    people: int


class House:
    """A server, and models of the SDK that ask it."""

    def __init__(self, url: str, engine: ScriptedEngine) -> None:
        self.url, self.engine = url, engine
        self.asked: list[str] = []

    def will_call(self, name: str, arguments: str) -> None:
        self.engine.will_say(f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>')

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(work)

    @property
    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def agent(self, name: str = "Secretary", **options: Any) -> Any:
        model = agents.OpenAIResponsesModel(model="scripted", openai_client=self.client)
        return agents.Agent(name=name, instructions=f"You are the {name}.", model=model, **options)

    def weather_tool(self) -> Any:
        @agents.function_tool
        def get_weather(city: str) -> str:
            """The weather in a city."""
            self.asked.append(city)
            return f"It rains in {city}."

        return get_weather


@pytest.fixture(scope="module")
def whole_house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    agents.set_tracing_disabled(True)
    config = Config(data_dir=tmp_path_factory.mktemp("data"))
    engine = ScriptedEngine(context=8192)
    backend: LocalBackend = fake_backend(config, engine, template=TEMPLATE, name="scripted")
    with running(cast(Any, backend), config) as server:
        yield House(server.url, engine)
    asyncio.run(backend.close())


@pytest.fixture
def house(whole_house: House) -> House:
    whole_house.asked.clear()
    return whole_house


def reused(result: Any) -> list[tuple[int, int]]:
    """Of each response: tokens of the prompt, and how many of them were not evaluated again."""
    usages = [response.usage for response in result.raw_responses]
    return [(usage.input_tokens, usage.input_tokens_details.cached_tokens) for usage in usages]


def test_an_agent_calls_its_tool_and_answers(house: House) -> None:
    house.will_call("get_weather", '{"city": "Oslo"}')
    house.engine.will_say("Take an umbrella.")
    result = house.run(agents.Runner.run(house.agent(tools=[house.weather_tool()]), "What about Oslo?"))
    assert house.asked == ["Oslo"]
    assert result.final_output == "Take an umbrella."
    (first, _), (_, cached) = reused(result)
    assert cached > first


def test_an_agent_hands_over_to_another(house: House) -> None:
    house.will_call("transfer_to_pilot", "{}")
    house.engine.will_say("Pier four.")
    pilot = house.agent("Pilot")
    result = house.run(agents.Runner.run(house.agent(handoffs=[pilot]), "Where do I land?"))
    assert (result.last_agent.name, result.final_output) == ("Pilot", "Pier four.")


def test_an_answer_has_the_type_that_the_agent_promises(house: House) -> None:
    house.engine.will_say('{"name": "Oslo", "people": 700000}')
    result = house.run(agents.Runner.run(house.agent(output_type=Town), "Tell me of a town."))
    assert result.final_output == Town(name="Oslo", people=700000)


def test_an_answer_is_streamed(house: House) -> None:
    house.will_call("get_weather", '{"city": "Bergen"}')
    house.engine.will_say("It rains, as always.")

    async def stream() -> tuple[list[str], list[str], str]:
        result = agents.Runner.run_streamed(house.agent(tools=[house.weather_tool()]), "Bergen?")
        raw, items = [], []
        async for event in result.stream_events():
            if event.type == "raw_response_event":
                raw.append(event.data.type)
            elif event.type == "run_item_stream_event":
                items.append(event.name)
        return raw, items, result.final_output

    raw, items, answer = house.run(stream())
    assert answer == "It rains, as always." and house.asked == ["Bergen"]
    assert items == ["tool_called", "tool_output", "message_output_created"]
    assert raw.count("response.completed") == 2
    assert {"response.function_call_arguments.delta", "response.output_text.delta"} <= set(raw)


def test_a_session_of_the_client_goes_on_from_stored_state(house: House, tmp_path: Path) -> None:
    async def talk() -> list[Any]:
        session = agents.SQLiteSession("s", tmp_path / "session.sqlite")
        ask = [agents.Runner.run(house.agent(), text, session=session) for text in ("I am Ann.", "Who am I?")]
        return [await one for one in ask]

    house.engine.will_say("Hello Ann.", "You are Ann.")
    first, second = house.run(talk())
    assert second.final_output == "You are Ann."
    [(prompt, _)], [(_, cached)] = reused(first), reused(second)
    assert cached > prompt


def test_a_session_on_the_server_is_a_conversation(house: House) -> None:
    async def talk() -> tuple[Any, list[Any]]:
        session = agents.OpenAIConversationsSession(openai_client=house.client)
        await agents.Runner.run(house.agent(), "I am Ben.", session=session)
        second = await agents.Runner.run(house.agent(), "Who am I?", session=session)
        return second, await session.get_items()

    house.engine.will_say("Hello Ben.", "You are Ben.")
    second, items = house.run(talk())
    assert second.final_output == "You are Ben."
    assert [item["role"] for item in items] == ["user", "assistant", "user", "assistant"]


def test_turns_are_chained_by_the_id_of_the_last_response(house: House) -> None:
    async def talk() -> Any:
        first = await agents.Runner.run(house.agent(), "I am Cid.")
        return await agents.Runner.run(house.agent(), "Who am I?", previous_response_id=first.last_response_id)

    house.engine.will_say("Hello Cid.", "You are Cid.")
    result = house.run(talk())
    assert result.final_output == "You are Cid."
    [(prompt, cached)] = reused(result)
    assert prompt > cached > 0.5 * prompt
