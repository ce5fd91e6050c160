"""The settings: what there is (`settings`), what each accepts (`kinds`, `tables`), and where it comes from
(`sources`).

And the `machine`: its CPU, and the RAM that some defaults are a share of.
"""

from __future__ import annotations

from emberkeep.config.kinds import LoraFile, parse_size, public_url, readable_size
from emberkeep.config.machine import cpu_facts, free_ram, peak_ram, resident_ram, total_ram
from emberkeep.config.settings import (
    DEFAULT_MODEL,
    FIELDS,
    OFF,
    Config,
    accepts,
    check_exposure,
    default_of,
    forsaken_memory,
    help_for,
    is_list,
    is_loopback,
    is_model_name,
    memory_file,
    placed_by_itself,
    public_values,
    show_value,
    slice_tokens,
    ttls,
    type_of,
)
from emberkeep.config.sources import LoadedConfig, load_config
from emberkeep.config.tables import McpServer, WarmPrefix, check_name

__all__ = [
    "DEFAULT_MODEL",
    "FIELDS",
    "OFF",
    "Config",
    "LoadedConfig",
    "LoraFile",
    "McpServer",
    "WarmPrefix",
    "accepts",
    "check_exposure",
    "check_name",
    "cpu_facts",
    "default_of",
    "forsaken_memory",
    "free_ram",
    "help_for",
    "is_list",
    "is_loopback",
    "is_model_name",
    "load_config",
    "memory_file",
    "parse_size",
    "peak_ram",
    "placed_by_itself",
    "public_url",
    "public_values",
    "readable_size",
    "resident_ram",
    "show_value",
    "slice_tokens",
    "total_ram",
    "ttls",
    "type_of",
]
