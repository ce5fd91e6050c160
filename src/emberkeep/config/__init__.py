"""The settings: what there is (`settings`), what is accepted (`kinds`), where values come from (`loading`).

And the machine: its CPU (`cpu`), and the RAM that some defaults are a share of (`ram`).
"""

from __future__ import annotations

from emberkeep.config.cpu import cpu_facts
from emberkeep.config.kinds import parse_size, readable_size
from emberkeep.config.loading import LoadedConfig, load_config
from emberkeep.config.ram import free_ram, resident_ram, total_ram
from emberkeep.config.settings import (
    DEFAULT_MODEL,
    FIELDS,
    OFF,
    Config,
    accepts,
    check_exposure,
    default_of,
    help_for,
    is_loopback,
    public_values,
    shown,
    slice_tokens,
    ttls,
    type_of,
)
from emberkeep.config.tables import McpServer, check_name
from emberkeep.config.warm import WarmPrefix

__all__ = [
    "DEFAULT_MODEL",
    "FIELDS",
    "OFF",
    "Config",
    "LoadedConfig",
    "McpServer",
    "WarmPrefix",
    "accepts",
    "check_exposure",
    "check_name",
    "cpu_facts",
    "default_of",
    "free_ram",
    "help_for",
    "is_loopback",
    "load_config",
    "parse_size",
    "public_values",
    "readable_size",
    "resident_ram",
    "shown",
    "slice_tokens",
    "total_ram",
    "ttls",
    "type_of",
]
