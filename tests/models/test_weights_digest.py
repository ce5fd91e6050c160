from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from emberkeep.errors import ModelBroken, ModelNotFound
from emberkeep.models import digest
from emberkeep.models.digest import model_digest, remember, weights_digest


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "w.gguf"
    path.write_bytes(b"weights" * 1000)
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "digests"


def _sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _never(*_: object) -> str:
    raise AssertionError("the file was read again")


def test_it_is_the_sha256_of_the_file(weights: Path, cache: Path) -> None:
    seen: list[tuple[int, int]] = []
    assert weights_digest(weights, cache) == _sha(weights)
    assert digest.sha256_of(weights, lambda done, total: seen.append((done, total))) == _sha(weights)
    assert seen[-1] == (7000, 7000)


def test_a_model_in_parts_tells_how_much_of_all_of_them_was_read(weights: Path, cache: Path) -> None:
    parts = [weights.with_name(f"w-{number:05}-of-00002.gguf") for number in (1, 2)]
    for part in parts:
        part.write_bytes(weights.read_bytes())
    seen: list[tuple[int, int]] = []
    model_digest(parts[0], cache, lambda done, total: seen.append((done, total)))
    assert seen == [(7000, 14000), (14000, 14000)]


def test_an_unchanged_file_is_not_read_again_nor_over_a_link(
    weights: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = weights_digest(weights, cache)
    link = weights.with_name("link.gguf")
    link.symlink_to(weights)
    monkeypatch.setattr(digest, "sha256_of", _never)
    assert weights_digest(weights, cache) == weights_digest(link, cache) == first


def test_a_replaced_file_of_equal_size_and_age_is_read_again(weights: Path, cache: Path) -> None:
    weights_digest(weights, cache)
    before = weights.stat()
    other = weights.with_name("other")
    other.write_bytes(b"WEIGHTS" * 1000)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(weights)
    assert weights_digest(weights, cache) == _sha(weights)


def test_a_file_edited_in_place_that_pretends_to_be_as_old_is_read_again(weights: Path, cache: Path) -> None:
    weights_digest(weights, cache)
    before = weights.stat()
    weights.write_bytes(b"WEIGHTS" * 1000)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_mtime_ns == before.st_mtime_ns
    assert weights_digest(weights, cache) == _sha(weights)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"sha256": "00"}'])
def test_a_damaged_cache_entry_is_recomputed(weights: Path, cache: Path, content: bytes) -> None:
    weights_digest(weights, cache)
    (entry,) = cache.iterdir()
    entry.write_bytes(content)
    assert weights_digest(weights, cache) == _sha(weights)


def test_an_unusable_cache_folder_only_costs_time(weights: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    assert weights_digest(weights, blocked) == _sha(weights)


def test_a_known_digest_can_be_handed_in(weights: Path, cache: Path) -> None:
    remember(weights, "ab" * 32, cache)
    assert weights_digest(weights, cache) == "ab" * 32


def test_entries_are_private(weights: Path, cache: Path) -> None:
    weights_digest(weights, cache)
    (entry,) = cache.iterdir()
    assert (cache.stat().st_mode & 0o777, entry.stat().st_mode & 0o777) == (0o700, 0o600)


def test_many_at_once_agree_and_leave_one_entry_per_file(weights: Path, cache: Path) -> None:
    files = [weights.with_name(f"{i}.gguf") for i in range(4)]
    for i, file in enumerate(files):
        file.write_bytes(bytes([i]) * 10_000)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda file: weights_digest(file, cache), files * 16))
    assert results == [_sha(file) for file in files] * 16
    assert len(list(cache.iterdir())) == 4


def test_a_file_that_changes_while_it_is_read_is_refused(
    weights: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = digest.sha256_of

    def write_more(path: Path, *rest: None) -> str:
        found = read(path, *rest)
        weights.write_bytes(b"changed")
        return found

    monkeypatch.setattr(digest, "sha256_of", write_more)
    with pytest.raises(ModelBroken, match="changed while it was read"):
        weights_digest(weights, cache)
    assert not cache.exists()


def test_a_missing_file_is_not_found(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ModelNotFound, match="No such file"):
        weights_digest(tmp_path / "none.gguf", cache)
