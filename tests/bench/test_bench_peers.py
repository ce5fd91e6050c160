"""`bench peers`: what the figures are made of. The other server is a scripted one; nothing here is a timing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from emberkeep.bench.http_client import Exchange, Reply, parse_stream
from emberkeep.bench.peers import rate_doubts, rate_rows, wait_doubts, wait_rows
from emberkeep.bench.report import Row
from emberkeep.bench.server_process import PeerProcess, peer_version
from emberkeep.bench.sides import OURS, PEER, Rate
from emberkeep.cli.bench import app
from emberkeep.errors import EmberkeepError
from helpers import scripted_llama_server, tiny_gguf
from helpers.commands import run_module

pytestmark = pytest.mark.slow

REPLY = Reply(
    ttft_ms=100.0,
    text="",
    prompt_tokens=1000,
    completion_tokens=16,
    cached_tokens=990,
    tier="-",
    prepare_ms=0.0,
    load_ms=0.0,
    decode_step_ms=1.0,
)
COLD = replace(REPLY, cached_tokens=0)


# ── the rows ──


def test_a_wait_is_compared_round_by_round_and_more_than_one_is_ours_being_faster() -> None:
    ours = [replace(REPLY, ttft_ms=ms) for ms in (10.0, 20.0)]
    peer = [replace(REPLY, ttft_ms=ms, cached_tokens=500) for ms in (40.0, 40.0)]
    (row,) = wait_rows({"next turn": {OURS: ours, PEER: peer}})
    assert samples(row, "ratio") == (4.0, 2.0)
    assert (row.values["reused by us"], row.values["by llama-server"]) == (990, 500)


def test_a_rate_is_compared_the_other_way_round() -> None:
    (row,) = rate_rows({"1 stream": {OURS: [Rate(60.0, (128,))], PEER: [Rate(40.0, (128,))]}})
    assert samples(row, "ratio") == (1.5,)


def samples(row: Row, column: str) -> tuple[float, ...]:
    return row.values[column].samples  # type: ignore[union-attr]


def test_a_cold_prompt_that_was_partly_reused_is_told() -> None:
    half = replace(COLD, cached_tokens=500)
    assert list(wait_doubts({"cold prompt": {OURS: [COLD], PEER: [COLD]}})) == []
    (doubt,) = wait_doubts({"cold prompt": {OURS: [COLD], PEER: [COLD, half]}})
    assert "llama-server reused a part of it" in doubt


def test_a_cache_that_was_missed_is_told() -> None:
    (doubt,) = wait_doubts({"next turn": {OURS: [REPLY, COLD], PEER: [REPLY, REPLY]}})
    assert doubt.startswith("next turn: emberkeep found less than half")


def test_prompts_of_different_lengths_are_told() -> None:
    (doubt,) = wait_doubts({"cold prompt": {OURS: [COLD], PEER: [replace(COLD, prompt_tokens=1020)]}})
    assert "different lengths" in doubt


def test_answers_that_ended_early_are_told() -> None:
    rates = {"2 clients": {OURS: [Rate(1.0, (16, 16))], PEER: [Rate(1.0, (16, 9))]}}
    assert list(rate_doubts(rates, 16)) == ["2 clients: some answers of llama-server ended before 16 tokens."]


# ── the other server ──


def test_the_stream_of_a_llama_server_is_read_like_ours() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    frames = [
        {"choices": [{"delta": {"role": "assistant", "content": None}}]},
        {"choices": [{"delta": {"content": "Yes"}}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": usage, "timings": {"cache_n": 4, "predicted_ms": 30.0}},
    ]
    events = b"".join(b"data: " + json.dumps(frame).encode() + b"\n\n" for frame in frames)
    reply = parse_stream(Exchange(0, 0.5, 1, b"HTTP/1.1 200 OK\r\n\r\n" + events + b"data: [DONE]\n\n"))
    assert (reply.text, reply.cached_tokens, reply.tier) == ("Yes", 4, "-")
    assert reply.decode_step_ms == 15.0


def test_a_program_that_cannot_be_run_is_explained(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no program")
    with pytest.raises(EmberkeepError, match=r"text cannot be run: Permission denied\."):
        peer_version(tmp_path / "text")


def test_a_program_that_ends_at_once_is_explained_by_its_own_words(tmp_path: Path) -> None:
    program = tmp_path / "broken"
    program.write_text("#!/bin/sh\necho no such model\n")
    program.chmod(0o755)
    with pytest.raises(EmberkeepError, match="did not start: no such model"):
        PeerProcess(program, tmp_path / "model.gguf", tmp_path, parallel=1, ctx=128)


def test_without_a_program_to_compare_with_nothing_is_measured() -> None:
    result = CliRunner().invoke(app, ["peers", "--quick"])
    assert result.exit_code == 2
    assert "--peer PATH" in result.output


def test_both_servers_are_measured_and_their_own_counters_are_told(tmp_path: Path) -> None:
    model, program = tiny_gguf.dense(tmp_path / "tiny.gguf"), scripted_llama_server.install(tmp_path)
    arguments = ("peers", "--quick", "--model", str(model), "--peer", str(program))
    done = run_module(
        "emberkeep", "bench", *arguments, "--data-dir", "data", "--json", "report.json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    (result,) = report["results"]
    waits, rates = result["tables"]
    cold, *warm = waits["rows"]
    assert max(cold["reused by us"], cold["by llama-server"]) < 25  # what the template begins with
    assert len(warm) == 4
    assert all(row["reused by us"] > 250 and row["by llama-server"] > 70 for row in warm)
    assert all(len(row["ratio"]["samples"]) == 2 for row in (*waits["rows"], *rates["rows"]))
    assert [row["label"] for row in rates["rows"]] == [
        "1 stream",
        "2 clients",
        "1 stream beside a busy process",
        "2 clients beside a busy process",
    ]
    assert scripted_llama_server.VERSION in result["notes"][0] and "--parallel 2" in result["notes"][0]
    assert report["doctor"]["platform"] in done.stdout
    assert list((tmp_path / "data").iterdir()) == []
