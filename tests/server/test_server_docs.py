"""The pages of the API say what is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from emberkeep.api.openai_chat import ChatBody
from emberkeep.api.openai_completions import CompletionBody
from emberkeep.api.responses_body import ResponseBody
from emberkeep.server.routes.cache import EntryBody, VerifyBody, WarmBody
from emberkeep.server.routes.memory import AnswerBody, FactBody
from emberkeep.types.events import MissReason
from emberkeep.types.request import Sampling

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
