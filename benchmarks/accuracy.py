"""`accuracy`: the same questions answered from stored state and by fresh evaluation, greedily, token by token.

Every question is asked in its conversation, as a client would (*turns*); then cold, which is what the others are
compared with. Then a part of its prompt is stored, another share for each question, and it is asked from there:
out of the engine, out of RAM, and from disk after the model was opened again. At last it is evaluated once more
without any stored state, in other slices and beside others: what differs between two cold evaluations is the
engine's own rounding. All get the same token ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from benchmarks.model_under_test import ModelUnderTest, open_under_test
from benchmarks.question_files import Question, Talk, own_questions, read_questions
from benchmarks.questions import holds_answer
from emberkeep.bench.report import BenchResult, Row, Series, Table, Value, series
from emberkeep.bench.workspace import Workspace
from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError
from emberkeep.library.results import Result, VerifyReport
from emberkeep.types.events import TokenLogprob
from emberkeep.types.lineage import private_namespace
from emberkeep.types.request import Execution, Message, Request, Sampling
from emberkeep.values import dataclass

TURNS, HOT, RAM, DISK, TURNS_DISK = "turns, hot", "hot", "RAM", "disk", "turns, disk"
ROUNDING = "cold, other slices"
BUCKETS = ((0, "0 %"), (25, "0–25 %"), (50, "25–50 %"), (75, "50–75 %"), (99.999, "75–99 %"), (100, "100 %"))
"""Up to how many percent of a prompt were reused, and how that is called."""
_SHARES = (0.0, 0.12, 0.37, 0.62, 0.87, 1.0)
"""Of a prompt that is stored before it is asked for: one of each bucket, in turn."""
_SLICE, _AT_ONCE = 32, 4
"""Fewer rows than llama.cpp computes together, and beside others: as answers and a busy server do it."""
_LIKELY = -7.0
"""Only tokens with a logprob of at least this are compared, one in a thousand: rounding moves others more, and no
sampler would take them."""
_CANDIDATES = 64
"""So many are compared at each place."""
_FACTOR = 2.0
"""The largest difference of some dozens is no limit for some dozens more. Wrong state differs by whole nats."""
_NOTHING = 1e-4
"""Nats: what float32 leaves of a logprob where an engine happens to give the same bytes twice."""

_STORED = Request(execution=Execution(from_store=True))


@dataclass(frozen=True, slots=True)
class AccuracyPlan:
    questions: Path | None = None
    """None: those that come with the package."""
    engine: str = "auto"
    prompts: int = 40
    """Questions that are asked."""
    answer_tokens: int = 16

    def quick(self) -> AccuracyPlan:
        return replace(self, prompts=6, answer_tokens=8)


@dataclass(frozen=True, slots=True)
class Asked:
    """A question in its place: everything before it was said."""

    question: Question
    ids: tuple[int, ...]

    def stored(self, number: int) -> tuple[int, ...]:
        """What of it is stored beforehand."""
        return self.ids[: round(_SHARES[number % len(_SHARES)] * len(self.ids))]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that is compared with the cold one to the same ids."""

    number: int
    """The question's."""
    way: str
    compared: VerifyReport
    answers: tuple[str, ...] = ()
    """What would be right."""

    @property
    def share(self) -> float:
        """Percent of what could be reused: the last token of a prompt is always evaluated."""
        return 100 * self.compared.reused_tokens / max(self.compared.cached.lookup.prompt_tokens - 1, 1)

    @property
    def bucket(self) -> str:
        return next(name for most, name in BUCKETS if self.share <= most)

    @property
    def largest(self) -> float:
        """Nats by which the logprob of a likely token differs at most, as long as both say the same."""
        pairs = zip(self.compared.cached.logprobs, self.compared.fresh.logprobs, strict=False)
        last = self.compared.first_difference
        upto = islice(pairs, None if last is None else last + 1)
        return max((_difference(warm, cold) for warm, cold in upto), default=0.0)

    @property
    def margin(self) -> float | None:
        """How much likelier the cold choice was than the other one, where they differ first."""
        at = self.compared.first_difference
        if at is None or at >= min(len(self.compared.cached.logprobs), len(self.compared.fresh.logprobs)):
            return None
        cold, other = self.compared.fresh.logprobs[at], self.compared.cached.logprobs[at].token_id
        return next((cold.logprob - token.logprob for token in cold.top if token.token_id == other), None)

    def is_right(self, result: Result) -> bool:
        return holds_answer(result.text, self.answers)


def _difference(warm: TokenLogprob, cold: TokenLogprob) -> float:
    """0 where either has no candidates."""
    here = {token.token_id: token.logprob for token in warm.top}
    # What is not among the candidates is at most as likely as the last of them.
    last = min(here.values(), default=0.0)
    likely = [token for token in cold.top if token.logprob >= _LIKELY] if here else []
    return max(
        (
            abs(token.logprob - here[token.token_id]) if token.token_id in here else token.logprob - last
            for token in likely
        ),
        default=0.0,
    )


