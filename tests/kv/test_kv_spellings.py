"""One text, several stored spellings: which of them is replayed."""

from __future__ import annotations

from emberkeep.engine.fake import FakeVocab
from helpers.kv_building import exported, ids, new_store

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
    assert store.replay(cursor, b"the", VOCAB.pieces) == tuple(LETTERS)


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
