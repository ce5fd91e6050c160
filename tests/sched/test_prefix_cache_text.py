from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.chat.prompt_tokens import PromptTokenizer, SeamedTemplate, SeamedText
from emberkeep.chat.template import ChatTemplate
from emberkeep.engine.fake import FakeVocab
from emberkeep.kv.tree import Made
from emberkeep.sched.commits import RecentAnswers, StoredText
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


def test_an_answer_that_comes_back_as_text_gets_the_ids_that_were_sampled(store):
    look = StoredText(store, RecentAnswers(4), VOCAB, Lineage("alice"))
    assert replayed(look, QUESTION.tolist(), "then") == tuple(ANSWER)
    assert VOCAB.tokenize("then") != ANSWER


def test_other_users_answers_are_not_replayed(store):
    assert replayed(StoredText(store, RecentAnswers(4), VOCAB, Lineage("bob")), QUESTION.tolist(), "then") == ()


def test_once_a_prompt_has_left_the_store_nothing_is_replayed(store):
    look = StoredText(store, RecentAnswers(4), VOCAB, Lineage("alice"))
    changed = [*QUESTION[:100].tolist(), 1, *QUESTION[101:].tolist()]
    assert replayed(look, changed, "then") == ()
    assert replayed(look, [*changed, *ANSWER], "then") == ()


def test_a_prompt_may_grow_between_questions(store):
    look = StoredText(store, RecentAnswers(4), VOCAB, Lineage("alice"))
    assert replayed(look, QUESTION[:50].tolist(), "nothing") == ()
    assert replayed(look, QUESTION.tolist(), "then") == tuple(ANSWER)


def test_long_prompts_are_followed(store):
    long = prompt(3000, seed=9)
    put(store, long, namespace="alice", sampled=((0, 128),))
    look = StoredText(store, RecentAnswers(4), VOCAB, Lineage("alice"))
    tail = "".join(map(chr, long[2900:]))
    assert replayed(look, long[:2900].tolist(), tail) == tuple(long[2900:].tolist())


def test_an_answer_is_replayed_before_the_store_has_it(store):
    recent = RecentAnswers(2)
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


def test_a_special_token_that_was_sampled_is_not_replayed_for_a_text_that_looks_like_it(store):
    recent, end = RecentAnswers(2), VOCAB.specials["<|im_end|>"]
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
    look = StoredText(store, RecentAnswers(2), VOCAB, Lineage("alice"))
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
    for text, is_quoted, as_ids in prompts:
        written = QUOTING.quote(text) if is_quoted else SeamedText(text)
        look = StoredText(store, RecentAnswers(4), vocab, EXACT)
        ids = PromptTokenizer(vocab).tokenize(written).ids
        assert tokenizer.tokenize(written, replay=look.replay).ids == ids
        sent = [*text.encode()] if as_ids else ids
        keep(store, np.array(sent, np.int32), size, Made.GIVEN if as_ids else Made.UNKNOWN)
