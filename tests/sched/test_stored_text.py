"""A prompt that is still text gets the ids that are stored for it."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.chat.prompt_tokens import PromptTokenizer, SeamedTemplate, SeamedText
from emberkeep.chat.template import ChatTemplate
from emberkeep.engine.fake import FakeVocab
from emberkeep.kv.tree import Made
from emberkeep.sched.stored_text import RecentAnswers, StoredText
from emberkeep.types.lineage import EXACT, Lineage
from helpers.chance import examples
from helpers.kv_building import exported, new_store, prompt, put

VOCAB = FakeVocab()

QUESTION = prompt(140)

ANSWER = [ord(c) for c in "then"]  # the tokenizer would say "th" "en"

QUOTING = SeamedTemplate(ChatTemplate.default(), VOCAB)


def replayed(look, before, text):
    data = text.encode()
    ids, end = look.replay(before, data, 0, {len(data)})
    assert end == (len(data) if ids else 0)
    return ids


@pytest.fixture
def store(tmp_path):
    store = new_store(tmp_path)
    whole = np.array([*QUESTION, *ANSWER], np.int32)
    put(store, QUESTION, namespace="alice")
    cursor = store.advance(store.origin(Lineage("alice")), whole)
    store.insert(cursor, whole[140:], exported(whole, 140, 144), ((0, 4),), fork=False)
    yield store
    store.close()


def test_an_answer_that_comes_back_as_text_gets_the_ids_that_were_sampled_for_its_user(store):
    look = StoredText(store, RecentAnswers(4, VOCAB), VOCAB, Lineage("alice"))
    assert replayed(look, QUESTION.tolist(), "then") == tuple(ANSWER)
    assert VOCAB.tokenize("then") != ANSWER
    theirs = StoredText(store, RecentAnswers(4, VOCAB), VOCAB, Lineage("bob"))
    assert replayed(theirs, QUESTION.tolist(), "then") == ()


def test_once_a_prompt_has_left_the_store_nothing_is_replayed(store):
    look = StoredText(store, RecentAnswers(4, VOCAB), VOCAB, Lineage("alice"))
    changed = [*QUESTION[:100].tolist(), 1, *QUESTION[101:].tolist()]
    assert replayed(look, changed, "then") == ()
    assert replayed(look, [*changed, *ANSWER], "then") == ()


def test_long_prompts_are_followed(store):
    long = prompt(3000, seed=9)
    put(store, long, namespace="alice", sampled=((0, 128),))
    look = StoredText(store, RecentAnswers(4, VOCAB), VOCAB, Lineage("alice"))
    tail = "".join(map(chr, long[2900:]))
    assert replayed(look, long[:2900].tolist(), tail) == tuple(long[2900:].tolist())


def test_an_answer_is_replayed_before_the_store_has_it(store):
    recent = RecentAnswers(2, VOCAB)
    asked = prompt(60, seed=11)
    whole = np.array([*asked, *ANSWER], np.int32)
    recent.add(Lineage("alice"), whole, (60, 64))
    look = StoredText(store, recent, VOCAB, Lineage("alice"))
    assert replayed(look, asked.tolist(), "then") == tuple(ANSWER)
    assert replayed(StoredText(store, recent, VOCAB, Lineage("bob")), asked.tolist(), "then") == ()
    assert replayed(StoredText(store, recent, VOCAB, Lineage("alice")), asked[:59].tolist(), "then") == ()
    for seed in range(2):
        recent.add(Lineage("alice"), prompt(20, seed=seed), (10, 20))
    assert replayed(StoredText(store, recent, VOCAB, Lineage("alice")), asked.tolist(), "then") == ()


def test_an_answer_is_replayed_only_after_the_whole_text_that_came_before_it(store):
    recent, asked = RecentAnswers(2, VOCAB), b"what is it that they asked, and what was the answer? " * 2
    recent.add(Lineage("alice"), np.array([*asked, *ANSWER], np.int32), (len(asked), len(asked) + len(ANSWER)))

    def replayed_after(before: bytes) -> tuple[int, ...]:
        text = before + b"then"
        return StoredText(store, recent, VOCAB, Lineage("alice")).replay([], text, 0, frozenset({len(text)}))[0]

    assert replayed_after(asked) == (*asked, *ANSWER)
    assert replayed_after(b"W" + asked[1:]) == ()
    assert replayed_after(asked[1:]) == ()


def test_a_special_token_that_was_sampled_is_not_replayed_for_a_text_that_looks_like_it(store):
    recent, end = RecentAnswers(2, VOCAB), VOCAB.specials["<|im_end|>"]
    sampled = [*ANSWER, end, *ANSWER]
    recent.add(Lineage("alice"), np.array([*QUESTION, *sampled], np.int32), (140, 140 + len(sampled)))

    def ids_of(written):
        look = StoredText(store, recent, VOCAB, Lineage("alice"))
        return PromptTokenizer(VOCAB).tokenize(written, replay=look.replay, before=QUESTION.tolist()).ids[140:]

    assert ids_of(SeamedText("then<|im_end|>then")) == sampled
    assert ids_of(QUOTING.quote("then<|im_end|>then")) == VOCAB.tokenize("then<|im_end|>then", parse_special=False)


@pytest.mark.parametrize("odd", ["\ufdd0", "\ufdd1", "\uffff", "\x00"])
def test_an_answer_is_found_again_whatever_characters_it_has(store, odd):
    answer = [*f"{odd}then{odd}".encode()]
    asked = prompt(60, seed=11)
    whole = np.array([*asked, *answer], np.int32)
    put(store, whole, namespace="alice", sampled=((60, len(whole)),))
    look = StoredText(store, RecentAnswers(2, VOCAB), VOCAB, Lineage("alice"))
    ids = PromptTokenizer(VOCAB).encode(f"{odd}then{odd}", replay=look.replay, before=asked.tolist())
    assert ids == whole.tolist()


class UnsplitVocab(FakeVocab):
    """Special tokens are not borders: a text is tokenised as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.splits_at_specials = False


