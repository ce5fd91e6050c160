"""Whatever is drafted, and by whom, an answer is the one of plain decoding, and so is the state that it leaves."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.chat.grammar import Grammars
from emberkeep.engine.base import KvUnit, Logits
from emberkeep.engine.fake import FakeEngine
from emberkeep.sched import speculation
from emberkeep.sched.sampling import Sampler
from emberkeep.types.request import JsonFormat, Request, Sampling
from helpers.chance import examples
from helpers.drafting import LONG, PROMPT, SmallEngine, ToldCorpus, answer_of, knows, wrong_at
from helpers.engines import RecordingEngine
from helpers.scheduling import CLOSING, GREEDY, Gate, Recorder, Rig


@pytest.fixture(scope="module")
def plain() -> list[int]:
    """Long enough that there is something to draft."""
    answer = answer_of().answer
    assert len(answer) > 20
    return answer


CORPORA = {
    "right": lambda text: knows(text),
    "wrong at once": lambda text: wrong_at(text, 0),
    "wrong in the middle": lambda text: wrong_at(text, 3),
    "always the same": lambda text: lambda latest, limit: [65] * limit,
    "what was just said": lambda text: lambda latest, limit: latest[-limit:],
    "no tokens at all": lambda text: lambda latest, limit: [-1, 10**6] * limit,
    "the end of the turn": lambda text: lambda latest, limit: [FakeEngine().vocab.eos] * limit,
}
MODELS = {"a model that agrees": "fake", "another model": "others"}
SOURCES = [*CORPORA, *MODELS]
SOME = ["right", "wrong in the middle", "what was just said", *MODELS]


def drafted_by(kind: str, text: list[int]) -> dict[str, Any]:
    """What a rig needs for such drafts; `text`: what is going to be said, after its prompt."""
    if kind in MODELS:
        return {"draft": SmallEngine(weights=MODELS[kind])}
    return {"corpus": ToldCorpus(CORPORA[kind](text))}


@pytest.mark.parametrize("kind", SOURCES)
def test_greedy_text_is_that_of_plain_decoding(plain, kind):
    spoken = answer_of(**drafted_by(kind, PROMPT + plain))
    assert spoken.answer == plain
    assert spoken.ending.timings.draft_n_accepted <= spoken.ending.timings.draft_n
    assert (spoken.ending.timings.draft_n > 0) == (kind not in ("no tokens at all", "the end of the turn"))


@pytest.mark.parametrize("kind", ["right", "a model that agrees"])
def test_right_drafts_save_steps(plain, kind):
    engine = RecordingEngine(cells=1 << 15)
    spoken = answer_of(engine=engine, **drafted_by(kind, PROMPT + plain))
    decodes = [shape for batch in engine.shapes for shape in batch if shape[1] >= len(PROMPT) - 1]
    assert len(decodes) < len(plain) / 3
    assert spoken.ending.timings.draft_n_accepted == spoken.ending.timings.draft_n > len(plain) / 2


def test_a_stored_path_is_drafted_from_the_first_token_on_and_a_prediction_also_after_a_difference(plain):
    prediction = (*plain[:5], 33, *plain[6:])
    for spoken in answer_of(corpus=ToldCorpus(path=plain)), answer_of(corpus=ToldCorpus(), prediction=prediction):
        assert spoken.answer == plain
        assert spoken.ending.timings.draft_n_accepted > len(plain) / 2


class WritingEngine(FakeEngine):
    """Writes one text, whatever it is asked."""

    def __init__(self, prompt: list[int], answer: list[int]) -> None:
        super().__init__()
        self._text = [*prompt, *answer, self.vocab.eos]

    def logits(self, index: int, row: int = 0) -> Logits:
        logits = np.zeros(self.vocab.size, np.float32)
        logits[self._text[self._latest[index][1] + row]] = 20.0
        return logits


WORDS = b"box jar lid mug pot rim tap urn vat wok zip axe bib cog dam elk fig gum hay ivy".split()
SOURCE = b"".join(b"the %b has a count of %b, " % pair for pair in zip(WORDS, WORDS[::-1], strict=True))
RENAMED = SOURCE.replace(b"count", b"SIZE")


@pytest.mark.parametrize("source", ["prompt", "prediction"])
def test_a_text_that_is_written_again_with_another_name_is_drafted_with_it(source):
    begun = list(RENAMED[:12])
    prompt = [*(SOURCE if source == "prompt" else b"Rename it."), *b"\nAgain:\n", *begun]
    prediction = tuple(SOURCE[len(begun) :] if source == "prediction" else b"")
    answer = list(RENAMED[len(begun) :])
    with Rig(engine=WritingEngine(prompt, answer), corpus=ToldCorpus()) as rig:
        spoken = rig.run(prompt, max_new=len(answer) + 1, prediction=prediction)
    assert spoken.answer == answer
    assert spoken.ending.timings.draft_n_accepted > 0.86 * len(answer)
    assert spoken.ending.timings.draft_n < 1.15 * spoken.ending.timings.draft_n_accepted


def test_a_text_that_the_answer_has_left_keeps_nothing_else_from_being_looked_for():
    prompt = [*SOURCE, *b"Again: ", *SOURCE[:12]]
    new = [33 + i % 62 for i in range(60)]
    answer = [*SOURCE[12:40], *new]
    corpus = ToldCorpus()
    with Rig(engine=WritingEngine(prompt, answer), corpus=corpus) as rig:
        spoken = rig.run(prompt, max_new=len(answer) + 1)
    assert spoken.answer == answer
    assert corpus.asked > 0.8 * len(new)


def test_with_a_seed_nothing_is_drafted_unless_it_is_asked_for():
    """Real engines round differently in steps with drafts, and a seed is to give the same text again."""
    assert Request().may_speculate
    assert not Request(sampling=Sampling(seed=1)).may_speculate
    assert Request(sampling=Sampling(seed=1), speculation=True).may_speculate


@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, seed=7),
        Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05, seed=11),
        Sampling(temperature=1.3, typical_p=0.8, seed=3, logit_bias={70: 4.0, 71: -100.0}),
        Sampling(temperature=0.9, seed=6, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.4),
    ],
    ids=["sampled", "cut", "typical", "penalised"],
)
def test_a_seed_gives_the_text_that_it_gives_without(kind, sampling):
    without = answer_of(sampling=sampling, top_logprobs=2)
    sources = drafted_by(kind, PROMPT + without.answer)
    spoken = answer_of(sampling=sampling, top_logprobs=2, speculation=True, **sources)
    assert spoken.answer == without.answer
    assert spoken.logprobs == without.logprobs
    if kind == "a model that agrees":  # it draws with the same random numbers
        timings = spoken.ending.timings
        assert timings.draft_n_accepted == timings.draft_n > timings.predicted_n / 2


@pytest.mark.parametrize("kind", ["right", "wrong in the middle", *MODELS])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 6, 9, 11])
def test_a_stop_inside_a_draft_leaves_the_same_state_as_without(plain, kind, length):
    """What comes after the stop was evaluated, and is gone."""
    states = []
    for sources in ({}, drafted_by(kind, PROMPT + plain)):
        with Rig(**sources) as rig:
            stops = Recorder(stop_at=lambda tokens: length - 1 if len(tokens) >= length else None)
            assert rig.run(PROMPT, stops, max_new=LONG).tokens == plain[:length]
            (idle,) = rig.scheduler._slots.idle
            states.append((idle.tokens[:].tolist(), idle.computed, bytes(exported(rig, idle))))
    assert states[0] == states[1]


@pytest.mark.parametrize("kind", ["right", "a model that agrees"])
@pytest.mark.parametrize("most", range(1, 20, 2))
def test_no_more_than_asked_for_is_sampled(plain, kind, most):
    assert answer_of(max_new=most, **drafted_by(kind, PROMPT + plain)).answer == plain[:most]


@pytest.mark.parametrize("kind", SOURCES)
def test_the_next_turn_reuses_all_of_it(plain, kind, tmp_path):
    """From the engine, and from disk in another process."""
    more = [*PROMPT, *plain, *CLOSING, *range(40, 60)]
    with Rig(tmp_path, **drafted_by(kind, PROMPT + plain)) as rig:
        rig.run(PROMPT, max_new=len(plain))
        hot = rig.run(more, max_new=8)
        assert hot.lookup.hot_tokens >= len(PROMPT) + len(plain)
    with Rig(tmp_path, corpus=ToldCorpus(lambda latest, limit: [66] * limit)) as rig:
        cold = rig.run(more, max_new=8)
        assert cold.lookup.cold_tokens >= len(PROMPT) + len(plain)
    assert cold.answer == hot.answer == answer_of(more).answer[:8]


@pytest.mark.parametrize("kind", ["right", "a model that agrees"])
def test_sequences_with_and_without_drafts_share_a_step(plain, kind):
    others = [[90 - i % 37 for i in range(length)] for length in (30, 45)]
    alone = [answer_of(prompt).answer for prompt in others]
    sources = drafted_by(kind, PROMPT + plain)
    with Rig(**sources) as rig:
        together = Gate(rig.engine)
        running = [rig.start(prompt, max_new=LONG) for prompt in (PROMPT, *others)]
        unwanted = rig.start([*PROMPT[:-1], 99], max_new=LONG, speculation=False)
        together.open()
        assert [each.answer for each in running] == [plain, *alone]
        assert unwanted.wait().ending.timings.draft_n == 0
    if "draft" in sources:
        assert all(each.ending.timings.draft_n_accepted for each in running)


def test_beside_a_long_prompt_no_more_rows_want_logits_than_an_engine_gives():
    """The prompt's own rows want none."""
    engine = RecordingEngine(cells=1 << 15, context=1 << 13, batch=512)
    with Rig(engine=engine, corpus=ToldCorpus(lambda latest, limit: [65] * limit), parallel=8) as rig:
        running = [rig.start(PROMPT[i:] + PROMPT, max_new=LONG) for i in range(7)]
        running.append(rig.start([40 + i % 70 for i in range(4000)], max_new=4))
        assert all(each.wait().error is None for each in running)
    wanted = [sum(outputs for *_, outputs in batch) for batch in engine.shapes]
    assert 8 < max(wanted) <= engine.capabilities.outputs


