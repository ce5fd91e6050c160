"""`endless`: a conversation many times as long as the context, whose client sends all of it with every turn.

Facts are told in its first tenth and asked for at its end, when they have long left the context. After every turn
the state that it left behind is read back as text: what stands there is what the model has read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from random import Random

from benchmarks.talkers import WAYS, Said, Talker
from emberkeep.bench.report import BenchResult, Row, Table, Value, percentile, series
from emberkeep.bench.workspace import Words, Workspace
from emberkeep.errors import EmberkeepError

_SYSTEM = "You are a friendly companion on a long walk. Answer in one or two short sentences."
_FACTS_PER_MESSAGE = 3
_FIRST = 3
"""Results of a search among which a fact has to be."""

_NAMES = (
    *("Adara", "Belmin", "Corvo", "Dagny", "Elswin", "Farren", "Gisela", "Hollis", "Ivarin", "Jorun", "Kerrin"),
    *("Lomax", "Maelis", "Nerida", "Osric", "Perrin", "Quilla", "Rowena", "Sorrel", "Tamsin"),
)
_THINGS = ("boat", "horse", "garden", "violin", "cottage", "bakery", "parrot", "sword", "tavern", "telescope")
_ADJECTIVES = ("amber", "cobalt", "crimson", "dusty", "frozen", "gilded", "hollow", "ivory", "silent", "velvet")
_NOUNS = ("badger", "comet", "falcon", "glacier", "heron", "lantern", "meadow", "orchid", "raven", "thistle")


@dataclass(frozen=True, slots=True)
class EndlessPlan:
    ctx: int = 1024
    times: int = 20
    """How many contexts the conversation fills, without the questions at its end."""
    exact_times: int = 3
    """The same for a second one, of which nothing may be approximate."""
    facts: int = 50
    user_tokens: int = 16
    answer_tokens: int = 48
    through: str = "http"
    is_exact: bool = False

    @property
    def context(self) -> int:
        return self.ctx

    def quick(self) -> EndlessPlan:
        return replace(self, ctx=512, times=3, exact_times=2, facts=4, answer_tokens=16)


@dataclass(frozen=True, slots=True)
class Fact:
    """One that cannot be guessed, with the question that asks for it."""

    sentence: str
    question: str
    value: str


@dataclass(frozen=True, slots=True)
class Turn:
    said: Said
    state_before: int
    """Tokens that the turn before has left."""
    state: int
    has_system: bool
    has_message: bool
    """Whether they were in the prompt."""
    asks: Fact | None = None
    is_found: bool = False
    has_fact: bool = False
    """Whether memory finds what it asks for, and whether that was in the prompt."""

    @property
    def kept(self) -> float:
        """The share of what was there that did not have to be evaluated again."""
        return min(self.said.cached_tokens / self.state_before, 1.0)


@dataclass(slots=True)
class Talk:
    messages: list[dict[str, str]] = field(default_factory=lambda: [{"role": "system", "content": _SYSTEM}])
    turns: list[Turn] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def state(self) -> int:
        return self.turns[-1].state if self.turns else 1

    @property
    def evicting(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.said.evictions]

    @property
    def following(self) -> list[Turn]:
        """Turns right after one that evicted."""
        pairs = pairwise(self.turns)
        return [turn for before, turn in pairs if before.said.evictions and not turn.said.evictions]

    @property
    def ordinary(self) -> list[Turn]:
        return [turn for turn in self.turns[1:] if not turn.said.evictions]

    @property
    def questions(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.asks]


async def run(workspace: Workspace, plan: EndlessPlan) -> BenchResult:
    workspace.require_context(plan.context)
    shorter = replace(plan, is_exact=True, times=plan.exact_times, facts=min(plan.facts, _FACTS_PER_MESSAGE))
    talks = {"": await _talk(workspace, plan), "exact, ": await _talk(workspace, shorter)}
    evicting = {label: talk for label, talk in talks.items() if talk.evicting}
    title = f"{plan.times} times a context of {plan.ctx:,} tokens, {plan.through}"
    return BenchResult(
        "endless",
        (
            Table(title, tuple(row for label, talk in talks.items() for row in _turn_rows(label, talk))),
            Table("evictions", tuple(_eviction_row(label, talk) for label, talk in evicting.items())),
            Table("what the prompts held", tuple(_held_row(label, talk) for label, talk in talks.items())),
        ),
        (
            "kept: tokens that were reused or moved up / tokens of the state that the turn before left.",
            "pause: what eviction costs besides the engine's own work.",
            *(doubt for talk in talks.values() for doubt in _doubts(talk)),
        ),
    )


def _doubts(talk: Talk) -> Iterator[str]:
    yield from (f"A turn failed: {error}" for error in talk.errors[:1])
    for turn in talk.questions:
        if turn.asks and not (turn.is_found and turn.has_fact):
            yield f"Not found: {turn.asks.question}"


# ── the conversation ──


async def _talk(workspace: Workspace, plan: EndlessPlan) -> Talk:
    facts, talk = made_up_facts(plan.facts), Talk()
    total, told = plan.times * plan.ctx, 0
    async with WAYS[plan.through](workspace, plan.ctx) as talker:
        for number, text in enumerate(_tell(facts, workspace.words, plan)):
            if told >= total:
                break
            if number % 20 == 0:
                workspace.say(f"{'exact, ' * plan.is_exact}{told:,} of {total:,} tokens")
            told += await _say(talk, talker, plan, text)
        workspace.say(f"asking for {len(facts)} facts")
        for fact in facts:
            await _say(talk, talker, plan, fact.question, fact)
    return talk


def _tell(facts: Sequence[Fact], words: Words, plan: EndlessPlan) -> Iterator[str]:
    """Facts, with a little else after every second message, and then anything, without end."""
    numbers = count()
    for begin in range(0, len(facts), _FACTS_PER_MESSAGE):
        yield " ".join(fact.sentence for fact in facts[begin : begin + _FACTS_PER_MESSAGE])
        if begin % 2:
            yield _small_talk(words, plan, next(numbers))
    yield from (_small_talk(words, plan, number) for number in numbers)


def _small_talk(words: Words, plan: EndlessPlan, number: int) -> str:
    return f"Let us talk about {words.text(plan.user_tokens - 4, number)}."


async def _say(talk: Talk, talker: Talker, plan: EndlessPlan, text: str, asks: Fact | None = None) -> int:
    """About how many tokens the conversation has become longer. A turn that fails is left out of it."""
    messages = [*talk.messages, {"role": "user", "content": text}]
    try:
        found = await talker.search(text, _FIRST) if asks else []
        said = await talker.ask(messages, plan.answer_tokens, exact=plan.is_exact)
        left = await talker.left()
    except EmberkeepError as error:
        talk.errors.append(str(error))
        return 1
    before, has_message, _ = left.text.rpartition(text)
    turn = Turn(said, talk.state, left.tokens, has_system=_SYSTEM in before, has_message=bool(has_message))
    if asks:
        is_found = any(asks.sentence in one for one in found)
        turn = replace(turn, asks=asks, is_found=is_found, has_fact=asks.value in before)
    talk.turns.append(turn)
    talk.messages = [*messages, {"role": "assistant", "content": said.text}]
    return plan.user_tokens + said.completion_tokens


# ── the tables ──


def _turn_rows(label: str, talk: Talk) -> Iterator[Row]:
    kinds = {
        "without an eviction": talk.ordinary,
        "with one": talk.evicting,
        "right after one": talk.following,
    }
    for kind, turns in kinds.items():
        if turns:
            yield Row(f"{label}{kind}", _turn_values(turns))


def _turn_values(turns: Sequence[Turn]) -> dict[str, Value]:
    said = [turn.said for turn in turns]
    return {
        "turns": len(turns),
        "TTFT": series((one.ttft_ms for one in said), "ms"),
        "prompt tokens": series((one.prompt_tokens for one in said), ""),
        "evaluated": series((one.prompt_tokens - one.cached_tokens for one in said), ""),
        "reused": series((100 * one.reuse for one in said), "%"),
        "kept": series((100 * turn.kept for turn in turns), "%"),
    }


def _eviction_row(label: str, talk: Talk) -> Row:
    all_ = [eviction for turn in talk.evicting for eviction in turn.said.evictions]
    pauses = [one.plan_ms + one.archive_ms for one in all_]
    return Row(
        f"{label}{len(all_)} evictions",
        {
            "messages": series((one.messages for one in all_), ""),
            "tokens": series((one.tokens for one in all_), ""),
            "planning": series((one.plan_ms for one in all_), "ms"),
            "archiving": series((one.archive_ms for one in all_), "ms"),
            "pause": series(pauses, "ms"),
            "pause, p95": f"{percentile(pauses, 95):.1f} ms",
            "engine": series((one.engine_ms for one in all_), "ms"),
            "not archived": sum(not one.archived for one in all_),
        },
    )


def _held_row(label: str, talk: Talk) -> Row:
    turns, questions = talk.turns, talk.questions
    return Row(
        f"{label}{len(turns)} turns",
        {
            "errors": len(talk.errors),
            "system message": _share(turn.has_system for turn in turns),
            "current message": _share(turn.has_message for turn in turns),
            "marked approximate": _share(turn.said.is_approximate for turn in turns),
            f"fact among the first {_FIRST} found": _share(turn.is_found for turn in questions),
            "fact in the prompt": _share(turn.has_fact for turn in questions),
        },
    )


def _share(these: Iterable[bool]) -> str:
    known = list(these)
    return f"{sum(known)} of {len(known)}"


def made_up_facts(count: int) -> list[Fact]:
    """At most a hundred. Names and things come again, but never together; values do not."""
    random = Random(count)
    owned = random.sample([(name, thing) for name in _NAMES for thing in _THINGS], count)
    values = random.sample([f"{first}-{second}" for first in _ADJECTIVES for second in _NOUNS], count)
    return [
        Fact(f"The {thing} of {name} is called {value}.", f"What is the {thing} of {name} called?", value)
        for (name, thing), value in zip(owned, values, strict=True)
    ]
