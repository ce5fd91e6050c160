from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.question_files import Question, own_questions, read_questions
from benchmarks.questions import holds_answer
from emberkeep.errors import EmberkeepError


def only(tmp_path: Path, entry: Any) -> tuple[Question, ...]:
    file = tmp_path / "questions.json"
    file.write_text(json.dumps([entry]))
    (talk,) = read_questions(file)
    return talk.questions


def test_our_own_questions_are_answered_in_their_texts() -> None:
    talks = own_questions()
    assert sum(len(talk.questions) for talk in talks) == 40
    for talk in talks:
        text = talk.questions[0].text.rsplit("\n\n", 1)[0]
        assert all(holds_answer(text, question.answers) for question in talk.questions)


@pytest.mark.parametrize(
    ("entry", "text", "answers"),
    [
        ("Why?", "Why?", ()),
        ({"question": "Who?", "answer": "Ada"}, "Who?", ("Ada",)),
        ({"prompt": "How many?", "answer": 3}, "How many?", ("3",)),
        ({"question": "How many?", "answer": "2 + 2 is 4.\n#### 4"}, "How many?", ("4",)),
        ({"context": "A text.", "question": "Q?", "answers": {"text": ["a", "b"]}}, "A text.\n\nQ?", ("a", "b")),
        ({"question": "Q?", "answer": {"value": "x", "aliases": ["y"]}}, "Q?", ("x", "y")),
        (
            {"ctxs": [{"title": "T", "text": "one"}, {"text": "two"}], "question": "Q?", "answers": ["a"]},
            "T\none\n\ntwo\n\nQ?",
            ("a",),
        ),
        ({"question": "Q?", "choices": ["red", "blue"], "answer": 1}, "Q?\n\nA. red\nB. blue", ("blue",)),
        (
            {"question": "Q?", "choices": {"text": ["red", "blue"], "label": ["A", "B"]}, "answerKey": "A"},
            "Q?\n\nA. red\nB. blue",
            ("red",),
        ),
        ({"instruction": "Translate.", "input": "oui", "output": "yes"}, "Translate.\n\noui", ("yes",)),
    ],
)
def test_common_forms_of_a_question_are_read(
    tmp_path: Path, entry: Any, text: str, answers: tuple[str, ...]
) -> None:
    assert only(tmp_path, entry) == (Question(text, answers),)


def test_the_last_thing_that_the_user_says_is_the_question(tmp_path: Path) -> None:
    said = [("system", "S"), ("user", "one"), ("assistant", "yes"), ("user", "two"), ("assistant", "no")]
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in said]}) + "\n\n")
    (talk,) = read_questions(file)
    assert talk.questions == (Question("two", ("no",)),)
    assert talk.before == (("system", "S"), ("user", "one"), ("assistant", "yes"))


def test_turns_are_asked_one_after_the_other(tmp_path: Path) -> None:
    assert only(tmp_path, {"turns": ["one", "two"], "reference": ["1", "2"]}) == (
        Question("one", ("1",)),
        Question("two", ("2",)),
    )
    people = [{"from": "human", "value": "one"}, {"from": "gpt", "value": "1"}, {"from": "human", "value": "two"}]
    assert only(tmp_path, {"conversations": people}) == (Question("one"), Question("two"))


@pytest.mark.parametrize("content", ["", "{", "[]", "[1]", '{"text": "x"}', '{"turns": 1}', '{"messages": [1]}'])
def test_a_file_without_questions_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(content)
    with pytest.raises(EmberkeepError, match="give"):
        read_questions(file)


def test_an_answer_is_right_where_its_words_stand_together() -> None:
    assert holds_answer("It was built by Hedda Lund, in 1871.", ("hedda lund",))
    assert holds_answer("A dog.", ("cat", "the dog"))
    assert not holds_answer("18710", ("1871",))
    assert not holds_answer("Lund Hedda", ("Hedda Lund",))
