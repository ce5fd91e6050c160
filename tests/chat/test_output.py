from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.chat import output
from emberkeep.chat.output import LineLimit, OutputOptions, StopScanner, TextStream, open_reasoning
from emberkeep.types.events import Event, ReasoningDelta, TextDelta, TokenLogprob
from emberkeep.types.request import Message, ReasoningFormat, Request, Tool, ToolChoice
from helpers.byte_vocab import Answer, TinyVocab
from helpers.scripted_backend import text_of

VOCAB = TinyVocab(("<|eot|>", "[THINK]", "[/THINK]", "<|im_end|>"))

TOOLS = (Tool("weather"), Tool("read_file"))

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


def read(stream: TextStream, ids: list[int]) -> Answer:
    answer = Answer()
    for token in ids:
        events, answer.stopped = stream.push(token, TokenLogprob(token, VOCAB.pieces[token], -1.0))
        answer.add(events)
        answer.pushed += 1
        if answer.stopped:
            break
    answer.add(stream.finish())
    return answer


def answered(text: str, **options: Any) -> Answer:
    """The answer when `text` is sampled byte by byte, which must not differ from word by word."""
    by_byte = read(TextStream(VOCAB, OutputOptions(**options)), list(text.encode()))
    by_word = read(TextStream(VOCAB, OutputOptions(**options)), VOCAB.tokenize(text))
    for one in ("text", "reasoning", "names", "arguments"):
        assert getattr(by_byte, one) == getattr(by_word, one)
    return by_byte


# ── text ──
@given(
    st.lists(st.sampled_from(["Hello", "é", "🔥", " ", "\n", "<think", "```json", "{"]), max_size=8).map("".join)
)
def test_plain_text_comes_through_with_every_token_and_logprob_once(text: str) -> None:
    ids = VOCAB.tokenize(text)
    answer = read(TextStream(VOCAB, OutputOptions()), ids)
    assert (answer.text, answer.tokens, answer.logprobs) == (text, ids, ids)


def test_a_character_is_never_cut() -> None:
    stream = TextStream(VOCAB, OutputOptions())
    outs = [stream.push(byte)[0] for byte in "🔥".encode()]
    assert outs[:3] == [[], [], []]
    assert outs[3] == [TextDelta(0, "🔥", (), tuple("🔥".encode()))]


def test_bytes_that_are_no_text_become_replacement_characters() -> None:
    answer = read(TextStream(VOCAB, OutputOptions()), [*b"a\xff", *"🔥".encode()[:2]])
    assert answer.text == "a��"
    assert len(answer.logprobs) == 4


def test_control_tokens_are_invisible() -> None:
    ids = [ord("a"), VOCAB.specials["<|eot|>"], ord("b"), VOCAB.specials["<|im_end|>"]]
    answer = read(TextStream(VOCAB, OutputOptions()), ids)
    assert (answer.text, answer.tokens) == ("ab", [ord("a"), ord("b")])


def test_raw_prompts_get_raw_text() -> None:
    text = f" <think>x</think>{CALL}"
    assert answered(text, raw=True).text == text


# ── stop strings ──
def test_a_token_that_reaches_into_the_stop_string_is_visible_but_not_kept() -> None:
    vocab = TinyVocab(words=["end.ST"])
    stream = TextStream(vocab, OutputOptions(stop=("STOP",)))
    ids = vocab.tokenize("The end.STOP")
    events = [event for token in ids for event in stream.push(token)[0]] + stream.finish()
    texts = [event for event in events if isinstance(event, TextDelta)]
    assert "".join(event.text for event in texts) == "The end."
    assert [token for event in texts for token in event.tokens] == [*b"The ", 256]
    assert stream.text_kept_tokens == 4


@pytest.mark.parametrize(
    ("sampled", "stops", "text", "stop", "kept"),
    [
        ("Hello worldSTOP!", ("never", "worlds", "STOP"), "Hello world", "STOP", 2),
        ("Hello ST", ("STOP",), "Hello ST", None, 4),
    ],
)
def test_the_stop_string_that_came_is_known_and_what_is_kept_before_it(
    sampled: str, stops: tuple[str, ...], text: str, stop: str | None, kept: int
) -> None:
    stream = TextStream(VOCAB, OutputOptions(stop=stops))
    answer = read(stream, [*VOCAB.tokenize(sampled), VOCAB.eos])
    assert (answer.text, stream.stop, stream.text_kept_tokens) == (text, stop, kept)
    assert answer.stopped is (stop is not None)


