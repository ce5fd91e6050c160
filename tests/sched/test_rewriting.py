"""A text that is written again with changes is followed, and its changes are expected again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.kv.ngram_index import NgramIndex
from emberkeep.sched.drafts import Rewriting

OLD = list(range(100, 140))


def follow(text: list[int], answer: list[int] = []) -> Rewriting:  # noqa: B006
    index = NgramIndex()
    rewriting = Rewriting(index)
    rewriting.begin(index.begin(text), 4)
    rewriting.add(answer)
    return rewriting


NAMED = [1, 2, 50, 3, 4, 50, 5, 6, 50, 7]


@pytest.mark.parametrize(
    ("text", "answer", "draft"),
    [
        pytest.param(OLD, OLD[:7], OLD[7:], id="a copy goes on as the old text does"),
        pytest.param(OLD, OLD, [], id="nothing comes at its end"),
        pytest.param(OLD, [*OLD, 1, 2, 3], [], id="nor behind it"),
        pytest.param(OLD, [*OLD[:7], 1], OLD[8:], id="after another token the old text is tried behind it"),
        pytest.param(OLD, [*OLD[:7], OLD[12]], OLD[13:], id="what is left out is passed over"),
        pytest.param(OLD, [*OLD[:7], 1, 2, 3, 4, 5, OLD[7]], OLD[8:], id="the old text follows what is put in"),
        pytest.param(
            [1, 2, 3, 50, 51, 52, 4, 5, 6, 50, 51, 52, 7, 8, 50, 9],
            [1, 2, 3, 60, 4, 5],
            [6, 60, 7, 8, 50, 9],
            id="several tokens that become one are expected again",
        ),
        pytest.param(
            [1, 2, 50, 3, 4, 5, 50, 3, 6, 7], [1, 2, 3, 4], [5, 3, 6, 7], id="what is left out is expected again"
        ),
        pytest.param(
            [1, 2, 50, 3, 4, 5, 50, 3, 6, 7],
            [1, 2, 60, 50, 3, 4],
            [5, 60, 50, 3, 6, 7],
            id="what is put in is expected again",
        ),
        pytest.param(NAMED, [1, 2, 60, 3, 4, 50], [5, 6, 50, 7], id="one that is not made is expected no more"),
        pytest.param(NAMED, [1, 2, 60, 3, 4, 61, 5, 6], [61, 7], id="the latest change is expected"),
        pytest.param(
            NAMED,
            [1, 2, 60, 61, 3, 4, 60, 62, 5, 6],
            [60, 62, 7],
            id="one that goes on otherwise is another",
        ),
        pytest.param(
            NAMED[:8],
            [1, 2, 60, 61, 62, 3, 4, 60],
            [61, 62, 5, 6],
            id="one that has begun is drafted to its end",
        ),
    ],
)
def test_what_is_drafted_after_an_answer_that_changes_a_text(text, answer, draft):
    assert follow(text, answer).draft(40) == draft


def test_what_was_changed_once_is_expected_again():
    text = [1, 2, 3, 50, 4, 5, 6, 50, 7, 8, 9, 50, 10, 11]
    for new in ([60], [60, 61], [60, 61, 62, 63]):
        answer = [1, 2, 3, *new, 4, 5]
        assert follow(text, answer).draft(20) == [6, *new, 7, 8, 9, *new, 10, 11]


def test_what_is_written_for_long_is_no_longer_the_old_text():
    rewriting = follow(OLD, [*OLD[:7], *range(30)])
    assert not rewriting.is_followed
    assert rewriting.draft(5) == []


def test_agreement_speaks_for_it_and_a_change_against_it():
    matched = [follow(OLD, answer).matched for answer in (OLD[:2], OLD[:12], [*OLD[:12], 1], [*OLD[:12], 1, 2])]
    assert matched == [6, 16, 1, 0]


def test_most_of_a_renamed_file_is_drafted():
    """A name of two tokens at every tenth place becomes one of three."""
    line = [*range(1, 9), 50, 51]
    text = [token + 1000 * (number if token < 10 else 0) for number in range(30) for token in line]
    answer = []
    for token in text:
        answer += {50: [60, 61], 51: [62]}.get(token, [token])
    rewriting = follow(text)
    steps, at = 0, 0
    while at < len(answer):
        draft = rewriting.draft(16)
        right = next((i for i, token in enumerate(draft) if answer[at + i : at + i + 1] != [token]), len(draft))
        rewriting.add(answer[at : at + right + 1])
        at += right + 1
        steps += 1
    assert steps <= 2 + len(answer) / 14


tokens = st.integers(1, 6)


@given(st.lists(tokens, max_size=60), st.lists(tokens, max_size=80), st.integers(1, 20))
def test_whatever_the_answer_is_the_draft_is_made_of_known_tokens(old: list[int], answer: list[int], limit: int):
    rewriting = follow(old)
    for at, token in enumerate(answer):
        draft = rewriting.draft(limit)
        assert len(draft) <= limit
        assert set(draft) <= {*old, *answer[:at]}
        rewriting.add([token])


@given(st.lists(tokens, min_size=1, max_size=60), st.integers(1, 59), st.integers(1, 20))
def test_a_copy_is_drafted_from_every_place(old: list[int], at: int, limit: int):
    assert follow(old, old[:at]).draft(limit) == old[at : at + limit]
