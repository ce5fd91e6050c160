"""Conversations with known answers, and the files in which a server keeps them."""

from __future__ import annotations

from pathlib import Path

from emberkeep.kv.disk import chunkfile
from emberkeep.types.request import Json
from helpers.server_process import Reply, ServerProcess
from helpers.stored_chats import greedy, possible_prompts, said, text_of

_SERVER = Path(__file__).with_name("serve_fake.py")
_MAX_TOKENS = 8


def start(data_dir: Path, *options: str) -> ServerProcess:
    return ServerProcess(str(_SERVER), "--data-dir", str(data_dir), *options)


def ask(server: ServerProcess, user: str, *, weights: str = "fake") -> Reply:
    """One question of about 600 tokens that no other client asks; its answer must be right."""
    messages = [said("system", f"You are {user}'s own helper. " * 20), said("user", "What is it?")]
    reply = server.chat([message.json() for message in messages], user_id=user, max_tokens=_MAX_TOKENS)
    (prompt,) = possible_prompts(messages)
    assert reply.text == text_of(greedy(prompt, _MAX_TOKENS, weights=weights))
    assert reply.prompt_tokens == len(prompt)
    return reply


def is_all_reused(reply: Reply) -> bool:
    """The last token of a prompt is always evaluated."""
    return reply.cached_tokens == reply.prompt_tokens - 1


def cold(server: ServerProcess) -> Json:
    return server.stats()["store"]["cold"]


def store_folder(data_dir: Path) -> Path:
    (folder,) = (path for path in (data_dir / "kv").iterdir() if path.is_dir())
    return folder


def files_of(data_dir: Path, user: str) -> list[Path]:
    """The chunk files of a user's conversation, first tokens first."""
    described = [
        (chunkfile.read_description(path)[0], path) for path in store_folder(data_dir).glob("chunks/*/*.kv")
    ]
    own = [(description.start, path) for description, path in described if f'"{user}"' in description.namespace]
    return [path for _, path in sorted(own)]
