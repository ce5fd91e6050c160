"""Which services can be spoken to: what is usual for each, keys, SDKs that are missing, backends of one's own."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from time import time

import pytest

from emberkeep.backend.remote.base import Provider, retry_after
from emberkeep.backend.remote.vendors import (
    GROUP,
    VENDORS,
    api_url,
    default_context,
    has_key,
    open_provider,
    vendor_names,
    vendor_of,
    with_defaults,
)
from emberkeep.errors import ConfigError, RemoteRefused
from emberkeep.types.models import RemoteModel

CANARY = "canary-7f3a9c"

OWN = """
    class Parrot:
        def __init__(self, remote, key):
            self.remote, self.key = remote, key

    def open_parrot(remote, key):
        return Parrot(remote, key)

    nothing = None
"""


def remote(backend: str) -> RemoteModel:
    return RemoteModel("mine", backend)


@pytest.fixture
def own_backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with backends of its own."""
    (tmp_path / "parrots.py").write_text(textwrap.dedent(OWN))
    info = tmp_path / "parrots-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: parrots\nVersion: 1.0\n")
    entries = ["parrot = parrots:open_parrot", "mute = parrots:nothing", "lost = parrots.gone:open_parrot"]
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *entries, "openai = parrots:open_parrot"]))
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield
    sys.modules.pop("parrots", None)


@pytest.mark.slow
@pytest.mark.parametrize("backend", VENDORS)
def test_every_kind_can_be_opened(backend: str) -> None:
    assert default_context(remote(backend)) > 0
    one = replace(remote(backend), base_url="http://127.0.0.1:1", model="some")
    provider: Provider = open_provider(one, dict.fromkeys(VENDORS[backend].key_envs, CANARY))
    assert CANARY not in repr(provider)


@pytest.mark.parametrize(
    ("backend", "base_url", "url", "speaks"),
    [
        ("openai", None, "https://api.openai.com/v1", "openai"),
        ("openai", "http://127.0.0.1:9", "http://127.0.0.1:9/v1", "compatible"),
        ("compatible", "https://eu.api.openai.com/v1", "https://eu.api.openai.com/v1", "openai"),
        ("compatible", "http://nas:8000/", "http://nas:8000/v1", "compatible"),
        ("gemini", None, "https://generativelanguage.googleapis.com/v1beta/openai", "gemini"),
        ("gemini", "https://proxy.example", "https://proxy.example/v1beta/openai", "gemini"),
        ("grok", "https://eu-west-1.api.x.ai", "https://eu-west-1.api.x.ai/v1", "grok"),
        ("ollama", "http://nas:11434", "http://nas:11434/v1", "ollama"),
        ("ollama", "https://nas/ollama", "https://nas/ollama/v1", "ollama"),
        ("trtllm", "https://nas/trt/", "https://nas/trt/v1", "trtllm"),
    ],
)
def test_an_address_says_where_the_api_is_and_how_it_is_spoken_to(
    backend: str, base_url: str | None, url: str, speaks: str
) -> None:
    one = replace(remote(backend), base_url=base_url)
    assert (api_url(one), vendor_of(one)) == (url, VENDORS[speaks])


def test_what_the_user_has_said_is_kept() -> None:
    said = RemoteModel("mine", "ollama", "qwen", "http://127.0.0.1:9", "MY_KEY")
    assert with_defaults(said) == said


@pytest.mark.parametrize("backend", [name for name, vendor in VENDORS.items() if vendor.key_envs])
def test_a_key_may_be_in_each_of_its_variables_and_the_usual_one_comes_first(backend: str) -> None:
    names = VENDORS[backend].key_envs
    usual = names[0]
    for name in names:
        assert has_key(remote(backend), {usual: " ", name: CANARY})
        assert with_defaults(remote(backend), {name: CANARY}).api_key_env == name
    assert with_defaults(remote(backend), dict.fromkeys(names, CANARY)).api_key_env == usual
    under_another_name = replace(remote(backend), api_key_env="WORK_KEY")
    assert has_key(under_another_name, {"WORK_KEY": CANARY})
    assert not has_key(under_another_name, dict.fromkeys(names, CANARY))
    with pytest.raises(RemoteRefused, match=usual):
        open_provider(remote(backend), {usual: "  "})


def test_a_service_that_needs_no_key_needs_the_one_that_was_named() -> None:
    assert has_key(remote("ollama"), {})
    with pytest.raises(RemoteRefused, match="PROXY_KEY"):
        open_provider(replace(remote("ollama"), api_key_env="PROXY_KEY"), {})


@pytest.mark.parametrize(
    ("backend", "words"),
    [("compatible", "base_url"), ("antropic", "did you mean anthropic"), ("zzzz", "use openai, ")],
)
def test_what_cannot_be_opened_says_what_is_missing(backend: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_provider(remote(backend), {})


def test_a_missing_sdk_is_told_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "anthropic", None)
    with pytest.raises(ConfigError, match=r"pip install 'emberkeep\[remote\]'"):
        open_provider(remote("anthropic"), {"ANTHROPIC_API_KEY": CANARY})


@pytest.mark.usefixtures("own_backends")
def test_a_backend_of_ones_own_is_opened_with_its_key() -> None:
    assert "parrot" in vendor_names()
    one = replace(remote("parrot"), api_key_env="PARROT_KEY")
    provider = open_provider(one, {"PARROT_KEY": CANARY})
    assert (provider.remote, provider.key) == (one, CANARY)  # type: ignore[attr-defined]
    assert open_provider(remote("parrot"), {}).key is None  # type: ignore[attr-defined]


@pytest.mark.usefixtures("own_backends")
@pytest.mark.parametrize("backend", ["mute", "lost"])
def test_a_backend_of_ones_own_that_cannot_be_opened_is_explained(backend: str) -> None:
    with pytest.raises(ConfigError, match="parrots"):
        open_provider(remote(backend), {})


@pytest.mark.usefixtures("own_backends")
def test_no_package_can_take_the_place_of_a_known_kind() -> None:
    assert vendor_names().count("openai") == 1
    with pytest.raises(RemoteRefused):
        open_provider(remote("openai"), {})


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7),
        ({"retry-after-ms": "1500", "retry-after": "7"}, 1.5),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-1"}, None),
        ({"retry-after": formatdate(0, usegmt=True)}, 0),
        ({}, None),
    ],
)
def test_when_to_come_back_is_read_from_headers(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers) == seconds


def test_a_date_to_come_back_at_is_in_the_future() -> None:
    wait = retry_after({"retry-after": formatdate(time() + 3600, usegmt=True)})
    assert wait is not None and 3000 < wait <= 3600
