"""What Prometheus is told."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from emberkeep import __version__
from emberkeep.backend.models import Models
from emberkeep.config.settings import Config
from emberkeep.engine.base import Footprint
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import DeadlineExceeded, EngineError, Overloaded, RemoteDown
from emberkeep.server.app import create_app
from emberkeep.server.metrics import FIGURES
from emberkeep.server.request_log import RequestLog
from emberkeep.types.events import Finished, FinishReason, MissReason, TextDelta
from emberkeep.types.models import LENGTH_BUCKETS, SourceStats, SpeculationStats
from emberkeep.types.request import Json, Request, Sampling
from helpers.scripted_backend import fake_backend, text_of
from helpers.scripted_server import COMPLETED, HANG, WAIT_S, ScriptedBackend, Step, running

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
DOCS = (Path(__file__).parents[2] / "docs/operating.md").read_text(encoding="utf-8")

LEFT_OUT = (
    r"engine\.(attention|pool\.block_tokens)",  # a name, and a constant
    r"planning\.(enabled|footprint\.device)",  # a setting and a name
    r"memory\.(oldest|newest)",  # times
    r"model",  # a label of emberkeep_info
    r"recent_lookups.*",  # single requests
    r"speculation\.(enabled|reason|draft_model|(drafted|accepted)_tokens)",  # a setting, texts, sums by source
    r"speculation\.sources\.\w+\.(acceptance|accepted_lengths)",  # a quotient, and a histogram of its own
    r"scheduler\.slots.*",  # what each holds, for llama-server's clients
    r"embeddings",  # told by models that give some
    r"scheduler\.(jobs|cancelled|failed)",  # counted per request, see server/request_log.RequestMetrics
    r"store\.(folder|cold\.last_error)",  # texts
    r"store\.remote",  # told where hosts share their state
)
"""Figures of the backend that are not exported."""

Samples = dict[str, float]
"""Value by name and labels, as Prometheus writes them."""


class Site:
    """A server's inside, without the network."""

    def __init__(self, *script: Step, config: Config | None = None) -> None:
        self.backend = ScriptedBackend(script)
        app = create_app(Models(self.backend), config or Config())
        self._app = RequestLog(app, app.state.metrics.observe)

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self._app), base_url="http://localhost")

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            async with self.client() as client:
                return await client.request(method, path, **options)

        return asyncio.run(send())

    def ask(self, **fields: Json) -> int:
        return self.call("POST", CHAT, json=BODY | fields).status_code

    def scrape(self, **options: Any) -> Samples:
        return parsed(self.call("GET", "/metrics", **options).raise_for_status().text)


def parsed(text: str) -> Samples:
    samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def outcomes(samples: Samples) -> dict[str, float]:
    pattern = re.compile(r'emberkeep_requests_total\{outcome="(\w+)"\}')
    return {found[1]: value for name, value in samples.items() if value and (found := pattern.fullmatch(name))}


# ── requests ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_counted_with_its_usage(stream: bool) -> None:
    site = Site()
    site.ask(stream=stream)
    samples = site.scrape()
    assert outcomes(samples) == {"finished": 1}
    assert samples["emberkeep_time_to_first_token_seconds_sum"] == COMPLETED.timings.ttft_ms / 1e3
    assert samples["emberkeep_request_queue_time_seconds_sum"] == COMPLETED.timings.queue_ms / 1e3
    assert samples["emberkeep_time_per_output_token_seconds_sum"] == pytest.approx(0.01)
    assert samples["emberkeep_e2e_request_latency_seconds_count"] == 1


def test_every_prompt_of_a_request_has_its_own_first_token() -> None:
    site = Site()
    site.call("POST", "/v1/completions", json={"prompt": ["a", "b"]})
    samples = site.scrape()
    assert samples["emberkeep_time_to_first_token_seconds_count"] == 2
    assert samples["emberkeep_e2e_request_latency_seconds_count"] == 1


def test_why_no_more_was_reused_is_counted() -> None:
    site = Site()
    site.ask()
    assert not any(value for name, value in site.scrape().items() if "cache_misses_total" in name)
    missed = replace(COMPLETED, lookup=replace(COMPLETED.lookup, reason=MissReason.DIVERGED))
    site.backend.reset(Finished(0, FinishReason.STOP), missed)
    site.ask()
    assert site.scrape()['emberkeep_prefix_cache_misses_total{reason="diverged"}'] == 1


