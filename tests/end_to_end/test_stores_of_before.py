"""A data folder that an earlier version has written: everything in it is found again, byte for byte.

`stores/before.tar.xz` was made by the version before the one that took the code apart, as the history of this file
shows; it holds the folder, and what that version answered to the next turn of every conversation in it.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from time import sleep

from emberkeep.engine.base import KvUnit
from emberkeep.engine.fake import FakeEngine
from emberkeep.types.lineage import Approximation, Repair, private_namespace
from emberkeep.types.request import Json, Message, Request, ToolCall
from helpers.conversing import CONTEXT, GREEDY, Answer, Client, Harbour, ScriptedEngine, line

ARCHIVE = Path(__file__).parent / "stores" / "before.tar.xz"
ENGINES = {
    "ranges": lambda: ScriptedEngine(),
    "snapshots": lambda: FakeEngine(context=2048, cells=8192, kv_unit=KvUnit.SNAPSHOT),
    "both": lambda: FakeEngine(context=2048, cells=8192, kv_unit=KvUnit.BOTH),
}
DOCUMENTS = [" ".join(line(100 * part + i) for i in range(3)) for part in range(3)]
BLEND = Approximation(Repair.CACHEBLEND)

CONVERSATIONS: dict[str, tuple[str, dict[str, Json]]] = {
    "plain": ("ranges", {}),
    "of a user": ("ranges", {"user": "ann"}),
    "with a salt": ("ranges", {"user": "ann", "namespace": private_namespace("ann", "blue")}),
    "in 8 bits": ("ranges", {"kv_bits": 8}),
    "in 4 bits": ("ranges", {"kv_bits": 4, "user": "bob"}),
    "of snapshots": ("snapshots", {}),
    "of both": ("both", {"conversation_id": "both"}),
}
LONG = {"evicted": {"user": "eve"}, "evicted exactly": {"user": "eva", "approximate": False}}


@contextmanager
def opened(folder: Path, engine: str) -> Iterator[Harbour]:
    slow = ENGINES[engine]()
    # Else it would be cheaper to compute again than to load.
    slow.on_evaluate = lambda batch: sleep(2e-4 * sum(len(rows.tokens) for rows in batch))
    with Harbour(folder, slow, disk_budget=1 << 30, sweep_s=3600) as harbour:
        yield harbour


def client_of(harbour: Harbour, name: str, messages: list[Message] | None = None) -> Client:
    fields = CONVERSATIONS[name][1] if name in CONVERSATIONS else LONG[name]
    client = Client(harbour, **{"max_tokens": 6, "recall": "off", "system": name, **fields})
    client.messages = messages or []
    return client


def blended(harbour: Harbour, order: list[int]) -> Answer:
    text = "".join(DOCUMENTS[i] for i in order)
    ids = tuple(harbour.backend.tokenizer.tokenize(text, add_special=False, parse_special=False))
    return harbour.ask(Request(prompt=ids, approximate=BLEND, sampling=GREEDY, max_tokens=4))


def told(answer: Answer) -> dict[str, Json]:
    """What must be the same again."""
    lookup = answer.lookup
    stored = lookup.warm_tokens + lookup.cold_tokens  # a part of it may have been read ahead, or be shared
    assert sum(part.tokens for part in lookup.sources) == lookup.prompt_tokens
    rest = asdict(replace(lookup, warm_tokens=stored, cold_tokens=0))
    del rest["sources"]  # the earlier version did not tell them
    assert rest.pop("remote_tokens") == 0  # nor did it know other hosts
    if rest["divergence"]:
        assert rest["divergence"].pop("volatile") == ()  # what was recorded knows nothing of it
    return {"ids": answer.ids, "lookup": {k: v for k, v in rest.items() if not k.endswith("_ms")}}


def read(folder: Path, said: dict[str, Json]) -> dict[str, Json]:
    """What is answered to the next turn of everything."""
    found: dict[str, Json] = {}
    for engine in ENGINES:
        with opened(folder, engine) as harbour:
            if engine == "ranges":
                entries = harbour.backend.cache.entries()
                found["entries"] = sorted(
                    [e.id, e.user, e.tokens, e.kv_bits, e.turns, e.is_pinned] for e in entries
                )
                stats = harbour.backend.stats()["store"]
                found["store"] = [stats["folder"], stats["cold"]["chunks"], stats["cold"]["damaged_chunks"]]
                found["blended"] = told(blended(harbour, [2, 0, 1]))
                found["moved"] = told(blended(harbour, [1, 2, 0]))
            for name in [*CONVERSATIONS, *LONG]:
                if (CONVERSATIONS[name][0] if name in CONVERSATIONS else "ranges") == engine:
                    client = client_of(harbour, name, [_message(message) for message in said[name]])
                    found[name] = told(client.say("What was the second remark?"))
                    found[f"{name}, once more"] = told(client.say("And the third?"))
    return json.loads(json.dumps(found))


def _message(data: dict[str, Json]) -> Message:
    calls = tuple(ToolCall(**call) for call in data["tool_calls"])
    return Message(data["role"], data["content"], data["reasoning"], calls)


def test_everything_that_was_stored_is_used_again(tmp_path: Path) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    before = json.loads((tmp_path / "before.json").read_text())
    found = read(tmp_path / "data", before["said"])
    assert found.keys() == before["found"].keys()
    for name, answer in found.items():
        assert answer == before["found"][name], name
    reused = [found[name]["lookup"] for name in [*CONVERSATIONS, *LONG]]
    assert all(one["hot_tokens"] == 0 and one["warm_tokens"] > 100 for one in reused)
    assert found["blended"]["lookup"]["warm_tokens"] > CONTEXT // 4
    assert found["moved"]["lookup"]["moved_tokens"] > 100