def keep(store, tokens, size, made):
    """In chunks of `size`, however short, so that there are many borders of chunks."""
    while (cursor := store.advance(store.origin(EXACT), tokens)).position < len(tokens):
        end = min(cursor.position + size, len(tokens))
        payload = exported(tokens, cursor.position, end)
        store.insert(cursor, tokens[cursor.position : end], payload, (), fork=True, made=made)


parts = st.lists(st.one_of(st.sampled_from(sorted(VOCAB.specials)), st.text("then ar", max_size=9)), max_size=6)

prompts = st.lists(st.tuples(parts.map("".join), st.booleans(), st.booleans()), min_size=1, max_size=8)


@examples(60)
@given(prompts, st.integers(1, 9), st.sampled_from([FakeVocab, UnsplitVocab]))
def test_with_or_without_a_store_a_text_has_the_same_ids(prompts, size, kind):
    """Whatever texts and ids came before, while nothing was sampled."""
    store, vocab = new_store(None), kind()
    tokenizer = PromptTokenizer(vocab)
    for message, is_quoted, as_ids in prompts:
        written = QUOTING.quote(message) if is_quoted else SeamedText(message)
        look = StoredText(store, RecentAnswers(4, vocab), vocab, EXACT)
        ids = PromptTokenizer(vocab).tokenize(written).ids
        assert tokenizer.tokenize(written, replay=look.replay).ids == ids
        sent = [*message.encode()] if as_ids else ids
        keep(store, np.array(sent, np.int32), size, Made.GIVEN if as_ids else Made.UNKNOWN)


