"""llama-server's own endpoints, field by field."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from emberkeep.types.cache import CacheEntry, EntryKind, Removed
from emberkeep.types.events import Accepted, Finished, FinishReason, Progress, TextDelta, TokenLogprob
from emberkeep.types.request import Infill, Json, SourceFile, Ttl
from helpers.scripted_server import COMPLETED, ScriptedBackend

WHOLE = {
    "index",
    "content",
    "tokens",
    "id_slot",
    "stop",
    "model",
    "tokens_predicted",
    "tokens_evaluated",
    "generation_settings",
    "prompt",
    "has_new_line",
    "truncated",
    "stop_type",
    "stopping_word",
    "tokens_cached",
    "timings",
}
CHUNK = {"index", "content", "tokens", "stop", "id_slot", "tokens_predicted", "tokens_evaluated"}
TOP = (TokenLogprob(7, b"a", -0.5), TokenLogprob(8, b"\xc3", -1.0))
ANSWER = (
    Accepted(10, "<s>Once"),
    TextDelta(0, "Hel", (TokenLogprob(7, b"Hel", -0.5, TOP),), (7,)),
    TextDelta(0, "lo\n", (), (8, 9)),
    Finished(0, FinishReason.STOP),
    replace(COMPLETED, slot=2),
)


def complete(http: httpx.Client, **fields: Any) -> Any:
    response = http.post("/completion", json={"prompt": "Once", **fields})
    assert response.status_code == 200, response.text
    return response.json()


def chunks(http: httpx.Client, **fields: Any) -> list[Any]:
    response = http.post("/completion", json={"prompt": "Once", "stream": True, **fields})
    assert response.headers["content-type"].startswith("text/event-stream")
    return [
        json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line.startswith("data")
    ]


# ── completion ──


def test_a_whole_completion_has_every_field(backend: ScriptedBackend, http: httpx.Client) -> None:
    backend.reset(*ANSWER)
    told = complete(http, n_predict=5, return_tokens=True)
    assert set(told) == WHOLE
    assert (told["content"], told["tokens"], told["stop"], told["index"]) == ("Hello\n", [7, 8, 9], True, 0)
    assert (told["stop_type"], told["stopping_word"], told["id_slot"]) == ("eos", "", 2)
    assert (told["prompt"], told["has_new_line"], told["truncated"]) == ("<s>Once", True, False)
    assert told["tokens_evaluated"] == COMPLETED.usage.prompt_tokens
    assert told["tokens_cached"] == COMPLETED.usage.total_tokens
    assert {"prompt_n", "prompt_ms", "prompt_per_token_ms", "predicted_per_second"} <= set(told["timings"])
    assert backend.last.max_tokens == 5


def test_tokens_are_told_when_they_are_asked_for(backend: ScriptedBackend, http: httpx.Client) -> None:
    backend.reset(*ANSWER)
    assert complete(http)["tokens"] == []


def test_the_settings_that_were_used_are_told(backend: ScriptedBackend, http: httpx.Client) -> None:
    fields = {
        "dry_multiplier": 0.8,
        "temperature": 0.5,
        "seed": 42,
        "samplers": "kt",
        "stop": ["x"],
        "n_predict": 3,
    }
    settings = complete(http, **fields, logit_bias=[[5, False]])["generation_settings"]
    assert {name: settings[name] for name in fields} == {**fields, "samplers": ["top_k", "temperature"]}
    assert settings["logit_bias"] == [{"token": 5, "bias": None}]
    assert settings["repeat_last_n"] == 64
    assert complete(http)["generation_settings"]["seed"] == -1


@pytest.mark.parametrize(
    ("finished", "expected"),
    [
        (Finished(0, FinishReason.STOP), ("eos", "")),
        (Finished(0, FinishReason.LENGTH), ("limit", "")),
        (Finished(0, FinishReason.STOP, "###"), ("word", "###")),
    ],
)
def test_the_reason_of_the_end_is_told(
    backend: ScriptedBackend, http: httpx.Client, finished: Finished, expected: tuple[str, str]
) -> None:
    backend.reset(TextDelta(0, "x"), finished, COMPLETED)
    told = complete(http)
    assert (told["stop_type"], told["stopping_word"]) == expected


def test_probabilities_are_the_models_own_or_as_drawn(backend: ScriptedBackend, http: httpx.Client) -> None:
    backend.reset(*ANSWER)
    (first,) = complete(http, n_probs=2)["completion_probabilities"]
    assert (first["id"], first["token"], first["bytes"], first["logprob"]) == (7, "Hel", [72, 101, 108], -0.5)
    assert [other["token"] for other in first["top_logprobs"]] == ["a", ""]
    assert first["top_logprobs"][1]["bytes"] == [0xC3]
    assert (backend.last.top_logprobs, backend.last.logprobs_as_drawn) == (2, False)
    (drawn,) = complete(http, n_probs=2, post_sampling_probs=True)["completion_probabilities"]
    assert drawn["prob"] == pytest.approx(0.6065, abs=1e-3)
    assert len(drawn["top_probs"]) == 2
    assert backend.last.logprobs_as_drawn


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        ("", [""]),
        ([1, 2], [(1, 2)]),
        ([1.0, 2.0], [(1, 2)]),
        ([[1.0], [2]], [(1,), (2,)]),
        (["a", "b"], ["a", "b"]),
        ([[1, 2], "b"], [(1, 2), "b"]),
        (["a", 2, "b"], [(1, 97, 2, 98)]),
        ([3, "a"], [(3, 97)]),
        ([["a", 2], [3]], [(1, 97, 2), (3,)]),
        ({"prompt_string": "a"}, ["a"]),
        ([{"prompt_string": "a"}, "b"], ["a", "b"]),
    ],
)
def test_every_form_of_prompt_is_read(
    backend: ScriptedBackend, http: httpx.Client, prompt: Json, expected: list[Any]
) -> None:
    told = complete(http, prompt=prompt)
    assert [request.prompt for request in backend.requests] == expected
    assert isinstance(told, list) is (len(expected) > 1)


def test_answers_to_several_prompts_are_numbered_and_each_has_its_own_figures(
    backend: ScriptedBackend, http: httpx.Client
) -> None:
    backend.reset(TextDelta(0, "x", (), (5,)), TextDelta(1, "y", (), (5, 6)), *_ends(2), COMPLETED)
    told = complete(http, prompt=["a", "b"], n_cmpl=2)
    assert [(each["index"], each["content"]) for each in told] == [(0, "x"), (1, "y"), (2, "x"), (3, "y")]
    assert [each["tokens_predicted"] for each in told] == [1, 2, 1, 2]


def _ends(count: int) -> list[Finished]:
    return [Finished(index, FinishReason.STOP) for index in range(count)]


def test_only_the_fields_that_are_asked_for(backend: ScriptedBackend, http: httpx.Client) -> None:
    backend.reset(*ANSWER)
    wanted = ["content", "generation_settings/n_predict", "timings/prompt_n", "nothing", "content/x"]
    assert complete(http, n_predict=4, response_fields=wanted) == {
        "content": "Hello\n",
        "generation_settings/n_predict": 4,
        "timings/prompt_n": COMPLETED.timings.prompt_n,
    }


def test_a_stream_has_chunks_and_one_last_object(backend: ScriptedBackend, http: httpx.Client) -> None:
    backend.reset(*ANSWER)
    *pieces, last = chunks(http, n_probs=2)
    assert [piece["content"] for piece in pieces] == ["Hel", "lo\n"]
    assert set(pieces[0]) == CHUNK | {"completion_probabilities"}
    assert set(pieces[1]) == CHUNK
    assert [piece["tokens"] for piece in pieces] == [[7], [8, 9]]
    assert [piece["tokens_predicted"] for piece in pieces] == [1, 3]
    assert all(piece["tokens_evaluated"] == 10 and piece["stop"] is False for piece in pieces)
    assert set(last) == WHOLE
    assert (last["content"], last["tokens"], last["stop"], last["has_new_line"]) == ("", [], True, True)


def test_every_choice_of_a_stream_tells_how_many_tokens_it_has(
    backend: ScriptedBackend, http: httpx.Client
) -> None:
    pieces = (TextDelta(0, "a", tokens=(7,)), TextDelta(1, "bc", tokens=(8, 9)))
    backend.reset(*pieces, Finished(0, FinishReason.LENGTH), Finished(1, FinishReason.LENGTH), COMPLETED)
    last = [chunk for chunk in chunks(http, n_cmpl=2) if chunk["stop"]]
    assert [(chunk["index"], chunk["tokens_predicted"]) for chunk in last] == [(0, 1), (1, 2)]


def test_a_stream_tells_timings_and_progress_when_they_are_asked_for(
    backend: ScriptedBackend, http: httpx.Client
) -> None:
    backend.reset(Progress(10, 2, 6, 1.5), *ANSWER)
    progress, first, *_ = chunks(http, timings_per_token=True, return_progress=True)
    assert progress["prompt_progress"] == {"total": 10, "cache": 2, "processed": 6, "time_ms": 1.5}
    assert (progress["timings"]["prompt_n"], progress["timings"]["prompt_ms"]) == (4, 1.5)
    assert first["timings"]["predicted_n"] == 1


def test_limits_on_lines_reach_the_request(backend: ScriptedBackend, http: httpx.Client) -> None:
    complete(http, t_max_predict_ms=500.0, n_indent=4, n_predict=-1)
    assert (backend.last.line_seconds, backend.last.indent, backend.last.max_tokens) == (0.5, 4, None)


def test_adapters_of_one_request_are_refused_with_the_way_out(http: httpx.Client) -> None:
    response = http.post("/completion", json={"prompt": "a", "lora": [{"id": 0, "scale": 0.5}]})
    assert response.status_code == 400
    assert "--lora" in response.json()["error"]["message"]


# ── infill ──


def test_infill_asks_for_the_text_between(backend: ScriptedBackend, http: httpx.Client) -> None:
    backend.reset(*ANSWER)
    body = {
        "input_prefix": "def f():\n",
        "input_suffix": "return 1",
        "input_extra": [{"filename": "a.py", "text": "x"}, {"text": "y"}],
        "prompt": "    ",
        "samplers": ["top_k", "top_p", "infill"],
    }
    told = http.post("/infill", json=body).json()
    assert set(told) == WHOLE
    files = (SourceFile("a.py", "x"), SourceFile("tmp", "y"))
    assert backend.last.infill == Infill("return 1", files, "    ")
    assert backend.last.prompt == "def f():\n"
    assert backend.last.sampling.samplers == ("top_k", "top_p", "infill")


# ── about the server ──


def test_props_tell_defaults_template_and_slots(backend: ScriptedBackend, http: httpx.Client) -> None:
    props = http.get("/props").json()
    assert props["default_generation_settings"]["params"]["temperature"] == 0.8
    assert props["default_generation_settings"]["n_ctx"] == backend.card.context
    assert (props["chat_template"], props["bos_token"], props["eos_token"]) == ("{{ messages }}", "<s>", "</s>")
    assert props["modalities"] == {"vision": False, "video": False, "audio": False}
    assert props["model_path"] == backend.card.id
    assert {"total_slots", "model_alias", "build_info", "is_sleeping", "chat_template_caps"} <= set(props)


def test_props_cannot_be_changed(http: httpx.Client) -> None:
    response = http.post("/props", json={})
    assert response.status_code == 400
    assert "cannot be changed" in response.json()["error"]["message"]


SLOTS = [
    {"id": 0, "is_processing": False, "entry": "0123456789ab", "n_tokens": 84},
    {"id": 1, "is_processing": True, "entry": None, "n_tokens": 5},
    {"id": 2, "is_processing": False, "entry": None},
]
ENTRY = CacheEntry(
    id="0123456789ab",
    kind=EntryKind.CONVERSATION,
    name="chat",
    head="",
    user="",
    is_shared=False,
    tokens=84,
    bytes=4096,
    warm_tokens=84,
    cold_tokens=0,
    idle_s=0.0,
    hits=0,
    turns=1,
    branches=1,
    ttl=Ttl.SHORT,
    expires_in_s=60.0,
    is_pinned=False,
)


@pytest.fixture
def slots(backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """What was done to the cache."""
    done: list[tuple[str, object]] = []

    def pin(entry: str, pinned: bool) -> CacheEntry:
        done.append(("pin" if pinned else "unpin", entry))
        return ENTRY

    def remove(entry: str) -> Removed:
        done.append(("remove", entry))
        return Removed(1, 84, 4096)

    cache = SimpleNamespace(entries=lambda: [ENTRY], pin=pin, remove=remove)
    monkeypatch.setattr(backend, "cache", cache)
    monkeypatch.setattr(backend, "stats", lambda: {"scheduler": {"slots": SLOTS}})
    return done


@pytest.mark.usefixtures("slots")
def test_slots_are_listed_without_what_is_in_them(backend: ScriptedBackend, http: httpx.Client) -> None:
    told = http.get("/slots").json()
    assert [slot["id"] for slot in told] == [0, 1, 2]
    assert [slot["is_processing"] for slot in told] == [False, True, False]
    assert all(slot["n_ctx"] == backend.card.context and "entry" not in slot for slot in told)
    assert http.get("/slots?fail_on_no_slot=1").status_code == 200


def test_a_full_server_can_say_so(
    backend: ScriptedBackend, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "stats", lambda: {"scheduler": {"slots": SLOTS[1:2]}})
    assert http.get("/slots?fail_on_no_slot=1").status_code == 503


def test_saving_a_slot_pins_what_rests_in_it(http: httpx.Client, slots: list[tuple[str, object]]) -> None:
    told = http.post("/slots/0?action=save", json={"filename": "a.bin"}).json()
    assert (told["id_slot"], told["filename"], told["n_saved"], told["n_written"]) == (0, "a.bin", 84, 4096)
    assert told["timings"]["save_ms"] >= 0
    assert slots == [("pin", "0123456789ab")]
    restored = http.post("/slots/1?action=restore", json={"filename": "a.bin"}).json()
    assert (restored["id_slot"], restored["n_restored"], restored["n_read"]) == (1, 84, 4096)
    by_name = http.post("/slots/1?action=restore", json={"filename": "chat"}).json()
    assert by_name["n_restored"] == 84


def test_erasing_a_slot_removes_what_rests_in_it(http: httpx.Client, slots: list[tuple[str, object]]) -> None:
    assert http.post("/slots/0?action=erase").json() == {"id_slot": 0, "n_erased": 84}
    assert slots == [("remove", "0123456789ab")]


@pytest.mark.usefixtures("slots")
@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/slots/0", {}, 400, "action: is required"),
        ("/slots/0?action=save", {}, 400, "filename: is required"),
        ("/slots/0?action=save", {"filename": "../x"}, 400, "without folders"),
        ("/slots/1?action=save", {"filename": "x"}, 400, "at work"),
        ("/slots/2?action=erase", {}, 400, "Nothing rests"),
        ("/slots/9?action=erase", {}, 400, "There are 3 slots"),
        ("/slots/0?action=restore", {"filename": "never"}, 404, "Nothing was saved"),
        ("/slots/x?action=erase", {}, 400, "slot"),
    ],
)
def test_a_slot_that_cannot_be_used_says_why(
    http: httpx.Client, path: str, body: Json, status: int, words: str
) -> None:
    response = http.post(path, json=body)
    assert response.status_code == status
    assert words in response.json()["error"]["message"]


@pytest.fixture
def adapters(backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    details = {"lora": [{"file": "a.gguf", "scale": 0.5, "sha256": "0"}]}
    monkeypatch.setattr(backend, "card", replace(backend.card, details=details))


@pytest.mark.usefixtures("adapters")
def test_adapters_are_listed_and_their_scales_stay(http: httpx.Client) -> None:
    assert http.get("/lora-adapters").json() == [{"id": 0, "path": "a.gguf", "scale": 0.5}]
    assert http.post("/lora-adapters", json=[{"id": 0, "scale": 0.5}]).json() == {"success": True}
    for other in ([{"id": 0, "scale": 1.0}], []):
        refused = http.post("/lora-adapters", json=other)
        assert refused.status_code == 400
        assert "--lora" in refused.json()["error"]["message"]


@pytest.mark.usefixtures("adapters")
@pytest.mark.parametrize("body", [{}, [5], [{"id": 7, "scale": 1}], [{"id": 0}], [{"id": [], "scale": 1}]])
def test_what_is_no_list_of_scales_is_refused(http: httpx.Client, body: Json) -> None:
    assert http.post("/lora-adapters", json=body).status_code == 400