async def run(workspace: Workspace, plan: AccuracyPlan) -> BenchResult:
    talks = own_questions() if plan.questions is None else read_questions(plan.questions)
    examination = Examination(workspace, plan, talks)
    return report(await examination.answers(), examination.left_out)


class Examination:
    def __init__(self, workspace: Workspace, plan: AccuracyPlan, talks: Sequence[Talk]) -> None:
        self._workspace, self._plan, self._talks = workspace, plan, talks
        self._data_dir = workspace.new_data_dir()
        self.left_out = 0
        """Questions for which the context is too short."""
        self._asked: list[Asked] = []
        self._cold: list[Result] = []
        self._warm: dict[str, list[Result]] = {}

    async def answers(self) -> list[Answer]:
        """Each question in every way but cold, with the cold answer to compare with. Raises EmberkeepError."""
        async with open_under_test(self._config()) as model:
            await self._in_turns(model)
            self._cold = await self._one_by_one(model, "cold", Request(use_cache=False))
            await self._store_prefixes(model)
        async with open_under_test(self._config()) as model:
            self._warm[DISK] = await self._one_by_one(model, DISK, _STORED, own=True)
            self._warm[TURNS_DISK] = await self._one_by_one(model, TURNS_DISK, _STORED)
        async with open_under_test(replace(self._config(), parallel=_AT_ONCE)) as model:
            self._warm[ROUNDING] = await self._evaluate_beside_others(model)
        return [
            Answer(number, way, VerifyReport(result, self._cold[number]), asked.question.answers)
            for way, results in self._warm.items()
            for number, (asked, result) in enumerate(zip(self._asked, results, strict=True))
        ]

    def _config(self) -> Config:
        model, engine = str(self._workspace.model), self._plan.engine
        return Config(model=model, data_dir=self._data_dir, engine=engine, parallel=1)

    async def _in_turns(self, model: ModelUnderTest) -> None:
        """What is answered to a question is said before the next one. Those that do not fit are not asked."""
        self._warm[TURNS] = []
        room = model.backend.card.context - self._plan.answer_tokens - 1
        for talk in self._talks:
            messages = [Message(role, text) for role, text in talk.before]
            for number, question in enumerate(talk.questions):
                if len(self._asked) == self._plan.prompts:
                    return
                messages.append(Message("user", question.text))
                ids = tuple(model.prompt_ids(messages))
                if len(ids) > room:
                    self.left_out += len(talk.questions) - number
                    break
                self._say(TURNS, len(self._asked))
                self._asked.append(Asked(question, ids))
                result = (await model.ask(self._request(ids))).result
                self._warm[TURNS].append(result)
                messages.append(Message("assistant", result.text))
        if not self._asked:
            raise EmberkeepError(f"No question fits into {room:,} tokens: choose another --model or --questions.")

    async def _one_by_one(
        self, model: ModelUnderTest, way: str, cache: Request, *, own: bool = False
    ) -> list[Result]:
        """`cache`: says what it may use. `own`: from what was stored for each question alone."""
        results = []
        for number, asked in enumerate(self._asked):
            self._say(way, number)
            request = replace(self._request(asked.ids, number if own else None), use_cache=cache.use_cache)
            request = request.decided(from_store=cache.execution.from_store, is_kept=False)
            results.append((await model.ask(request)).result)
        return results

    async def _store_prefixes(self, model: ModelUnderTest) -> None:
        self._warm[HOT], self._warm[RAM] = [], []
        for number, asked in enumerate(self._asked):
            self._say(f"{HOT} and {RAM}", number)
            if stored := asked.stored(number):
                await model.ask(replace(self._request(stored, number), max_tokens=0, top_logprobs=None))
            again = self._request(asked.ids, number).decided(is_kept=False)
            self._warm[HOT].append((await model.ask(again)).result)
            self._warm[RAM].append((await model.ask(again.decided(from_store=True))).result)

    async def _evaluate_beside_others(self, model: ModelUnderTest) -> list[Result]:
        results: list[Result] = []
        for first in range(0, len(self._asked), _AT_ONCE):
            self._say(ROUNDING, first)
            some = self._asked[first : first + _AT_ONCE]
            own = [replace(self._request(asked.ids), use_cache=False, prefill_slice=_SLICE) for asked in some]
            fresh = [request.decided(is_kept=False) for request in own]
            results += [reply.result for reply in await asyncio.gather(*map(model.ask, fresh))]
        return results

    def _request(self, ids: tuple[int, ...], number: int | None = None) -> Request:
        """`number`: of the question whose own state it is to find. None: that of the conversations."""
        return Request(
            prompt=ids,
            namespace=private_namespace("turns" if number is None else f"question {number}"),
            max_tokens=self._plan.answer_tokens,
            sampling=Sampling(temperature=0),
            top_logprobs=_CANDIDATES,
            speculation=False,  # steps of another shape round differently
        )

    def _say(self, way: str, number: int) -> None:
        of = len(self._asked) if self._cold or way == "cold" else self._plan.prompts
        self._workspace.say(f"{way}: question {number + 1} of {of}")


