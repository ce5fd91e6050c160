"""How likely the tokens of a prompt were: every one of them, whatever the steps are and whatever is stored."""

from itertools import pairwise

import numpy as np
import pytest

from emberkeep.engine.base import Rows
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import EngineError
from emberkeep.sched.sampling import describe
from helpers.scheduling import Gate, Rig

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
