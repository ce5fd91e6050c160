"""`emberkeep cache` where no server runs: the stores themselves, and a model where one is needed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from emberkeep.cli.cache import ROWS, app
from emberkeep.config.settings import Config
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import NoSuchEntry
from emberkeep.library.emberkeep import Emberkeep
from emberkeep.types.request import Json
from helpers.commands import Commands
from helpers.kept_chats import asking, keep, let_time_pass, open_emberkeep

pytestmark = pytest.mark.usefixtures("data_dir")

DAY_S = 86_400.0

commands = Commands(app)
run, ok, refused = commands.run, commands.ok, commands.refused


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The fake model can be loaded; gives the settings it was loaded with."""
    loaded: list[Config] = []

    def open_fake(config: Config) -> Emberkeep:
        loaded.append(config)
        return open_emberkeep(config)

    monkeypatch.setattr(Emberkeep, "open", open_fake)
    monkeypatch.setattr("emberkeep.cli.cache_stores.install_model", lambda config: None)
    return loaded


def listed(*arguments: str) -> list[Json]:
    return json.loads(ok("ls", "--json", *arguments))


def id_of(head: str) -> str:
    (entry,) = [entry for entry in listed() if entry["head"] == head]
    return entry["id"]


def heads(entries: Sequence[Json]) -> list[str]:
    return [entry["head"] for entry in entries]


# ── ls ──


def test_an_empty_machine_is_told_how_to_begin(data_dir: Path) -> None:
    assert "`emberkeep chat`" in ok("ls")
    assert not data_dir.exists()


def test_what_is_kept_is_listed_the_latest_first(data_dir: Path) -> None:
    keep(data_dir, "Which ships are here?", user="alice")
    keep(data_dir, "Who is at sea?")
    head, *rows, total = ok("ls").splitlines()
    assert head.split() == ["what", "user", "tokens", "size", "where", "last", "use", "hits", "kept", "id"]
    assert [row.split("  ")[0] for row in rows] == ["Who is at sea?", "Which ships are here?"]
    alice = rows[1]
    assert "alice" in alice
    assert "disk" in alice
    assert "long, 60 min left" in alice
    assert alice.split()[-1] == id_of("Which ships are here?")
    assert total.startswith("2 entries; ")
    assert "0 bytes in RAM" in total


def test_one_users_entries_can_be_listed(data_dir: Path) -> None:
    keep(data_dir, "Which ships are here?", user="alice")
    keep(data_dir, "Who is at sea?")
    assert {entry["user"] for entry in listed("--user", "alice")} == {"alice"}
    assert {entry["user"] for entry in listed("--user", "")} == {None}
    assert "without --user" in ok("ls", "--user", "bob")


def test_the_largest_can_come_first(data_dir: Path) -> None:
    keep(data_dir, "Why? " * 50, "Who?")
    assert heads(listed())[0] == "Who?"
    assert heads(listed("--sort", "tokens"))[0].startswith("Why?")
    sizes = [entry["bytes"] for entry in listed("--sort", "size")]
    assert sizes == sorted(sizes, reverse=True)


def test_a_long_list_is_cut_unless_all_of_it_is_wanted(data_dir: Path) -> None:
    keep(data_dir, *(f"Where is ship {number}?" for number in range(ROWS + 4)))
    *rows, total = ok("ls").splitlines()[1:]
    assert len(rows) == ROWS
    assert "--all lists the other 4" in total
    assert len(ok("ls", "--all").splitlines()) == 1 + ROWS + 4 + 1
    assert len(listed()) == ROWS + 4


def test_what_replicas_of_a_cluster_kept_is_found_when_it_does_not_run(data_dir: Path) -> None:
    keep(data_dir, "Who is at sea?")
    for replica in ("0", "1"):
        keep(data_dir / "replicas" / replica, f"What did replica {replica} hear?", user="ann")
    assert len(listed()) == 3
    assert len(listed("--user", "ann")) == 2
    ok("rm", "--user", "ann", "--yes")
    assert heads(listed()) == ["Who is at sea?"]


def test_every_models_store_is_looked_into(data_dir: Path) -> None:
    keep(data_dir, "Which ships are here?", model="one")
    keep(data_dir, "Who is at sea?", model="two")
    assert {(entry["model"], entry["head"]) for entry in listed()} == {
        ("one", "Which ships are here?"),
        ("two", "Who is at sea?"),
    }
    assert ok("ls").splitlines()[0].split()[-1] == "model"
    assert {entry["model"] for entry in listed("--model", "two")} == {"two"}