# ── reasoning ──
THOUGHT = "<think>\nWhy?\n</think>\n\nSo."

STRIP, INLINE = ReasoningFormat.STRIP, ReasoningFormat.INLINE


@pytest.mark.parametrize(
    ("written", "options", "reasoning", "text"),
    [
        (THOUGHT, {}, "Why?", "So."),
        ("<thinking>Why?</thinking>So.", {}, "Why?", "So."),
        ("[THINK]Why?[/THINK]So.", {}, "Why?", "So."),
        ("<think> \n \nWhy?\n \n</think>\n\nSo.", {}, "Why?", "So."),
        ("<think>Why </thi", {}, "Why </thi", ""),
        ("Use <think>tags</think> here.", {}, "", "Use <think>tags</think> here."),
        (THOUGHT, {"reasoning_format": STRIP}, "", "So."),
        (THOUGHT, {"reasoning_format": INLINE}, "", THOUGHT),
    ],
)
def test_reasoning_is_separated_as_the_client_wants_it(
    written: str, options: dict[str, Any], reasoning: str, text: str
) -> None:
    answer = answered(written, **options)
    assert (answer.reasoning, answer.text) == (reasoning, text)
    assert answer.logprobs == list(text.encode())


def test_blanks_at_the_beginning_are_not_held_back() -> None:
    """The first token counts. A reasoning block may still follow them."""
    stream = TextStream(VOCAB, OutputOptions())
    events, _ = stream.push(ord("\n"))
    assert [event.text for event in events if isinstance(event, TextDelta)] == ["\n"]
    assert answered("\n<think>Why?</think>So.").reasoning == "Why?"


def test_markers_that_are_control_tokens_still_separate() -> None:
    think = [VOCAB.specials["[THINK]"], *b"Why?", VOCAB.specials["[/THINK]"], *b"So."]
    answer = read(TextStream(VOCAB, OutputOptions()), think)
    assert (answer.reasoning, answer.text) == ("Why?", "So.")


def test_reasoning_that_the_prompt_opened_needs_no_start_marker() -> None:
    block = open_reasoning("<|im_start|>assistant\n<think>\n")
    stream = TextStream(VOCAB, OutputOptions(reasoning=block))
    answer = read(stream, list(b"Why?</think>So."))
    assert (answer.reasoning, answer.text) == ("Why?", "So.")
    assert stream.reasoning_tokens == 4
    assert answer.logprobs == list(b"So.")


def test_a_prompt_with_a_closed_block_opens_nothing() -> None:
    assert open_reasoning("<think>\n\n</think>\n\n") is None


def test_reasoning_streams_before_it_ends() -> None:
    stream = TextStream(VOCAB, OutputOptions())
    events = [event for byte in b"<think>Because" for event in stream.push(byte)[0]]
    assert "".join(event.text for event in events if isinstance(event, ReasoningDelta)) == "Because"


@pytest.mark.parametrize("form", ReasoningFormat)
def test_calls_are_read_behind_reasoning_and_never_in_it(form: ReasoningFormat) -> None:
    text = f"<think>Maybe {CALL}?</think>\n{CALL}"
    answer = answered(text, tools=TOOLS, reasoning_format=form)
    assert answer.calls == [("weather", {"city": "Bern"})]
    assert CALL in answer.text + answer.reasoning or form is ReasoningFormat.STRIP


@pytest.mark.parametrize("draft", ["", f"Maybe {CALL}? Yes: "])
def test_a_call_that_ends_an_answer_is_meant_although_the_reasoning_never_ended(draft: str) -> None:
    answer = answered(f"<think>Look it up. {draft}\n{CALL}\n{CALL}\n", tools=TOOLS)
    assert [name for name, _ in answer.calls] == ["weather", "weather"]
    assert answered(f"<think>{CALL} or not?", tools=TOOLS).calls == []
    assert called(cut(f"<think>{CALL}")[1]) == []


@pytest.mark.parametrize("form", ReasoningFormat)
def test_thoughts_are_counted_wherever_they_go(form: ReasoningFormat) -> None:
    stream = TextStream(VOCAB, OutputOptions(reasoning_format=form))
    read(stream, list(b"<think>Why?</think>So."))
    assert stream.reasoning_tokens == 4


