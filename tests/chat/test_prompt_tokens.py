from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_vocab import TinyVocab

from emberkeep.chat.tokens import PromptTokenizer, _Fragments
from emberkeep.types import Vocab

SPECIALS = ("<|im_start|>", "<|im_start|>x", "<|im_end|>")
PARTS = st.sampled_from([*SPECIALS, "<|im_", "|>", "x", "Hello", "ST", "OP", " é", "\n", "🔥"])
TEXTS = st.lists(st.one_of(PARTS, st.text(max_size=5)), max_size=12).map("".join)


@given(TEXTS)
def test_fragments_give_what_tokenising_the_whole_gives(text: str) -> None:
    vocab = TinyVocab(SPECIALS)
    ids = PromptTokenizer(vocab).encode(text)
    assert ids == vocab.tokenize(text)
    assert vocab.text(ids) == text


def test_the_longest_special_wins() -> None:
    vocab = TinyVocab(SPECIALS)
    assert PromptTokenizer(vocab).encode("<|im_start|>x") == [vocab.specials["<|im_start|>x"]]


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
    seen: list[str] = []

    def replay(before: Sequence[int], fragment: str) -> tuple[int, ...]:
        seen.append(fragment)
        return ()

    text = "<|im_start|>user\nHello<|im_end|>"
    assert PromptTokenizer(vocab).encode(text, replay=replay) == vocab.tokenize(text)
    assert seen == [text]


def test_sampled_ids_take_the_place_of_the_canonical_ones() -> None:
    vocab = TinyVocab()
    sampled = tuple(b"assistant\nHello")
    asked: list[tuple[tuple[int, ...], str]] = []

    def replay(before: Sequence[int], fragment: str) -> tuple[int, ...]:
        asked.append((tuple(before), fragment))
        return sampled if fragment == "assistant\nHello" else ()

    ids = PromptTokenizer(vocab).encode("<|im_start|>assistant\nHello<|im_end|>\n", replay=replay)
    start, end = vocab.specials["<|im_start|>"], vocab.specials["<|im_end|>"]
    assert ids == [start, *sampled, end, ord("\n")]
    assert asked == [((start,), "assistant\nHello"), ((start, *sampled, end), "\n")]


def test_replayed_ids_are_not_taken_for_canonical_ones_later() -> None:
    vocab = TinyVocab()
    tokenizer = PromptTokenizer(vocab)
    tokenizer.encode("Hello", replay=lambda before, fragment: tuple(b"Hello"))
    assert tokenizer.encode("Hello") == vocab.tokenize("Hello")


def test_the_memory_of_fragments_forgets_the_oldest() -> None:
    known = _Fragments(max_chars=8)
    known.put("aaaa", (1,))
    known.put("bbbb", (2,))
    known.get("aaaa")
    known.put("cc", (3,))
    known.put("longer than all", (4,))
    assert [known.get(text) for text in ("aaaa", "bbbb", "cc", "longer than all")] == [(1,), None, (3,), None]


@pytest.mark.slow
@given(st.lists(st.one_of(st.sampled_from(["<|im_start|>", "<|im_end|>", " the", "é"]), st.text())).map("".join))
def test_a_real_vocabulary_agrees_with_itself(real_vocab: Vocab, text: str) -> None:
    ids = PromptTokenizer(real_vocab).encode(text)
    assert ids == real_vocab.tokenize(text)
