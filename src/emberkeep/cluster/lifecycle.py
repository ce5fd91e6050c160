"""`emberkeep cluster`: find or start a Ray, deploy on it, look at what runs there, end it.

<data_dir>/cluster.json    the address of the Ray on which the cluster of this folder runs
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from emberkeep.cluster.deployment import (
    GATEWAY,
    GATEWAY_APP,
    REPLICAS,
    REPLICAS_APP,
    gateway_app,
    replicas_app,
    version_of_gateway,
    version_of_replicas,
)
from emberkeep.cluster.replica import Opening
from emberkeep.cluster.slots import alone_on, forget_address, note_address, noted_address, prepare_start
from emberkeep.config.settings import Config, show_value
from emberkeep.errors import EmberkeepError
from emberkeep.library.installation import declared_prefixes
from emberkeep.models.library import ModelLibrary
from emberkeep.runtime.served_models import open_models
from emberkeep.server.lifecycle import bind
from emberkeep.server.presence import announce, check_exposure
from emberkeep.signals import ending_signals
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.cluster")
logging.getLogger("ray.serve").setLevel(logging.ERROR)

_NAMESPACE = "emberkeep"
_OBJECT_STORE_BYTES = 200 << 20
"""Nothing but requests and answers passes through it."""
_ASK_S = 30.0
_LOOK_S = 1.0
_LOOPBACK = "127.0.0.2" if sys.platform == "linux" else None
"""Ray would take another address than 127.0.0.1; elsewhere it stays on loopback by itself."""


@dataclass(frozen=True, slots=True)
class Status:
    url: str
    """Empty while the gateway is not ready."""
    state: str
    message: str
    """What keeps it from running; empty when nothing does."""
    replicas: list[dict[str, Any]]


def serve_cluster(config: Config, *, install: Callable[[Config], None]) -> None:
    """On a Ray of its own it blocks until SIGINT, SIGTERM or SIGHUP; on one that it has joined, until all replicas
    answer. Raises EmberkeepError.

    `install` makes sure that the model is here.
    """
    check_exposure(config)
    declared_prefixes(config)
    bind(config.host, config.port).close()  # so that a port in use is told before anything is started
    install(config)
    with started_ray(config):
        url = deploy(config)
        print(banner(config, url), file=sys.stderr, flush=True)
        if config.cluster_address is None:
            with announce(config.data_dir, url):
                _wait_for_end()
            _end_in_order()


def update_cluster(config: Config) -> str:
    """Deploys these settings where the cluster runs: replicas are replaced one after the other. The gateway's URL.

    Blocks until all are replaced. Raises EmberkeepError.
    """
    check_exposure(config)
    declared_prefixes(config)
    with joined_ray(config):
        return deploy(config)


def stop_cluster(config: Config) -> None:
    """Requests that run may finish. Blocks. Raises EmberkeepError."""
    with joined_ray(config):
        end()


def cluster_status(config: Config) -> Status:
    """Raises EmberkeepError."""
    with joined_ray(config):
        return status()


def banner(config: Config, url: str) -> str:
    ending = "Ctrl-C" if config.cluster_address is None else "emberkeep cluster stop"
    return (
        f"Emberkeep is ready at {url}/v1\n"
        f"  page      {url}\n"
        f"  replicas  {show_value(config, 'replicas')}\n"
        f"  data      {config.data_dir}\n"
        f"  stop      {ending}"
    )


# ── on a Ray that is connected ──


def deploy(config: Config, opening: Opening = open_models) -> str:
    """Replaces what these settings change, one replica after the other, and leaves the rest as it is. Blocks until
    every replica answers. The gateway's URL. Raises EmberkeepError."""
    config = _with_lasting_names(config)
    serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
    if {about["version"] for about in _replicas()} != {version_of_replicas(config)}:
        _run(REPLICAS_APP, replicas_app(config, opening))
    if _gateway().get("version") != version_of_gateway(config):
        _run(GATEWAY_APP, gateway_app(config))
    return _gateway()["url"]


def _with_lasting_names(config: Config) -> Config:
    """Models that are named by paths are found from any folder: replicas do not start in this one."""
    name = ModelLibrary(config.data_dir / "models").lasting_name
    return replace(
        config,
        model=config.model and name(config.model),
        models=tuple(map(name, config.models)),
        speculation=name(config.draft_model) if config.draft_model else config.speculation,
    )


