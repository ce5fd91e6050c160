"""`emberkeep cluster`: several servers as one, on Ray Serve."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from emberkeep.cli.commands import JsonFlag, command_group, with_settings
from emberkeep.cli.model_setup import install_model
from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError

if TYPE_CHECKING:
    from emberkeep.cluster.lifecycle import Status

EXAMPLES = """\b
Examples:
  emberkeep cluster serve --replicas 3     three servers behind one address, on this machine
  emberkeep cluster serve --replicas 1-4
  emberkeep cluster serve --cluster-address 10.0.0.1:6379 --cluster-gpus 1
  emberkeep cluster update --ctx 16384             replace the replicas one after the other
  emberkeep cluster status                         what runs, and where
  emberkeep cluster stop                           when the requests that run have ended
"""
_DEPLOYED = (
    *("model", "models", "host", "port", "data_dir", "ctx", "parallel", "ram_budget", "disk_budget", "api_key"),
    *("threads", "kv_type", "engine", "device", "dtype", "gpu_layers", "max_concurrent_per_user", "backend"),
    *("base_url", "replicas", "cluster_gpus"),
    *("cluster_backends", "cluster_address", "config"),
)
app = command_group("Several servers as one, on Ray Serve.", EXAMPLES)


@app.command(epilog=EXAMPLES)
@with_settings(*_DEPLOYED)
def serve(config: Config) -> None:
    """Start replicas of the server, and a gateway that sends each request to the one that knows it.

    On a Ray of its own it runs until it is stopped; on one that runs already it returns once all replicas answer.
    """
    _prepare_ray(config)
    from emberkeep.cluster.lifecycle import serve_cluster

    serve_cluster(config, install=install_model)


@app.command()
@with_settings(*_DEPLOYED)
def update(config: Config) -> None:
    """Give these settings to the cluster that runs.

    Its replicas are replaced one after the other, and no request is lost.
    """
    _prepare_ray(config)
    from emberkeep.cluster.lifecycle import update_cluster

    print(f"All replicas at {update_cluster(config)} have the new settings.")


@app.command()
@with_settings("data_dir", "cluster_address", "config")
def status(config: Config, as_json: JsonFlag = False) -> None:
    """What runs, and where."""
    _prepare_ray(config)
    from emberkeep.cluster.lifecycle import cluster_status

    found = cluster_status(config)
    print(json.dumps(asdict(found), indent=2) if as_json else "\n".join(_lines(found)))


@app.command()
@with_settings("data_dir", "cluster_address", "config")
def stop(config: Config) -> None:
    """End the cluster, when the requests that run have ended or their time has."""
    _prepare_ray(config)
    from emberkeep.cluster.lifecycle import stop_cluster

    stop_cluster(config)
    print("The cluster has ended.")


def _lines(status: Status) -> list[str]:
    head = f"{status.state} at {status.url}/v1" if status.url else status.state
    why = [status.message] if status.message else []
    replicas = [
        f"  replica {about['replica']}  {about['model']}, {about['active']} active, process {about['pid']}, "
        f"{about['data']}"
        for about in status.replicas
    ]
    return [head, *why, *replicas]


def _prepare_ray(config: Config) -> None:
    """Call it before anything imports Ray. Raises EmberkeepError."""
    if importlib.util.find_spec("ray") is None:
        raise EmberkeepError('Clusters need Ray: pip install "emberkeep[cluster]".')
    from emberkeep.cluster.slots import prepare_join

    prepare_join(config)
