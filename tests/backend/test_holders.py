"""Forgetting a user reaches everything that holds what they sent."""

from __future__ import annotations

import ast
import asyncio
import gc
import hashlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emberkeep
from emberkeep.backend.base import ModelCard
from emberkeep.backend.local import LocalBackend
from emberkeep.backend.remote.backend import RemoteBackend, RemoteOptions
from emberkeep.backend.remote.trtllm import TurnTracker
from emberkeep.config.settings import Config
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import EngineError
from emberkeep.kv.forgetting import Holders
from emberkeep.runtime.local_model import OpenedDraft, assemble
from emberkeep.session.sessions import Policy, Sessions
from emberkeep.types.events import TextDelta
from emberkeep.types.lineage import private_namespace
from emberkeep.types.request import Message, Request, Tool, ToolChoice
from helpers.on_demand_models import FakeEmbeddingEngine, embedder_over
from helpers.scripted_backend import CHATML, fake_backend, settle

# No text of any other test, and no constant of this one, has these in it.
USER, WORD = (hashlib.sha256(one).hexdigest()[:20] for one in (b"user", b"word"))
TOOLS = (Tool("find", "Finds things.", {"type": "object", "properties": {"name": {"type": "string"}}}),)


def ask(backend: LocalBackend, turns: int, **fields: Any) -> None:
    asyncio.run(_talk(backend, turns, fields))
    settle(backend)
    backend.scheduler.store.flush()


async def _talk(backend: LocalBackend, turns: int, fields: dict[str, Any]) -> None:
    messages = [Message("system", f"You help. {WORD} " * 12)]
    for turn in range(turns):
        messages.append(Message("user", f"{WORD} number {turn}, what of it? " * 4))
        request = Request(messages=tuple(messages), max_tokens=8, user=USER, **fields)
        events = [event async for event in backend.generate(request)]
        messages.append(Message("assistant", "".join(e.text for e in events if isinstance(e, TextDelta))))


def found_in_memory() -> list[str]:
    """Objects that hold a trace, by their type; this module's own are none."""
    gc.collect()
    traces = [USER.encode(), WORD.encode(), np.array(list(WORD.encode()), np.int32).tobytes()]
    pending, seen = gc.get_objects(), {id(globals()), id(traces)}
    found = []
    while pending:
        holder = pending.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        for held in gc.get_referents(holder):
            if any(trace in _bytes_of(held) for trace in traces):
                found.append(f"{type(holder).__qualname__} holds {held!r:.80}")
            elif isinstance(held, tuple | dict) and not gc.is_tracked(held):
                pending.append(held)
    return found


def _bytes_of(held: object) -> bytes:
    if isinstance(held, str):
        return held.encode("utf-8", "surrogatepass")
    if type(held) is np.ndarray:
        return held.astype(np.int32).tobytes() if held.dtype.kind in "iu" else held.tobytes()
    return bytes(held) if isinstance(held, bytes | bytearray) else b""


def test_no_object_of_the_process_holds_anything_of_a_user_who_was_forgotten(tmp_path: Path) -> None:
    backend = fake_backend(Config(data_dir=tmp_path))
    namespace = private_namespace(USER)
    ask(backend, 3, namespace=namespace, conversation_id=f"{WORD}-talk")
    ask(backend, 1, namespace=namespace, tools=TOOLS, tool_choice=ToolChoice("required"))
    assert len(found_in_memory()) > 20
    backend.cache.remove_user(USER)
    assert backend.memory is not None
    backend.memory.forget(namespace)
    settle(backend)
    assert found_in_memory() == []
    asyncio.run(backend.close())


# ── classes ──


class _Evicting:
    """A provider that tells of its blocks."""

    on_removed = None

    def __init__(self) -> None:
        self.forget = TurnTracker(lambda request, places: None).forget

    async def close(self) -> None: ...


async def _with_everything(folder: Path) -> LocalBackend:
    """A model with a draft model and an embedder, and a remote one beside it."""
    config, engine, draft = Config(data_dir=folder), FakeEngine(), FakeEngine()
    card = ModelCard("fake", 0, engine.capabilities.context)
    backend = assemble(config, engine, CHATML, card, draft=OpenedDraft("draft", draft))
    backend.embed_with(embedder_over(FakeEmbeddingEngine()))
    remote = RemoteBackend(
        ModelCard("far", 0, 100, remote="far"),
        _Evicting(),  # type: ignore[arg-type]
        Sessions(None, Policy(100)),
        RemoteOptions(),
        holders=backend.holders,
    )
    await remote.start()
    return backend


def _classes_that_forget() -> Iterator[type]:
    """Those with `forget(owners)`, but for protocols."""
    root = Path(emberkeep.__file__).parent
    for path in root.rglob("*.py"):
        if "def forget(self, owners" not in path.read_text():
            continue
        module = importlib.import_module(".".join(("emberkeep", *path.relative_to(root).with_suffix("").parts)))
        for node in ast.walk(ast.parse(path.read_text())):
            has_it = isinstance(node, ast.ClassDef) and any(
                isinstance(part, ast.FunctionDef) and part.name == "forget" and "owners" in ast.unparse(part.args)
                for part in node.body
            )
            if has_it and not getattr(getattr(module, node.name), "_is_protocol", False):
                yield getattr(module, node.name)


def test_every_class_that_can_forget_owners_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = set()
    for one in _classes_that_forget():
        original = vars(one)["forget"]

        def noted(self: Any, *args: Any, original: Any = original, name: str = one.__qualname__) -> Any:
            missing.discard(name)
            return original(self, *args)

        missing.add(one.__qualname__)
        monkeypatch.setattr(one, "forget", noted)

    async def story() -> None:
        backend = await _with_everything(tmp_path)
        await asyncio.to_thread(backend.cache.remove_user, USER)
        await backend.close()

    assert len(missing) > 10
    asyncio.run(story())
    assert missing == set()


# ── the registry ──


def test_all_are_told_though_one_fails_and_the_failure_is_raised_at_the_end() -> None:
    holders, told = Holders(), list[str]()

    def fail(owners: object) -> None:
        raise EngineError("It is broken.")

    def erase(user: str) -> Any:
        told.append(user)
        raise EngineError("It is later.")

    holders.join("first", holders, fail)
    holders.join("second", holders, lambda owners: told.append("second"))
    holders.join_lasting(holders, erase)
    with pytest.raises(EngineError, match="It is broken"):
        holders.forget("ann")
    assert told == ["second", "ann"]


def test_who_has_left_is_not_told() -> None:
    holders, member = Holders(), object()
    holders.join("one", member, lambda owners: pytest.fail("told"))
    holders.join_lasting(member, lambda user: pytest.fail("told"))
    holders.leave(member)
    assert holders.forget("ann").entries == 0
