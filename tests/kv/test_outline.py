"""The stored tree as a picture needs it: nothing is lost, whatever is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.kv import outline as outlines
from emberkeep.kv.outline import Runs, outline
from emberkeep.kv.store import Budgets, KvStore
from emberkeep.kv.tree import Chunk, Cursor, RadixTree, new_chunk, new_root
from emberkeep.token_arrays import TokenArray
from emberkeep.types.cache import CacheTree, EntryKind, Label
from emberkeep.types.lineage import EXACT, SHARED, Lineage, private_namespace
from helpers.chance import examples, times
from helpers.kv_building import FINGERPRINT, PLENTY, chunks_of, ids, new_store, prompt, put

ALICE = private_namespace("alice")
PAYLOAD = memoryview(b"tiny")
MANY = 1 << 20


def tree_of(store: KvStore, limit: int = MANY, at: str = "", hot: dict[str, int] | None = None) -> CacheTree:
    tree = store.catalogue.tree(hot or {}, limit, at)
    assert tree is not None
    check(tree, limit)
    return tree


def check(tree: CacheTree, limit: int) -> None:
    """What holds for every tree."""
    assert len(tree.nodes) <= limit
    by_id = {node.id: node for node in tree.nodes}
    assert len(by_id) == len(tree.nodes)
    assert tree.tokens == sum(node.own_tokens for node in tree.nodes)
    below = Counter(node.parent for node in tree.nodes)
    seen: set[str | None] = {None}
    for node in tree.nodes:
        assert node.parent in seen  # parents come first
        seen.add(node.id)
        assert min(node.hot_tokens, node.warm_tokens, node.cold_tokens) >= 0
        if node.parent is not None:
            assert node.start == by_id[node.parent].end
        if not node.branches:
            assert node.own_tokens == node.end - node.start
            assert below[node.id] <= node.below
            under = sum(one.tokens for one in tree.nodes if one.parent == node.id) if len(by_id) < 2000 else None
            assert under in (None, node.tokens - node.own_tokens)


def spans(tree: CacheTree) -> list[tuple[int, int]]:
    return sorted((node.start, node.end) for node in tree.nodes)


def grow(store: KvStore, cursor: Cursor, tokens: TokenArray) -> Cursor:
    return store.insert(cursor, tokens, PAYLOAD, (), fork=True)


def in_ram() -> KvStore:
    return KvStore(FINGERPRINT, Budgets(PLENTY))


def end_turn(store: KvStore, name: str, cursor: Cursor) -> str:
    entry = store.turn_ended(Label(EntryKind.CONVERSATION, f"id:{name}", f"about {name}", name=name), cursor)
    assert entry is not None
    return entry.id


# ── runs ──


def test_an_empty_store_has_no_nodes() -> None:
    assert tree_of(in_ram(), 1) == CacheTree((), 0, 0, 0)


def test_chunks_without_a_branch_are_one_node() -> None:
    store = in_ram()
    put(store, prompt(1000))
    (node,) = tree_of(store).nodes
    assert (node.start, node.end, node.chunks, node.parent, node.below) == (0, 1000, 8, None, 0)
    assert node.bytes == sum(chunk.bytes for chunk in chunks_of(store))


def test_a_branch_inside_a_chunk_cuts_it() -> None:
    store = in_ram()
    trunk = grow(store, store.origin(EXACT), prompt(128))
    grow(store, trunk, prompt(50, seed=1))
    grow(store, Cursor(trunk.chunk, 40, EXACT), prompt(30, seed=2))
    tree = tree_of(store)
    assert spans(tree) == [(0, 40), (40, 70), (40, 178)]
    first = tree.nodes[0]
    assert (first.tokens, first.own_tokens, first.below, first.chunks) == (208, 40, 2, 1)
    rest = next(node for node in tree.nodes if node.end == 178)
    assert rest.id == f"{first.id}.40" and rest.chunks == 1
    assert tree.bytes == sum(chunk.bytes for chunk in chunks_of(store))
    assert tree_of(store, at=rest.id).nodes[0].id == rest.id


def test_owners_have_their_own_beginnings_and_a_change_of_owner_is_seen() -> None:
    store = in_ram()
    shared = grow(store, store.origin(Lineage(SHARED)), prompt(128))
    grow(store, Cursor(shared.chunk, 128, Lineage(ALICE)), prompt(60, seed=1))
    grow(store, store.origin(EXACT), prompt(70, seed=2))
    grow(store, Cursor(shared.chunk, 64, Lineage(ALICE, 8)), prompt(60, seed=3))
    nodes = {(node.start, node.end, node.user, node.is_shared, node.is_exact) for node in tree_of(store).nodes}
    assert nodes == {
        (0, 64, "", True, True),
        (64, 128, "", True, True),
        (128, 188, "alice", False, True),
        (64, 124, "alice", False, False),
        (0, 70, "", False, True),
    }


def test_a_snapshot_is_bytes_of_the_run_in_which_it_was_taken() -> None:
    store = in_ram()
    trunk = grow(store, store.origin(EXACT), prompt(128))
    for used in (20, 40, 100):
        store.insert_snapshot(Cursor(trunk.chunk, used, EXACT), memoryview(bytes(1000)))
    grow(store, Cursor(trunk.chunk, 40, EXACT), prompt(30, seed=2))
    tree = tree_of(store)
    assert spans(tree) == [(0, 40), (40, 70), (40, 128)]
    by_end = {node.end: node for node in tree.nodes}
    assert (by_end[40].chunks, by_end[128].chunks, by_end[70].chunks) == (3, 1, 1)
    assert by_end[40].bytes > 2000 > by_end[128].bytes > 1000 > by_end[70].bytes
    assert (tree.bytes, tree.chunks) == (sum(c.bytes for c in chunks_of(store)), 5)


def test_tiers_are_told_by_the_fastest(tmp_path) -> None:
    store = new_store(tmp_path)
    tokens = prompt(1000)
    entry = end_turn(store, "a", put(store, tokens))
    store.flush()
    cold = [chunk for chunk in chunks_of(store) if chunk.start < 256]
    store.transact(lambda ledger: [ledger.ram.free(chunk) for chunk in cold])
    (node,) = tree_of(store).nodes
    assert (node.hot_tokens, node.warm_tokens, node.cold_tokens) == (0, 744, 256)
    (node,) = tree_of(store, hot={entry: 300, "unknown": 5}).nodes
    assert (node.hot_tokens, node.warm_tokens, node.cold_tokens) == (300, 700, 0)


@st.composite
def forests(draw) -> tuple[list[Chunk], int]:
    """Chunks of several lineages that hang anywhere, also twice at the same place, parents first."""
    lineages = [EXACT, Lineage(ALICE), Lineage(ALICE, 8)]
    tree = RadixTree()
    places = [Cursor(new_root(""), 0, EXACT), Cursor(new_root(ALICE), 0, Lineage(ALICE))]
    chunks: list[Chunk] = []
    for number in range(draw(st.integers(0, 14))):
        place = draw(st.sampled_from(places))
        cursor = Cursor(place.chunk, place.used, draw(st.sampled_from(lineages)))
        chunk = new_chunk(
            FINGERPRINT, cursor, ids(*[number] * draw(st.integers(0, 4))), draw(st.integers(1, 99)), 0
        )
        if chunk.is_snapshot and (place.chunk.is_root or tree.get(chunk.key)):
            continue
        tree.add(chunk)
        chunk.last_used = draw(st.integers(0, 5))
        chunks.append(chunk)
        places += [Cursor(chunk, used, EXACT) for used in range(1, len(chunk.tokens) + 1)]
    return chunks, draw(st.integers(1, 12))


def runs_token_by_token(chunks: Iterable[Chunk]) -> Counter[tuple[int, int]]:
    """Spans of runs, found in the simplest way."""
    followers: dict[tuple[int, int], list[tuple[Chunk, int]]] = {}
    texts = [chunk for chunk in chunks if not chunk.is_snapshot]
    for chunk in texts:
        for offset in range(len(chunk.tokens) - 1):
            followers.setdefault((id(chunk), offset + 1), []).append((chunk, offset + 1))
        if chunk.parent is not None and not chunk.parent.is_root:
            followers.setdefault((id(chunk.parent), chunk.take), []).append((chunk, 0))
    joined = set()
    for (before, _), after in followers.items():
        (chunk, offset), *others = after
        if not others and (id(chunk) == before or chunk.lineage == chunk.parent.lineage):
            joined.add((id(chunk), offset))
    found: Counter[tuple[int, int]] = Counter()
    for chunk in texts:
        for offset in range(len(chunk.tokens)):
            if (id(chunk), offset) in joined:
                continue
            start, here, used = chunk.start + offset, chunk, offset + 1
            while (after := followers.get((id(here), used), [])) and (id(after[0][0]), after[0][1]) in joined:
                here, used = after[0][0], after[0][1] + 1
            found[start, here.start + used] += 1
    return found


@examples(50)
@given(forests())
def test_runs_are_those_found_token_by_token_and_every_limit_keeps_the_sums(forest) -> None:
    chunks, limit = forest
    whole = outline(Runs(chunks), [], MANY)
    assert whole is not None
    check(whole, MANY)
    assert Counter((node.start, node.end) for node in whole.nodes) == runs_token_by_token(chunks)
    tree = outline(Runs(chunks), [], limit)
    assert tree is not None
    check(tree, limit)
    assert (tree.tokens, tree.bytes, tree.chunks) == (whole.tokens, whole.bytes, whole.chunks)
    assert tree.tokens == sum(len(chunk.tokens) for chunk in chunks)
    assert (tree.bytes, tree.chunks) == (sum(chunk.bytes for chunk in chunks), len(chunks))
    for node in tree.nodes:
        closer = outline(Runs(chunks), [], MANY, node.id)
        assert closer is not None
        check(closer, MANY)
        assert closer.tokens >= node.tokens  # what was used lately is shown, and is among these branches as well


# ── limits ──


@pytest.fixture(scope="module")
def crowd() -> Iterator[KvStore]:
    """A few users who share a prefix each, with conversations of many lengths."""
    store = in_ram()
    for number in range(600):
        owner = private_namespace(f"user{number % 3}")
        cursor = store.advance(store.origin(Lineage(owner)), prompt(128))
        if not cursor.position:
            cursor = grow(store, cursor, prompt(128))
        length = 10 + number if number % 7 else 4
        end_turn(store, f"c{number}", grow(store, cursor, prompt(length, seed=number + 1)))
    yield store
    store.close()


@pytest.mark.parametrize("limit", [1, 2, 10, 100, 602, 603, 1500])
def test_there_are_never_more_nodes_than_asked_for_and_nothing_is_lost(crowd: KvStore, limit: int) -> None:
    tree = tree_of(crowd, limit)
    assert tree.tokens == sum(len(chunk.tokens) for chunk in chunks_of(crowd))
    assert tree.bytes == sum(chunk.bytes for chunk in chunks_of(crowd))
    assert tree.chunks == 603
    assert len(tree.nodes) >= min(limit, 603) - 1
    assert sum(node.more_entries + len(node.entries) for node in tree.nodes) == 600
    branches = sum(node.branches for node in tree.nodes if node.parent is not None)
    assert limit < 10 or branches + sum(not node.branches for node in tree.nodes) == 603


def test_the_longest_branches_have_nodes_of_their_own(crowd: KvStore) -> None:
    tree = tree_of(crowd, 100)
    shown = sorted(node.own_tokens for node in tree.nodes if not node.branches and node.parent)
    assert sum(length > 520 for length in shown) > 70


def test_what_was_used_last_is_shown_however_short_it_is(crowd: KvStore) -> None:
    cursor = crowd.advance(crowd.origin(Lineage(private_namespace("user0"))), prompt(128))
    crowd.transact(lambda ledger: setattr(ledger, "tick", ledger.tick + 1))
    latest = crowd.insert(cursor, ids(1, 2, 3), PAYLOAD, (), fork=False)
    entry = end_turn(crowd, "latest", latest)
    try:
        ends = [end.id for node in tree_of(crowd, 20).nodes for end in node.entries]
        assert entry in ends
    finally:
        crowd.catalogue.remove(entry)


def test_branches_together_can_be_looked_at_until_all_were_seen(crowd: KvStore) -> None:
    seen, todo = set(), [""]
    while todo:
        tree = tree_of(crowd, 50, todo.pop())
        assert tree.tokens
        seen |= {node.id for node in tree.nodes if not node.branches}
        todo += [node.id for node in tree.nodes if node.branches]
    assert len(seen) == 603


def test_a_node_that_is_not_there(crowd: KvStore) -> None:
    for at in (
        "0123456789abcdef",
        "0123456789abcdef~3",
        "nonsense",
        "~",
        "../x",
        tree_of(crowd).nodes[0].id + ".500",
    ):
        assert crowd.catalogue.tree({}, 10, at) is None
    assert tree_of(crowd, 10, "~999").nodes == ()


def test_a_deep_chain_of_branches_is_not_too_deep() -> None:
    """A side branch at every chunk, so that no two chunks are one run."""
    root, chunks = new_root(""), list[Chunk]()
    cursor = Cursor(root, 0, EXACT)
    for number in range(10_000):
        for tokens in (ids(number, 1, 2), ids(number, 9)):
            chunk = new_chunk(FINGERPRINT, cursor, tokens, 1, 0)
            chunks.append(chunk)
        cursor = Cursor(chunks[-2], 3, EXACT)
    all_runs = Runs(chunks)
    assert len(all_runs) == 20_000
    for limit in (1, 2, 10, 1500):
        tree = outline(all_runs, [], limit)
        assert tree is not None and len(tree.nodes) <= limit
        assert tree.tokens == sum(node.own_tokens for node in tree.nodes) == 50_000


# ── entries ──


def test_entries_are_named_where_they_end() -> None:
    store = in_ram()
    first = end_turn(store, "a", put(store, prompt(200)))
    both = put(store, prompt(300, seed=1, start=prompt(200)))
    second = end_turn(store, "b", both)
    again = end_turn(store, "c", both)
    store.catalogue.pin(second, True)
    (node,) = tree_of(store).nodes
    assert [end.position for end in node.entries] == [300, 300, 200]
    assert {end.id for end in node.entries[:2]} == {second, again} and node.entries[2].id == first
    assert {end.head for end in node.entries} == {"about a", "about b", "about c"}
    assert node.is_pinned and [end.is_pinned for end in node.entries if end.id == second] == [True]
    assert all(store.catalogue.entry(end.id) for end in node.entries)


def test_an_earlier_branch_of_a_conversation_is_told_from_its_latest() -> None:
    store = in_ram()
    start = prompt(128)
    for seed in (1, 2):
        put(store, prompt(200, seed=seed, start=start))
        entry = end_turn(store, "a", store.advance(store.origin(EXACT), prompt(200, seed=seed, start=start)))
    ends = {end.is_latest: end.id for node in tree_of(store).nodes for end in node.entries}
    assert ends == {True: entry, False: entry}


def test_text_without_an_entry_can_be_named_all_the_same() -> None:
    store = in_ram()
    put(store, prompt(200))
    (node,) = tree_of(store).nodes
    (end,) = node.entries
    (listed,) = store.catalogue.entries()
    assert (end.id, end.position, end.head) == (listed.id, 200, "")
    assert store.catalogue.remove(end.id) is not None
    assert spans(tree_of(store)) == [(0, 128)]


# ── while the store lives ──


def test_it_can_be_looked_at_while_chunks_come_and_go() -> None:
    store = KvStore(FINGERPRINT, Budgets(40_000))

    def churn() -> None:
        for seed in range(times(60)):
            end_turn(store, f"c{seed % 20}", put(store, prompt(300, seed=seed % 50)))
            store.catalogue.remove(store.catalogue.entries()[-1].id)

    with ThreadPoolExecutor(1) as pool:
        churning = pool.submit(churn)
        for limit in cycle((1, 7, 1500)):
            tree_of(store, limit)
            if churning.done():
                break
        churning.result()


@pytest.mark.parametrize("look", [tree_of, lambda store: store.catalogue.entries()])
def test_others_get_the_lock_and_the_interpreter_meanwhile(look, monkeypatch: pytest.MonkeyPatch) -> None:
    store, given_way = in_ram(), list[bool]()
    for number in range(2500):
        grow(store, store.origin(EXACT), ids(number, 1))
    monkeypatch.setattr(outlines, "sleep", lambda _: given_way.append(store._lock.locked()))
    look(store)
    assert len(given_way) > 2 and not any(given_way)