def test_a_narrow_terminal_gets_lines_instead_of_columns(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(data_dir, "Which of the ships that came in yesterday are still here?", user="alice")
    narrow = Console(width=60, force_terminal=True, color_system=None)
    monkeypatch.setattr("emberkeep.cli.console.console", lambda: narrow)
    with narrow.capture() as captured:
        ok("ls")
    first, *details = [line.rstrip() for line in captured.get().splitlines()]
    assert first.endswith("  Which of the ships that came in yesterday are…")
    assert all(len(line) <= 60 for line in details)
    assert details[0].strip().startswith("alice · ")


def test_what_users_wrote_cannot_drive_the_terminal(data_dir: Path) -> None:
    keep(data_dir, "\x1b[2J[red]hello[/red]")
    assert "\N{REPLACEMENT CHARACTER}[2J[red]hello[/red]" in ok("ls")


def test_looking_changes_nothing(data_dir: Path) -> None:
    keep(data_dir, "Which ships are here?", "Who is at sea?")
    files = [path for path in (data_dir / "kv").rglob("*") if path.suffix in (".db", ".kv")]
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}
    ok("ls")
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files} == before


def test_a_broken_store_is_left_out_with_one_sentence(data_dir: Path) -> None:
    keep(data_dir, "Which ships are here?", model="one")
    (index,) = (data_dir / "kv").glob("*/index.db")
    index.write_bytes(b"no database" * 100)
    keep(data_dir, "Who is at sea?", model="two")
    result = run("ls", "--json")
    assert "Who is at sea?" in result.stdout
    (sentence,) = result.stderr.splitlines()
    assert f"{index.parent} is left out" in sentence


# ── pin, rm, gc ──


def test_a_pin_is_remembered_and_taken_back(data_dir: Path) -> None:
    keep(data_dir, "Which ships are here?")
    wanted = id_of("Which ships are here?")
    assert ok("pin", wanted[:6]) == f"{wanted} is pinned: Which ships are here?\n"
    assert [entry["id"] for entry in listed() if entry["pinned"]] == [wanted]
    assert "pinned" in ok("ls")
    assert "not pinned any more" in ok("unpin", wanted)
    assert not any(entry["pinned"] for entry in listed())


def test_an_id_must_lead_to_one_entry(data_dir: Path) -> None:
    keep(data_dir, *(f"Where is ship {number}?" for number in range(20)))
    ids = [entry["id"] for entry in listed()]
    first = next(digit for digit in "0123456789abcdef" if sum(id_.startswith(digit) for id_ in ids) > 1)
    assert "give more of the id" in refused("pin", first)
    assert isinstance(run("rm", "zz").exception, NoSuchEntry)
    assert "`emberkeep cache ls --all`" in refused("show", "zz")
    assert not any(entry["pinned"] for entry in listed())


def test_removing_one_leaves_what_others_share(data_dir: Path) -> None:
    common = "Of all the ships that came in yesterday and of those before, "
    keep(data_dir, f"{common}which are here?", f"{common}who is at sea?", f"{common}whose are they?")
    last, other, _ = listed()
    assert ok("rm", last["id"]).startswith("Removed 1 entry, ")
    assert last["id"] not in [entry["id"] for entry in listed()]
    with open_emberkeep(Config(data_dir=data_dir)) as llm:
        again = llm.chat(asking(f"{common}who is at sea?"), max_tokens=4)
        assert again.usage.cached_tokens == again.usage.prompt_tokens - 1
        assert llm.cache.show(other["id"]).text.count(common) == 1


def test_everything_of_a_user_is_removed_in_every_models_store(data_dir: Path) -> None:
    for model in ("one", "two"):
        keep(data_dir, "Which ships are here?", "And yesterday?", model=model, user="alice")
        keep(data_dir, "Who is at sea?", model=model)
    assert ok("rm", "--user", "alice", "--yes").startswith("Removed 4 entries, ")
    assert [(entry["model"], entry["user"]) for entry in listed()] == [("two", None), ("one", None)]


def test_nothing_is_removed_without_yes_where_there_is_no_terminal(data_dir: Path) -> None:
    keep(data_dir, "Which ships are here?", user="alice")
    assert "say --yes" in refused("rm", "--user", "alice")
    assert len(listed()) == 1


@pytest.mark.parametrize(("answer", "left"), [("n\n", 1), ("y\n", 0)])
def test_at_a_terminal_it_is_asked(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, answer: str, left: int
) -> None:
    keep(data_dir, "Which ships are here?", user="alice")
    monkeypatch.setattr("emberkeep.cli.console._is_terminal", lambda: True)
    result = run("rm", "--user", "alice", input=answer)
    assert "Remove everything of the user alice (1 entry)?" in result.stderr
    assert len(listed()) == left


@pytest.mark.parametrize("arguments", [["rm"], ["rm", "ab", "--user", "alice"], ["explain"]])
def test_wrong_usage_is_status_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_what_has_outlived_its_time_can_be_removed(data_dir: Path) -> None:
    keep(data_dir, "Which ships are here?", user="alice")
    keep(data_dir, "Who is at sea?", user="bob")
    ok("pin", id_of("Who is at sea?"))
    assert ok("gc") == "Nothing has outlived its time.\n"
    let_time_pass(data_dir, 2 * DAY_S)
    assert "expired" in ok("ls")
    assert "2 days ago" in ok("ls")
    assert ok("gc").startswith("Removed 1 entry, ")
    assert heads(listed()) == ["Who is at sea?"]


