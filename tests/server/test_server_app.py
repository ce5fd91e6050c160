"""Which routes there are, when they are made, and what the document says of them."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path

import httpx
import pytest
from starlette.exceptions import HTTPException

from emberkeep.api.openai_chat import ChatBody
from emberkeep.api.openai_completions import CompletionBody
from emberkeep.api.responses_body import ResponseBody
from emberkeep.backend.models import Models
from emberkeep.config.settings import Config
from emberkeep.models.library import ModelLibrary
from emberkeep.server import app
from emberkeep.server.app import SUBJECTS, Subjects, make_routes
from emberkeep.server.middleware import Drain
from emberkeep.server.request_log import RequestMetrics
from emberkeep.server.routes.base import Routes, Served, SideWork
from emberkeep.server.routes.cache import EntryBody, VerifyBody, WarmBody
from emberkeep.server.routes.memory import AnswerBody, FactBody
from emberkeep.types.events import MissReason
from emberkeep.types.request import Sampling
from helpers.scripted_server import ScriptedBackend


@pytest.fixture
def served(tmp_path: Path) -> Served:
    models, library = Models(ScriptedBackend()), ModelLibrary(tmp_path)
    return Served(models, Config(), library, SideWork(), Drain(), RequestMetrics())


def owners(path: str) -> list[int]:
    """Of the paths in the table those that `path` is or begins with: whose they are, the longest one's first."""
    found = [
        (len(mine), place)
        for place, (_, *paths) in enumerate(SUBJECTS)
        for mine in paths
        if path == mine or path.startswith(f"{mine}/")
    ]
    return [place for _, place in sorted(found, reverse=True)]


def test_every_route_belongs_to_the_subject_that_makes_it(served: Served) -> None:
    for place, (module, *paths) in enumerate(SUBJECTS):
        routes = make_routes(module, served).listed
        assert routes
        for route in routes:
            assert owners(route.path)[0] == place, route.path
        used = {path for path in paths for route in routes if route.path == path or route.path.startswith(path)}
        assert used == set(paths)


def test_no_method_of_a_path_is_there_twice(served: Served) -> None:
    listed = [
        (route.method, route.path) for module, *_ in SUBJECTS for route in make_routes(module, served).listed
    ]
    assert len(listed) == len(set(listed))


def test_the_document_has_the_first_path_of_a_function_and_no_alias(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/models/{model_id}", "/health", "/v1/responses"} <= set(paths)
    assert not {"/chat/completions", "/models", "/v1/health", "/responses", "/v1/events", "/openapi.json"} & set(
        paths
    )


def test_parameters_stand_in_the_document_as_they_are_read(http: httpx.Client) -> None:
    act = http.get("/openapi.json").json()["paths"]["/slots/{slot}"]["post"]
    told = {parameter["name"]: parameter for parameter in act["parameters"]}
    assert {name: (told[name]["in"], told[name]["required"]) for name in told} == {
        "slot": ("path", True),
        "action": ("query", True),
        "model": ("query", False),
    }
    assert told["slot"]["schema"]["minimum"] == 0
    assert told["action"]["schema"]["enum"] == ["save", "restore", "erase"]
    assert "default" not in told["model"]["schema"]


def test_what_a_function_says_of_itself_stands_in_the_document(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    delete = paths["/v1/conversations/{conversation_id}/items/{item_id}"]["delete"]
    assert delete["description"] == "Answers with the conversation that it was in."
    assert delete["operationId"] == "delete_v1_conversations__conversation_id__items__item_id__delete"
    chat = paths["/v1/chat/completions"]["post"]
    assert set(chat["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert set(paths["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}
    assert "content" not in paths["/health"]["get"]["responses"]["503"]  # an error of its own
    assert "431" in chat["responses"] and "414" not in chat["responses"]  # a long path is answered as a long head


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of two subjects of a table: which have been made."""
    made: list[str] = []

    def making(name: str, _: Served) -> Routes:
        made.append(name)
        return Routes()

    monkeypatch.setattr(app, "SUBJECTS", (("a", "/a"), ("ab", "/a/b")))
    monkeypatch.setattr(app, "make_routes", making)
    return made


def ask(app: Subjects, path: str) -> None:
    async def nothing() -> dict[str, str]:
        return {}

    async def nowhere(_: object) -> None:
        pass

    with pytest.raises(HTTPException) as caught:
        asyncio.run(app({"type": "http", "method": "GET", "path": path, "app": app}, nothing, nowhere))
    assert caught.value.status_code == 404


def test_a_subject_is_made_when_it_is_asked_for_and_only_once(served: Served, made: list[str]) -> None:
    app = Subjects(served)
    ask(app, "/nowhere")
    ask(app, "/ab")
    assert made == []
    for _ in range(2):
        ask(app, "/a/b/c/d/e")
    assert made == ["ab"]
    ask(app, "/a/c")
    assert made == ["ab", "a"]


def test_a_subject_that_two_threads_ask_for_is_made_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    made, begun, go_on = list[Routes](), threading.Event(), threading.Event()

    def make(*_: object) -> Routes:
        begun.set()
        assert go_on.wait(60)
        made.append(Routes())
        return made[-1]

    monkeypatch.setattr(app, "SUBJECTS", (("a", "/a"),))
    monkeypatch.setattr(app, "make_routes", make)
    subjects = Subjects(served)
    asking = [threading.Thread(target=lambda: list(subjects.routes())) for _ in range(2)]
    asking[0].start()
    assert begun.wait(60)
    asking[1].start()
    go_on.set()
    for thread in asking:
        thread.join(60)
    assert len(made) == 1


# ── the pages of the API say what is so ──

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("apis.md", "cache-api.md", "operating.md")
TEXT = "\n".join((DOCS / page).read_text(encoding="utf-8") for page in PAGES)


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p"])
def test_the_sampling_defaults_are_told(name: str) -> None:
    row = next(line for line in TEXT.splitlines() if line.startswith(f"| `{name}`"))
    assert row.endswith(f"; {getattr(Sampling(), name)} unless given |")


def test_every_field_is_told() -> None:
    told = set(re.findall(r"`([a-z_]+)", TEXT))
    bodies = (ChatBody, CompletionBody, EntryBody, VerifyBody, WarmBody, FactBody, AnswerBody, ResponseBody)
    assert {info.alias or name for body in bodies for name, info in body.model_fields.items()} <= told


def test_every_reason_is_told() -> None:
    assert all(f"`{reason}`" in TEXT for reason in MissReason)