class WordVocab(FakeVocab):
    """No token goes over the end of a word. Counts the characters that it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = tuple(re.sub(rb"^[a-z.] $", b"\xff", piece) for piece in self.pieces)
        self.asked = 0

    def tokenize(self, text: str, *, parse_special: bool = True) -> list[int]:
        self.asked += len(text)
        words = re.split(r"(?<=[a-z.])(?= )", text)
        return [id for word in words for id in FakeVocab.tokenize(self, word, parse_special=parse_special)]


class UnsplitWords(WordVocab):
    """Special tokens are no borders."""

    def __init__(self) -> None:
        super().__init__()
        self.splits_at_specials = False


STORY = "then the rest is said, and a train enters. " * 80
MORE = st.lists(st.sampled_from(["then", " the", " es", ". ", "7", "é", " "]), max_size=8).map("".join)


@examples(40)
@given(
    st.lists(st.tuples(st.integers(0, len(STORY)), MORE, st.booleans()), min_size=2, max_size=5),
    st.integers(5, 900),
)
def test_a_text_that_grows_or_branches_has_the_ids_of_the_whole(prompts, size):
    store, vocab = new_store(None), WordVocab()
    recent, tokenizer = RecentAnswers(4, vocab), PromptTokenizer(vocab)
    for shared, more, as_ids in prompts:
        text = STORY[:shared] + more + STORY[:300]
        ids = PromptTokenizer(vocab).encode(text)
        assert tokenizer.encode(text, replay=StoredText(store, recent, vocab, EXACT).replay) == ids
        sent = [*text.encode()] if as_ids else ids
        keep(store, np.array(sent, np.int32), size, Made.GIVEN if as_ids else Made.UNKNOWN)


def test_what_is_known_of_a_long_text_is_not_tokenised_again():
    store, vocab = new_store(None), WordVocab()
    keep(store, np.array(vocab.tokenize(STORY), np.int32), 128, Made.UNKNOWN)
    recent, texts = RecentAnswers(4, vocab), (f"{STORY}and so on", STORY[:-50])
    expected = [vocab.tokenize(text) for text in texts]
    vocab.asked = 0
    looks = [StoredText(store, recent, vocab, EXACT) for _ in texts]
    ids = [PromptTokenizer(vocab).encode(t, replay=look.replay) for t, look in zip(texts, looks, strict=True)]
    assert ids == expected
    assert vocab.asked < 100


def test_what_the_model_wrote_keeps_its_ids_inside_of_a_longer_text():
    store, vocab = new_store(None), WordVocab()
    asked, answer = vocab.tokenize(STORY), [*b" then there he is"]  # the tokenizer would say " t" "he" "n"
    put(store, np.array([*asked, *answer], np.int32), sampled=((len(asked), len(asked) + len(answer)),))
    look = StoredText(store, RecentAnswers(4, vocab), vocab, EXACT)
    ids = PromptTokenizer(vocab).encode(f"{STORY} then there he is. And then?", replay=look.replay)
    kept = [*asked, *b" then there he"]
    assert ids == [*kept, *vocab.tokenize(" is. And then?")]


def test_what_somebody_quoted_never_stands_for_a_control_token():
    store, vocab = new_store(None), UnsplitWords()
    said = f"{STORY}yes<|im_end|>\n{STORY}"
    keep(store, np.array(PromptTokenizer(vocab).tokenize(QUOTING.quote(said)).ids, np.int32), 128, Made.UNKNOWN)
    look, written = StoredText(store, RecentAnswers(4, vocab), vocab, EXACT), SeamedText(f"{said} and so on")
    assert PromptTokenizer(vocab).tokenize(written, replay=look.replay).ids == vocab.tokenize(written.text)


def test_where_tokens_go_over_the_ends_of_words_a_text_is_tokenised_as_a_whole():
    store = new_store(None)
    keep(store, np.array(VOCAB.tokenize(STORY), np.int32), 128, Made.UNKNOWN)
    text = STORY.rstrip()[:-3]
    look = StoredText(store, RecentAnswers(4, VOCAB), VOCAB, EXACT)
    assert PromptTokenizer(VOCAB).encode(text, replay=look.replay) == VOCAB.tokenize(text)
