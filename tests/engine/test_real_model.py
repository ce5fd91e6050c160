"""The default model on every engine: stored state is what was computed, through restarts and a crowded engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from emberkeep.engine.base import Engine, Outcome, Rows
from emberkeep.engine.hf.engine import HfEngine
from emberkeep.engine.hf.model_loader import HfModel, HfSettings, HfSource, load_model
from emberkeep.engine.llamacpp.context import LlamaSettings
from emberkeep.engine.llamacpp.engine import LlamaEngine
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.models.gguf import read_header
from emberkeep.types.events import TokenLogprob
from helpers.engines import evaluate, exported
from helpers.scheduling import Rig

pytestmark = pytest.mark.slow

STORY = (
    "<|im_start|>system\nYou are a careful librarian who answers in one short sentence.<|im_end|>\n"
    "<|im_start|>user\n" + "The lamp in the reading room was lit again at dusk, and nobody said why. " * 24
)
QUESTION = "Who lit the lamp?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def loaded_by_torch(smollm2: Path) -> HfModel:
    prefix = "tokenizer.ggml."
    metadata = read_header(smollm2).metadata
    facts = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    source = HfSource(smollm2.parent, smollm2.name, facts)
    return load_model(source, device="cpu", dtype="auto", attention="eager")


def open_llama(path: Path, cells: int, *, flash: bool = True) -> LlamaEngine:
    settings = LlamaSettings(context=cells, cells=cells, sequences=8, flash=flash)
    return LlamaEngine(LlamaModel(path), settings, "smollm2")


def open_hf(model: HfModel, cells: int) -> HfEngine:
    return HfEngine(model, HfSettings(context=cells, cells=cells, sequences=8, batch=512), "smollm2")


@pytest.fixture(params=["llama.cpp", "no flash", "hf"])
def open_engine(request: pytest.FixtureRequest, smollm2: Path, loaded_by_torch: HfModel):
    engines = []

    def make(cells: int = 2048) -> Engine:
        if request.param == "hf":
            engines.append(open_hf(loaded_by_torch, cells))
        else:
            engines.append(open_llama(smollm2, cells, flash=request.param == "llama.cpp"))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def test_restored_state_gives_bit_equal_logits(open_engine):
    source, target = open_engine(), open_engine()
    tokens = np.array(source.vocab.tokenize(STORY), np.int32)[:400]
    more = tokens[:8]
    assert source.evaluate([Rows(0, 0, tokens, outputs=0)]) is Outcome.DONE
    for start in range(0, 400, 128):
        end = min(start + 128, 400)
        payload = exported(source, 0, start, end)
        assert target.import_kv(0, start, end, [payload], start) is Outcome.DONE
    rows = Rows(0, 400, more, outputs=1)
    source.evaluate([rows])
    target.evaluate([rows])
    assert np.array_equal(source.logits(0), target.logits(0))


def test_a_restart_gives_the_same_answer_without_evaluating_the_prompt(open_engine, tmp_path):
    engine = open_engine()
    prompt = engine.vocab.tokenize(STORY + QUESTION)
    closing = tuple(engine.vocab.tokenize("<|im_end|>\n"))
    with Rig(tmp_path, engine, prefill_slice=512) as rig:
        first = rig.run(prompt, max_new=16, closing=closing)
    with Rig(tmp_path, open_engine(), prefill_slice=512) as rig:
        again = rig.run(prompt, max_new=16, closing=closing)
        assert again.lookup.cold_tokens == len(prompt) - 1
        assert again.answer == first.answer
        assert rig.scheduler.counters.evaluated_tokens <= 1 + 16 + len(closing)


def test_both_engines_read_the_same_tokens_and_expect_the_same_to_follow(smollm2, loaded_by_torch):
    """llama.cpp computes with the quantised weights, torch with what they stand for."""
    engines = [open_llama(smollm2, 1024), open_hf(loaded_by_torch, 1024)]
    (ours, theirs) = (engine.vocab.tokenize(STORY[:900] + QUESTION) for engine in engines)
    assert ours == theirs
    logits = []
    for engine in engines:
        engine.evaluate([Rows(0, 0, np.array(ours, np.int32), outputs=1)])
        logits.append(engine.logits(0)[: loaded_by_torch.vocab.size].copy())
        engine.close()
    assert logits[0].argmax() == logits[1].argmax()
    assert np.corrcoef(*logits)[0, 1] > 0.98


LATER = "<|im_end|>\n<|im_start|>user\n" + "The gardener left a letter under the blue vase on Thursday. " * 12
NOTICE = "Some of this was left out. "


def test_a_spliced_conversation_goes_on_almost_as_if_the_shorter_one_had_been_evaluated(open_engine):
    engine = open_engine()
    texts = (STORY[:90], STORY[90:900], LATER, NOTICE, QUESTION)
    first, removed, later, notice, question = (np.array(engine.vocab.tokenize(text), np.int32) for text in texts)
    longer, shorter = (np.concatenate([first, middle, later, question]) for middle in (removed, notice))
    evaluate(engine, 0, 0, len(longer) - len(question), longer)
    assert engine.splice(0, len(first), len(first) + len(removed), notice) is Outcome.DONE
    spliced = evaluate(engine, 0, len(shorter) - len(question), len(shorter), shorter)
    evaluate(engine, 1, 0, len(shorter) - len(question), shorter)
    fresh = evaluate(engine, 1, len(shorter) - len(question), len(shorter), shorter)
    assert spliced.argmax() == fresh.argmax()
    assert _divergence(spliced, fresh) < 0.05


def _divergence(one: np.ndarray, other: np.ndarray) -> float:
    """Kullback-Leibler, of what is expected next."""
    ours, theirs = (logits - np.logaddexp.reduce(logits.astype(np.float64)) for logits in (one, other))
    return float((np.exp(theirs) * (theirs - ours)).sum())


WORDS = ["walnut", "harbour", "quartz", "saffron", "meadow", "lantern"]


def test_users_never_see_each_others_secrets(open_engine, tmp_path):
    """Many users at once in an engine too small for all of them. Batch shapes change logits a little, so the
    first token's distribution is compared, not the text."""
    engine = open_engine(cells=1024)
    prompts = {
        word: engine.vocab.tokenize(
            "<|im_start|>system\nYou repeat what you are told.<|im_end|>\n<|im_start|>user\n"
            f"My secret word is {word}. Say my secret word.<|im_end|>\n<|im_start|>assistant\n"
        )
        for word in WORDS
    }
    with Rig(tmp_path, engine, parallel=3) as rig:
        for _ in range(2):
            running = [rig.start(prompt, max_new=10, namespace=word) for word, prompt in prompts.items()]
            for recorder in running:
                recorder.wait()
        rig.settle()
        for word, prompt in prompts.items():
            cached = rig.run(prompt, max_new=10, namespace=word, top_logprobs=8)
            fresh = rig.run(prompt, max_new=1, namespace=word, top_logprobs=8, use_cache=False)
            assert cached.lookup.reused_tokens == len(prompt) - 1
            said = b"".join(engine.vocab.pieces[token] for token in cached.answer).decode().lower()
            assert not any(other in said for other in WORDS if other != word)
            assert _distance(cached.logprobs[0], fresh.logprobs[0]) < 0.5
        assert rig.store.counters.damaged_chunks == 0


def _distance(one: TokenLogprob, other: TokenLogprob) -> float:
    """How far the likeliest tokens that both name are apart."""
    mine = {top.token_id: top.logprob for top in one.top}
    theirs = {top.token_id: top.logprob for top in other.top}
    both = sorted(mine.keys() & theirs.keys(), key=lambda token: -mine[token])[:4]
    assert len(both) == 4
    return max(abs(mine[token] - theirs[token]) for token in both)
