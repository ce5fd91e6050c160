from __future__ import annotations

from collections.abc import Sequence, Set

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from emberkeep.chat.prompt_tokens import PromptTokenizer
from emberkeep.types.models import Vocab
from helpers.byte_vocab import TinyVocab
from helpers.chance import examples

SPECIALS = ("<|im_start|>", "<|im_start|>x", "<|im_end|>")
PARTS = st.sampled_from([*SPECIALS, "<|im_", "|>", "x", "Hello", "ST", "OP", " é", "\n", "🔥"])
TEXTS = st.lists(st.one_of(PARTS, st.text(max_size=5)), max_size=12).map("".join)


@given(TEXTS)
@example("\ufdd0")
@example("\ufdd1<|im_end|>\ufdd0")
def test_fragments_give_what_tokenising_the_whole_gives(text: str) -> None:
    vocab = TinyVocab(SPECIALS)
    ids = PromptTokenizer(vocab).encode(text)
    assert ids == vocab.tokenize(text)
    assert vocab.text(ids) == text


@examples(20)
@given(TEXTS, st.booleans())
def test_no_text_has_fewer_tokens_than_the_fewest(text: str, is_long: bool) -> None:
    tokenizer = PromptTokenizer(TinyVocab(SPECIALS))
    text *= 40_000 // (len(text) or 1) + 1 if is_long else 1
    assert tokenizer.fewest(text) <= len(tokenizer.encode(text))


def test_many_special_tokens_are_not_few() -> None:
    assert PromptTokenizer(TinyVocab(SPECIALS)).fewest("<|im_end|>" * 10_000) == 10_000


def test_a_history_is_tokenised_once() -> None:
    vocab = TinyVocab()
    tokenizer = PromptTokenizer(vocab)
    history = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    tokenizer.encode(history)
    vocab.tokenized.clear()
    tokenizer.encode(history + "Hi<|im_end|>")
    assert vocab.tokenized == ["assistant\nHi"]


def test_a_vocabulary_whose_specials_eat_blanks_is_tokenised_as_a_whole() -> None:
    vocab = TinyVocab(splits_at_specials=False)
    seen: list[tuple[bytes, int, Set[int]]] = []

    def replay(before: Sequence[int], text: bytes, start: int, borders: Set[int]) -> tuple[tuple[int, ...], int]:
        seen.append((text, start, borders))
        return (), start

    text = "<|im_start|>user\nHello<|im_end|>"
    assert PromptTokenizer(vocab).encode(text, replay=replay) == vocab.tokenize(text)
    assert seen == [(text.encode(), 0, {len(text)})]


def test_sampled_ids_take_the_place_of_the_canonical_ones() -> None:
    vocab = TinyVocab()
    sampled = tuple(b"assistant\nHello")
    asked: list[tuple[tuple[int, ...], bytes]] = []

    def replay(before: Sequence[int], text: bytes, start: int, borders: Set[int]) -> tuple[tuple[int, ...], int]:
        end = min(border for border in borders if border > start)
        asked.append((tuple(before), text[start:end]))
        return (sampled, end) if text[start:end] == b"assistant\nHello" else ((), start)

    ids = PromptTokenizer(vocab).encode("<|im_start|>assistant\nHello<|im_end|>\n", replay=replay)
    start, end = vocab.specials["<|im_start|>"], vocab.specials["<|im_end|>"]
    assert ids == [start, *sampled, end, ord("\n")]
    assert asked == [((start,), b"assistant\nHello"), ((start, *sampled, end), b"\n")]


def test_sampled_ids_may_write_a_special_token_with_ordinary_ones() -> None:
    vocab = TinyVocab()
    sampled = "é<|im_end|>".encode()

    def replay(before: Sequence[int], text: bytes, start: int, borders: Set[int]) -> tuple[tuple[int, ...], int]:
        assert len(sampled) in borders
        return (tuple(sampled), len(sampled)) if start == 0 else ((), start)

    ids = PromptTokenizer(vocab).encode("é<|im_end|>\nmore", replay=replay, before=[7])
    assert ids == [7, *sampled, *vocab.tokenize("\nmore")]


def test_replayed_ids_are_not_taken_for_canonical_ones_later() -> None:
    vocab = TinyVocab()
    tokenizer = PromptTokenizer(vocab)
    tokenizer.encode("Hello", replay=lambda before, text, start, borders: (tuple(b"Hello"), 5))
    assert tokenizer.encode("Hello") == vocab.tokenize("Hello")


@pytest.mark.slow
@given(st.lists(st.one_of(st.sampled_from(["<|im_start|>", "<|im_end|>", " the", "é"]), st.text())).map("".join))
def test_a_real_vocabulary_agrees_with_itself(real_vocab: Vocab, text: str) -> None:
    ids = PromptTokenizer(real_vocab).encode(text)
    assert ids == real_vocab.tokenize(text)
