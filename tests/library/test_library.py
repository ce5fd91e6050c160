from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from emberkeep.api.body import parse_body
from emberkeep.api.openai_chat import ChatBody
from emberkeep.errors import ConfigError, EmberkeepError, InvalidField, Overloaded, RequestError
from emberkeep.library.emberkeep import Emberkeep
from emberkeep.types.events import (
    Completed,
    Eviction,
    Finished,
    FinishReason,
    Fit,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)
from emberkeep.types.models import SourceStats, SpeculationStats
from emberkeep.types.request import JsonFormat, Message, Request, Tool, ToolCall, Ttl
from helpers.scripted_backend import FOREVER, ScriptedBackend, Step, answer


def scripted(*steps: Step) -> tuple[Emberkeep, ScriptedBackend]:
    backend = ScriptedBackend(lambda request: steps)
    return Emberkeep(backend), backend


def test_a_chat_gives_text_and_what_it_cost() -> None:
    llm, _ = scripted(*answer("warm as embers", prompt_tokens=8, cached_tokens=6, tokens=(1, 2, 3)))
    with llm:
        result = llm.chat("hi")
    assert result.text == "warm as embers"
    assert result.finish_reason is FinishReason.STOP
    assert result.kv_reuse_ratio == 0.75
    assert result.tokens == (1, 2, 3)
    assert result.ttft_ms == 38.0
    assert result.total_ms > 0


def test_generate_sends_a_raw_prompt_and_chat_sends_messages() -> None:
    llm, backend = scripted(*answer("x"))
    with llm:
        llm.generate("Once", max_tokens=7, temperature=0, stop="\n", seed=3, json_schema={"type": "object"})
        llm.chat("hi")
    raw, chat = backend.requests
    assert (raw.prompt, raw.messages, raw.max_tokens, raw.stop) == ("Once", (), 7, ("\n",))
    assert (raw.sampling.temperature, raw.sampling.seed) == (0, 3)
    assert raw.format == JsonFormat({"type": "object"})
    assert (chat.prompt, chat.messages) == (None, (Message("user", "hi"),))


def test_a_prediction_is_a_text_or_has_openais_shape() -> None:
    llm, backend = scripted(*answer("x"))
    with llm:
        llm.generate("Once", prediction="upon a time")
        llm.chat("hi", prediction={"type": "content", "content": "Hello."}, speculation=False)
    raw, chat = backend.requests
    assert (raw.prediction, raw.speculation) == ("upon a time", None)
    assert (chat.prediction, chat.speculation) == ("Hello.", False)


def test_messages_and_tools_may_have_openais_shape() -> None:
    llm, backend = scripted(*answer("x"))
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    with llm:
        llm.chat(messages, tools=[tool])
    assert backend.requests[0].messages == (
        Message("user", "add"),
        Message("assistant", tool_calls=(ToolCall("c1", "add", '{"a": 1}'),)),
        Message("tool", "2", tool_call_id="c1"),
    )
    assert backend.requests[0].tools == (Tool("add", "", {"type": "object"}),)