def test_a_full_queue_is_told_from_a_bad_request() -> None:
    site = Site(Overloaded("Full."))
    assert [site.ask(), site.ask(stream=True), site.ask(temperature=9)] == [503, 503, 400]
    samples = site.scrape()
    assert outcomes(samples) == {"refused": 3}
    assert samples['emberkeep_requests_refused_total{reason="overloaded"}'] == 2
    assert samples['emberkeep_requests_refused_total{reason="invalid_request_error"}'] == 1


@pytest.mark.parametrize("error", [EngineError("Broken."), DeadlineExceeded("Late."), RemoteDown("It is down.")])
@pytest.mark.parametrize("begun", [[], [TextDelta(0, "Hel")]])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_breaks_has_failed(error: Exception, begun: list[Step], stream: bool) -> None:
    site = Site(*begun, error)
    site.ask(stream=stream)
    assert outcomes(site.scrape()) == {"failed": 1}


def test_an_answer_that_the_end_of_the_server_cuts_off_has_failed() -> None:
    site = Site(TextDelta(0, "Hel"), HANG)

    async def cut_off() -> httpx.Response:
        async with site.client() as client:
            asking = asyncio.create_task(client.post(CHAT, json=BODY | {"stream": True}))
            assert await asyncio.to_thread(site.backend.hanging.wait, WAIT_S)
            asking.cancel()
            return await asking

    assert "The server stopped" in asyncio.run(cut_off()).text
    assert outcomes(site.scrape()) == {"failed": 1}


def test_looking_around_is_no_request() -> None:
    site = Site()
    for path in ("/health", "/v1/models", "/v1/stats", "/metrics"):
        site.call("GET", path)
    assert outcomes(site.scrape()) == {}


def test_two_applications_in_one_process_count_apart() -> None:
    one, other = Site(), Site()
    one.ask()
    assert outcomes(other.scrape()) == {}


def test_a_client_that_leaves_a_server_has_cancelled_and_its_warmup_is_no_request() -> None:
    with running(ScriptedBackend([TextDelta(0, "Hel"), HANG]), Config()) as server:
        with httpx.stream("POST", f"{server.url}{CHAT}", json=BODY | {"stream": True}):
            assert server.backend.hanging.wait(WAIT_S)
        assert server.backend.stopped_early.wait(WAIT_S)
        assert outcomes(parsed(httpx.get(f"{server.url}/metrics").text)) == {"cancelled": 1}


# ── the backend's figures ────────────────────────────────────────────────────────────────────────


def stats_scraped(stats: dict[str, Json]) -> Samples:
    site = Site()
    site.backend.stats = lambda: stats  # type: ignore[method-assign]
    return site.scrape()


def test_figures_of_the_tiers_are_told_by_tier() -> None:
    samples = stats_scraped(
        {
            "scheduler": {"prompt_tokens": 9, "reused_hot_tokens": 1, "reused_cold_tokens": 5},
            "store": {
                "warm": {"bytes": 10, "budget": 20, "read_seconds": 0.5},
                "cold": {"bytes": 30, "budget": 40, "read_seconds": 1.5, "write_seconds": 2.5},
                "evictions": {"warm": {"pressure": 3}, "cold": {"expired": 4}},
            },
        }
    )
    assert samples["emberkeep_prefix_cache_queries_total"] == 9
    assert samples['emberkeep_prefix_cache_hits_total{tier="hot"}'] == 1
    assert samples['emberkeep_prefix_cache_hits_total{tier="cold"}'] == 5
    assert samples['emberkeep_tier_bytes{tier="warm"}'] == 10
    assert samples['emberkeep_tier_budget_bytes{tier="cold"}'] == 40
    assert samples['emberkeep_tier_load_seconds_total{tier="cold"}'] == 1.5
    assert samples["emberkeep_cold_write_seconds_total"] == 2.5
    assert samples['emberkeep_evictions_total{reason="pressure",tier="warm"}'] == 3
    assert samples['emberkeep_evictions_total{reason="expired",tier="cold"}'] == 4
    assert not any(name.startswith("emberkeep_queue") for name in samples)


