"""One text, stored in several token ids: which of them are used again."""

from __future__ import annotations

import numpy as np

from emberkeep.engine.fake import FakeVocab
from emberkeep.kv.tree import Made
from emberkeep.types.lineage import EXACT
from helpers.kv_building import LONG, PIECES, exported, ids, new_store, put, replayed


def test_sampled_tokens_are_replayed_by_their_text(store):
    letter_ids = np.array([ord(c) for c in "the then"], np.int32)
    put(store, np.concatenate([LONG[:100], letter_ids]), sampled=((100, 108),))
    cursor = store.advance(store.origin(EXACT), LONG[:100])
    assert replayed(store, cursor, b"the then", PIECES) == tuple(letter_ids)
    assert replayed(store, cursor, b"the", PIECES) == tuple(letter_ids[:3])
    assert replayed(store, cursor, b"then", PIECES) == ()
    assert replayed(store, store.origin(EXACT), b"the then", PIECES) == ()


def test_a_replay_follows_an_answer_over_chunk_borders(store):
    answer = np.array([ord(c) for c in "a long answer " * 30], np.int32)
    whole = np.concatenate([LONG[:100], answer])
    cursor = store.origin(EXACT)
    for begin in range(0, len(whole), 128):
        end = min(begin + 128, len(whole))
        span = ((max(100 - begin, 0), end - begin),)
        cursor = store.insert(cursor, whole[begin:end], exported(whole, begin, end), span, fork=False)
    at = store.advance(store.origin(EXACT), LONG[:100])
    assert replayed(store, at, b"a long answer " * 30, PIECES) == tuple(answer)


def test_stored_tokens_outside_the_vocabulary_are_passed_over(store):
    alien = np.array([5, 2_000_000], np.int32)
    put(store, alien, sampled=((0, 2),))
    assert replayed(store, store.origin(EXACT), b"\x05!", PIECES) == ()
    assert store.readahead(EXACT, b"\x05!", PIECES) == set()


VOCAB = FakeVocab()

QUESTION = list(b"what?")

LETTERS = list(b"the")

SPECIALS = frozenset(VOCAB.specials.values())

END = VOCAB.specials["<|im_end|>"]

HE = VOCAB.tokenize("he")


def test_of_several_ids_for_a_text_those_that_were_sampled_are_replayed() -> None:
    """A crash left the first letter of an answer, and both ways to go on from it were stored later."""
    store = new_store(None)
    begun = ids(*QUESTION, LETTERS[0])
    rest_sampled, rest_tokenized = ids(*LETTERS[1:]), ids(*HE)
    at = store.insert(store.origin(EXACT), begun, exported(begun, 0, 6), ((5, 6),), fork=True)
    for rest, spans in ((rest_sampled, ((0, 2),)), (rest_tokenized, ())):
        whole = ids(*begun, *rest)
        store.insert(at, rest, exported(whole, 6, len(whole)), spans, fork=False)
    cursor = store.advance(store.origin(EXACT), ids(*QUESTION))
    assert replayed(store, cursor, b"the", VOCAB.pieces) == tuple(LETTERS)


def test_a_chunk_knows_what_any_of_its_siblings_knew_was_sampled() -> None:
    store = new_store(None)
    asked = ids(*QUESTION)
    answered = ids(*QUESTION, *LETTERS)
    continued = ids(*answered, *b" and then?")
    origin = store.origin(EXACT)
    store.insert(origin, asked, exported(asked, 0, 5), (), fork=False)
    in_use = store.match(EXACT, asked)  # so that it stays beside the longer ones
    store.insert(origin, answered, exported(answered, 0, 8), ((5, 8),), fork=False)
    store.insert(origin, continued, exported(continued, 0, len(continued)), (), fork=False)
    store.release(in_use)
    assert store.advance(origin, continued).chunk.sampled == ((5, 8),)


