from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.questions import Question, f1, made_up_questions, read_questions
from emberkeep.bench.workspace import Words
from emberkeep.errors import EmberkeepError

pytestmark = pytest.mark.slow

QUESTION = Question("Where?", ("Rome",), ("one two three", "to Rome it goes", "five six seven"))
WORDS = Words(dict.fromkeys(("some", "other", "words", "here"), 1))


def test_questions_are_read_with_titles_before_their_passages(tmp_path: Path) -> None:
    file = tmp_path / "questions.json"
    passages = [{"title": "Lakes", "text": "Deep."}, {"text": "Plain."}]
    file.write_text(json.dumps([{"question": "How?", "answers": ["deep"], "ctxs": passages}]))
    (question,) = read_questions(file)
    assert (question.text, question.answers) == ("How?", ("deep",))
    assert question.passages == ("Lakes\nDeep.", "Plain.")
    assert [question.holds_answer(passage) for passage in question.passages] == [True, False]


@pytest.mark.parametrize(
    "content", ["[", "{}", "3", '[{"question": "How?"}]', '[{"question": 1, "answers": 2, "ctxs": 3}]']
)
def test_a_file_without_questions_is_refused_with_its_shape(tmp_path: Path, content: str) -> None:
    file = tmp_path / "questions.json"
    file.write_text(content)
    with pytest.raises(EmberkeepError, match="give a JSON list of objects with question, answers and ctxs"):
        read_questions(file)


def test_a_made_up_question_is_answered_by_exactly_one_passage() -> None:
    for question in made_up_questions(WORDS, count=20, passages=6, tokens=30):
        subject = question.text.removeprefix("In which city is the ").removesuffix(" kept?")
        (holding,) = (passage for passage in question.passages if subject in passage)
        assert question.holds_answer(holding)


def test_made_up_questions_are_the_same_every_time_and_differ_from_each_other() -> None:
    first, second = made_up_questions(WORDS, 2, 4, 20)
    assert [first, second] == made_up_questions(WORDS, 2, 4, 20)
    assert not set(first.passages) & set(second.passages)


# ── what is done with them ──


def test_passages_are_shuffled_so_that_another_one_comes_first() -> None:
    for seed in range(20):
        shuffled = QUESTION.shuffle(seed)
        assert shuffled.passages[0] != QUESTION.passages[0]
        assert sorted(shuffled.passages) == sorted(QUESTION.passages)


@pytest.mark.parametrize("passages", [(), ("Rome",), ("Rome", "Rome")])
def test_passages_of_which_none_is_another_stay_as_they_are(passages: tuple[str, ...]) -> None:
    question = Question("Where?", ("Rome",), passages)
    assert question.shuffle(3) == question


def test_a_short_passage_stays_whole() -> None:
    assert QUESTION.shorten("to Rome\nit goes", 4, str.split) == "to Rome\nit goes"


def test_a_passage_is_cut_around_the_answer() -> None:
    passage = " ".join([*(f"w{i}" for i in range(50)), "rome", *(f"w{i}" for i in range(50, 100))])
    cut = QUESTION.shorten(passage, 11, str.split).split()
    assert len(cut) == 11
    assert cut.index("rome") == 5


def test_a_passage_without_the_answer_keeps_its_beginning() -> None:
    assert QUESTION.shorten("a b c d e f", 3, str.split) == "a b c"


@pytest.mark.parametrize(
    ("text", "answers", "expected"),
    [
        ("The Eiffel Tower!", ["eiffel tower"], 1.0),
        ("Paris, in France", ["Paris"], 0.5),
        ("no", ["yes"], 0.0),
        ("", ["yes"], 0.0),
        ("", ["the"], 1.0),
        ("b b c", ["b c c", "b b"], 0.8),
    ],
)
def test_f1_counts_words_as_squad_does(text, answers, expected) -> None:
    assert f1(text, answers) == pytest.approx(expected)