# ── tool calls ──
@pytest.mark.parametrize(
    "text",
    [
        CALL,
        '```json\n{"name": "weather", "arguments": {"city": "Bern"}}\n```',
        '```json\n[{"name": "weather", "parameters": {"city": "Bern"}}]\n```',
        ' {"name": "weather", "arguments": {"city": "Bern"}}\n',
        '[{"arguments": {"city": "Bern"}, "name": "weather"}]',
        '{"type": "function", "function": {"name": "weather", "arguments": "{\\"city\\": \\"Bern\\"}"}}',
        '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}',
        '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_',
    ],
)
def test_a_call_is_read_from_what_models_write(text: str) -> None:
    answer = answered(text, tools=TOOLS)
    assert answer.calls == [("weather", {"city": "Bern"})]
    assert answer.text == ""
    assert re.fullmatch(r"call_[0-9a-f]{24}", answer.ids[0] or "")


def test_text_before_a_call_and_several_calls() -> None:
    answer = answered(f"<think>Hm.</think>Let me look.\n\n{CALL}\n{CALL}\n", tools=TOOLS)
    assert (answer.reasoning, answer.text) == ("Hm.", "Let me look.")
    assert [name for name, _ in answer.calls] == ["weather", "weather"]
    assert len(set(answer.ids)) == 2


def test_text_after_a_call_is_text() -> None:
    answer = answered(f"{CALL}\nDone.", tools=TOOLS)
    assert len(answer.calls) == 1
    assert answer.text == "\nDone."


def test_end_markers_inside_arguments_do_not_end_the_call() -> None:
    content = 'Say </tool_call> or "```" \\ and ```json.'
    arguments = {"path": "a.md", "text": content}
    body = json.dumps({"name": "read_file", "arguments": arguments})
    for text in (f"<tool_call>{body}</tool_call>", f"```json\n{body}\n```"):
        assert answered(text, tools=TOOLS).calls == [("read_file", arguments)]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        (', "arguments": {"city" :"Bern",  "n":1.0}', '{"city" :"Bern",  "n":1.0}'),
        (', "arguments": {"text": "a\nb"}', '{"text": "a\\nb"}'),
        ("", "{}"),
    ],
)
def test_arguments_are_passed_on_as_they_were_written_and_repaired_where_they_are_no_json(
    written: str, arguments: str
) -> None:
    text = f'<tool_call>{{"name": "weather"{written}}}</tool_call>'
    assert answered(text, tools=TOOLS).arguments == [arguments]


@pytest.mark.parametrize(
    "text",
    [
        '```json\n{"name": "Alice", "age": 3}\n```\nThat is Alice.',
        '```json\n{"name": "unknown", "arguments": {}}\n```',
        "```json\n[1, 2]\n``` and ```python\nx\n```",
        '{"name": "Alice", "arguments": {}} is JSON',
        '{"weather": "warm"}',
        "[1] is a citation.",
        "<tool_call>none</tool_call>",
        '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "weather", "argum',
        "An open <tool_call>",
        "  spaces at both ends  ",
        "{",
    ],
)
def test_what_is_no_call_comes_through_as_text(text: str) -> None:
    answer = answered(text, tools=TOOLS)
    assert (answer.text, answer.calls) == (text, [])
    assert answer.logprobs == list(text.encode())


def test_ordinary_json_is_not_held_back_until_the_end() -> None:
    stream = TextStream(VOCAB, OutputOptions(tools=TOOLS))
    events = [event for byte in b'{"city": "Bern' for event in stream.push(byte)[0]]
    assert text_of(events) == '{"city": "Bern'


def test_without_tools_a_call_is_text() -> None:
    assert answered(CALL).text == CALL


def test_one_call_only_stops_after_the_first() -> None:
    stream = TextStream(VOCAB, OutputOptions(tools=TOOLS, one_call=True))
    answer = read(stream, list(f"{CALL}{CALL}".encode()))
    assert (answer.stopped, answer.pushed, len(answer.calls)) == (True, len(CALL), 1)
    assert stream.saw_tool_calls


def test_a_list_of_calls_is_cut_to_the_first_when_only_one_is_wanted() -> None:
    two = '[{"name": "weather", "arguments": {}}, {"name": "read_file", "arguments": {}}]'
    assert len(answered(two, tools=TOOLS).calls) == 2
    assert len(answered(two, tools=TOOLS, one_call=True).calls) == 1


