"""Settings that there are no more, and what to use instead."""

from __future__ import annotations

from collections.abc import Mapping

REMOVED: Mapping[str, str] = {
    "accept_any_model": 'give a model the alias `*`: aliases = {"*" = "MODEL"}, or --aliases *=MODEL.',
    "allowed_hosts": "list names of hosts in allow.",
    "allowed_origins": "list origins of pages, such as http://localhost:3000, in allow.",
    "ask_permission": "say server_tools = ask.",
    "auto_truncate": "say too_long = truncate.",
    "chunk_size": "state is stored in chunks of 128 tokens.",
    "cluster_cpus": "set threads: each replica takes so many, or its share of the machine's cores.",
    "cluster_max_replicas": "say replicas = 2-8.",
    "cluster_replicas": "say replicas = 2, or 2-8.",
    "cluster_target": "another replica is started where more requests run than parallel says.",
    "connections": "half of the files that the process may open, and at most 1000, can be connections.",
    "consult_depth": "who is asked by a model cannot ask another; `--disable-tools models` lets none be asked.",
    "draft_max": "as many tokens are drafted as are worth it; speculation = off drafts none.",
    "draft_model": "say speculation = MODEL.",
    "drain_s": "running requests get 20 seconds to finish when the server stops.",
    "embeddings": "memory is searched by meaning, too, where the extra emberkeep[embeddings] is installed.",
    "evict": "say too_long = refuse (or evict, the default).",
    "exact": "say approximate = never.",
    "keep_first": "say residency = partial:FIRST,LAST.",
    "keep_last": "say residency = partial:FIRST,LAST.",
    "low_water": "messages leave until half of the context is free.",
    "memory_path": "the memory is memory.sqlite3 in data_dir; a link of that name may lead to another disk.",
    "notools": "say tools = off.",
    "num_blocks": "set gpu_memory: the memory of a GPU in which models and state may be.",
    "planning": "say memory_margin = off.",
    "prefill_slice": "steps are as long as suits the machine; a request says prefill_chunk_size for shorter ones.",
    "recall_tokens": "an eighth of the context is quoted, and 512 tokens at most; recall = off quotes nothing.",
    "remote_deadline_s": "a request waits half a second for the shared server.",
    "remote_password": "write it into remote, as in valkey://user:password@host:6379 (best in EMBERKEEP_REMOTE).",
    "remote_retries": "a request that a service failed is sent again twice.",
    "remote_user": "write it into remote, as in valkey://user:password@host:6379.",
    "remote_writes_per_s": "at most 256 MiB a second are written to the shared server.",
    "routing": "a request goes to the replica that knows its beginning, else to the one with the least to do.",
    "show_consulted": "a chat always shows what a model answered that another one asked.",
    "tool_output": "a model gets 8,000 characters of a tool's result at a time, and can ask for the rest.",
    "tool_turns": "a model has to answer after 16 rounds of tool calls.",
    "tracked_conversations": "16 conversations are looked after at a time.",
    "truncate_dimensions": "requests that ask for `dimensions` get them.",
    "ttl_extended_s": "say ttl = {extended = 86400}, or --ttl extended=86400.",
    "ttl_long_s": "say ttl = {long = 3600}, or --ttl long=3600.",
    "ttl_short_s": "say ttl = {short = 300}, or --ttl short=300.",
    "turns_to_cold": "an unused branch leaves RAM for the disk after four turns of its conversation.",
    "turns_to_warm": "an unused branch leaves the engine for RAM after two turns of its conversation.",
    "vector_budget": "vectors of embeddings take a twentieth of disk_budget.",
}
"""Each name with a sentence that goes on after "is gone: "."""


def why_gone(key: str, written: str) -> str | None:
    """What to tell who still uses a setting, as it was `written`; None where there never was such a setting."""
    instead = REMOVED.get(key)
    return None if instead is None else f"{written} is gone: {instead}"