def test_a_step_that_has_no_room_for_drafts_is_taken_without(plain):
    cells = len(PROMPT) + LONG + len(CLOSING)
    engine = FakeEngine(cells=cells, context=cells)
    with Rig(engine=engine, corpus=ToldCorpus(knows(PROMPT + plain))) as rig:
        assert rig.run(PROMPT, max_new=LONG).answer == plain


@pytest.mark.parametrize("unit", [KvUnit.SNAPSHOT, KvUnit.BOTH])
def test_models_with_snapshots_do_without_and_say_so(unit):
    corpus, draft = ToldCorpus(lambda latest, limit: [65] * limit), SmallEngine()
    with Rig(engine=FakeEngine(kv_unit=unit), corpus=corpus, draft=draft) as rig:
        assert rig.run(PROMPT, max_new=LONG).ending.timings.draft_n == 0
        stats = rig.scheduler.speculation_stats()
    assert not stats.enabled
    assert "cannot go back" in stats.reason
    assert not corpus.asked
    assert draft.evaluated_tokens == 0


def test_what_is_of_no_use_is_looked_for_in_a_share_of_the_time(plain, monkeypatch):
    monkeypatch.setattr(speculation, "_MOST_LOOKING_S", 1e-6)
    useless, useful = ToldCorpus(wrong_at(PROMPT + plain, 0)), ToldCorpus(wrong_at(PROMPT + plain, 1))
    accepted = []
    for corpus in (useless, useful):
        with Rig(corpus=corpus) as rig:
            rig.scheduler._parts.speculation._seconds = lambda rows, depth, outputs: 1e-7
            accepted.append(rig.run(PROMPT, max_new=LONG).ending.timings.draft_n_accepted)
    assert 0 < useless.asked < 0.5 * len(plain)
    assert useful.asked > 0.9 * (len(plain) - accepted[1] - 1)