@pytest.mark.parametrize(
    ("messages", "options", "field"),
    [
        ([{"content": "x"}], {}, "messages[0].role"),
        ([{"role": "user", "content": 5}], {}, "messages[0].content"),
        ([{"role": "assistant", "tool_calls": [{}]}], {}, "messages[0].tool_calls[0].id"),
        ([5], {}, "messages[0]"),
        (5, {}, "messages"),
        ("hi", {"tools": [{"name": "add"}]}, "tools[0].function"),
        ("hi", {"tools": [Tool("two words")]}, "tools[0].function.name"),
        ("hi", {"max_tokens": "many"}, "max_tokens"),
        ("hi", {"temperature": -0.1}, "temperature"),
        ("hi", {"json_schema": {"type": object()}}, "json_schema"),
        ("hi", {"ttl": "5m"}, "ttl"),
    ],
)
def test_a_bad_request_names_its_field(messages: object, options: dict[str, object], field: str) -> None:
    llm, backend = scripted(*answer("x"))
    with llm, pytest.raises(InvalidField) as caught:
        llm.chat(messages, **options)  # type: ignore[arg-type]
    assert caught.value.param == field
    assert backend.requests == []


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 99},
        {"temperature": "hot"},
        {"top_p": -0.1},
        {"top_k": -2},
        {"min_p": 2},
        {"seed": 2**63},
        {"max_tokens": -2},
        {"max_tokens": 1.5},
        {"stop": ["a"] * 17},
        {"stop": [""]},
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "user", "content": "half \ud800"}]},
        {"tools": [{"type": "function", "function": {"name": "two words"}}]},
        {"user": "u" * 513},
        {"conversation_id": 5},
        {"speculation": "off"},
        {"prediction": 5},
        {"prediction": {"type": "content", "content": 5}},
    ],
    ids=str,
)
def test_the_library_refuses_what_http_refuses_with_the_same_words(fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    with pytest.raises(RequestError) as over_http:
        parse_body(ChatBody, json.dumps(body).encode()).to_request()
    llm, _ = scripted(*answer("x"))
    with llm, pytest.raises(RequestError) as in_python:
        llm.chat(body.pop("messages"), **body)
    assert in_python.value.param == over_http.value.param
    if over_http.value.param:
        assert str(in_python.value) == str(over_http.value)


def test_users_are_the_same_people_as_over_http() -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "user": "Ann",
        "cache_salt": "s",
        "conversation_id": "c",
    }
    over_http = parse_body(ChatBody, json.dumps(body).encode()).to_request()
    llm, backend = scripted(*answer("x"))
    with llm:
        llm.chat("hi", user="Ann", namespace="s", conversation_id="c")
        llm.chat("hi", user="Ann")
        llm.chat("hi", user="", namespace="", conversation_id="")
        llm.chat("hi")
    both, named, empty, unnamed = backend.requests
    for request in (both, over_http):
        assert (request.user, request.namespace, request.conversation_id) == ("Ann", '["Ann", "s"]', "c")
    assert named.namespace == '["Ann", ""]'
    assert empty == unnamed
    assert (unnamed.user, unnamed.namespace, unnamed.conversation_id, unnamed.ttl) == ("", "", None, None)


def test_a_time_to_live_is_a_word_or_a_value_of_ours() -> None:
    llm, backend = scripted(*answer("x"))
    with llm:
        for ttl in Ttl:
            llm.chat("hi", ttl=ttl)
            llm.chat("hi", ttl=str(ttl))
    assert [request.ttl for request in backend.requests] == [ttl for ttl in Ttl for _ in range(2)]


def test_no_limit_is_none_or_minus_one_and_some_limit_is_the_default() -> None:
    llm, backend = scripted(*answer("x"))
    with llm:
        llm.chat("hi", max_tokens=None)
        llm.chat("hi", max_tokens=-1)
        llm.chat("hi")
    assert [request.max_tokens for request in backend.requests] == [None, None, 256]


def test_a_misspelt_argument_is_named_with_the_right_one() -> None:
    llm, _ = scripted(*answer("x"))
    with llm:
        for call in (llm.chat, llm.generate, llm.stream):
            with pytest.raises(InvalidField, match=r"^max_token: .* did you mean max_tokens\?$"):
                call("hi", max_token=4)  # type: ignore[call-arg]
        with pytest.raises(InvalidField, match=r"^colour: .* temperature"):
            llm.chat("hi", colour="red")  # type: ignore[call-arg]
        with pytest.raises(InvalidField, match=r"^tools: is not an argument"):
            llm.generate("hi", tools=[])  # type: ignore[call-arg]


@pytest.mark.parametrize("prompt", [5, None, ["a"]])
def test_a_prompt_that_is_no_text_is_one_sentence(prompt: Any) -> None:
    llm, _ = scripted(*answer("x"))
    with llm, pytest.raises(InvalidField) as caught:
        llm.generate(prompt)
    assert str(caught.value) == "prompt: give a text."


