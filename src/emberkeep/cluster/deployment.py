"""What is deployed on Ray Serve: the replicas, and the gateway in front of them.

Each is an application of its own, with a version that is made of its settings: Ray replaces all of an application
that is deployed again, and a gateway that is replaced does not listen for a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import astuple
from typing import Any

from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, TaskCancelledError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from emberkeep import __version__
from emberkeep.cluster.gateway import RETRY_AFTER_S, Gateway, ReplicaLost, board
from emberkeep.cluster.replica import Opening, ReplicaServer
from emberkeep.cluster.requests import AnswerPart, ReplicaAnswer, ReplicaRequest
from emberkeep.cluster.router import ReplicaRouter
from emberkeep.config.settings import DRAIN_S, FIELDS, Config
from emberkeep.errors import Overloaded, StoreFailed
from emberkeep.routing import RouteKeys
from emberkeep.runtime.served_models import open_models
from emberkeep.server.app import create_front
from emberkeep.server.http_server import Server
from emberkeep.server.lifecycle import bind
from emberkeep.server.presence import reachable_url
from emberkeep.values import dataclass

REPLICAS = "replicas"
GATEWAY = "gateway"
REPLICAS_APP = "emberkeep-replicas"
GATEWAY_APP = "emberkeep-gateway"
_FLUSH_S = 60.0
"""After the drain: time to write what is not on disk yet."""
_SIDE_REQUESTS = 64
"""That a replica takes besides those it answers or lets wait: statistics, lists, refusals."""
_STATS_S = 1.0
_STARTS = 3
"""How often a replica is started that cannot: what is wrong is told after that."""
_ALL_S, _LOOK_S = 600.0, 10.0
"""For an answer of all replicas: loading a model is one; and where nothing is changed."""
_ONE_AT_A_TIME = 1e-3
"""The part of the replicas that an update replaces together."""
_HEAD_NODE = {"node:__internal_head__": 0.001}
"""Where the port is: always on the same machine."""
_OF_GATEWAY = (
    *("host", "port", "api_key", "allow", "log_level"),
    *("parallel", "max_concurrent_per_user"),
)
"""Settings whose change makes a new gateway."""
_NOT_OF_REPLICAS = frozenset({"host", "port", "allow", "cluster_address"})
"""Settings whose change makes no new replicas."""


@dataclass(frozen=True, slots=True)
class Handled:
    """The replicas, as Ray Serve's handle reaches them."""

    handle: DeploymentHandle

    def ask(self, asked: ReplicaRequest, keys: RouteKeys) -> HandledAnswer:
        return HandledAnswer(self.handle.options(stream=True).answer.remote(asked, keys=keys))

    async def ask_all(self, asked: ReplicaRequest) -> Sequence[ReplicaAnswer]:
        try:
            sent = self.handle.broadcast("answer_whole", asked)
            limit = _LOOK_S if asked.method in ("GET", "HEAD") else _ALL_S
            found = await sent.results_async(timeout_s=limit, return_exceptions=True)
        except (DeploymentUnavailableError, TimeoutError):
            found = []
        answers = [answer for answer in found if isinstance(answer, ReplicaAnswer)]
        if not answers:
            raise Overloaded("No replica answers: try again in a moment.", RETRY_AFTER_S)
        if len(answers) < len(found) and asked.method == "DELETE":
            raise Overloaded("A replica has ended before it had removed everything: ask again.", RETRY_AFTER_S)
        return answers

    async def forget_rest(self, user: str, asked: frozenset[str]) -> None:
        try:
            sent = self.handle.broadcast("forget_rest", user, asked)
            outcomes = await sent.results_async(timeout_s=_ALL_S, return_exceptions=True)
        except (DeploymentUnavailableError, TimeoutError):
            outcomes = []
        failures = [str(one) for one in outcomes if one]
        machines = {name.rpartition("/")[0] for name in asked}
        if failures or outcomes.count("") < len(machines):
            why = failures[0] if failures else "a replica does not answer"
            raise StoreFailed(f"Not everything of that user could be removed ({why}): ask again.")

    def learn(self, keys: RouteKeys, replica: str) -> None:
        board.learn(keys, replica)


