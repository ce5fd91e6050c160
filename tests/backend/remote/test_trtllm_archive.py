"""What TensorRT-LLM drops from its KV cache is archived, and can be found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from emberkeep.backend.remote.losing import _same_places
from emberkeep.backend.remote.trtllm import TrtllmProvider
from emberkeep.types import Message, RemoteModel, Request
from support.remote_model import remote
from support.vendors.driving import drive
from support.vendors.trtllm_server import TrtllmServer, removed, stored, used

BOAT = Message("user", "My boat is called Zephyr and lies at pier 3.")
NOTED = Message("assistant", "Noted, Zephyr at pier 3.")
WEATHER = Message("user", "What is the weather like out there?")


def test_turns_whose_blocks_are_removed_are_archived_once(tmp_path: Path) -> None:
    server = TrtllmServer(used(32, 31, NOTED.content), used(96, 31, "Windy."))

    async def talk(provider: TrtllmProvider, _: TrtllmServer) -> list[str]:
        backend = remote(provider, tmp_path, context=4000)  # type: ignore[arg-type]
        first = Request(messages=(BOAT,), conversation_id="harbour")
        for request in (first, replace(first, messages=(BOAT, NOTED, WEATHER))):
            async for _event in backend.generate(request):
                pass
        server.happened.append(stored(None, 1, 2, 3, 4, last=30))
        await provider.poll()
        for event in (removed(2), removed(1)):
            server.happened.append(event)
            await provider.poll()
        await backend._losses.close()
        assert backend.memory is not None
        return [row["user_text"] for row in backend.memory.export("") if row["kind"] == "turn"]

    assert drive(
        lambda: server, lambda url: TrtllmProvider(RemoteModel("t", "trtllm", "tiny", url), None), talk
    ) == [BOAT.content]


def test_places_are_those_of_what_was_said_whatever_the_model_was_shown() -> None:
    said = [Message("system", "Be brief."), BOAT, NOTED, WEATHER, Message("assistant", "Windy.")]
    shown = [
        said[0],
        Message("user", f"[2 earlier messages have left.]\n\n{WEATHER.content}"),
        Message("assistant", "", tool_calls=()),
        said[4],
    ]
    assert _same_places(shown, said, [1, 3]) == {3, 4}
