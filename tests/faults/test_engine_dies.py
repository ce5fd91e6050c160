"""A server whose engine has failed tells every client, and ends so that a supervisor can start it anew."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from emberkeep.backend.models import Models
from emberkeep.config.settings import Config
from emberkeep.server.app import create_app
from helpers.scripted_backend import fake_backend
from helpers.server_process import ServerProcess

_SERVER = Path(__file__).with_name("serve_dying.py")
_SHORT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
_LONG = {"messages": [{"role": "user", "content": "harbour " * 500}], "max_tokens": 4}


@pytest.mark.parametrize("api_key", [None, "secret-key-of-the-test"])
def test_health_is_503_and_says_why_to_those_who_may_know(tmp_path: Path, api_key: str | None) -> None:
    def broken() -> None:
        raise RuntimeError("a bug")

    async def ask() -> tuple[httpx.Response, httpx.Response, httpx.Response]:
        config = Config(data_dir=tmp_path, api_key=api_key)
        backend = fake_backend(config)
        transport = httpx.ASGITransport(create_app(Models(backend), config))
        known = {"Authorization": f"Bearer {api_key}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=known) as http:
            before = await http.get("/health")
            backend.scheduler._admit = broken  # type: ignore[method-assign]
            failed = await http.post("/v1/chat/completions", json=_SHORT)
            after = await http.get("/health")
        await backend.close()
        return before, failed, after

    before, failed, after = asyncio.run(ask())
    assert (before.status_code, before.json()["status"]) == (200, "ok")
    assert [told.json()["backend_connected"] for told in (before, after)] == [True, False]
    assert failed.status_code == 500
    assert "The engine has failed" in failed.json()["error"]["message"]
    assert (after.status_code, after.json()["status"]) == (503, "failed")
    assert ("error" in after.json()) == (api_key is None)


@pytest.mark.slow
def test_the_process_ends_with_a_sentence_and_every_client_is_told(tmp_path: Path) -> None:
    # Nothing but the engine that dies can answer: there is no model.
    model = str(tmp_path / "none.gguf")
    arguments = ("serve", "--port", "0", "--data-dir", str(tmp_path), "--parallel", "2", "--model", model)
    with ServerProcess(str(_SERVER), *arguments) as server, ThreadPoolExecutor() as pool:
        url = f"{server.url}/v1/chat/completions"
        assert server.http.post(url, json=_SHORT).status_code == 200
        assert server.http.get(f"{server.url}/health").status_code == 200
        asked = [pool.submit(httpx.post, url, json=_LONG, timeout=60) for _ in range(6)]
        for answer in asked:
            try:
                response = answer.result()
            except httpx.ConnectError:
                continue  # it came when all was over
            assert response.status_code in (500, 503)
            assert "error" in response.json()
        assert server.exit_code() == 1
        last = server.log.strip().splitlines()[-1]
        assert "The engine has failed (RuntimeError) and answers no more: start again; the log says why." in last
