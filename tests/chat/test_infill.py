"""Prompts that ask for the text between two others."""

from __future__ import annotations

import pytest

from emberkeep.chat.infill import infill_text
from emberkeep.chat.prompt_tokens import SeamedText
from emberkeep.errors import InvalidField
from emberkeep.types.request import Infill, SourceFile
from helpers.byte_vocab import TinyVocab

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|endoftext|>")


@pytest.mark.parametrize(
    ("specials", "text"),
    [
        (QWEN, "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"),
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


def test_files_come_first_and_what_is_begun_last() -> None:
    infill = Infill("end", files=(SourceFile("a.py", "x = 1"),), begun="be")
    assert infill_text(TinyVocab(QWEN), "start", infill, SeamedText).text == (
        "<|file_sep|>a.py\nx = 1\n<|file_sep|><|fim_prefix|>start<|fim_suffix|>end<|fim_middle|>be"
    )


def test_a_model_that_was_not_trained_to_fill_in_refuses_by_the_clients_word() -> None:
    with pytest.raises(InvalidField, match="input_suffix: this model has no tokens for filling in"):
        infill_text(TinyVocab(), "a", Infill("b", param="input_suffix"), SeamedText)
