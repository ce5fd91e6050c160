"""`replay`: recorded conversations, turn by turn, through a real server that is killed and started in between.

All of them are open at a time: the first turn of each is sent, then the second of each. So after a restart every
one of them goes on from what the server before had written. One request runs at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.recorded_sessions import Session, read_sessions
from emberkeep.bench.report import BenchResult, Row, Table, Value, series
from emberkeep.bench.servers import BenchClient, OwnServer, Reply, chat_body, parse_stream
from emberkeep.bench.workspace import Workspace
from emberkeep.errors import EmberkeepError
from emberkeep.types.request import Json
from emberkeep.values import dataclass

RESPONSES = "responses.jsonl"


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    file: Path
    conversations: int = 8
    most_turns: int = 12
    restart_every: int = 0
    """0: once, half way."""
    answer_tokens: int = 32
    recorded: bool = False
    """The history has what was answered then, and not what the model answers now."""
    out: Path | None = None

    def quick(self) -> ReplayPlan:
        return replace(self, conversations=2, most_turns=2, answer_tokens=4)


@dataclass(frozen=True, slots=True)
class Sent:
    """One turn that was sent."""

    session: str
    turn: int
    """From 1."""
    is_resumed: bool
    """The first of its conversation that this server got, though an earlier one got others."""
    reply: Reply | None
    failure: str = ""


async def run(workspace: Workspace, plan: ReplayPlan) -> BenchResult:
    sessions = read_sessions(plan.file)[: plan.conversations]
    return report(workspace.model.name, await Replay(workspace, plan, sessions).play())


class Replay:
    """All conversations with one model."""

    def __init__(self, workspace: Workspace, plan: ReplayPlan, sessions: Sequence[Session]) -> None:
        self._workspace, self._plan, self._sessions = workspace, plan, sessions
        self._data_dir = workspace.new_data_dir()
        self._out = plan.out
        self._histories: list[list[Json]] = [_system(session) for session in sessions]
        self._ended: set[int] = set()
        """Conversations in which a turn failed: what would come next has lost its history."""
        self._lives = 0
        self._known: set[int] = set()
        """Conversations that this server has got."""
        self.sent: list[Sent] = []

    async def play(self) -> Sequence[Sent]:
        if self._out is not None:
            self._out.mkdir(parents=True, exist_ok=True)
            (self._out / RESPONSES).unlink(missing_ok=True)
        waiting = list(self._turns())
        every = self._plan.restart_every or -(-len(waiting) // 2)
        for begin in range(0, len(waiting), every):
            await self._live(waiting[begin : begin + every])
        return self.sent

    def _turns(self) -> Iterator[tuple[int, int]]:
        """Conversation and turn, both from 0: the first turn of each, then the second."""
        for turn in range(self._plan.most_turns):
            yield from ((number, turn) for number, one in enumerate(self._sessions) if turn < len(one.told))

    async def _live(self, turns: Sequence[tuple[int, int]]) -> None:
        """One server, from its start until it is killed. Raises EmberkeepError if it does not start."""
        self._lives += 1
        self._known.clear()
        try:
            with OwnServer(self._workspace, self._data_dir, parallel=1, more=_SETTINGS) as server:
                client = server.client
                for number, turn in turns:
                    if number not in self._ended:
                        self._say(number, turn)
                        await self._send(client, number, turn)
                await _settle(client)
        finally:
            self._keep_log()

    async def _send(self, client: BenchClient, number: int, turn: int) -> None:
        session, history = self._sessions[number], self._histories[number]
        history.append({"role": "user", "content": session.told[turn]})
        body = chat_body(history, self._plan.answer_tokens) | ({"tools": session.tools} if session.tools else {})
        is_resumed = turn > 0 and number not in self._known
        raw, reply, failure = "", None, ""
        try:
            exchange = await client.post("/v1/chat/completions", body)
            raw = exchange.raw.decode(errors="replace")
            reply = parse_stream(exchange)
        except (EmberkeepError, OSError, ValueError, LookupError) as error:
            failure = str(error) or type(error).__name__
            self._ended.add(number)
        else:
            history.append({"role": "assistant", "content": self._answer(session, turn, reply)})
        self._known.add(number)
        self.sent.append(Sent(session.name, turn + 1, is_resumed, reply, failure))
        self._keep_response(self.sent[-1], body, raw)

    def _answer(self, session: Session, turn: int, reply: Reply) -> str:
        then = session.answers[turn] if turn < len(session.answers) else ""
        return then if self._plan.recorded and then else reply.text

    def _say(self, number: int, turn: int) -> None:
        session = self._sessions[number]
        self._workspace.say(f"server {self._lives}: {session.name}, turn {turn + 1}")

    # ── what is kept ──

    def _keep_log(self) -> None:
        log = self._data_dir / "serve.log"
        if self._out is not None and log.exists():
            shutil.copyfile(log, self._out / f"server-{self._lives}.log")

    def _keep_response(self, sent: Sent, body: Json, raw: str) -> None:
        if self._out is None:
            return
        line = {
            "server": self._lives,
            "conversation": sent.session,
            "turn": sent.turn,
            "after_restart": sent.is_resumed,
            "request": body,
            "response": raw,
            **(
                {"ttft_ms": sent.reply.ttft_ms, "text": sent.reply.text}
                if sent.reply
                else {"failure": sent.failure}
            ),
        }
        with (self._out / RESPONSES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


_SETTINGS = {"tools": "off", "log_level": "info"}
"""What a model writes is sent back as it wrote it. The log says what happened to each request."""


def _system(session: Session) -> list[Json]:
    return [{"role": "system", "content": session.system}] if session.system else []


async def _settle(client: BenchClient) -> None:
    """Returns when everything is on disk, or the server has died: what is not written is evaluated again."""
    try:
        await client.wait_until_settled()
    except (EmberkeepError, OSError, ValueError):
        return


# ── what came of it ──


def report(model: str, sent: Sequence[Sent]) -> BenchResult:
    title = f"{model}, {len({one.session for one in sent})} conversations, {len(sent)} requests"
    tables = [Table(title, tuple(rows(sent)))]
    failed = [one for one in sent if one.failure]
    if failed:
        failures = (Row(f"{one.session}, turn {one.turn}", {"failure": one.failure}) for one in failed)
        tables.append(Table("failures", tuple(failures)))
    return BenchResult("replay", tuple(tables), _NOTES)


_NOTES = (
    "reused: tokens of the prompt whose state was there; evaluated: the others. TTFT by the client's clock.",
    "after a restart: the first turn of a conversation in a server that followed one that was killed.",
)


def rows(sent: Sequence[Sent]) -> Iterator[Row]:
    for turn in sorted({one.turn for one in sent if one.turn}):
        yield _row(f"turn {turn}", [one for one in sent if one.turn == turn])
    if resumed := [one for one in sent if one.is_resumed]:
        yield _row("after a restart", resumed)
    yield _row("all", sent)


def _row(label: str, sent: Iterable[Sent]) -> Row:
    asked = list(sent)
    replies = [one.reply for one in asked if one.reply is not None]
    prompt, reused = (sum(getattr(one, name) for one in replies) for name in ("prompt_tokens", "cached_tokens"))
    values: dict[str, Value] = {"requests": len(asked), "failures": len(asked) - len(replies)}
    if replies:
        values |= {
            "TTFT": series((reply.ttft_ms for reply in replies), "ms"),
            "prompt tokens": prompt,
            "reused": reused,
            "evaluated": prompt - reused,
            "share": f"{100 * reused / max(prompt, 1):.1f} %",
            "mostly from": " ".join(sorted({reply.tier for reply in replies})),
        }
    return Row(label, values)
