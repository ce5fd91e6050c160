"""The settings: what there is (`settings`), what is accepted (`kinds`), where values come from (`loading`)."""

from __future__ import annotations

from emberkeep.config.kinds import parse_size, readable_size
from emberkeep.config.loading import LoadedConfig, load_config
from emberkeep.config.settings import (
    DEFAULT_MODEL,
    Config,
    accepts,
    check_exposure,
    default_of,
    help_for,
    is_loopback,
    public_values,
    shown,
    total_ram,
    ttls,
    type_of,
)
from emberkeep.config.warm import WarmPrefix

__all__ = [
    "DEFAULT_MODEL",
    "Config",
    "LoadedConfig",
    "WarmPrefix",
    "accepts",
    "check_exposure",
    "default_of",
    "help_for",
    "is_loopback",
    "load_config",
    "parse_size",
    "public_values",
    "readable_size",
    "shown",
    "total_ram",
    "ttls",
    "type_of",
]