def test_what_was_sampled_may_go_on_over_the_borders_of_a_text() -> None:
    """A model can write a special token in ordinary ones; what comes after the answer was not sampled."""
    store = new_store(None)
    answer, closing = list(b"yes</tool>"), [VOCAB.specials["<|im_end|>"]]
    whole = ids(*b"assistant:", *answer, *closing, *b"next")
    store.insert(store.origin(EXACT), whole, exported(whole, 0, len(whole)), ((10, 20),), fork=False)
    text = b"assistant:yes</tool><|im_end|>next"
    borders = {13, 20, 30, 34}
    assert store.replay(store.origin(EXACT), text, 0, borders, VOCAB.pieces) == (tuple(whole[:20].tolist()), 20)


def test_a_templates_own_words_are_replayed_only_up_to_the_first_border() -> None:
    store = new_store(None)
    whole = ids(*b"user:hi", *b"bot:", *b"yes")
    store.insert(store.origin(EXACT), whole, exported(whole, 0, len(whole)), ((11, 14),), fork=False)
    assert store.replay(store.origin(EXACT), b"user:hibot:yes", 0, {7, 14}, VOCAB.pieces) == ((), 0)
    assert store.replay(store.origin(EXACT), b"user:hibot:yes", 0, {14}, VOCAB.pieces) == (
        tuple(whole.tolist()),
        14,
    )


def stretch(store, text: str) -> tuple[int, ...]:
    """The stored ids of a prompt that begins with `text` and a special token."""
    data = text.encode()
    found, end = store.replay(store.origin(EXACT), data + b"<|im_end|>", 0, {len(data)}, VOCAB.pieces, SPECIALS)
    assert end == (len(data) if found else 0)
    return found


def test_what_was_tokenized_once_is_not_tokenised_again() -> None:
    store = new_store(None)
    text = "then there is the other one. " * 20
    tokenized = VOCAB.tokenize(text)
    put(store, ids(*tokenized, END, *b"\n"))
    assert stretch(store, text) == tuple(tokenized)


def test_the_beginning_of_a_longer_text_may_have_other_ids() -> None:
    store = new_store(None)
    put(store, ids(*VOCAB.tokenize("neat"), END))
    put(store, ids(*VOCAB.tokenize("nea")))
    assert stretch(store, "nea") == ()


def test_ids_that_a_client_sent_are_not_those_of_a_text() -> None:
    store = new_store(None)
    put(store, ids(*b"then", END), made=Made.GIVEN)
    assert stretch(store, "then") == ()
    put(store, ids(*VOCAB.tokenize("then"), END))
    assert stretch(store, "then") == tuple(VOCAB.tokenize("then"))


def test_a_special_token_that_a_client_sent_is_no_border_of_a_text() -> None:
    """The tokenizer was asked for a longer text, of which the client's ids use a part."""
    store = new_store(None)
    put(store, ids(*VOCAB.tokenize("athen")))
    put(store, ids(*VOCAB.tokenize("athen")[:2], END), made=Made.GIVEN)
    cut = b"".join(VOCAB.pieces[token] for token in VOCAB.tokenize("athen")[:2]).decode()
    assert stretch(store, cut) == ()


def test_sampled_ids_go_before_the_tokenizers() -> None:
    store = new_store(None)
    put(store, ids(*VOCAB.tokenize("then"), END))
    put(store, ids(*b"then", END), sampled=((0, 4),))
    assert stretch(store, "then") == tuple(b"then")


def test_where_ids_came_from_survives_a_restart(tmp_path) -> None:
    store = new_store(tmp_path)
    put(store, ids(*b"then", END), made=Made.GIVEN)
    put(store, ids(*VOCAB.tokenize("other"), END))
    store.close()
    for index in (None, *tmp_path.glob("*/index.db")):
        if index:
            index.unlink()
        store = new_store(tmp_path)
        assert stretch(store, "then") == ()
        assert stretch(store, "other") == tuple(VOCAB.tokenize("other"))
        store.close()
