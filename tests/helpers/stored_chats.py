"""Conversations with known answers, what a model without any cache would answer, and the files of a server."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from emberkeep.engine.base import Rows
from emberkeep.engine.fake import FakeEngine, FakeVocab
from emberkeep.kv.disk import chunkfile
from emberkeep.types.request import Json
from helpers.server_process import Reply, ServerProcess

VOCAB = FakeVocab()
_START, _END = VOCAB.specials["<|im_start|>"], VOCAB.specials["<|im_end|>"]
Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Said:
    """One message, and every list of token ids that its content may have."""

    role: str
    text: str
    tokenizations: tuple[Ids, ...]

    def json(self) -> dict[str, str]:
        return {"role": self.role, "content": self.text}


def said(role: str, text: str, sampled: Ids = ()) -> Said:
    """`sampled` begins with the ids behind the text, if the model wrote it."""
    plain = tuple(VOCAB.tokenize(text))
    behind = _leading(sampled, text)
    return Said(role, text, (plain,) if behind in ((), plain) else (behind, plain))


def possible_prompts(messages: list[Said]) -> Iterator[Ids]:
    """Every prompt that the server may make of these messages."""
    header = tuple(VOCAB.tokenize("assistant\n"))
    for contents in itertools.product(*(message.tokenizations for message in messages)):
        parts = [_message(said.role, content) for said, content in zip(messages, contents, strict=True)]
        yield (*itertools.chain(*parts), _START, *header)


def greedy(prompt: Ids, max_tokens: int, *, bias: Mapping[int, float] | None = None, weights: str = "fake") -> Ids:
    engine = FakeEngine(weights=weights)
    added = np.zeros(VOCAB.size, np.float32)
    for token, amount in (bias or {}).items():
        added[token] = amount
    engine.evaluate([Rows(0, 0, np.array(prompt, np.int32), True)])
    answer: list[int] = []
    while len(answer) < max_tokens:
        token = int((engine.logits(0) + added).argmax())
        if token in VOCAB.eog:
            break
        answer.append(token)
        engine.evaluate([Rows(0, len(prompt) + len(answer) - 1, np.array([token], np.int32), True)])
    return tuple(answer)


def text_of(ids: Ids) -> str:
    return b"".join(VOCAB.pieces[token] for token in ids).decode()


def _message(role: str, content: Ids) -> Ids:
    return (_START, *VOCAB.tokenize(f"{role}\n"), *content, _END, *VOCAB.tokenize("\n"))


def _leading(sampled: Ids, text: str) -> Ids:
    """The first of the sampled ids whose text is exactly `text`; none when it ends inside a token."""
    for count in range(len(sampled) + 1):
        if text_of(sampled[:count]) == text:
            return sampled[:count]
    return ()


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
