"""`agents`: whole sessions of coding agents, in our server and in a llama-server: what each evaluates of them.

A session is played as real clients do it. The system prompt begins with a header that is new in every call, tools
come in random order, a title and summaries are asked for in between with other system prompts, reasoning is never
sent back, and the arguments of calls are written anew. What the model answers is its own; what it is told next was
recorded. Times are not taken: how many tokens a server evaluates does not depend on what else the machine does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from benchmarks.recorded_sessions import Session, read_sessions
from emberkeep.bench.report import BenchResult, Row, Table
from emberkeep.bench.servers import OURS, PEER, BenchClient, ComparedServer, OwnServer, PeerServer, peer_version
from emberkeep.bench.workspace import Workspace
from emberkeep.types.request import Json

_BUNDLED = Path(__file__).parent / "sessions"
_HEADER = "x-anthropic-billing-header: cc_version=2.1.37.{version:03x}; cc_entrypoint=cli; cch={cch:05x};\n"
_TITLE = "Write a title of at most five words for what the user wants. Answer with the title only."
_SUMMARY = "Summarise in one sentence what happened last in this session of a coding agent."
_SUMMED_UP = 3
"""Messages that a summary is made of."""
_LONGEST = 6000
"""Characters of what a model is told at a time: agents cut longer results."""
_CHARS_PER_TOKEN = 2.5
"""About the fewest that such texts have."""
_SHIFTED = f"{PEER} that shifts"


@dataclass(frozen=True, slots=True)
class AgentsPlan:
    peer: Path | None = None
    data: Path | None = None
    answer_tokens: int = 48
    ctx: int = 8192
    turns: int = 40
    """At most, of a session; it ends earlier where the context is nearly full."""
    summary_every: int = 4

    def quick(self) -> AgentsPlan:
        return replace(self, answer_tokens=8, turns=4, summary_every=2)


# ── playing a session ──


@dataclass(slots=True)
class Played:
    """What one server made of a session."""

    requests: int = 0
    prompt_tokens: int = 0
    evaluated: int = 0
    """Prompt tokens that were not reused, and those of the answers."""
    rules: set[str] = field(default_factory=set)
    """Those of hygiene."""
    tree: set[int] = field(default_factory=set)
    """Every beginning of everything that the model had to read or wrote, as a hash."""

    @property
    def unique(self) -> int:
        return len(self.tree)

    @property
    def ratio(self) -> float:
        return self.evaluated / max(self.unique, 1)

    def add(self, ids: Iterable[int]) -> None:
        known = 0
        for token in ids:
            known = hash((known, token))
            self.tree.add(known)

    def __add__(self, other: Played) -> Played:
        return Played(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.evaluated + other.evaluated,
            self.rules | other.rules,
            self.tree | other.tree,
        )


class Player:
    """One session with one server."""

    def __init__(self, client: BenchClient, session: Session, plan: AgentsPlan) -> None:
        self._client, self._session, self._plan = client, session, plan
        self._random = Random(session.name)
        self._messages: list[Json] = []
        self.played = Played()

    async def play(self) -> Played:
        told = [text[:_LONGEST] for text in self._session.told[: self._plan.turns]]
        await self._ask([_message("system", _TITLE), _message("user", told[0])], ())
        for number, text in enumerate(told, 1):
            if not self._has_room(text):
                break
            self._messages += self._results(text)
            await self._turn()
            if number % self._plan.summary_every == 0:
                await self._ask([_message("system", _SUMMARY), _message("user", self._latest())], ())
        return self.played

    def _has_room(self, text: str) -> bool:
        """Neither server has to leave anything out."""
        said = sum(len(json.dumps(message)) for message in [*self._messages, *self._session.tools])
        chars = len(self._session.system) + said + len(text)
        return chars / _CHARS_PER_TOKEN + self._plan.answer_tokens < 0.8 * self._plan.ctx

    def _results(self, text: str) -> list[Json]:
        """What comes next: the result of every call, or a message."""
        last = self._messages[-1] if self._messages else {}
        calls = last.get("tool_calls") or ()
        return [_message("tool", text, tool_call_id=call["id"]) for call in calls] or [_message("user", text)]

    async def _turn(self) -> None:
        seed = self._random
        header = _HEADER.format(version=seed.randrange(1 << 12), cch=seed.randrange(1 << 20))
        tools = seed.sample(self._session.tools, len(self._session.tools))
        system = self._session.system
        answer = await self._ask(
            [_message("system", system), *self._messages], tools, sent=_message("system", header + system)
        )
        self._messages.append(sent_back(answer))

    def _latest(self) -> str:
        return "\n".join(f"{one['role']}: {one['content']}" for one in self._messages[-_SUMMED_UP:])

    async def _ask(self, messages: Sequence[Json], tools: Sequence[Json], sent: Json = None) -> Json:
        """`messages`: as a model has to read them; `sent`: the first of them as the client sends it."""
        more = {"tools": list(tools)} if tools else {}
        body = {"messages": [sent or messages[0], *messages[1:]], **more}
        limits = {"max_tokens": self._plan.answer_tokens, "temperature": 0, "speculation": False}
        answered = json.loads((await self._client.post("/v1/chat/completions", {**body, **limits})).body())
        self._count(answered)
        steady = {"tools": list(self._session.tools)} if tools else {}
        read = json.loads((await self._client.post("/apply-template", {"messages": messages, **steady})).body())
        answer: Json = answered["choices"][0]["message"]
        # A call that was made is in the next prompt.
        self.played.add(await self._client.tokenize(read["prompt"] + (answer.get("content") or "")))
        return answer

    def _count(self, answered: Json) -> None:
        usage, played = answered["usage"], self.played
        played.requests += 1
        played.prompt_tokens += usage["prompt_tokens"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        played.evaluated += usage["prompt_tokens"] - cached + usage["completion_tokens"]
        played.rules |= set(answered.get("emberkeep", {}).get("hygiene", ()))


def _message(role: str, content: str, **more: Json) -> Json:
    return {"role": role, "content": content, **more}


def sent_back(answer: Mapping[str, Json]) -> Json:
    """An answer as many clients send it back: without reasoning, and with arguments written anew."""
    message = _message("assistant", answer.get("content") or "")
    if calls := answer.get("tool_calls"):
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _rewritten(call["function"]["arguments"])}}
            for call in calls
        ]
    return message


def _rewritten(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True, separators=(",", ":"))
    except ValueError:  # a call that was cut
        return "{}"


# ── the comparison ──


async def run(workspace: Workspace, plan: AgentsPlan) -> BenchResult:
    sessions = read_sessions(plan.data or _BUNDLED)
    results: dict[str, list[Played]] = {}
    notes = [
        "unique: tokens of all prompts and answers in one radix tree, without the header.",
        "ratio: evaluated / unique.",
    ]
    with OwnServer(workspace, parallel=1, ctx=plan.ctx) as ours:
        results[OURS] = await _play_all(workspace, ours, sessions, plan)
    if plan.peer is not None:
        notes.append(
            f"{PEER}: {peer_version(plan.peer)}. The one that shifts has --cache-reuse 256: it moves state"
        )
        notes.append("to other positions, which is approximate; the other one reuses prefixes only, as we do.")
        for name, more in ((PEER, ("--cache-reuse", "0")), (_SHIFTED, ())):
            with PeerServer(workspace, plan.peer, parallel=1, ctx=plan.ctx, more=("--jinja", *more)) as peer:
                results[name] = await _play_all(workspace, peer, sessions, plan)
    rules = sorted(set[str]().union(*(played.rules for played in results[OURS])))
    notes.append(f"hygiene of ours: {', '.join(rules) or 'none'}.")
    return BenchResult("agents", (Table(_title(sessions, plan), tuple(rows(sessions, results))),), tuple(notes))


async def _play_all(
    workspace: Workspace, side: ComparedServer, sessions: Sequence[Session], plan: AgentsPlan
) -> list[Played]:
    played = []
    for session in sessions:
        workspace.say(f"{side.name}: {session.name}")
        before = await _evaluated(side)
        played.append(await Player(side.client, session, plan).play())
        if before is not None:
            played[-1].evaluated = (await _evaluated(side) or 0) - before
    return played


async def _evaluated(side: ComparedServer) -> int | None:
    """By the engine's own count: also what is evaluated after an answer, for the next turn. None: it has none."""
    if not isinstance(side, OwnServer):
        return None
    return int((await side.client.wait_until_settled())["scheduler"]["evaluated_tokens"])


def _title(sessions: Sequence[Session], plan: AgentsPlan) -> str:
    return f"{len(sessions)} sessions, answers of {plan.answer_tokens} tokens"


def rows(sessions: Sequence[Session], results: Mapping[str, Sequence[Played]]) -> Iterator[Row]:
    for number, session in enumerate(sessions):
        for name, played in results.items():
            yield _row(f"{session.name}, {name}", played[number])
    for name, played in results.items():
        if len(played) > 1:
            yield _row(f"all, {name}", sum(played[1:], played[0]))


def _row(label: str, played: Played) -> Row:
    return Row(
        label,
        {
            "requests": played.requests,
            "prompt tokens": played.prompt_tokens,
            "unique": played.unique,
            "evaluated": played.evaluated,
            "ratio": f"{played.ratio:.3f}",
        },
    )