def status() -> Status:
    running = serve.status().applications
    known = [running[name] for name in (REPLICAS_APP, GATEWAY_APP) if name in running]
    if not known:
        return Status("", "stopped", "", [])
    worst = next((app for app in known if app.status != "RUNNING"), known[0])
    why = worst.message if worst.status != "RUNNING" else ""
    return Status(_gateway().get("url", ""), worst.status.value.lower(), why, _replicas())


def end() -> None:
    """The gateway first, so that no request comes to replicas that close. What else runs on this Ray is left as it
    is. Blocks."""
    running = serve.status().applications
    if GATEWAY_APP in running:
        serve.get_deployment_handle(GATEWAY, GATEWAY_APP).drain.remote().result()
        serve.delete(GATEWAY_APP)
    if REPLICAS_APP in running:
        serve.delete(REPLICAS_APP)


def _end_in_order() -> None:
    """What ends all processes of a group at once, such as a supervisor, may have ended Ray's before."""
    try:
        end()
    except (RayError, RayServeException):
        log.warning("Ray has ended before the replicas: what they had not written is evaluated again.")


def _run(name: str, app: serve.Application) -> None:
    """Raises EmberkeepError."""
    try:
        serve.run(app, name=name, route_prefix=None)
    except (RuntimeError, RayServeException) as error:
        raise EmberkeepError(f"The cluster did not start: {_why(name, error)}") from error


def _gateway() -> dict[str, str]:
    """Empty where there is none that answers."""
    found = _ask_all(GATEWAY, GATEWAY_APP)
    return found[0] if found else {}


def _replicas() -> list[dict[str, Any]]:
    """Those that answer."""
    replicas = _ask_all(REPLICAS, REPLICAS_APP)
    return sorted(replicas, key=lambda about: (len(about["replica"]), about["replica"]))


def _ask_all(deployment: str, app: str) -> list[dict[str, Any]]:
    if app not in serve.status().applications:
        return []
    try:
        asked = serve.get_deployment_handle(deployment, app).broadcast("about")
        answers = asked.results(timeout_s=_ASK_S, return_exceptions=True)
    except (RayServeException, TimeoutError):
        return []
    return [about for about in answers if isinstance(about, dict)]


def _why(name: str, error: BaseException) -> str:
    """Why a deployment failed: the last line of the replica's own error, which is ours where there is one."""
    known = serve.status().applications.get(name)
    messages = [each.message for each in known.deployments.values() if each.message] if known else []
    lines = [line.strip() for line in "\n".join([str(error), *messages]).splitlines() if line.strip()]
    raised = [line.partition(": ")[2] for line in lines if line.startswith("emberkeep.errors.")]
    return raised[-1] if raised else lines[-1]


# ── which Ray ──


@contextmanager
def started_ray(config: Config) -> Iterator[None]:
    """A Ray for this machine alone, which ends with the block; or the one that the configuration names. Raises
    EmberkeepError."""
    if config.cluster_address is not None:
        with _connected(config.cluster_address):
            yield
        return
    with alone_on(config.data_dir):
        prepare_start(config)
        _init_ray(
            address="local",
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _node_ip_address=_LOOPBACK,
        )
        try:
            note_address(config.data_dir, ray.get_runtime_context().gcs_address)
            yield
        finally:
            forget_address(config.data_dir)
            ray.shutdown()


@contextmanager
def joined_ray(config: Config) -> Iterator[None]:
    """The one that the configuration names, else the one of this data folder. Raises EmberkeepError."""
    address = config.cluster_address or noted_address(config.data_dir)
    if address is None:
        raise EmberkeepError(
            f"No cluster runs on {config.data_dir}: start one with `emberkeep cluster serve`, or name its Ray "
            "with --cluster-address."
        )
    with _connected(address):
        yield


@contextmanager
def _connected(address: str) -> Iterator[None]:
    try:
        _init_ray(address=address)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise EmberkeepError(f"No Ray answers at {address}: start it, or correct --cluster-address.") from error
    try:
        yield
    finally:
        ray.shutdown()


def _init_ray(**options: Any) -> None:
    # Ray lets its processes import from the current folder, before all else: anybody may have filled it.
    with chdir("/"):
        ray.init(namespace=_NAMESPACE, log_to_driver=False, logging_level=logging.ERROR, **options)


def _wait_for_end() -> None:
    """Until a signal comes, or `emberkeep cluster stop` has ended what runs."""
    is_told = threading.Event()
    before = {number: signal.signal(number, lambda *_: is_told.set()) for number in ending_signals()}
    try:
        while not is_told.wait(_LOOK_S) and GATEWAY_APP in serve.status().applications:
            pass
    except RayError as error:
        raise EmberkeepError("Ray has ended, and the cluster with it: start it again.") from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
