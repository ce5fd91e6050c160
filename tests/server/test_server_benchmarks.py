"""`/v1/benchmarks`: what was measured here, the newest first, and nothing else from the disk."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from emberkeep.bench.figures import series
from emberkeep.bench.kept_results import keep_result
from emberkeep.bench.report import BenchResult, Row, Table
from emberkeep.config.settings import Config
from emberkeep.types.request import Json
from helpers.scripted_server import ScriptedBackend, running

AROUND = {
    "emberkeep": "1",
    "command": ["bench", "turns"],
    "model": {"file": "tiny.gguf", "bytes": 7},
    "machine": {"cores": 2},
    "versions": {"python": "3"},
}


def measured(name: str, *samples: float) -> BenchResult:
    return BenchResult(
        name, (Table("time", (Row("turn 1", {"TTFT": series(samples, "ms"), "reused": 3}),)),), ("n",)
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "benchmarks"


@pytest.fixture
def client(folder: Path) -> Iterator[httpx.Client]:
    with (
        running(ScriptedBackend(), Config(data_dir=folder.parent)) as server,
        httpx.Client(base_url=server.url, timeout=20) as client,
    ):
        yield client


def listed(client: httpx.Client, **query: int) -> Json:
    response = client.get("/v1/benchmarks", params=query)
    assert response.status_code == 200, response.text
    return response.json()


def test_nothing_measured_is_an_empty_list(client: httpx.Client) -> None:
    assert listed(client) == {"data": [], "object": "list", "has_more": False}


def test_the_newest_comes_first_page_by_page(client: httpx.Client, folder: Path) -> None:
    ids = [keep_result(folder, measured(name, 1.0), AROUND).stem for name in ("turns", "load", "turns")]
    assert [one["id"] for one in listed(client)["data"]] == ids[::-1]
    first = listed(client, limit=2)
    assert ([one["id"] for one in first["data"]], first["has_more"]) == (ids[:0:-1], True)
    rest = listed(client, limit=2, offset=2)
    assert ([one["id"] for one in rest["data"]], rest["has_more"]) == (ids[:1], False)
    head = rest["data"][0]
    assert head.pop("when") > "2020"
    assert head == {
        "id": ids[0],
        "object": "benchmark",
        "name": "turns",
        "command": ["bench", "turns"],
        "emberkeep": "1",
        "model": {"file": "tiny.gguf", "bytes": 7},
    }
    assert client.get("/v1/benchmarks", params={"limit": 0}).json()["error"]["param"] == "limit"


def test_one_of_them_is_told_as_it_was_kept(client: httpx.Client, folder: Path) -> None:
    path = keep_result(folder, measured("turns", 10.0, 12.0), AROUND)
    told = client.get(f"/v1/benchmarks/{path.stem}").json()
    assert told == {**json.loads(path.read_text()), "id": path.stem, "object": "benchmark"}
    assert told["tables"][0]["rows"][0]["TTFT"]["median"] == 11.0 and told["pictures"][0]["svg"].startswith("<svg")


@pytest.mark.parametrize(
    "name",
    ["none", "..", "%2e%2e", "..%2Fsecret", "%2Fetc%2Fpasswd", "a%00b", "a.json", "x" * 200, "%F0%9F%90%88"],
)
def test_no_name_leads_elsewhere(client: httpx.Client, folder: Path, name: str) -> None:
    folder.mkdir()
    result = json.loads(keep_result(folder, measured("turns", 1.0), AROUND).read_text())
    for place in (folder.parent / "secret.json", folder / "a.json.json"):
        place.write_text(json.dumps(result))
    response = client.get(f"/v1/benchmarks/{name}")
    assert response.status_code == 404
    assert "median" not in response.text


DAMAGED = {
    "empty": "",
    "cut": '{"name": "turns", "ta',
    "a-list": "[]",
    "deep": "[" * 100_000,
    "without-tables": '{"name": "turns", "when": "2026-01-01T00:00:00+00:00", "notes": [], "pictures": []}',
    "not-utf8": "\udcff",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_left_out_and_the_log_says_so(
    client: httpx.Client, folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept = keep_result(folder, measured("turns", 1.0), AROUND)
    (folder / f"{name}.json").write_bytes(DAMAGED[name].encode("utf-8", "surrogateescape"))
    caplog.set_level(logging.WARNING)
    assert [one["id"] for one in listed(client)["data"]] == [kept.stem]
    assert f"{name}.json is no result of a benchmark" in caplog.text
    assert client.get(f"/v1/benchmarks/{name}").status_code == 404


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", 5),
        ("notes", "one"),
        ("command", None),
        ("machine", []),
        ("machine", {"load": float("inf")}),
        ("tables", [{"title": "t", "rows": [{"label": "l", "c": {"median": 1}}]}]),
        ("tables", [{"title": "t", "rows": [{"label": "l", "c": [1]}]}]),
        ("pictures", [{"title": "t"}]),
        ("pictures", [{"title": "t", "svg": {}}]),
    ],
)
def test_a_file_of_another_shape_is_left_out(client: httpx.Client, folder: Path, field: str, value: Json) -> None:
    path = keep_result(folder, measured("turns", 1.0), AROUND)
    assert len(listed(client)["data"]) == 1
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    assert listed(client)["data"] == []


def test_a_file_that_is_too_large_is_not_read(client: httpx.Client, folder: Path) -> None:
    path = keep_result(folder, measured("turns", 1.0), AROUND)
    with path.open("a") as file:
        file.write(" " * (8 << 20))
    assert listed(client)["data"] == []