# ── show, explain, verify ──


class Impostor(FakeEngine):
    """Other weights under the same fingerprint: what must never happen, made to happen."""

    def __init__(self, *, weights: str) -> None:
        super().__init__(weights=f"not {weights}")
        self.fingerprint = FakeEngine(weights=weights).fingerprint


def test_an_entry_is_shown_with_its_text(data_dir: Path, model: list[Config]) -> None:
    keep(data_dir, "Which ships are here?", user="alice")
    shown = ok("show", id_of("Which ships are here?"))
    assert "alice" in shown
    assert "<|im_start|>user\nWhich ships are here?<|im_end|>" in shown
    assert (model[0].parallel, model[0].warm) == (1, ())


def test_a_long_text_is_cut_in_the_middle(data_dir: Path, model: list[Config]) -> None:
    keep(data_dir, "Which ships are here? " * 20)
    entry = listed()[0]["id"]
    assert "text, 41 of " in ok("show", entry, "--chars", "40")


def test_an_entry_is_shown_without_its_text_where_its_model_is_gone(data_dir: Path) -> None:
    keep(data_dir, "Which ships are here?")
    result = run("show", id_of("Which ships are here?"))
    assert result.exit_code == 0
    assert "Which ships are here?" in result.stdout
    assert result.stderr == "Its text needs the model fake: name its file with --model.\n"


def test_an_edited_message_is_explained_from_both_sides(data_dir: Path, model: list[Config]) -> None:
    with open_emberkeep(Config(data_dir=data_dir)) as llm:
        llm.chat([*asking("Ships? Here."), *asking("Which?")], max_tokens=4, user="alice")
    Path("request.json").write_text(
        json.dumps({"model": "another name", "messages": [*asking("Ships? There."), *asking("Which?")]})
    )
    said = ok("explain", "request.json", "--user", "alice")
    assert "Message 1 (user) was edited at token" in said
    assert "edited_message" in said
    stored, asked = said.splitlines()[-2:]
    assert stored.startswith("stored is")
    assert "Here." in stored
    assert asked.startswith("the prompt has")
    assert "There." in asked


def test_a_request_is_read_from_a_pipe(data_dir: Path, model: list[Config]) -> None:
    keep(data_dir, "Which ships are here?")
    body = json.dumps({"messages": asking("Which ships are here?")})
    assert ok("explain", "-", input=body).startswith("All ")


def test_a_raw_prompt_is_explained(data_dir: Path, model: list[Config]) -> None:
    assert "0 of 4 tokens can be reused." in ok("explain", "--prompt", "ahoy")


@pytest.mark.parametrize("text", ["{", "[]", "\udc80"])
def test_what_is_no_request_is_one_sentence(text: str, model: list[Config]) -> None:
    Path("request.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert "request.json is not" in refused("explain", "request.json")
    assert model == []


def test_stored_state_that_is_right_agrees(data_dir: Path, model: list[Config]) -> None:
    keep(data_dir, "Which ships are here?", "Who is at sea?")
    said = ok("verify", "--tokens", "8")
    assert "0 damaged." in said
    assert "2 entries replayed, 100.0% of 16 tokens agree." in said
    wanted = id_of("Who is at sea?")
    said = ok("verify", wanted[:8])
    assert wanted in said
    assert "1 entry replayed" in said


def test_how_exact_a_replay_can_be_is_told(data_dir: Path, model: list[Config]) -> None:
    keep(data_dir, "Which ships are here? " * 20)
    said = " ".join(ok("verify").split())
    assert re.search(r"\d+ wide, \d+ narrow", said)
    assert re.search(r"\d+ of \d+ tokens can be reproduced to the bit", said)


def test_a_damaged_file_is_found_and_put_away(data_dir: Path, model: list[Config]) -> None:
    keep(data_dir, "Which ships are here? " * 20)
    damaged = max((data_dir / "kv").glob("*/chunks/*/*.kv"), key=lambda path: path.stat().st_size)
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    result = run("verify")
    assert result.exit_code == 1
    assert "1 damaged and put into quarantine." in result.stdout
    assert not damaged.exists()
    assert run("verify").exit_code == 0


def test_state_that_differs_is_status_1(
    data_dir: Path, model: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(data_dir, "Which ships are here?")
    monkeypatch.setattr("helpers.kept_chats.FakeEngine", Impostor)
    result = run("verify")
    assert result.exit_code == 1
    assert "0 damaged." in result.stdout
    assert "100.0%" not in result.stdout


def test_nothing_is_loaded_to_verify_nothing(model: list[Config]) -> None:
    assert "`emberkeep chat`" in ok("verify")
    assert model == []