def test_an_error_while_drafting_harms_no_answer(plain):
    def fails(latest: list[int], limit: int) -> list[int]:
        raise RuntimeError("injected")

    assert answer_of(corpus=ToldCorpus(fails)).answer == plain


@pytest.mark.parametrize(("kind", "source"), [("right", "corpus"), ("a model that agrees", "model")])
def test_figures_say_what_was_drafted_by_whom_and_how_much_of_it_was_right(plain, kind, source):
    with Rig(**drafted_by(kind, PROMPT + plain)) as rig:
        timings = rig.run(PROMPT, max_new=LONG).ending.timings
        stats = rig.scheduler.speculation_stats()
    assert stats.enabled
    assert (stats.drafted_tokens, stats.accepted_tokens) == (timings.draft_n, timings.draft_n_accepted)
    figures = stats.sources[source]
    assert sum(figures.accepted_lengths) == figures.drafts > 0
    assert figures.accepted_tokens > 0
    if source == "model":
        assert stats.draft_model.steps > 0
        assert stats.json()["draft_model"]["reason"] is None


def exported(rig: Rig, idle) -> memoryview:
    (payload,) = rig.engine.export_kv(idle.slot, (0, idle.computed)).payloads()
    return payload


class BiasedEngine(FakeEngine):
    """Six tokens, always with the same probabilities: what is drawn can be counted."""

    SHARES = np.array([0.4, 0.3, 0.15, 0.1, 0.04, 0.01])

    def __init__(self) -> None:
        super().__init__(cells=1 << 12, context=1 << 12)
        self._logits = np.full(self.vocab.size, -np.inf, np.float32)
        self._logits[65:71] = np.log(self.SHARES)

    def logits(self, index: int, row: int = 0) -> Logits:
        return self._logits


