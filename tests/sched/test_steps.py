"""Which tokens a step evaluates, and how likely those of a prompt were, whatever the steps are."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from emberkeep.engine.base import Outcome, Rows
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import EngineError
from emberkeep.kv.policy import Rate
from emberkeep.kv.tree import Cursor, new_root
from emberkeep.sched.sampling import Sampler, describe, penalise
from emberkeep.sched.sequence import Sequence, slice_within
from emberkeep.sched.sequence_state import Phase
from emberkeep.sched.steps import Planner
from emberkeep.types.lineage import EXACT
from emberkeep.types.request import Request, Sampling
from helpers.scheduling import GREEDY, Gate, Recorder, Rig, prompt_of

PROMPT = [(7 * i) % 90 + 32 for i in range(300)]


def scores_of(prompt, top=2):
    """The direct way: one token at a time."""
    engine, scores = FakeEngine(), []
    for place, (token, following) in enumerate(pairwise(prompt)):
        engine.evaluate([Rows(0, place, np.array([token], np.int32), outputs=1)])
        scores.append(describe(engine.logits(0), following, top, engine.vocab.pieces))
    return scores


def asking(**more):
    return {"echo": True, "top_logprobs": 2, "use_cache": False, **more}


@pytest.mark.parametrize("max_new", [0, 1, 5])
@pytest.mark.parametrize("length", [1, 2, 65, 300])
def test_every_token_of_a_prompt_has_its_score_whatever_is_sampled_after_it(length, max_new):
    with Rig() as rig:
        spoken = rig.run(PROMPT[:length], max_new=max_new, **asking())
        plain = rig.run(PROMPT[:length], max_new=max_new)
    assert spoken.scores == scores_of(PROMPT[:length])
    assert spoken.answer == plain.answer


def test_what_is_stored_is_evaluated_again_and_what_was_scored_is_stored():
    with Rig() as rig:
        first = rig.run(PROMPT, max_new=0, **asking())
        again = rig.run(PROMPT, max_new=0, **asking())
        plain = rig.run(PROMPT, max_new=3)
    assert first.scores == again.scores == scores_of(PROMPT)
    assert again.lookup.reused_tokens == 0
    assert plain.lookup.reused_tokens == len(PROMPT) - 1


def test_prompts_are_scored_beside_others_that_are_answered():
    others = [PROMPT[i:] for i in (1, 2)]
    with Rig() as rig:
        gate = Gate(rig.engine)
        decoding = rig.start(PROMPT[:40], max_new=60)
        scored = [rig.start(prompt, max_new=0, **asking()) for prompt in others]
        gate.open()
        assert [spoken.wait().scores for spoken in scored] == [scores_of(prompt) for prompt in others]
        answer = decoding.answer
    with Rig() as rig:
        assert rig.run(PROMPT[:40], max_new=60).answer == answer


def test_no_step_wants_more_logits_than_the_engine_gives():
    engine, most = FakeEngine(cells=1 << 15), []
    engine.on_evaluate = lambda batch: most.append(sum(rows.outputs for rows in batch))
    with Rig(engine=engine) as rig:
        running = [rig.start(PROMPT[i:], max_new=8, **asking()) for i in range(4)]
        for spoken in running:
            spoken.wait()
    assert max(most) <= engine.capabilities.outputs


def test_tokens_that_have_to_be_evaluated_again_are_scored_once():
    engine = FakeEngine(cells=1 << 15)
    failed = []

    def fail_once(batch):
        if len(batch) > 1 and not failed and any(rows.start > 60 for rows in batch):
            failed.append(True)
            raise EngineError("once")

    engine.on_evaluate = fail_once
    with Rig(engine=engine) as rig:
        gate_free = [rig.start(PROMPT[i:], max_new=0, **asking()) for i in (0, 1)]
        assert [spoken.wait().scores for spoken in gate_free] == [scores_of(PROMPT[i:]) for i in (0, 1)]


# ── tokens that the engine chooses ──


class Choosing(FakeEngine):
    """As the sampler would, of what it is told."""

    draws = True

    def evaluate(self, batch):
        self.batch = list(batch)
        return super().evaluate(batch)

    def likeliest(self, index, row=0):
        logits, how = self.logits(index, row).copy(), self.batch[index].choosing
        if how is not None and how.penalties is not None:
            ids = list(how.penalties.counts)
            times = np.array(list(how.penalties.counts.values()), np.float32)
            logits[ids] = penalise(logits[ids], times, LOWERED)
        if how is not None and how.mask is not None:
            logits[np.unpackbits(how.mask.view(np.uint8), count=len(logits), bitorder="little") == 0] = -np.inf
        self.latest = int(logits.argmax())
        return self.latest

    def logprobs(self, index, row):
        top = self.batch[index].choosing.top_logprobs
        found = describe(self.logits(index, row), self.latest, top, self.vocab.pieces)
        return found.logprob, [(one.token_id, one.logprob) for one in found.top]


def joining(engine: FakeEngine) -> FakeEngine:
    engine.capabilities = replace(engine.capabilities, joins_last=True)
    return engine


class Alternating:
    """A grammar of even tokens and odd ones."""

    def __init__(self):
        self.seen = []

    def mask(self):
        return np.full(320, 0xAAAAAAAA if len(self.seen) % 2 else 0x55555555, np.uint32)

    def advance(self, token):
        assert token % 2 == len(self.seen) % 2
        self.seen.append(token)

    def forced(self):
        return []

    def count_allowed(self, tokens):
        return 0


LOWERED = Sampling(temperature=0.0, frequency_penalty=2.0, repetition_penalty=1.4)


@pytest.mark.parametrize("has_grammar", [False, True])
@pytest.mark.parametrize("sampling", [GREEDY, LOWERED])
def test_an_engine_that_chooses_tells_the_tokens_and_logprobs_that_are_sampled_elsewhere(sampling, has_grammar):
    told = []
    for engine in (FakeEngine(), Choosing(), joining(Choosing()), joining(FakeEngine())):
        with Rig(engine=engine) as rig:
            recorder = Recorder()
            made = rig.sequence(PROMPT[:40], recorder, max_new=30, sampling=sampling)
            made.sampler = Sampler(sampling, Alternating() if has_grammar else None, top_logprobs=3)
            rig.scheduler.submit(made)
            told.append((recorder.wait().answer, recorder.logprobs))
    assert told[1:] == told[:1] * 3
    assert len(told[0][1]) == len(told[0][0]) > 5


class GoingOn(Choosing):
    """Takes up to four steps at once."""

    def evaluate(self, batch):
        outcome = super().evaluate(batch)
        self.chosen = {}
        if outcome is Outcome.DONE:
            for index, rows in enumerate(batch):
                if rows.choosing is not None and rows.goes_on:
                    self.chosen[index] = [super().likeliest(index)]
            latest = self._latest
            for index, tokens in self.chosen.items():
                rows = batch[index]
                for _ in range(min(rows.goes_on, 3)):
                    start, token = rows.start + len(tokens), np.array(tokens[-1:], np.int32)
                    FakeEngine.evaluate(self, [Rows(rows.sequence, start, token, 1)])
                    tokens.append(int(self.logits(0).argmax()))
            self._latest = latest
        return outcome

    def likeliest(self, index, row=0):
        return self.chosen[index][row] if index in self.chosen else super().likeliest(index, row)

    def went_on(self, index):
        return self.chosen.get(index, [0])[:-1]


@pytest.mark.parametrize("stop", [99, 3, 6])
@pytest.mark.parametrize("max_new", [1, 2, 9, 30])
def test_an_engine_that_goes_on_by_itself_gives_the_same_answers_and_state(max_new, stop):
    """`stop`: one is over after so many tokens, in the middle of what the engine went on with; one of them is no
    part of the answer."""
    found = []
    for engine in (FakeEngine(), GoingOn(), joining(GoingOn())):
        with Rig(engine=engine) as rig:
            stopped = Recorder(lambda tokens: stop - 1 if len(tokens) == stop else None)
            prompts, other = (PROMPT[:40], PROMPT[7:]), Recorder()
            running = [rig.sequence(p, r, max_new=max_new) for p, r in zip(prompts, (stopped, other), strict=True)]
            for sequence in running:
                rig.scheduler.submit(sequence)
            answers = [recorder.answer for recorder in (stopped, other)]
            rig.settle()
            evaluated = [sequence.computed for sequence in running]
            again = rig.run(PROMPT[:40] + answers[0], max_new=5)  # goes on from the state that was left
            found.append((answers, evaluated, again.answer, again.lookup.cached_tokens))
    assert found[1:] == found[:1] * 2


# ── which tokens the next step evaluates ──


def sequence(slot: int, prompt: int, *, computed: int = 0) -> Sequence:
    made = Sequence(prompt_of([0] * prompt, max_new=10), Request(), Sampler(GREEDY), Recorder())
    made.occupy(slot, Cursor(new_root(""), 0, EXACT), None, computed)
    return made


def planned(planner: Planner, *sequences: Sequence) -> dict[int, int]:
    """Slot to the number of tokens in the next step."""
    return {each.rows.sequence: len(each.rows.tokens) for each in planner.plan(list(sequences))}


@pytest.fixture
def planner() -> Planner:
    return Planner(batch=512, largest_slice=512, speed=Rate(1e6))


@pytest.mark.parametrize(
    ("prompts", "plan"),
    [
        pytest.param([(2000, 0)], [512], id="a prompt alone gets the largest slice"),
        pytest.param([(100, 0)], [99], id="all but the last token"),
        pytest.param([(100, 99)], [1], id="which is evaluated alone"),
        pytest.param(
            [(3000, 0), (51, 0), (2000, 0)], [128, 50, 334], id="short ones first, a quarter for the oldest"
        ),
        pytest.param([(541, 0)], [270], id="no prompt ends in a tiny slice"),
        pytest.param([(541, 270)], [270], id="so it is cut in half"),
        pytest.param([(700, 0)], [512], id="unless what is left is large enough"),
        pytest.param(
            [(50, 49), (2000, 0), (60, 59)], [1, 510, 1], id="every answer gets its token beside prompts"
        ),
    ],
)
def test_a_step_is_shared_by_prompts_and_answers(planner, prompts, plan):
    """Each prompt with how much of it is computed."""
    sequences = [sequence(slot, length, computed=done) for slot, (length, done) in enumerate(prompts)]
    assert planned(planner, *sequences) == dict(enumerate(plan))


@pytest.mark.parametrize(
    ("length", "computed", "step"), [(100, 0, (100, 1)), (513, 0, (512, 0)), (100, 99, (1, 1))]
)
def test_where_it_may_the_last_token_goes_with_those_before_it(length, computed, step):
    planner = Planner(batch=512, largest_slice=512, speed=Rate(1e6), joins_last=True)
    (rows,) = (each.rows for each in planner.plan([sequence(0, length, computed=computed)]))
    assert (len(rows.tokens), rows.outputs) == step


def test_only_the_last_token_wants_logits(planner):
    (first,) = planner.plan([sequence(0, 100)])
    (last,) = planner.plan([sequence(0, 100, computed=99)])
    assert not first.rows.outputs
    assert last.rows.outputs


def test_slices_follow_the_measured_speed():
    planner = Planner(batch=512, largest_slice=512, speed=Rate(150.0))
    assert planned(planner, sequence(0, 2000)) == {0: 256}
    assert planned(planner, sequence(0, 50, computed=49), sequence(1, 2000)) == {0: 1, 1: 32}
    assert [slice_within(seconds, Rate(150.0), 128, 512) for seconds in (0.1, 2.0, 60.0)] == [128, 256, 512]


def test_steps_with_few_tokens_say_nothing_about_the_speed():
    speed = Rate()
    planner = Planner(batch=512, largest_slice=512, speed=speed)
    planner.measure(3, 1, 1.0)
    planner.measure(64, 64, 1.0)  # answers of many
    assert speed.value is None
    planner.measure(200, 1, 2.0)
    assert speed.value == 100


def test_a_closing_turn_is_evaluated_without_logits(planner):
    closing = sequence(0, 100, computed=100)
    closing.phase = Phase.CLOSING
    closing.tokens.extend((7, 8))
    (last,) = planner.plan([closing])
    assert (len(last.rows.tokens), last.rows.outputs) == (2, False)
