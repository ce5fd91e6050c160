"""Questions for a model, alone or several in a conversation, with what would be right where that is known.

A file is a JSON list, or has one object per line. Each object is a conversation:

    {"question": "Who built it?", "answer": "Hedda Lund"}           or `prompt`, `instruction`; `output`
    {"context": "...", "question": "...", "answers": ["a", "b"]}    or `ctxs`, `passages`
    {"question": "...", "choices": ["a", "b"], "answer": 1}         or the letter of the right one, or its text
    {"messages": [{"role": "user", "content": "..."}], "answer": "..."}
    {"turns": ["...", "..."]}                                       asked one after the other
    {"conversations": [{"from": "human", "value": "..."}]}          what people said, one after the other
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import cast, get_args

from benchmarks.question_set import INSTRUCTION, QUESTION_SET
from benchmarks.recorded_sessions import message_text, read_entries, session_of
from emberkeep.errors import EmberkeepError
from emberkeep.types.request import Json, Role
from emberkeep.values import dataclass

_QUESTIONS = ("question", "prompt", "instruction", "query", "input")
_ANSWERS = ("answers", "answer", "references", "reference", "output", "target", "expected")
_PASSAGES = ("context", "ctxs", "passages", "documents")
_FINAL = "####"
"""Comes before the result where an answer also shows the way to it, as in GSM8K."""


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    answers: tuple[str, ...] = ()
    """Any of them is right. Empty: nobody says."""


@dataclass(frozen=True, slots=True)
class Talk:
    """Questions that are asked one after the other."""

    questions: tuple[Question, ...]
    before: tuple[tuple[Role, str], ...] = ()
    """Role and text of what comes before the first one."""


def own_questions() -> list[Talk]:
    return [_about(text, questions) for text, questions in QUESTION_SET]


def _about(text: str, questions: Sequence[tuple[str, str]]) -> Talk:
    (first, answer), *others = questions
    asked = [Question(f"{text}\n\n{first}", (answer,)), *(Question(one, (right,)) for one, right in others)]
    return Talk(tuple(asked), (("system", INSTRUCTION),))


def read_questions(path: Path) -> list[Talk]:
    """Blocks. Raises EmberkeepError, OSError."""
    entries = read_entries(path)
    try:
        talks = [_talk(entry) for entry in entries]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise EmberkeepError(
            f"{path.name} holds no questions ({error}): give objects with question, prompt, messages or turns, "
            "and answer where it is known."
        ) from error
    if not talks:
        raise EmberkeepError(f"{path.name} is empty: give a file with at least one question.")
    return talks


def _talk(entry: Json) -> Talk:
    """Raises LookupError, TypeError, ValueError, AttributeError."""
    if isinstance(entry, str):
        return Talk((Question(entry),))
    if entry.get("messages"):
        return _after_messages(entry)
    if entry.get("conversations"):
        return _one_by_one(session_of(entry, "").told, ())
    if entry.get("turns"):
        return _one_by_one([message_text(turn) for turn in entry["turns"]], _reference(entry))
    name = next((name for name in _QUESTIONS if isinstance(entry.get(name), str)), None)
    if name is None:
        raise LookupError(f"an entry has none of {', '.join(_QUESTIONS)}")
    more = [entry["input"]] if name != "input" and isinstance(entry.get("input"), str) else []
    parts = [*_passages(entry), entry[name], *more, *_listed(_choices(entry))]
    return Talk((Question("\n\n".join(part for part in parts if part), _answers(entry)),))


def _after_messages(entry: Mapping[str, Json]) -> Talk:
    """The last thing that the user says is the question; an answer behind it is the right one."""
    said = [(_role(message), message_text(message)) for message in entry["messages"]]
    last = max(index for index, (role, _) in enumerate(said) if role == "user")
    behind = tuple(text for role, text in said[last + 1 :] if role == "assistant" and text)
    return Talk((Question(said[last][1], _answers(entry) or behind[:1]),), tuple(said[:last]))


def _role(message: Mapping[str, Json]) -> Role:
    if message["role"] not in get_args(Role):
        raise ValueError(f"there is no role {message['role']}")
    return cast(Role, message["role"])


def _one_by_one(texts: Sequence[str], answers: Sequence[str]) -> Talk:
    """`answers`: one for each, or nobody knows which is whose."""
    if not texts:
        raise ValueError("a conversation in which nobody asks")
    known: Sequence[tuple[str, ...]] = [(answer,) for answer in answers]
    rights = known if len(known) == len(texts) else [()] * len(texts)
    return Talk(tuple(Question(text, right) for text, right in zip(texts, rights, strict=True)))


def _passages(entry: Mapping[str, Json]) -> list[str]:
    found: Json = next((entry[name] for name in _PASSAGES if entry.get(name)), [])
    return [_passage(one) for one in ([found] if isinstance(found, str) else found)]


def _passage(one: Json) -> str:
    return one if isinstance(one, str) else f"{one.get('title') or ''}\n{one['text']}".strip()


def _choices(entry: Mapping[str, Json]) -> list[str]:
    found = entry.get("choices") or entry.get("options") or []
    return [str(one) for one in (found["text"] if isinstance(found, dict) else found)]


def _listed(choices: Sequence[str]) -> list[str]:
    lines = [f"{letter}. {choice}" for letter, choice in zip(ascii_uppercase, choices, strict=False)]
    return ["\n".join(lines)] if lines else []


def _answers(entry: Mapping[str, Json]) -> tuple[str, ...]:
    found = _reference(entry) or _reference({"answer": entry.get("answerKey")})
    choices = _choices(entry)
    return tuple(_choice(answer, choices) for answer in found) if choices else found


def _reference(entry: Mapping[str, Json]) -> tuple[str, ...]:
    found = next((entry[name] for name in _ANSWERS if entry.get(name) not in (None, "", [])), None)
    if isinstance(found, dict):
        # SQuAD has the texts of its answers, TriviaQA the value and other names of it.
        found = found["text"] if "text" in found else [found["value"], *found.get("aliases", ())]
    listed = [] if found is None else found if isinstance(found, list) else [found]
    return tuple(str(one).rsplit(_FINAL, 1)[-1].strip() for one in listed if one is not None)


def _choice(answer: str, choices: Sequence[str]) -> str:
    """The text of the right one, which may be named by its number (from 0) or its letter."""
    letters = ascii_uppercase[: len(choices)]
    if answer in choices:
        return answer
    if answer.isdecimal() and int(answer) < len(choices):
        return choices[int(answer)]
    return choices[letters.index(answer)] if len(answer) == 1 and answer in letters else answer