def test_messages_of_ours_go_through_unchanged() -> None:
    llm, backend = scripted(*answer("x"))
    messages = (
        Message("system", "Be brief."),
        Message("user", "", name="ann"),
        Message("assistant", "", "hm", (ToolCall("c1", "add", '{"a":  1}'),)),
        Message("tool", "2", tool_call_id="c1"),
    )
    tools = (Tool("add", "Add numbers", {"type": "object"}),)
    with llm:
        llm.chat(messages, tools=tools)
    assert backend.requests[0].messages == messages
    assert backend.requests[0].tools == tools


def test_reasoning_and_tool_calls_are_put_together() -> None:
    llm, _ = scripted(
        ReasoningDelta(0, "let me "),
        ReasoningDelta(0, "see"),
        ToolCallDelta(0, 0, "c1", "add", '{"a"'),
        ToolCallDelta(0, 1, "c2", "sub", "{}"),
        ToolCallDelta(0, 0, None, None, ": 1}"),
        Finished(0, FinishReason.TOOL_CALLS),
    )
    with llm:
        result = llm.chat("hi")
    assert result.reasoning == "let me see"
    assert result.tool_calls == (ToolCall("c1", "add", '{"a": 1}'), ToolCall("c2", "sub", "{}"))
    assert result.finish_reason is FinishReason.TOOL_CALLS


def test_an_error_of_the_backend_reaches_the_caller() -> None:
    llm, _ = scripted(TextDelta(0, "a"), Overloaded("The queue is full: try again."))
    with llm, pytest.raises(Overloaded, match="queue is full"):
        llm.chat("hi")


def test_a_stream_gives_text_in_pieces_and_then_the_result() -> None:
    llm, _ = scripted(ReasoningDelta(0, "hm"), *answer("warm as embers"))
    with llm, llm.stream("hi") as stream:
        pieces = [piece for piece in stream if piece]
        assert pieces == ["warm", " as", " embers"]
        assert stream.result.text == "warm as embers"
        assert stream.result.reasoning == "hm"


@pytest.mark.parametrize("way", ["close", "with", "drop"])
def test_leaving_a_stream_early_cancels_the_request(way: str) -> None:
    llm, backend = scripted(TextDelta(0, "first"), FOREVER)
    with llm:
        stream = llm.stream("hi")
        assert next(iter(stream)) == "first"
        if way == "close":
            stream.close()
        elif way == "with":
            with stream:
                pass
        else:
            del stream
            gc.collect()
        assert backend.cancelled == 1


def test_a_stopped_stream_still_tells_what_was_read() -> None:
    llm, _ = scripted(TextDelta(0, "half", tokens=(4,)), FOREVER)
    with llm:
        stream = llm.stream("hi")
        next(iter(stream))
        stream.close()
    assert (stream.result.text, stream.result.tokens, stream.result.finish_reason) == ("half", (4,), None)


def test_warm_evaluates_the_prompt_and_generates_nothing() -> None:
    llm, backend = scripted(*answer("", prompt_tokens=100, cached_tokens=40))
    with llm:
        warmed = llm.warm("You are a helpful assistant.")
        llm.warm([{"role": "system", "content": "Be brief."}])
    assert (warmed.tokens, warmed.cached_tokens) == (100, 40)
    assert [request.max_tokens for request in backend.requests] == [0, 0]
    assert backend.requests[0].prompt == "You are a helpful assistant."
    assert backend.requests[1].messages == (Message("system", "Be brief."),)


def test_verify_compares_stored_state_with_fresh_evaluation() -> None:
    def script(request: Request) -> Iterable[Step]:
        tokens = (1, 2, 3, 4) if request.use_cache else (1, 2, 9, 9)
        return answer("a" if request.use_cache else "b", cached_tokens=7, tokens=tokens)

    backend = ScriptedBackend(script)
    with Emberkeep(backend) as llm:
        report = llm.verify("Once", max_tokens=4)
    assert (report.equal, report.first_difference, report.agreement) == (False, 2, 0.5)
    assert report.reused_tokens == 7
    warmed, fresh, cached = backend.requests
    assert (warmed.max_tokens, cached.use_cache, fresh.use_cache) == (0, True, False)
    assert cached.sampling.temperature == fresh.sampling.temperature == 0
    assert cached.speculation is fresh.speculation is False  # so that both are computed in the same steps