@given(
    st.lists(
        st.sampled_from(
            [CALL, "<tool_call>", "</tool_call>", '"', "\\", "{", "```json", "```", "a ", "<think>", "é"]
        )
    ).map("".join)
)
def test_nothing_is_lost_whatever_is_written(text: str) -> None:
    answer = answered(text, tools=TOOLS)
    assert (answer.text == text) == (not answer.calls and not text.lstrip().startswith("<think>"))


# ── answers that are cut ──
def cut(text: str, **options: Any) -> tuple[TextStream, list[Event]]:
    stream = TextStream(VOCAB, OutputOptions(tools=TOOLS, **options))
    events = [event for byte in text.encode() for event in stream.push(byte)[0]]
    return stream, [*events, *stream.finish(cut=True)]


def called(events: list[Event]) -> list[tuple[str | None, str]]:
    answer = Answer()
    answer.add(events)
    return list(zip(answer.names, answer.arguments, strict=True))


@pytest.mark.parametrize("length", range(1, len(CALL) - len("}\n</tool_call>")))
def test_a_cut_call_never_shows_its_markup(length: int) -> None:
    stream, events = cut(f"Let me look.\n{CALL[:length]}")
    assert text_of(events) == "Let me look."
    assert not stream.saw_tool_calls
    whole_name = '"weather"' in CALL[:length]
    assert [name for name, _ in called(events)] == (["weather"] if whole_name else [])


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<tool_call>{"name": "weather"', ""),
        ('<tool_call>{"name": "weather", "argum', ""),
        ('<tool_call>{"name": "weather", "arguments": {"city": "Be', '{"city": "Be'),
        ('<tool_call>{"name": "weather", "arguments": {"city": "Bern"}', '{"city": "Bern"}'),
        ('<tool_call>{"arguments": {"name": "x"}, "name": "weather"', '{"name": "x"}'),
        ('<tool_call>{"type": "function", "function": {"name": "weather", "arguments": {"c', '{"c'),
        ('```json\n{"name": "weather", "arguments": {"city": "Be', '{"city": "Be'),
        ('{"name": "weather", "parameters": {"city": "Be', '{"city": "Be'),
    ],
)
def test_a_cut_call_has_the_arguments_so_far(text: str, arguments: str) -> None:
    stream, events = cut(text)
    assert (text_of(events), called(events)) == ("", [("weather", arguments)])
    assert not stream.saw_tool_calls


def test_a_name_inside_the_arguments_is_not_the_calls() -> None:
    assert called(cut('<tool_call>{"arguments": {"name": "weather", "n": ')[1]) == []


def test_a_call_cut_behind_whole_ones_is_one_more() -> None:
    stream, events = cut(f'{CALL}\n<tool_call>{{"name": "read_file", "arguments": {{"pa')
    assert called(events) == [("weather", '{"city": "Bern"}'), ("read_file", '{"pa')]
    assert not stream.saw_tool_calls
    assert not cut(f"{CALL}\n<tool_")[0].saw_tool_calls


def test_a_whole_call_that_lacks_only_its_end_marker_counts() -> None:
    stream, events = cut(CALL.removesuffix("_call>"))
    assert called(events) == [("weather", '{"city": "Bern"}')]
    assert stream.saw_tool_calls


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Al',
        '```json\n{"name": "Alice", "arguments": {"a',
        '```json\n{"name": "weather',
        "Done.\n```",
        "a",
    ],
)
def test_a_cut_answer_that_is_no_call_is_text(text: str) -> None:
    assert text_of(cut(text)[1]) == text


# ── requests ──
@pytest.mark.parametrize(
    ("request_", "calls"),
    [
        (Request(messages=(Message("user", "?"),), tools=(Tool("weather"),)), 1),
        (Request(messages=(Message("user", "?"),), tools=(Tool("weather"),), tool_choice=ToolChoice("none")), 0),
        (Request(messages=(Message("user", "?"),)), 0),
        (Request(prompt="?", tools=(Tool("weather"),)), 0),
    ],
)
def test_a_request_says_whether_calls_are_read(request_: Request, calls: int) -> None:
    stream = TextStream.for_request(VOCAB, request_, index=2, prompt="")
    answer = read(stream, list(CALL.encode()))
    assert len(answer.calls) == calls
    assert answer.text == ("" if calls else CALL)


