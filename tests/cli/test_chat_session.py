from __future__ import annotations

import io
import json
import signal
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from emberkeep.cli.chat_history import ChatHistory, Journal
from emberkeep.cli.chat_session import ChatSession, Terminal, stats_line
from emberkeep.cli.console import printable
from emberkeep.errors import ContextExceeded
from emberkeep.library.arguments import Options
from emberkeep.library.emberkeep import Emberkeep
from emberkeep.types.events import Completed, Eviction, FinishReason, Fit, ReasoningDelta, TextDelta
from emberkeep.types.request import Message, Request
from helpers.scripted_backend import FOREVER, ScriptedBackend, Step, answer


class Bench:
    """A chat over a scripted backend, with what it printed."""

    def __init__(
        self,
        script: Iterable[Step] | None = None,
        *,
        system: str = "",
        interactive: bool = True,
        evicts: bool = True,
    ) -> None:
        self.backend = ScriptedBackend(lambda request: script or answer(f"re: {request.messages[-1].content}"))
        self.out: io.StringIO = io.StringIO()
        self.llm = Emberkeep(self.backend)
        self.interactive = interactive
        self.conversation = ChatHistory(system)
        self.evicts = evicts

    def say(self, *lines: str) -> None:
        options: Options = {"temperature": 0.0, "max_tokens": 9, "evict": self.evicts}
        ChatSession(
            self.llm,
            self.conversation,
            options,
            Terminal(self.out, self.interactive),
            Journal(None),
        ).run(lines)

    @property
    def last(self) -> Request:
        return self.backend.requests[-1]


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.llm.close()


def test_an_answer_is_printed_and_becomes_part_of_the_conversation(bench: Bench) -> None:
    bench.say("one", "two")
    assert bench.out.getvalue() == "re: one\nre: two\n"
    assert bench.last.messages == (
        Message("user", "one"),
        Message("assistant", "re: one"),
        Message("user", "two"),
    )
    assert (bench.last.max_tokens, bench.last.sampling.temperature) == (9, 0.0)


def test_blank_lines_are_not_messages(bench: Bench) -> None:
    bench.say("", "   ")
    assert bench.backend.requests == []


