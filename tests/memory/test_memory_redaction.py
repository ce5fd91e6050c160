from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.memory.memory import Memory
from emberkeep.memory.records import redact
from emberkeep.types.memory import ToolUse
from helpers.remembering import raw_bytes, turn

WHOLE = [
    "sk-proj-abcDEF1234567890abcdefGHIJ",
    "sk-ant-api03-AbCdEf1234567890AbCdEf-xyz_",
    "ghp_" + "a1B2" * 9,
    "gho_" + "a1B2" * 9,
    "github_pat_" + "1A_" * 14,
    "xoxb-1234567890-abcdefghij",
    "AKIAIOSFODNN7EXAMPLE",
    "AIza" + "Sy_-1" * 7,
    "hf_" + "Ab1" * 11,
    "glpat-" + "x1-_Y" * 4,
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dBjftJeZ4CVP-mB92K27",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA\nabc=\n-----END RSA PRIVATE KEY-----",
    "-----BEGIN OPENSSH PRIVATE KEY-----\ncut off in the middle",
]
PARTS = [
    ("Authorization: Bearer abcdefghij0123456789", "Authorization: Bearer [secret]"),
    ('api_key = "hunter2-hunter2"', 'api_key = "[secret]"'),
    ("OPENAI_API_KEY=abc123def456", "OPENAI_API_KEY=[secret]"),
    ("password: hunter2!", "password: [secret]"),
    ("my password is Tr0ub4dor&3", "my password is [secret]"),
    ('{"client_secret": "zz-yy-xx"}', '{"client_secret": "[secret]"}'),
    ('password = "[secret]-hunter2"', 'password = "[secret]"'),
    ("postgres://joe:pw@host/db", "postgres://joe:[secret]@host/db"),
]
HARMLESS = [
    "commit 3f786850e387550fdab836ed7e6dc881de23001b",
    "id 550e8400-e29b-41d4-a716-446655440000",
    "![x](data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk)",
    "the password: please choose one",
    "def api_key(self): return self.api_key",
    "api_key=os.environ['API_KEY']",
    "password = getpass()",
    "The secret: never give up",
    "risk-based-assessment-methodologies and task-management-with-long-names",
    "http://localhost:8000/v1 and git@github.com:me/x.git",
    "max_tokens: 4096, secret=None, a basic understanding",
    "sk-learn-is-a-library-with-a-long-name",
]


@pytest.mark.parametrize("secret", WHOLE)
def test_keys_and_tokens_go(secret: str) -> None:
    assert redact(f"use {secret}") == "use [secret]"


@pytest.mark.parametrize(("text", "without"), PARTS)
def test_only_the_secret_part_goes(text: str, without: str) -> None:
    assert redact(f"look: {text} end") == f"look: {without} end"


@pytest.mark.parametrize("text", HARMLESS)
def test_what_only_looks_like_a_secret_stays(text: str) -> None:
    assert redact(text) == text


PIECES = [
    *WHOLE,
    *(text for text, _ in PARTS),
    *HARMLESS,
    "password=",
    "Bearer ",
    '"',
    " ",
    "://a:",
    "@",
    "-",
    "1",
]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=6).map("".join))
def test_nothing_is_left_to_redact(text: str) -> None:
    assert redact(redact(text)) == redact(text)


def test_no_secret_reaches_the_files(memory: Memory, path: Path) -> None:
    secret = "sk-proj-abcDEF1234567890abcdefGHIJ"
    use = ToolUse("deploy", json.dumps({"api_key": secret}), f"used {secret}")
    memory.archive("", [turn(f"my key is {secret}", f"I noted {secret}", tool_uses=(use,))])
    memory.store_answer("", f"what is {secret}?", f"it is {secret}")
    assert b"abcdef1234567890" not in raw_bytes(path).lower()
    assert memory.search("", "key")[0].user_text == "my key is [secret]"
    (found,) = memory.search("", "deploy")
    assert json.loads(found.tool_uses[0].arguments) == {"api_key": "[secret]"}
