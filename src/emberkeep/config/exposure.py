"""Whether others than this machine's own programs could reach a server."""

from __future__ import annotations

import ipaddress

from emberkeep.config.settings import Config
from emberkeep.errors import ConfigError


def check_exposure(config: Config) -> None:
    """Raises ConfigError when others could reach the server without a key."""
    if config.api_key is None and not is_loopback(config.host):
        raise ConfigError(
            f"Listening on {config.host} lets other machines in: set --api-key or EMBERKEEP_API_KEY."
        )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