def test_drafts_are_told_by_their_source() -> None:
    lengths = (2, 0, 1, *[0] * (LENGTH_BUCKETS - 4), 1)
    drafts = {"context": SourceStats(4, 30, 22, lengths), "corpus": SourceStats(1, 3, 0, (1, *lengths[3:], 0))}
    samples = stats_scraped({"speculation": SpeculationStats(True, "", 5, 33, 22, drafts).json()})
    assert samples["emberkeep_speculative_steps_total"] == 5
    assert samples['emberkeep_drafts_total{source="context"}'] == 4
    assert samples['emberkeep_drafted_tokens_total{source="corpus"}'] == 3
    assert samples['emberkeep_accepted_draft_tokens_total{source="context"}'] == 22
    name = "emberkeep_accepted_draft_length"
    buckets = [
        samples[f'{name}_bucket{{le="{bound}",source="context"}}'] for bound in ("0", "1", "2", "15", "+Inf")
    ]
    assert buckets == [2, 2, 3, 3, 4]
    assert samples[f'{name}_sum{{source="context"}}'] == 22
    assert samples[f'{name}_count{{source="context"}}'] == 4
    assert f"`{name}`" in DOCS  # it is not among the figures


def test_what_is_not_known_yet_is_not_told() -> None:
    samples = stats_scraped({"measured": {"read_bytes_per_s": None, "import_bytes_per_s": 5.0}})
    assert samples["emberkeep_measured_import_bytes_per_second"] == 5
    assert "emberkeep_measured_read_bytes_per_second" not in samples


def test_the_model_and_the_version_are_labels() -> None:
    assert Site().scrape()[f'emberkeep_info{{model="org/tiny",version="{__version__}"}}'] == 1


@pytest.fixture(scope="module")
def stats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Json]:
    """What a real backend tells, as dotted paths, after it has done something."""
    config = Config(data_dir=tmp_path_factory.mktemp("data"))
    engine = FakeEngine()
    engine.footprint = Footprint("cpu", 1 << 40, 1 << 20, 1, 1, 1, 1)
    backend = fake_backend(config, engine)

    async def answer() -> dict[str, Json]:
        asked = Request(prompt="hello", max_tokens=8, sampling=Sampling(temperature=0.0))
        text = text_of([event async for event in backend.generate(asked)])
        async for _ in backend.generate(replace(asked, prediction=text)):
            pass
        told = backend.stats()
        await backend.close()
        return told

    return dict(leaves(asyncio.run(answer())))


def leaves(stats: dict[str, Json], above: str = "") -> Iterator[tuple[str, Json]]:
    for key, value in stats.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def test_every_figure_of_the_backend_is_exported_or_left_out_on_purpose(stats: dict[str, Json]) -> None:
    for path in stats:
        exported = [figure.name for figure in FIGURES if figure.labels(path) is not None]
        left_out = [pattern for pattern in LEFT_OUT if re.fullmatch(pattern, path)]
        assert len(exported) + len(left_out) == 1, f"{path}: give it one line in server/metrics.py, or in LEFT_OUT"


def test_nothing_is_left_out_that_is_not_there(stats: dict[str, Json]) -> None:
    assert [left for left in LEFT_OUT if not any(re.fullmatch(left, path) for path in stats)] == []


# ── the page ─────────────────────────────────────────────────────────────────────────────────────


def test_it_is_the_text_format_of_every_scraper() -> None:
    response = Site().call("GET", "/metrics", headers={"Accept": "application/openmetrics-text"})
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_it_wants_the_key_like_the_rest() -> None:
    site = Site(config=Config(api_key="canary"))
    assert site.call("GET", "/metrics").status_code == 401
    samples = site.scrape(headers={"Authorization": "Bearer canary"})
    assert samples['emberkeep_requests_refused_total{reason="invalid_api_key"}'] == 1


def test_every_metric_is_in_the_documentation() -> None:
    named = {f"emberkeep_{figure.name}" for figure in FIGURES}
    samples = {name.split("{")[0] for name in Site().scrape()}
    named |= {re.sub("_(bucket|count|sum)$", "", name) for name in samples if not name.endswith("_created")}
    assert sorted(name for name in named if f"`{name}`" not in DOCS) == []
