"""What `verify` tells about state that is stored exactly, in fewer bits, or at another place."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep import Emberkeep
from emberkeep.config.settings import Config
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import ContextExceeded, InvalidField
from emberkeep.library.results import kl
from emberkeep.types.events import TokenLogprob
from helpers.scripted_backend import fake_backend

pytestmark = pytest.mark.slow

DOCUMENTS = [f"Document {n}. " + " ".join(f"word {n * 37 + i * 11}" for i in range(40)) for n in range(3)]
STORED, SHUFFLED = "".join(DOCUMENTS), "".join(DOCUMENTS[::-1])


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[Emberkeep]:
    with Emberkeep(fake_backend(Config(data_dir=tmp_path))) as llm:
        yield llm


def test_exact_state_agrees_in_everything(llm: Emberkeep) -> None:
    report = llm.verify(STORED)
    assert report.equal
    assert report.agreement == report.forced_agreement == 1
    assert report.first_kl == report.mean_kl == 0
    assert report.reused_tokens == report.cached.usage.prompt_tokens - 1
    assert "exact" in str(report)
    assert "F1" not in str(report)


def test_the_report_tells_in_what_steps_the_state_was_computed(llm: Emberkeep) -> None:
    report = llm.verify(STORED)
    assert report.wide_tokens == report.reproducible_tokens == report.reused_tokens
    assert f"All {report.reused_tokens:,} tokens can be reproduced to the bit." in str(report)
    short = llm.verify("A few words.")
    assert (short.wide_tokens, short.narrow_tokens) == (0, short.reused_tokens)
    assert "same but for rounding" in str(short)


def test_packed_state_is_not_promised(llm: Emberkeep) -> None:
    report = llm.verify(STORED, kv_bits=8)
    assert report.wide_tokens == report.reused_tokens
    assert report.reproducible_tokens == 0


def test_moved_state_is_compared_with_a_fresh_evaluation(llm: Emberkeep) -> None:
    llm.generate(STORED, max_tokens=1)
    report = llm.verify(SHUFFLED, approximate="none")
    assert report.cached.lookup.moved_tokens > 300
    assert report.first_kl > 0.1  # the fake engine's answers have nothing in common
    assert report.forced_agreement < 1
    assert f"{report.cached.lookup.moved_tokens:,} from other places" in str(report)
    assert "approximate" in str(report)


def test_state_that_is_evaluated_again_altogether_agrees(llm: Emberkeep) -> None:
    llm.generate(STORED, max_tokens=1)
    report = llm.verify(SHUFFLED, approximate={"repair": "cacheblend", "ratio": 1.0})
    assert report.equal
    assert report.mean_kl == 0
    assert report.cached.lookup.is_approximate


def test_packed_state_is_loaded_and_compared(llm: Emberkeep) -> None:
    report = llm.verify(STORED, kv_bits=4)
    assert report.cached.lookup.is_approximate
    assert report.cached.lookup.warm_tokens > 0
    assert report.mean_kl > 0


def test_the_arguments_are_checked(llm: Emberkeep) -> None:
    with pytest.raises(InvalidField, match=r"approximate\.ratio"):
        llm.verify(STORED, approximate={"ratio": 2})
    with pytest.raises(InvalidField, match="kv_bits"):
        llm.verify(STORED, kv_bits=5)


def distribution(weights: list[float], listed: int) -> TokenLogprob:
    total = sum(weights)
    top = sorted(((w / total, i) for i, w in enumerate(weights)), reverse=True)[:listed]
    tokens = tuple(TokenLogprob(i, b"", math.log(p)) for p, i in top)
    return TokenLogprob(tokens[0].token_id, b"", tokens[0].logprob, tokens)


weights = st.lists(st.floats(0.001, 1), min_size=6, max_size=6)


@given(weights, weights, st.integers(1, 6))
def test_the_divergence_is_never_more_than_the_true_one(p, q, listed) -> None:
    true = sum(a / sum(p) * math.log(a / sum(p) / (b / sum(q))) for a, b in zip(p, q, strict=True))
    assert 0 <= kl(distribution(p, listed), distribution(q, listed)) <= true + 1e-9
    assert kl(distribution(p, 6), distribution(q, 6)) == pytest.approx(true, abs=1e-9)


# ── several at a time ──


def test_several_prompts_are_compared_one_by_one_and_overall(llm: Emberkeep) -> None:
    summary = llm.verify_batch([STORED, "A few words.", [{"role": "user", "content": "Hello"}]], max_tokens=8)
    assert summary.equal
    assert summary.agreement == summary.forced_agreement == 1
    assert summary.mean_kl == 0
    assert [item.prompt[:5] for item in summary.items] == ["Docum", "A few", "Hello"]
    assert summary.reused_tokens == sum(report.reused_tokens for report in summary.reports) > 300
    lines = str(summary).splitlines()
    assert lines[0].startswith("  1    8 of 8 ")
    assert lines[3:] == [
        f"3 of 3 answers are equal; {summary.reused_tokens:,} tokens were reused.",
        "Greedy tokens that agree: 100.0%; told the fresh answer so far, 100.0%.",
        "KL of the next token: 0.0000 over all answers.",
    ]


def test_what_differs_is_told_by_its_item_and_weighs_by_its_length(llm: Emberkeep) -> None:
    llm.generate(STORED, max_tokens=1)
    summary = llm.verify_batch([SHUFFLED, "Nothing of it is stored."], max_tokens=8, approximate="none")
    moved, plain = summary.reports
    assert (moved.equal, plain.equal, summary.equal) == (False, True, False)
    assert moved.agreement < 1 == plain.agreement
    longer, shorter = moved.length, plain.length
    assert longer > shorter > 0
    assert summary.agreement == pytest.approx((longer * moved.agreement + shorter) / (longer + shorter))
    assert 0 < summary.mean_kl < moved.mean_kl
    assert "1 of 2 answers are equal" in str(summary)


def test_one_that_cannot_be_compared_loses_nothing_of_the_others(tmp_path: Path) -> None:
    with Emberkeep(fake_backend(Config(data_dir=tmp_path), FakeEngine(context=256))) as llm:
        summary = llm.verify_batch(["one", "word " * 300, "three"], max_tokens=4)
        with pytest.raises(InvalidField, match=r"^prompts\[1\]: "):
            llm.verify_batch(["one", 5])  # type: ignore[list-item]
    (failed,) = summary.failed
    assert failed is summary.items[1]
    assert isinstance(failed.error, ContextExceeded)
    assert (len(summary.reports), summary.agreement, summary.equal) == (2, 1, False)
    assert "not compared  word word" in str(summary)
    assert "2 of 3 answers are equal" in str(summary)


def test_nothing_to_compare_is_no_agreement(llm: Emberkeep) -> None:
    summary = llm.verify_batch([])
    assert (summary.agreement, summary.mean_kl, str(summary)) == (
        None,
        None,
        "0 of 0 answers are equal; 0 tokens were reused.",
    )