def test_a_request_says_where_reasoning_goes() -> None:
    messages = (Message("user", "?"),)
    texts = {
        form: read(
            TextStream.for_request(VOCAB, Request(messages=messages, reasoning=form), index=0, prompt="<think>"),
            list(b"Why?</think>So."),
        ).text
        for form in (None, *ReasoningFormat)
    }
    assert texts == {None: "So.", "separate": "So.", "strip": "So.", "inline": "Why?</think>So."}


def test_events_carry_the_choice_they_belong_to() -> None:
    stream = TextStream.for_request(VOCAB, Request(prompt="?"), index=2, prompt="?")
    assert stream.push(ord("a"))[0] == [TextDelta(2, "a", (), (ord("a"),))]


OTHER = CALL.replace("Bern", "Rome")


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (f"{CALL}\n{CALL}\n{CALL}", ["Bern"]),
        (f"{CALL}\n{OTHER}\n{CALL}", ["Bern", "Rome", "Bern"]),
        (f"{CALL}\n{OTHER}\n{OTHER}\n{CALL}", ["Bern", "Rome"]),
        (f"{CALL}\n{CALL[:40]}", ["Bern"]),
    ],
)
def test_where_calls_are_required_the_answer_ends_before_one_that_repeats_the_one_before(
    text: str, arguments: list[str]
) -> None:
    answer = answered(text, tools=TOOLS, no_repeats=True)
    assert [json.loads(each)["city"] for each in answer.arguments] == arguments


def test_tokens_of_a_repeated_call_are_no_part_of_the_answer() -> None:
    stream = TextStream(VOCAB, OutputOptions(tools=TOOLS, no_repeats=True))
    ids = VOCAB.tokenize(f"{CALL}\n{CALL}")
    assert read(stream, ids).stopped
    assert stream.text_kept_tokens == len(VOCAB.tokenize(CALL))
    assert stream.saw_tool_calls


def test_a_model_that_is_free_to_call_may_repeat_itself() -> None:
    assert len(answered(f"{CALL}\n{CALL}", tools=TOOLS).arguments) == 2


def run(words: list[str], pieces: list[str]) -> tuple[str, str | None]:
    scanner = StopScanner(words)
    out = ""
    for piece in pieces:
        passed, stop = scanner.feed(piece)
        out += passed
        if stop:
            return out, stop
    return out + scanner.flush(), None


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    st.lists(st.text("abc", max_size=4), max_size=10),
)
def test_text_ends_before_the_first_stop_string_however_it_is_cut(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    complete = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    first_end = min((end for end, _ in complete), default=None)
    out, stop = run(stops, pieces)
    assert (stop is not None) == bool(complete)
    assert out in ([text[:start] for end, start in complete if end == first_end] or [text])
    assert text.startswith(out + (stop or ""))


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    scanner = StopScanner(["STOP"])
    assert scanner.feed("One ST") == ("One ", None)
    assert scanner.feed("ST") == ("ST", None)
    assert scanner.feed("OP and more") == ("", "STOP")
    assert run(["STOP"], ["ST", "O"]) == ("STO", None)


@pytest.mark.parametrize("stops", [[], [""]])
def test_without_stop_strings_everything_passes(stops: list[str]) -> None:
    assert run(stops, ["a", "b"]) == ("ab", None)


# ── lines ──
@pytest.mark.parametrize("pieces", [["  a", "\n  b\n", "c\n"], ["  a\n", "  ", "b", "\nc\n"], ["  a\n  b\nc\n"]])
def test_a_line_that_is_not_indented_enough_ends_the_answer_before_it(pieces: list[str]) -> None:
    assert Request(indent=2).limits_lines and not Request().limits_lines
    limit = LineLimit(None, 2)
    text = ""
    for piece in pieces:
        passed, ends = limit.feed(piece)
        text += passed
        if ends:
            break
    assert (text, ends) == ("  a\n  b\n", True)


def test_the_first_line_may_begin_as_it_likes() -> None:
    limit = LineLimit(None, 4)
    assert limit.feed("a = 1\n    b") == ("a = 1\n    b", False)


def test_after_its_time_an_answer_ends_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(output, "monotonic", lambda: now)
    limit = LineLimit(0.5, 0)
    assert limit.feed("a\n") == ("a\n", False)
    now = 100.6
    assert limit.feed("b") == ("b", False)
    assert limit.feed("c\n") == ("c\n", True)