# ── what came of it ──


def report(answers: Sequence[Answer], left_out: int = 0) -> BenchResult:
    warm = [answer for answer in answers if answer.way != ROUNDING]
    rounding = [answer for answer in answers if answer.way == ROUNDING]
    limit = max((answer.largest for answer in rounding), default=0.0)
    bound = max(_FACTOR * limit, _NOTHING)
    by_bucket = [(name, [one for one in warm if one.bucket == name]) for _, name in BUCKETS]
    by_way = [(way, [one for one in warm if one.way == way]) for way in dict.fromkeys(one.way for one in warm)]
    last = _row(ROUNDING, rounding, bound)
    questions = len({answer.number for answer in answers})
    tables = [
        Table(
            f"{questions} questions, by the share of the prompt that was reused", (*_rows(by_bucket, bound), last)
        ),
        Table("the same, by where it came from", (*_rows(by_way, bound), last)),
        Table("distribution of reuse", tuple(_distribution(by_bucket, [way for way, _ in by_way]))),
    ]
    if other := tuple(_different(answers)):
        tables.append(Table("answers that are not the cold one", other))
    notes = [*_notes(warm, limit)]
    if left_out:
        notes.append(f"{left_out} questions do not fit into the model's context and were not asked.")
    return BenchResult("accuracy", tuple(tables), tuple(notes))


def _rows(groups: Iterable[tuple[str, Sequence[Answer]]], bound: float) -> Iterator[Row]:
    return (_row(name, group, bound) for name, group in groups if group)


def _row(label: str, answers: Sequence[Answer], bound: float) -> Row:
    same = sum(answer.compared.equal for answer in answers)
    firsts = [at for answer in answers if (at := answer.compared.first_difference) is not None]
    values: dict[str, Value] = {
        "answers": len(answers),
        "same": f"{100 * same / len(answers):.0f} %",
        "first difference": f"token {min(firsts) + 1}" if firsts else "-",
        "largest Δ logprob": _nats([answer.largest for answer in answers], bound),
        "beyond rounding": sum(answer.largest > bound for answer in answers),
    }
    if known := [answer for answer in answers if answer.answers]:
        values["right, cold"] = _percent(answer.is_right(answer.compared.fresh) for answer in known)
        values["right, here"] = _percent(answer.is_right(answer.compared.cached) for answer in known)
    return Row(label, values)


def _nats(differences: Sequence[float], bound: float) -> Series:
    """In millionths where an engine computes so precisely that others would all be 0.000."""
    return series(differences, "nats") if bound >= 0.01 else series((1e6 * one for one in differences), "µnats")


def _percent(chosen: Iterable[bool]) -> str:
    all_ = list(chosen)
    return f"{100 * sum(all_) / len(all_):.1f} %"


def _distribution(buckets: Iterable[tuple[str, Sequence[Answer]]], ways: Sequence[str]) -> Iterator[Row]:
    for name, group in buckets:
        counts: dict[str, Value] = {way: sum(answer.way == way for answer in group) for way in ways}
        shares: dict[str, Value] = {"reused": series((one.share for one in group), "%")} if group else {}
        yield Row(name, {**counts, "all": len(group), **shares})


def _different(answers: Iterable[Answer]) -> Iterator[Row]:
    for answer in answers:
        if not answer.compared.equal:
            at, margin = answer.compared.first_difference, answer.margin
            yield Row(
                f"question {answer.number + 1}, {answer.way}",
                {
                    "reused": f"{answer.share:.0f} %",
                    "first difference": "-" if at is None else f"token {at + 1}",
                    "cold choice likelier by": "-" if margin is None else f"{margin:.3f} nats",
                    "cold": _short(answer.compared.fresh.text),
                    "here": _short(answer.compared.cached.text),
                },
            )


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 40 else f"{line[:39]}…"


def _notes(warm: Sequence[Answer], limit: float) -> Iterator[str]:
    yield "Δ logprob: of tokens likelier than one in a thousand, as far as both answers agree."
    yield f"{ROUNDING}: evaluated twice, nothing reused; slices of {_SLICE} tokens, {_AT_ONCE} prompts at once."
    largest = max(answer.largest for answer in warm)
    beyond = sum(answer.largest > max(_FACTOR * limit, _NOTHING) for answer in warm)
    if beyond:
        yield (
            f"{beyond} of {len(warm)} answers from stored state differ from the cold one by more than "
            f"{_FACTOR:g} times what two cold evaluations differ by: compare them with `Emberkeep.verify`."
        )
    else:
        yield (
            f"No difference beyond rounding in {len(warm)} answers: at most {largest:.2g} nats. Two cold "
            f"evaluations differ by up to {limit:.2g}, and {_FACTOR:g} times that is the limit."
        )
