"""Everything the OpenAPI document describes, asked in many unlikely ways."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import Status, events, from_schema
from schemathesis.python.asgi import HOST
from starlette.applications import Starlette

from emberkeep.backend.models import Models
from emberkeep.config.settings import Config
from emberkeep.engine.fake import FakeEngine
from emberkeep.server.app import create_app
from emberkeep.server.request_log import RequestLog
from emberkeep.types.request import Json
from helpers.chance import is_torture, seed, times
from helpers.scripted_backend import fake_backend

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starlette]:
    """A small context: answers without a limit end soon."""
    config = Config(data_dir=tmp_path_factory.mktemp("data"), allow=(HOST,))
    backend = fake_backend(config, FakeEngine(context=256))
    yield create_app(Models(backend), config)
    asyncio.run(backend.close())


def findings(app: Starlette) -> list[str]:
    """What is wrong with any operation; the same cases in every `make test`."""
    settings: dict[str, Json] = {
        "seed": seed(1),
        "generation": {"deterministic": not is_torture(), "max-examples": times(40), "database": "none"},
        "request-timeout": 60,
        "checks": {
            "positive_data_acceptance": {"enabled": False},  # see `refusals`
            # A list that is too long may make the body too large first: 413.
            "negative_data_rejection": {"expected-statuses": ["4xx", "5xx"]},
        },
        "phases": {"coverage": {"enabled": True}, "stateful": {"enabled": False}},
    }
    # As the server wraps it: a stream that is broken off, as the client does here, must be known to have begun.
    logged = RequestLog(app)
    schema = schemathesis.openapi.from_asgi("/openapi.json", logged, config=SchemathesisConfig.from_dict(settings))
    found, tested = [], set[str | None]()
    for event in from_schema(schema).execute():
        if isinstance(event, events.ScenarioFinished):
            found += failures(event) + refusals(event)
            tested |= {event.label} if event.status is Status.SUCCESS else set()
        elif isinstance(event, (events.NonFatalError, events.FatalError)):
            found.append(repr(event))
    return found + [f"{label} was not tested" for label in sorted(operations(app) - tested)]


def failures(scenario: events.ScenarioFinished) -> list[str]:
    checks = [check for of_case in scenario.recorder.checks.values() for check in of_case]
    return [
        f"{scenario.label}, {check.name}: {info.failure.title} {info.failure.message}\n{info.code_sample}"
        for check in checks
        if (info := check.failure_info)
    ]


NO_SCHEMA_SAYS = re.compile(
    "|".join(
        [
            # what the model is, and what it has
            "maximum context length",
            "token ids must be between",
            "is not a token of this model",
            "prompt is empty",
            "gives no embeddings",
            "does not rank documents",
            "reads text only",
            "has no tokens for filling in the middle",
            "is not a mixture of experts",
            "is the only model",
            "id of an adapter",
            "There (is|are) .* slots?",
            "Nothing rests",
            # which fields go together
            "leave one of them out",
            "does not go with raw and suffix",
            "best_of: give n or more",
            "is the model's own here",
            "must equal user_id",
            "name different users",
            "user_id: is required",
            "at least one message is needed",
            "input: is required",
            "filename: is required",
            "each is explained on its own",
            "goes with prompts that are texts",
            "goes without a last message",
            "needs logprobs",
            "needs at least one tool",
            "not among the tools",
            "two tools have this name",
            "is required when type is",
            # what is in a text
            "use lower-case letters",
            "content: is empty",
            "as an object or as its text",
            "as base64",
            "was not made here",
            "takes any text here",
            "grammar: cannot be used",
            "do not cite",
            # what is there, and what is done with it
            "no such item is stored",
            "cannot be changed while",
        ]
    )
)
"""Reasons for refusing a request that agrees with the document."""


def refusals(scenario: events.ScenarioFinished) -> list[str]:
    """Of requests that agree with the document, for reasons that it could tell."""
    cases, sent = scenario.recorder.cases, scenario.recorder.interactions
    refused = (
        (exchange.request, exchange.response.content.decode())
        for key, exchange in sent.items()
        if (meta := cases[key].value.meta) and meta.generation.mode is GenerationMode.POSITIVE
        if exchange.response is not None and exchange.response.status_code == 400
    )
    return [
        f"{scenario.label} refuses {request.body!r} at {request.uri}: {told}"
        for request, told in refused
        if not NO_SCHEMA_SAYS.search(told)
    ]


def operations(app: Starlette) -> set[str | None]:
    paths = app.state.subjects.document["paths"].items()
    return {f"{method.upper()} {path}" for path, methods in paths for method in methods}


@pytest.mark.timeout(times(1800))
def test_nothing_makes_the_server_fail_or_answer_off_the_document(app: Starlette) -> None:
    """Random requests, and every border of every field; those that agree with the document are not refused."""
    found = findings(app)
    assert not found, "\n\n".join(found)


def test_every_operation_says_which_errors_it_answers_with(app: Starlette) -> None:
    document = app.state.subjects.document
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert {"200", "401", "403"} <= set(operation["responses"]), path
            if method != "get":
                assert {"400", "404", "413", "429", "503", "504"} <= set(operation["responses"]), path
    fields = document["components"]["schemas"]["Error"]["properties"]["error"]["required"]
    assert set(fields) == {"message", "type", "param", "code"}
