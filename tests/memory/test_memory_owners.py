"""Whatever two owners do, neither ever sees anything of the other."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from emberkeep.memory.memory import Memory
from emberkeep.types.memory import Note, NoteKind
from emberkeep.types.request import Message
from helpers.chance import examples
from helpers.remembering import PLENTY, turn

OWNERS = st.sampled_from(["", '["anna", ""]'])
WORDS = st.sampled_from(["apple", "bridge", "cloud", "dust"])
TALKS = st.sampled_from(["one", "two"])


def mark(owner: str) -> str:
    return "ofanna" if owner else "ofnoname"


class TwoOwners(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.memory = Memory(Path(self.folder.name) / "memory.sqlite", limit_bytes=PLENTY)
        self.turns: set[tuple[str, str, str]] = set()
        self.facts: set[tuple[str, str]] = set()

    @rule(owner=OWNERS, word=WORDS, talk=TALKS)
    def archive(self, owner: str, word: str, talk: str) -> None:
        one = turn(f"{word}", mark(owner), conversation=talk)
        self.memory.archive(owner, [one], [Note(one.key, NoteKind.EVICTED, mark(owner))])
        self.turns.add((owner, word, talk))

    @rule(owner=OWNERS, word=WORDS)
    def set_fact(self, owner: str, word: str) -> None:
        self.memory.set_fact(owner, word, mark(owner))
        self.facts.add((owner, word))

    @rule(owner=OWNERS, word=WORDS)
    def delete_fact(self, owner: str, word: str) -> None:
        assert self.memory.delete_fact(owner, word) == ((owner, word) in self.facts)
        self.facts.discard((owner, word))

    @rule(owner=OWNERS, word=WORDS)
    def store_answer(self, owner: str, word: str) -> None:
        self.memory.store_answer(owner, word, mark(owner))

    @rule(owner=OWNERS, talk=TALKS)
    def save(self, owner: str, talk: str) -> None:
        self.memory.save_messages(owner, talk, [Message("user", mark(owner))], model=mark(owner))

    @rule(owner=OWNERS, talk=TALKS)
    def forget_a_conversation(self, owner: str, talk: str) -> None:
        mine = {one for one in self.turns if (one[0], one[2]) == (owner, talk)}
        assert self.memory.forget(owner, talk).turns == len(mine)
        self.turns -= mine

    @rule(owner=OWNERS)
    def forget_everything(self, owner: str) -> None:
        self.memory.forget(owner)
        self.turns = {one for one in self.turns if one[0] != owner}
        self.facts = {one for one in self.facts if one[0] != owner}

    @rule(owner=OWNERS, word=WORDS, talk=TALKS | st.none())
    def search(self, owner: str, word: str, talk: str | None) -> None:
        found = self.memory.search(owner, word, max_results=50, conversation=talk)
        assert {one.assistant_text for one in found} <= {mark(owner)}
        talks = {one.conversation for one in found if one.kind == "turn"}
        assert talks == {t for o, w, t in self.turns if (o, w) == (owner, word) and talk in (None, t)}

    @invariant()
    def nothing_crosses(self) -> None:
        for owner in ("", '["anna", ""]'):
            other = mark("" if owner else '["anna", ""]')
            assert other not in repr(list(self.memory.export(owner)))
            assert self.memory.stats(owner)["turns"] == sum(one[0] == owner for one in self.turns)
            assert {fact.name for fact in self.memory.facts(owner)} == {w for o, w in self.facts if o == owner}
            assert self.memory.search(owner, other) == []

    def teardown(self) -> None:
        self.memory.close()
        self.folder.cleanup()


TestTwoOwners = TwoOwners.TestCase
TestTwoOwners.settings = examples(15, stateful_step_count=15)