DRAWS = 20_000
"""With each of five drafters: 100,000."""

DRAFTERS = {
    "good": lambda latest, limit: [65] * limit,
    "bad": lambda latest, limit: [70] * limit,
    "impossible": lambda latest, limit: [80] * limit,
    "what was drawn last": lambda latest, limit: latest[-1:] * limit,
    "what was not drawn for longest": lambda latest, limit: [min(range(65, 71), key=latest[::-1].count)] * limit,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAFTERS)
def test_draws_have_the_distribution_of_the_model(kind):
    drawn: Counter[int] = Counter()
    with Rig(engine=BiasedEngine(), corpus=ToldCorpus(DRAFTERS[kind])) as rig:
        for seed in range(DRAWS // 2000):
            recorder = rig.run(
                PROMPT, max_new=2000, sampling=Sampling(1.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
            )
            drawn.update(recorder.answer)
        stats = rig.scheduler.speculation_stats()
    assert stats.drafted_tokens > DRAWS // 4
    total = sum(drawn.values())
    assert total == DRAWS
    expected = total * BiasedEngine.SHARES
    squares = sum((drawn[65 + i] - expected[i]) ** 2 / expected[i] for i in range(6))
    assert squares < 20.5, "less likely than 1 in 1000 with 5 degrees of freedom"


SCHEMA = {
    "type": "object",
    "properties": {
        "first_name": {"enum": ["Ada", "Adele", "Alan"]},
        "kind": {"enum": ["ab", "abc", "b"]},
        "known": {"type": "boolean"},
        "several": {"type": "array", "items": {"enum": ["one", "two"]}, "maxItems": 3},
    },
    "required": ["first_name", "kind", "known", "several"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def constraint():
    found = Grammars(FakeEngine().vocab).constraint_for(Request(prompt="x", format=JsonFormat(schema=SCHEMA)))
    assert found is not None
    return found


def test_what_a_schema_forces_is_taken_without_steps_of_its_own(constraint):
    engine = RecordingEngine(cells=1 << 15)
    with Rig(engine=engine, corpus=ToldCorpus()) as rig:
        written = written_by(rig, Sampler(GREEDY, constraint.matcher()))
        stats = rig.scheduler.speculation_stats()
    assert set(json.loads(written)) == set(SCHEMA["required"])
    assert stats.sources["grammar"].acceptance > 0.5
    assert stats.sources["grammar"].accepted_tokens > len(written) / 3


@examples(30)
@given(data=st.data(), kind=st.sampled_from(["what was just said", "always the same", "nothing"]))
def test_with_grammar_penalties_and_stop_text_is_that_of_plain_decoding(constraint, data, kind):
    sampling = Sampling(
        temperature=data.draw(st.sampled_from([0.0, 0.7, 1.5])),
        top_k=data.draw(st.sampled_from([0, 5, 40])),
        top_p=data.draw(st.sampled_from([0.8, 1.0])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.4])),
        frequency_penalty=data.draw(st.sampled_from([0.0, 0.6])),
        seed=data.draw(st.integers(0, 1000)),
        logit_bias=data.draw(st.sampled_from([{}, {97: 3.0}])),
    )
    stop = data.draw(st.sampled_from([None, 3, 10, 25]))
    drafts = CORPORA[kind]([]) if kind in CORPORA else lambda latest, limit: []
    texts = []
    for corpus in (None, ToldCorpus(drafts)):
        with Rig(corpus=corpus) as rig:
            texts.append(written_by(rig, Sampler(sampling, constraint.matcher()), stop))
    assert texts[0] == texts[1]


def written_by(rig: Rig, sampler: Sampler, stop: int | None = None) -> str:
    recorder = Recorder(stop_at=lambda tokens: stop - 1 if stop and len(tokens) >= stop else None)
    sequence = rig.sequence(PROMPT, recorder, max_new=150, speculation=True)
    sequence.sampler = sampler
    rig.scheduler.submit(sequence)
    return b"".join(rig.engine.vocab.pieces[token] for token in recorder.answer).decode()
