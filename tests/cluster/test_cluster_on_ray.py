from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, chdir, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import httpx
import openai
import pytest

from benchmarks.cluster_model import Machine, Outcome, RemoteSettings, simulate
from benchmarks.trace_file import BLOCK, Visit
from emberkeep.cli.cache_stores import closed_folders, open_stores
from emberkeep.config.settings import Config
from emberkeep.kv.remote.link import RemoteLink
from emberkeep.routing import Affinity
from emberkeep.server.presence import announce
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Json
from helpers.cluster import BLOCK_IDS, NodeServer, replay, running, slow_models
from helpers.kv_building import CHUNK_BYTES
from helpers.page_view import chromium
from helpers.valkey_server import running_valkey
from helpers.waiting import eventually

pytest.importorskip("ray", reason="needs the extra emberkeep[cluster]")
pytestmark = [pytest.mark.slow, pytest.mark.serial]

STEP_S = 0.005
REPLICAS = 3
PER_USER = 8
SHADOWED = "colorsys"
"""A module of Python's own that nothing else imports."""
RULES = "You keep the harbour's book, and write down every ship with its cargo, its pier and its captain. " * 8


@dataclass(frozen=True, slots=True)
class Cluster:
    url: str
    config: Config
    http: httpx.Client

    def chat(self, messages: list[Json], **fields: Json) -> Json:
        response = self.http.post(
            f"{self.url}/v1/chat/completions", json={"messages": messages, "temperature": 0, **fields}
        )
        assert response.status_code == 200, response.text
        return response.json()

    def stats(self) -> dict[str, Json]:
        told = self.http.get(f"{self.url}/v1/stats").json()["replicas"]
        return {one["replica"]: one["data"] for one in told}

    def active(self) -> int:
        return sum(stats["scheduler"]["active"] for stats in self.stats().values())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    from emberkeep.cluster.lifecycle import deploy, end, started_ray

    config = Config(
        model="fake",
        port=0,
        data_dir=tmp_path_factory.mktemp("cluster"),
        replicas=(REPLICAS, REPLICAS),
        max_concurrent_per_user=PER_USER,
        ram_budget=96 << 20,
        log_level="warning",
    )
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    theirs = tmp_path_factory.mktemp("theirs")
    (theirs / f"{SHADOWED}.py").touch()
    with ExitStack() as running:
        with chdir(theirs):
            running.enter_context(started_ray(config))
        http = running.enter_context(httpx.Client(timeout=60, verify=False))
        yield Cluster(deploy(config, slow_models(STEP_S)), config, http)
        end()


def test_no_process_imports_what_lies_in_the_folder_where_the_cluster_was_started(cluster: Cluster) -> None:
    import ray

    found = ray.get(ray.remote(lambda name: __import__(name).__file__).remote(SHADOWED))
    assert Path(found).parent == Path(os.__file__).parent


def say(role: str, text: str) -> Json:
    return {"role": role, "content": text}


def cached(answer: Json) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_an_answer_streams_through_the_gateway_as_it_is_written(cluster: Cluster) -> None:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        came, text = [], ""
        chunks = client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "Which ships are here?"}],
            max_tokens=100,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for chunk in chunks:
            came.append(time.monotonic())
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
    assert text
    assert len(came) > 20
    assert came[-1] - came[0] > 50 * STEP_S  # not all at once