class HandledAnswer:
    """Raises ReplicaLost."""

    def __init__(self, response: DeploymentResponseGenerator) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[AnswerPart]:
        try:
            async for part in self._response:
                yield part
        except (ActorDiedError, ActorUnavailableError, RayActorError, DeploymentUnavailableError) as error:
            raise ReplicaLost from error
        except TaskCancelledError as error:
            if self._response.cancelled():
                raise asyncio.CancelledError from error
            raise ReplicaLost from error

    def cancel(self) -> None:
        self._response.cancel()


class GatewayServer:
    """Ray Serve makes it and ends it; clients reach it over a port of its own, with all limits of a server."""

    async def __init__(self, config: Config, version: str) -> None:  # type: ignore[misc]
        """Raises EmberkeepError."""
        loop = asyncio.get_running_loop()
        self._version = version
        board.slots = config.parallel
        self._gateway = Gateway(
            Handled(serve.get_deployment_handle(REPLICAS, REPLICAS_APP)),
            config.max_concurrent_per_user,
            DRAIN_S,
            lambda: front.state.read_metrics(),
        )
        front = create_front(self._gateway, config)
        self._listener = bind(config.host, config.port)
        self._server = Server(front, config)
        self._url = reachable_url(config.host, self._listener.getsockname()[1])

        def on_change(present: frozenset[str]) -> None:
            loop.call_soon_threadsafe(self._gateway.set_present, present)

        board.watch(on_change)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))

    async def about(self) -> dict[str, str]:
        return {"url": self._url, "version": self._version}

    async def drain(self) -> None:
        """New requests are refused; returns when those that run have ended, or their time has."""
        if not self._serving.done():
            self._server.stop()
            await asyncio.wait([self._serving])

    def check_health(self) -> None:
        """Raises RuntimeError when nothing listens any more."""
        if self._serving.done():
            raise RuntimeError("the gateway's server has ended")

    async def __del__(self) -> None:
        if hasattr(self, "_serving"):
            await self.drain()
            with contextlib.suppress(OSError):
                self._listener.close()


def replicas_app(config: Config, opening: Opening = open_models) -> serve.Application:
    return _replicas(config).bind(config, version_of_replicas(config), opening)


def gateway_app(config: Config) -> serve.Application:
    return _gateway(config).bind(_for_gateway(config), version_of_gateway(config))


def version_of_replicas(config: Config) -> str:
    return _version(config, FIELDS.keys() - _NOT_OF_REPLICAS)


def version_of_gateway(config: Config) -> str:
    return _version(config, _OF_GATEWAY)


def _for_gateway(config: Config) -> Config:
    return Config(**{name: getattr(config, name) for name in _OF_GATEWAY})


def _version(config: Config, names: Iterable[str]) -> str:
    """The same as long as these settings are."""
    values = dict(zip(FIELDS, astuple(config), strict=True))
    text = repr([__version__, *((name, values[name]) for name in sorted(names))])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _gateway(config: Config) -> serve.Deployment:
    return serve.deployment(
        GatewayServer,
        name=GATEWAY,
        num_replicas=1,
        ray_actor_options={"num_cpus": 0, "resources": _HEAD_NODE},
        graceful_shutdown_timeout_s=DRAIN_S + _FLUSH_S,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=2,
    )


def _replicas(config: Config) -> serve.Deployment:
    least, most = config.replicas
    scale: dict[str, Any] = {"num_replicas": least}
    if most > least:
        scale = {"autoscaling_config": _autoscaling(config)}
    return serve.deployment(
        ReplicaServer,
        name=REPLICAS,
        **scale,
        ray_actor_options={"num_cpus": 0, "num_gpus": config.cluster_gpus},
        max_constructor_retry_count=_STARTS,
        rolling_update_percentage=_ONE_AT_A_TIME,
        max_ongoing_requests=config.parallel + config.queue + _SIDE_REQUESTS,
        graceful_shutdown_timeout_s=DRAIN_S + _FLUSH_S,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=2,
        request_router_config=RequestRouterConfig(
            request_router_class=ReplicaRouter, request_routing_stats_period_s=_STATS_S
        ),
    )


def _autoscaling(config: Config) -> AutoscalingConfig:
    return AutoscalingConfig(
        min_replicas=config.replicas[0],
        max_replicas=config.replicas[1],
        initial_replicas=config.replicas[0],
        target_ongoing_requests=config.parallel,
    )