def test_several_threads_share_one_model() -> None:
    backend = ScriptedBackend(lambda request: answer(request.messages[0].content))
    texts: dict[int, str] = {}
    with Emberkeep(backend) as llm:
        threads = [
            threading.Thread(target=lambda index=index: texts.update({index: llm.chat(f"say {index}").text}))
            for index in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == {index: f"say {index}" for index in range(8)}


def test_closing_closes_the_backend_once_and_ends_the_thread() -> None:
    before = threading.active_count()
    llm, backend = scripted(*answer("x"))
    llm.close()
    llm.close()
    assert backend.closed
    assert threading.active_count() == before


def test_a_closed_model_says_so() -> None:
    llm, _ = scripted(*answer("x"))
    llm.close()
    with pytest.raises(EmberkeepError, match="closed: load a new one"):
        llm.chat("hi")
    with pytest.raises(EmberkeepError, match="closed: load a new one"):
        llm.stats()


def test_closing_ends_a_stream_that_is_being_read() -> None:
    llm, backend = scripted(TextDelta(0, "first"), FOREVER)
    stream = iter(llm.stream("hi"))
    assert next(stream) == "first"
    llm.close()
    with pytest.raises(EmberkeepError, match="closed"):
        next(stream)
    assert backend.cancelled == 1


def test_what_was_drafted_comes_from_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    told = SpeculationStats(True, "", 2, 8, 4, {"context": SourceStats(2, 8, 4)})
    llm, backend = scripted()
    monkeypatch.setattr(backend, "speculation_stats", lambda: told)
    with llm:
        assert llm.speculative_stats() is told


def test_load_refuses_unknown_settings() -> None:
    with pytest.raises(ConfigError, match="did you mean ram_budget"):
        Emberkeep.load(ram_bugdet="1G")


@pytest.mark.parametrize(("setting", "value"), [("ctx", "abc"), ("parallel", 0), ("ram_budget", "much")])
def test_load_speaks_of_settings_not_of_flags(setting: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Emberkeep.load(**{setting: value})  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"{setting} = {value!r} is not ")
    assert "flag" not in str(caught.value)
    assert "--" not in str(caught.value)


def test_load_never_repeats_a_secret() -> None:
    with pytest.raises(ConfigError) as caught:
        Emberkeep.load(api_key=["canary-7f3a"])
    assert "canary" not in str(caught.value)


def test_importing_emberkeep_loads_nothing_heavy() -> None:
    program = (
        "import sys, emberkeep; assert emberkeep.__version__;"
        "heavy = {'torch', 'llama_cpp', 'apsw', 'starlette', 'numpy', 'httpx'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_program_may_end_in_the_middle_of_a_stream() -> None:
    program = (
        "from emberkeep import Emberkeep; from emberkeep.types.events import TextDelta;"
        "from helpers.scripted_backend import FOREVER, ScriptedBackend;"
        "llm = Emberkeep(ScriptedBackend(lambda request: [TextDelta(0, 'first'), FOREVER]));"
        "stream = iter(llm.stream('hi')); print(next(stream))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True, env=env
    )
    assert (done.stdout, done.stderr) == ("first\n", "")


def test_a_result_tells_what_left_the_context_and_what_came_back() -> None:
    *steps, completed = answer("x")
    assert isinstance(completed, Completed)
    left = (Eviction(messages=4, tokens=300, out=10),)
    told = replace(completed, fit=Fit(evictions=left, recalled=2))
    with Emberkeep(ScriptedBackend(lambda request: [*steps, told])) as llm:
        result = llm.chat("hi")
    assert (result.evictions, result.recalled) == (left, 2)