def test_the_engine_stops_when_the_client_leaves(cluster: Cluster) -> None:
    body = {"messages": [say("user", "Tell all.")], "max_tokens": 3000, "stream": True, "ignore_eos": True}
    with cluster.http.stream("POST", f"{cluster.url}/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        assert next(lines)
        assert eventually(lambda: cluster.active() == 1, 5)
    left = time.monotonic()
    assert eventually(lambda: cluster.active() == 0, 10)
    assert time.monotonic() - left < 3000 * STEP_S / 3


def turns_reused(cluster: Cluster, name: str, settle: Callable[[], object] = lambda: None) -> float:
    """Of the prompt tokens of later turns, in conversations that go on at the same time: so many that none of them
    comes back to its replica where these take turns. `settle` is called after every turn."""
    chats: dict[int, list[Json]] = {
        number: [say("system", f"{name} {number}. {RULES}"), say("user", "Begin.")] for number in range(5)
    }
    reused = asked = 0
    for turn in range(3):
        for messages in chats.values():
            answer = cluster.chat(messages, max_tokens=8)
            if turn:
                reused += cached(answer)
                asked += answer["usage"]["prompt_tokens"]
            messages += [answer["choices"][0]["message"], say("user", f"And ship {turn}?")]
        settle()
    return reused / asked


def test_a_conversation_stays_where_it_is_known(cluster: Cluster) -> None:
    before = {name: stats["scheduler"]["prompt_tokens"] for name, stats in cluster.stats().items()}
    assert turns_reused(cluster, "affinity") > 0.9
    after = {name: stats["scheduler"]["prompt_tokens"] for name, stats in cluster.stats().items()}
    assert all(after[name] > before[name] for name in after)  # and all replicas have work


def test_two_users_never_share_state(cluster: Cluster) -> None:
    messages = [say("system", f"Private. {RULES}"), say("user", "Who is here?")]
    first = [cached(cluster.chat(messages, user="ann", max_tokens=4)) for _ in range(2)]
    assert first[0] == 0
    assert first[1] > 0
    for _ in range(REPLICAS):
        other = cluster.chat([*messages, say("user", os.urandom(4).hex())], user=os.urandom(4).hex(), max_tokens=4)
        assert cached(other) == 0


def test_a_user_is_limited_over_all_replicas_together(cluster: Cluster) -> None:
    body = {"messages": [say("user", "Tell all.")], "max_tokens": 3000, "stream": True, "ignore_eos": True}
    with ExitStack() as open_streams:
        for _ in range(PER_USER):
            answer = cluster.http.stream(
                "POST", f"{cluster.url}/v1/chat/completions", json={**body, "user": "cat"}
            )
            assert open_streams.enter_context(answer).status_code == 200
        one_more = cluster.http.post(f"{cluster.url}/v1/chat/completions", json={**body, "user": "cat"})
        assert one_more.status_code == 429
        assert "limited to 8" in one_more.json()["error"]["message"]
        cluster.chat([say("user", "And me?")], user="dog", max_tokens=2)
        busy = [stats["scheduler"]["active"] for stats in cluster.stats().values()]
        assert min(busy) >= 1
    assert eventually(lambda: cluster.active() == 0, 10)
    cluster.chat([say("user", "Now?")], user="cat", max_tokens=2)


def test_one_scrape_tells_the_figures_of_every_replica(cluster: Cluster) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    text = cluster.http.get(f"{cluster.url}/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    evaluated = families["emberkeep_evaluated_tokens"].samples
    assert {sample.labels["replica"] for sample in evaluated} == {"0", "1", "2"}
    refused = families["emberkeep_requests_refused"].samples
    assert [sample.value for sample in refused if sample.labels["replica"] == "gateway"] == [1.0]


def test_what_is_forgotten_is_forgotten_everywhere(cluster: Cluster) -> None:
    fill_all(cluster, "eve")
    assert len({entry["replica"] for entry in all_entries(cluster, user_id="eve")}) > 1
    removed = cluster.http.delete(f"{cluster.url}/v1/cache", params={"user_id": "eve"}).json()["removed"]
    assert removed["entries"] >= 6
    assert not all_entries(cluster, user_id="eve")


def test_one_replica_can_be_asked_alone(cluster: Cluster) -> None:
    for replica in ("0", "1", "2"):
        told = ask_replica(cluster, replica, "/v1/stats")
        assert told["store"] == cluster.stats()[replica]["store"]
        entries = ask_replica(cluster, replica, "/v1/cache")["data"]
        assert len(entries) == len([one for one in all_entries(cluster) if one["replica"] == replica])
    refused = cluster.http.get(f"{cluster.url}/v1/stats", params={"replica": "7"})
    assert refused.status_code == 503
    assert "There is no replica '7' now" in refused.json()["error"]["message"]


def test_commands_look_into_every_replica(cluster: Cluster) -> None:
    fill_all(cluster, "fay")
    with announce(cluster.config.data_dir, cluster.url), open_stores(cluster.config, None) as stores:
        held = {store.folder: [entry for entry in store.entries() if entry.user == "fay"] for store in stores}
        assert {folder.parent.parent.name for folder in held} == {"0", "1", "2"}
        assert sum(map(len, held.values())) == 6
        store = next(one for one in stores if held[one.folder])
        store.remove(held[store.folder][0].id)
        assert len(all_entries(cluster, user_id="fay")) == 5
        assert closed_folders(cluster.config, None, stores) == []


def test_the_page_shows_one_replica_at_a_time(cluster: Cluster) -> None:
    fill_all(cluster, "gus")
    with chromium() as browser:
        page, complaints = browser.new_page(), []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"{cluster.url}/#/cache")
        for replica in ("2", "0"):
            page.get_by_label("Replica").select_option(replica)
            wanted = ask_replica(cluster, replica, "/v1/stats")["scheduler"]["prompt_tokens"]
            page.wait_for_selector(f".totals:has-text('of {wanted:,} prompt tokens')")
        page.get_by_role("button", name="Requests").click()
        page.wait_for_selector(".requests table")
        page.get_by_role("button", name="Chat").click()
        assert page.get_by_label("Replica").count() == 0
        page.fill("textarea[aria-label='Your message']", "Which ships?")
        page.keyboard.press("Enter")
        page.wait_for_selector(".message.assistant, [data-role='assistant']")
        assert complaints == []


def ask_replica(cluster: Cluster, replica: str, path: str) -> Json:
    """The router hears the names of replicas a moment after they have begun."""
    answers: list[httpx.Response] = []

    def is_there() -> bool:
        answers.append(cluster.http.get(cluster.url + path, params={"replica": replica}))
        return answers[-1].status_code == 200

    assert eventually(is_there, 10), answers[-1].text
    return answers[-1].json()


def all_entries(cluster: Cluster, **query: str) -> list[Json]:
    return cluster.http.get(f"{cluster.url}/v1/cache", params=query).json()["data"]


def fill_all(cluster: Cluster, user: str) -> None:
    """Six prompts at the same time, so that all replicas get some."""
    with ThreadPoolExecutor(6) as pool:
        asking = [
            pool.submit(cluster.chat, [say("user", f"{n} {RULES}")], user=user, max_tokens=30, ignore_eos=True)
            for n in range(6)
        ]
        assert all(asked.result() for asked in asking)


def test_a_response_is_continued_and_cancelled_by_its_id(cluster: Cluster) -> None:
    def respond(**body: Json) -> Json:
        return cluster.http.post(f"{cluster.url}/v1/responses", json={"max_output_tokens": 6, **body}).json()

    first = respond(input=f"Response. {RULES}", user="fox")
    second = respond(input="And then?", previous_response_id=first["id"], user="fox")
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > len(RULES) // 2
    assert cluster.http.get(f"{cluster.url}/v1/responses/{first['id']}", params={"user": "ann"}).status_code == 404

    running = respond(input="Tell all.", background=True, max_output_tokens=3000)
    of_it = f"{cluster.url}/v1/responses/{running['id']}"
    assert cluster.http.get(of_it).json()["status"] in ("queued", "in_progress")
    assert cluster.http.post(f"{of_it}/cancel").json()["status"] == "cancelled"
    assert eventually(lambda: cluster.active() == 0, 10)


# ── replicas that go ──


@dataclass(slots=True)
class Load:
    """Clients that ask one request after the other."""

    answered: int = 0
    broken: list[str] = field(default_factory=list)
    """Streams that had begun, by how they ended."""
    failed: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def under_load(cluster: Cluster, clients: int = 4) -> Iterator[Load]:
    load, over = Load(), threading.Event()

    def ask(client: int) -> None:
        with httpx.Client(timeout=60, verify=False) as http:
            for number in range(10_000):
                if over.is_set():
                    return
                body = {
                    "messages": [say("user", f"client {client}, request {number}")],
                    "max_tokens": 40,
                    "ignore_eos": True,
                    "stream": bool(client % 2),
                    "user": f"client {client}",
                }
                outcome = _outcome(http, cluster.url, body)
                with load.lock:
                    if outcome == "whole":
                        load.answered += 1
                    else:
                        (load.broken if outcome.startswith("broken") else load.failed).append(outcome)

    with ThreadPoolExecutor(clients) as pool:
        asking = [pool.submit(ask, client) for client in range(clients)]
        try:
            yield load
        finally:
            over.set()
        for one in asking:
            one.result()


def _outcome(http: httpx.Client, url: str, body: Json) -> str:
    """`whole`; `broken` where a stream that had begun said that it ended early; else what went wrong."""
    try:
        with http.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            lines = list(response.iter_lines())
    except httpx.HTTPError as error:
        return repr(error)
    if response.status_code != 200:
        return "\n".join(lines)
    if not body["stream"]:
        return "whole" if json.loads("".join(lines))["usage"]["completion_tokens"] == 40 else "cut short"
    if "data: [DONE]" in lines:
        return "whole"
    return f"broken: {lines[-2]}" if '"error"' in "".join(lines[-3:]) else "silently cut off"


def test_a_replica_that_is_killed_costs_no_request_that_had_not_begun_to_stream(cluster: Cluster) -> None:
    from emberkeep.cluster.lifecycle import status

    with under_load(cluster) as load:
        assert eventually(lambda: load.answered > 10)
        os.kill(status().replicas[1]["pid"], signal.SIGKILL)
        seen = load.answered
        assert eventually(lambda: load.answered > seen + 20)
        assert eventually(lambda: len(status().replicas) == REPLICAS)
    assert not load.failed
    assert len(load.broken) <= 2  # clients that were reading from it
    assert all("ask again" in how for how in load.broken)
    assert sorted(about["replica"] for about in status().replicas) == ["0", "1", "2"]  # its folder is used again


def test_a_rolling_update_loses_no_request_and_keeps_what_was_stored(cluster: Cluster) -> None:
    from emberkeep.cluster.lifecycle import deploy, status

    messages = [say("system", f"Update. {RULES}"), say("user", "Begin.")]
    cluster.chat(messages, max_tokens=4, conversation_id="kept")
    before = {about["pid"] for about in status().replicas}
    with under_load(cluster) as load:
        assert eventually(lambda: load.answered > 10)
        url = deploy(replace(cluster.config, queue=50), slow_models(STEP_S))
    assert url == cluster.url
    assert not before & {about["pid"] for about in status().replicas}
    assert not load.failed
    assert not load.broken
    assert cached(cluster.chat(messages, max_tokens=4, conversation_id="kept")) > len(RULES) // 2


def test_fewer_replicas_and_more_again_lose_no_request(cluster: Cluster) -> None:
    from emberkeep.cluster.lifecycle import deploy, status

    with under_load(cluster) as load:
        for replicas in (2, REPLICAS):
            seen = load.answered
            assert eventually(lambda seen=seen: load.answered > seen + 10)
            deploy(replace(cluster.config, queue=50, replicas=(replicas, replicas)), slow_models(STEP_S))
            assert len(status().replicas) == replicas
    assert not load.failed
    assert not load.broken


def test_with_a_shared_server_replicas_go_on_with_what_others_computed(cluster: Cluster, tmp_path: Path) -> None:
    from emberkeep.cluster.lifecycle import deploy

    with running_valkey(tmp_path) as valkey:
        config = replace(cluster.config, queue=50, remote=valkey.url)
        # So slow that loading is worth its while, as with a real model.
        shared = replace(cluster, url=deploy(config, slow_models(STEP_S, seconds_per_token=1e-3)))

        def is_written() -> bool:
            stats = shared.stats().values()
            return not any(one["scheduler"]["active"] or one["store"]["remote"]["pending_chunks"] for one in stats)

        assert turns_reused(shared, "shared", lambda: eventually(is_written)) > 0.9
        secret = [say("system", f"Private canary. {RULES}"), say("user", "Who is here?")]
        for _ in range(2 * REPLICAS):
            shared.chat(secret, user="ann", max_tokens=4)
            assert eventually(is_written)
            assert cached(shared.chat([*secret, say("user", "?")], user=os.urandom(4).hex(), max_tokens=4)) == 0
        of_ann = f"*:{RemoteLink(valkey.settings()).tag('ann')}:*"
        assert valkey.names(of_ann)
        removed = shared.http.delete(f"{shared.url}/v1/cache", params={"user_id": "ann"})
        assert removed.status_code == 200
        assert not valkey.names(of_ann)
        for _ in range(REPLICAS):
            assert cached(shared.chat([*secret, say("user", os.urandom(4).hex())], user="ann", max_tokens=4)) == 0
            shared.http.delete(f"{shared.url}/v1/cache", params={"user_id": "ann"})


# ── the simulator ──

SECONDS_PER_TOKEN = 2e-5
KEPT_BLOCKS = 240
"""For which all replicas together have RAM: fewer than the trace has."""


def conversations(first: int) -> list[Visit]:
    """Some that take turns, over common beginnings; what a turn adds stays. `first`: of the ids of blocks."""
    chance, new = random.Random(7), count(first + 1000)
    # So many beginnings that it does not matter much which replicas they happen to come to.
    talks = [[first + talk % 15 * 10, first + talk % 15 * 10 + 1, next(new)] for talk in range(30)]
    visits = []
    for number in range(150):
        talk = chance.choice(talks)
        talk.append(next(new))
        visits.append(Visit(tuple(talk), len(talk) * BLOCK, 1, number * 0.1))
    return visits


def simulated(visits: list[Visit], replicas: int) -> Outcome:
    machine = Machine(
        slots=4,
        prefill=BLOCK / BLOCK_IDS / SECONDS_PER_TOKEN,
        decode=100.0,
        import_=1e12,
        ram=KEPT_BLOCKS * CHUNK_BYTES // replicas,
        token_bytes=CHUNK_BYTES // BLOCK,
    )
    return simulate(visits, replicas, Affinity(), machine, RemoteSettings(0, 1.0, 0.0))


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_real_cluster_reuses_what_the_simulated_one_does(cluster: Cluster, replicas: int) -> None:
    from emberkeep.cluster.lifecycle import deploy

    visits = conversations(10_000 * replicas)  # which the gateway has never seen
    config = replace(
        cluster.config,
        replicas=(replicas, replicas),
        queue=60 + replicas,  # else the replicas would stay, with what they know
        ram_budget=KEPT_BLOCKS * CHUNK_BYTES,
        disk_budget=0,
        memory=False,
        max_concurrent_per_user=None,
    )
    real = replay(deploy(config, slow_models(0.001, SECONDS_PER_TOKEN)), visits)
    outcome = simulated(visits, replicas)
    told = f"{replicas} replicas: real {real.own_share:.3f}, simulated {outcome.own / outcome.tokens:.3f}"
    assert real.own_share == pytest.approx(outcome.own / outcome.tokens, abs=0.05), told
    print(told)


def test_servers_of_whole_nodes_are_routed_to_by_what_they_have_cached(cluster: Cluster) -> None:
    from emberkeep.cluster.lifecycle import deploy

    nodes = [NodeServer(kind) for kind in ("vllm", "sglang", "trtllm")]
    with running(nodes):
        config = replace(
            cluster.config,
            backends=tuple(
                RemoteModel(f"node-{node.kind}", "trtllm" if node.kind == "trtllm" else "compatible", "", node.url)
                for node in nodes
            ),
            cluster_backends=tuple(f"node-{node.kind}" for node in nodes),
        )
        over_nodes = replace(cluster, url=deploy(config))
        assert turns_reused(over_nodes, "nodes") > 0.9
        assert all(node.answered for node in nodes)
        told = over_nodes.chat([say("user", "Think.")])["choices"][0]["message"]
        assert (told["content"], told["reasoning_content"]) == ("A ship.", "Hm.")