def test_remarks_go_to_stderr_so_that_a_pipe_gets_answers_only(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.say("hi")
    assert bench.out.getvalue() == "re: hi\n"
    assert capsys.readouterr().err == "reused 0/10 tokens · first token 38 ms · 2 tokens at 200/s\n"


def test_the_stats_line_says_what_cut_an_answer(bench: Bench) -> None:
    whole = bench.llm.chat("hi")
    line = stats_line(whole, 9, 300)
    cut = replace(whole, choices=(replace(whole.choices[0], finish_reason=FinishReason.LENGTH),))
    assert stats_line(cut, whole.usage.completion_tokens, 300) == f"{line} · cut at --max-tokens"
    assert stats_line(cut, 9, 300) == f"{line} · the context of 300 tokens is full, /clear begins anew"


def test_the_stats_line_says_how_much_was_drafted(bench: Bench) -> None:
    whole = bench.llm.chat("hi")
    drafted = replace(whole, timings=replace(whole.timings, draft_n=40, draft_n_accepted=34))
    line = stats_line(whole, 9, 300)
    assert stats_line(drafted, 9, 300) == f"{line} · 34 of 40 drafted tokens accepted"


def test_the_stats_line_says_what_left_and_what_came_back(bench: Bench) -> None:
    whole = bench.llm.chat("hi")
    line = stats_line(whole, 9, 300)

    def line_with(*evictions: Eviction, recalled: int = 0) -> str:
        fit = Fit(evictions=evictions, recalled=recalled)
        return stats_line(replace(whole, fit=fit), 9, 300).removeprefix(line)

    assert line_with(recalled=2) == " · recalled 2"
    assert line_with(Eviction(1, 90, 1)) == " · 1 message left the context (archived)"
    twice = (Eviction(8, 500, 8), Eviction(4, 200, 12))
    assert line_with(*twice, recalled=1) == " · 12 messages left the context (archived) · recalled 1"
    assert (
        line_with(Eviction(8, 500, 8), Eviction(4, 200, 12, archived=False)) == " · 12 messages left the context"
    )


def test_what_could_not_be_archived_is_one_warning_and_the_chat_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    *said, completed = answer("yes")
    assert isinstance(completed, Completed)
    lost = Eviction(8, 500, 8, archived=False, error="The disk is full: make room.")
    bench = Bench([*said, replace(completed, fit=Fit(evictions=(lost, lost)))])
    with bench.llm:
        bench.say("hi")
    assert capsys.readouterr().err.endswith(
        "16 messages left the context\nWhat left the context was not archived: The disk is full: make room.\n"
    )
    assert len(bench.conversation.messages) == 2


class InterruptedOut(io.StringIO):
    """The user presses Ctrl-C when the marked text appears."""

    def write(self, text: str) -> int:
        if "half" in text:
            super().write(text)
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench([TextDelta(0, "half an"), FOREVER])
    bench.out = InterruptedOut()
    with bench.llm:
        bench.say("hi", "/system")
    assert bench.backend.cancelled == 1
    assert bench.conversation.messages == [Message("user", "hi"), Message("assistant", "half an")]
    assert capsys.readouterr().err.startswith("stopped\n")


def test_ctrl_c_ends_a_chat_that_reads_from_a_pipe() -> None:
    bench = Bench([TextDelta(0, "half an"), FOREVER], interactive=False)
    bench.out = InterruptedOut()
    with bench.llm, pytest.raises(KeyboardInterrupt):
        bench.say("hi")
    assert bench.backend.cancelled == 1


@pytest.mark.parametrize(
    ("evicts", "way_out"),
    [
        (True, "say it in fewer words, a larger --ctx holds more.\n"),
        (False, "/clear begins anew, a larger --ctx holds more, --too-long evict lets old messages leave.\n"),
    ],
)
def test_an_error_is_explained_and_the_turn_forgotten(
    capsys: pytest.CaptureFixture[str], evicts: bool, way_out: str
) -> None:
    bench = Bench([ContextExceeded(9000, 8192)], evicts=evicts)
    with bench.llm:
        bench.say("hi")
    assert capsys.readouterr().err == (f"The context holds 8192 tokens and this would make it 9000: {way_out}")
    assert bench.conversation.messages == []


def test_an_error_ends_a_chat_that_reads_from_a_pipe() -> None:
    bench = Bench([ContextExceeded(9000, 8192)], interactive=False)
    with bench.llm, pytest.raises(ContextExceeded):
        bench.say("hi", "again")
    assert len(bench.backend.requests) == 1


def test_reasoning_stays_out_of_a_pipe_and_in_the_conversation() -> None:
    bench = Bench([ReasoningDelta(0, "hm"), *answer("yes")])
    with bench.llm:
        bench.say("hi")
    assert bench.out.getvalue() == "yes\n"
    assert bench.conversation.messages[-1] == Message("assistant", "yes", "hm")


def test_system_sets_and_shows_the_system_message(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.say("/system", "/system Be brief.", "/system", "hi")
    assert "There is no system message" in (said := capsys.readouterr().err)
    assert "\nBe brief.\n" in said
    assert bench.last.messages[0] == Message("system", "Be brief.")


def test_clear_forgets_the_turns_and_keeps_the_system_message() -> None:
    bench = Bench(system="Be brief.")
    with bench.llm:
        bench.say("one", "/clear", "two")
    assert bench.last.messages == (Message("system", "Be brief."), Message("user", "two"))


def test_every_request_names_its_conversation_and_clear_begins_another(bench: Bench) -> None:
    bench.say("one", "two", "/clear", "three")
    first, second, third = [request.conversation_id for request in bench.backend.requests]
    assert first == second
    assert third not in (None, first)


def test_memory_without_a_memory_is_explained(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.say("/memory", "/memory ships")
    asked, told = capsys.readouterr().err.splitlines()
    assert asked.startswith("Say what to look for")
    assert told.startswith("Nothing is remembered here")


def test_quit_ends_the_chat(bench: Bench) -> None:
    bench.say("/quit", "hi")
    assert bench.backend.requests == []


def test_help_lists_every_command(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.say("/help")
    listed = {line.split()[0] for line in capsys.readouterr().err.splitlines() if line.startswith("/")}
    assert listed == {"/help", "/stats", "/system", "/save", "/memory", "/tools", "/clear", "/quit"}


def test_an_unknown_command_is_not_sent_to_the_model(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.say("/hlep")
    assert "There is no command /hlep" in capsys.readouterr().err
    assert bench.backend.requests == []


def test_a_space_lets_a_message_begin_with_a_slash(bench: Bench) -> None:
    bench.say(" /etc/hosts is what?")
    assert bench.last.messages == (Message("user", "/etc/hosts is what?"),)


def test_stats_show_the_backends_counters(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.say("/stats")
    assert capsys.readouterr().err == "requests: 0\nkv.warm_bytes: 1,048,576\n"


def test_save_writes_json_or_markdown(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench.say("hällo", f"/save {tmp_path / 'talk.json'}", f"/save {tmp_path / 'talk.md'}")
    saved = json.loads((tmp_path / "talk.json").read_text(encoding="utf-8"))
    assert saved["messages"] == [
        {"role": "user", "content": "hällo"},
        {"role": "assistant", "content": "re: hällo"},
    ]
    assert (tmp_path / "talk.md").read_text(encoding="utf-8") == "## user\n\nhällo\n\n## assistant\n\nre: hällo\n"
    assert f"Saved 2 messages to {tmp_path / 'talk.md'}." in capsys.readouterr().err


def test_a_save_that_fails_does_not_end_the_chat(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.say("hi", f"/save {tmp_path / 'no' / 'talk.md'}", "/save", "again")
    said = capsys.readouterr().err
    assert "Cannot write" in said
    assert "Say where" in said
    assert bench.out.getvalue() == "re: hi\nre: again\n"


def test_save_leaves_a_file_that_is_there_alone(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "talk.md"
    mine.write_text("keep")
    bench.say("hi", f"/save {mine}")
    assert f"{mine} exists already" in capsys.readouterr().err
    assert mine.read_text() == "keep"


def test_save_writes_nothing_when_nothing_was_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(system="Be brief.")
    with bench.llm:
        bench.say(f"/save {tmp_path / 'talk.md'}")
    assert "nothing to save" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_save_refuses_formats_that_it_cannot_write(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.say("hi", f"/save {tmp_path / 'talk.pdf'}", f"/save {tmp_path / 'talk'}")
    assert capsys.readouterr().err.count("give a name that ends in .md or .json") == 2
    assert list(tmp_path.iterdir()) == []


def test_a_model_cannot_drive_the_terminal() -> None:
    assert printable("a\033[2Jb\x07\x9b1m\tc\n👩‍💻", "") == "a[2Jb1m\tc\n👩‍💻"
