"""Prompts that ask for the text between two others."""

from __future__ import annotations

import pytest

from emberkeep.chat.infill import infill_text, infill_tokens
from emberkeep.chat.prompt import PromptBuilder
from emberkeep.chat.seams import SeamedText
from emberkeep.chat.template import ChatTemplate
from emberkeep.errors import InvalidField
from emberkeep.types.lineage import EXACT
from emberkeep.types.request import Infill, Request, SourceFile
from helpers.byte_vocab import TinyVocab

QWEN = TinyVocab(("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|endoftext|>"))


def test_the_parts_stand_between_the_tokens_of_the_vocabulary() -> None:
    assert infill_text(QWEN, "a = ", Infill("\nprint(a)"), SeamedText).text == (
        "<|fim_prefix|>a = <|fim_suffix|>\nprint(a)<|fim_middle|>"
    )


def test_files_come_first_and_what_is_begun_last() -> None:
    infill = Infill("end", files=(SourceFile("a.py", "x = 1"),), begun="be")
    assert infill_text(QWEN, "start", infill, SeamedText).text == (
        "<|file_sep|>a.py\nx = 1\n<|file_sep|><|fim_prefix|>start<|fim_suffix|>end<|fim_middle|>be"
    )


@pytest.mark.parametrize(
    ("specials", "text"),
    [
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<e>"), "<fim_prefix>a<fim_suffix>b<fim_middle>"),
        (("[PREFIX]", "[SUFFIX]", "</s>"), "[SUFFIX]b[PREFIX]a"),
        (
            ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "<e>"),
            "<｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>",
        ),
    ],
)
def test_vocabularies_have_their_own_tokens(specials: tuple[str, ...], text: str) -> None:
    assert infill_text(TinyVocab(specials), "a", Infill("b"), SeamedText).text == text


def test_a_model_that_was_not_trained_to_fill_in_refuses_by_the_clients_word() -> None:
    assert infill_tokens(TinyVocab()) is None
    with pytest.raises(InvalidField, match="input_suffix: this model has no tokens for filling in"):
        infill_text(TinyVocab(), "a", Infill("b", param="input_suffix"), SeamedText)


class Nothing:
    def read_ahead(self, text: str) -> frozenset[bytes]:
        return frozenset()

    def replay(self, *_: object) -> tuple[tuple[int, ...], int]:
        return (), 0


def test_a_prompt_has_the_special_tokens_once_whatever_its_parts_contain() -> None:
    prompts = PromptBuilder(
        QWEN, ChatTemplate.default(), lambda lineage: Nothing(), context=1000, wants_borders=False
    )
    request = Request(prompt="say <|fim_suffix|>", infill=Infill("<|fim_middle|> end"))
    ids = prompts.build(request, EXACT).tokens.tolist()
    specials = [token for token in ids if token in QWEN.controls]
    assert specials == [QWEN.specials[name] for name in ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")]
    assert b"".join(QWEN.pieces[token] for token in ids) == (
        b"<|fim_prefix|>say <|fim_suffix|><|fim_suffix|><|fim_middle|> end<|fim_middle|>"
    )
