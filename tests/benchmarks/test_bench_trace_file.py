from __future__ import annotations

import json

import pytest

from benchmarks.trace_file import Visit, read_trace
from emberkeep.errors import EmberkeepError
from helpers.benchmarks import written


def test_a_trace_is_read_as_it_was_recorded(tmp_path):
    visits = [Visit((0, 1), 600), Visit((0, 2, 3), 1536)]
    assert read_trace(written(tmp_path / "a.jsonl", visits)) == visits


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[]",
        '{"input_length": 10}',
        '{"input_length": 10, "hash_ids": []}',
        '{"input_length": 0, "hash_ids": [7]}',
        '{"input_length": 600, "hash_ids": [7]}',
        '{"input_length": 10, "hash_ids": [7, 8]}',
        '{"input_length": 10, "hash_ids": [-7]}',
        '{"input_length": 10, "hash_ids": [2147483648]}',
        '{"input_length": 600, "hash_ids": [7, 1]}',  # 1 follows 0 in the first line
        '{"input_length": 520, "hash_ids": [0, 1]}',  # and stands for 88 tokens
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path, line):
    path = written(tmp_path / "a.jsonl", [Visit((0, 1), 600)])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(EmberkeepError, match=r"^a\.jsonl, line 2 is not a request"):
        read_trace(path)


def test_an_empty_trace_is_refused(tmp_path):
    with pytest.raises(EmberkeepError, match="is empty"):
        read_trace(written(tmp_path / "a.jsonl", []))


TIMED = {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [0, 1]}


def test_where_times_count_they_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(TIMED))
    assert read_trace(path, timed=True) == [Visit((0, 1), 600, answer=7, at=1.5)]


@pytest.mark.parametrize(
    "change",
    [
        {"timestamp": None},
        {"timestamp": -1},
        {"timestamp": float("nan")},
        {"timestamp": float("inf")},
        {"output_length": None},
        {"output_length": -1},
        {"output_length": "many"},
        {"output_length": float("inf")},
    ],
)
def test_where_times_count_a_line_without_them_is_named(tmp_path, change):
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(TIMED)}\n{json.dumps(TIMED | change)}\n")
    with pytest.raises(EmberkeepError, match=r"^a\.jsonl, line 2 .* `timestamp` and `output_length`"):
        read_trace(path, timed=True)
