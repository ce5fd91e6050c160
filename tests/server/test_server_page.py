"""The page as a browser gets it: complete, small, closed to everything that is not in the package."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import httpx
import pytest

import emberkeep.server
from emberkeep.config.settings import Config
from emberkeep.server.routes.native import assets
from helpers.scripted_server import ScriptedBackend, running

PAGE = Path(emberkeep.server.__file__).parent / "page"
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
MOST_BYTES = 400_000


def test_a_browser_gets_the_page_and_a_program_what_is_where(http: httpx.Client) -> None:
    page = http.get("/", headers=BROWSER)
    assert page.headers["content-type"].startswith("text/html")
    assert '<script type="module" src="/page/app.js">' in page.text
    assert http.get("/").json()["api"] == "/v1"


def test_every_file_of_the_package_is_served(http: httpx.Client) -> None:
    files = {str(path.relative_to(PAGE)) for path in PAGE.rglob("*") if path.is_file()}
    assert files == set(assets())
    for name in files:
        assert http.get(f"/page/{name}").content == (PAGE / name).read_bytes()


def test_files_come_packed_and_are_not_sent_twice(http: httpx.Client) -> None:
    with http.stream("GET", "/page/app.js", headers={"Accept-Encoding": "gzip"}) as packed:
        body = b"".join(packed.iter_raw())
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(body) == (PAGE / "app.js").read_bytes()
    again = http.get("/page/app.js", headers={"If-None-Match": packed.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_nothing_runs_or_is_fetched_that_is_not_in_the_package(http: httpx.Client) -> None:
    for path in ("/", "/page/app.js", "/page/style.css"):
        policy = http.get(path, headers=BROWSER).headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    index = (PAGE / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\son\w+=|style=", index)


def test_what_the_page_imports_and_links_is_there() -> None:
    for path in PAGE.glob("*.js"):
        for name in re.findall(r'(?:from|import\()\s*"\./([^"]+)"', path.read_text()):
            assert name in assets(), (path.name, name)
    for name in re.findall(r'(?:src|href)="/page/([^"]+)"', (PAGE / "index.html").read_text()):
        assert name in assets()


def test_files_of_others_come_with_their_licences() -> None:
    licences = assets()["vendor/LICENSES.txt"].body.decode()
    for path in (PAGE / "vendor").glob("*.js"):
        assert f"({path.name})" in licences
        assert "sourceMappingURL" not in path.read_text()


def test_all_of_it_is_small() -> None:
    assert sum(len(asset.packed) for name, asset in assets().items()) < MOST_BYTES


@pytest.mark.parametrize("path", ["none.js", "../app.py", "%2e%2e/app.py", "vendor", "vendor/", "/etc/passwd", ""])
def test_other_paths_are_not_there(http: httpx.Client, path: str) -> None:
    answer = http.get(f"/page/{path}")
    assert answer.status_code == 404 or "app.js" in answer.text


def test_the_page_needs_no_key_and_everything_behind_it_does() -> None:
    with (
        running(ScriptedBackend(), Config(api_key="secret")) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        assert client.get("/", headers=BROWSER).status_code == 200
        assert client.get("/page/app.js").status_code == 200
        assert client.get("/").status_code == 401
        for path in ("/v1/models", "/v1/stats", "/v1/page/app.js", "/pages/app.js"):
            assert client.get(path, headers=BROWSER).status_code == 401
        assert client.post("/page/app.js").status_code in (401, 405)
