"""One text, several stored spellings: which of them is replayed."""

from __future__ import annotations

from emberkeep.engine.fake import FakeVocab
from helpers.kv_building import exported, ids, new_store, replayed

VOCAB = FakeVocab()
QUESTION = list(b"what?")
LETTERS = list(b"the")
HE = VOCAB.tokenize("he")


def test_of_several_spellings_the_one_that_was_sampled_is_replayed() -> None:
    """A crash left the first letter of an answer, and both ways to go on from it were stored later."""
    store = new_store(None)
    begun = ids(*QUESTION, LETTERS[0])
    rest_sampled, rest_tokenized = ids(*LETTERS[1:]), ids(*HE)
    at = store.insert(store.origin(""), begun, exported(begun, 0, 6), ((5, 6),), fork=True)
    for rest, spans in ((rest_sampled, ((0, 2),)), (rest_tokenized, ())):
        whole = ids(*begun, *rest)
        store.insert(at, rest, exported(whole, 6, len(whole)), spans, fork=False)
    cursor = store.advance(store.origin(""), ids(*QUESTION))
    assert replayed(store, cursor, b"the", VOCAB.pieces) == tuple(LETTERS)


def test_a_chunk_knows_what_any_of_its_siblings_knew_was_sampled() -> None:
    store = new_store(None)
    asked = ids(*QUESTION)
    answered = ids(*QUESTION, *LETTERS)
    continued = ids(*answered, *b" and then?")
    origin = store.origin("")
    store.insert(origin, asked, exported(asked, 0, 5), (), fork=False)
    in_use = store.match("", asked)  # so that it stays beside the longer ones
    store.insert(origin, answered, exported(answered, 0, 8), ((5, 8),), fork=False)
    store.insert(origin, continued, exported(continued, 0, len(continued)), (), fork=False)
    store.release(in_use)
    assert store.advance(origin, continued).chunk.sampled == ((5, 8),)


def test_what_was_sampled_may_go_on_over_the_borders_of_a_text() -> None:
    """A model can spell a special token with ordinary ones; what comes after the answer was not sampled."""
    store = new_store(None)
    answer, closing = list(b"yes</tool>"), [VOCAB.specials["<|im_end|>"]]
    whole = ids(*b"assistant:", *answer, *closing, *b"next")
    store.insert(store.origin(""), whole, exported(whole, 0, len(whole)), ((10, 20),), fork=False)
    text = b"assistant:yes</tool><|im_end|>next"
    borders = {13, 20, 30, 34}
    assert store.replay(store.origin(""), text, 0, borders, VOCAB.pieces) == (tuple(whole[:20].tolist()), 20)


def test_a_templates_own_words_are_replayed_only_up_to_the_first_border() -> None:
    store = new_store(None)
    whole = ids(*b"user:hi", *b"bot:", *b"yes")
    store.insert(store.origin(""), whole, exported(whole, 0, len(whole)), ((11, 14),), fork=False)
    assert store.replay(store.origin(""), b"user:hibot:yes", 0, {7, 14}, VOCAB.pieces) == ((), 0)
    assert store.replay(store.origin(""), b"user:hibot:yes", 0, {14}, VOCAB.pieces) == (tuple(whole.tolist()), 14)
