"""Settings that there are no more, and what to use instead."""

from __future__ import annotations

from collections.abc import Mapping

REMOVED: Mapping[str, str] = {
    "chunk_size": "state is stored in chunks of 128 tokens.",
    "cluster_cpus": "set threads: each replica takes so many, or its share of the machine's cores.",
    "cluster_target": "another replica is started where more requests run than parallel says.",
    "consult_depth": "who is asked by a model cannot ask another; `--disable-tools models` lets none be asked.",
    "draft_max": "as many tokens are drafted as are worth it; speculation = off drafts none.",
    "low_water": "messages leave until half of the context is free.",
    "num_blocks": "set gpu_memory: the memory of a GPU in which models and state may be.",
    "prefill_slice": "steps are as long as suits the machine; a request says prefill_chunk_size for shorter ones.",
    "recall_tokens": "an eighth of the context is quoted, and 512 tokens at most; recall = off quotes nothing.",
    "remote_deadline_s": "a request waits half a second for the shared server.",
    "remote_retries": "a request that a service failed is sent again twice.",
    "remote_writes_per_s": "at most 256 MiB a second are written to the shared server.",
    "show_consulted": "a chat always shows what a model answered that another one asked.",
    "tool_output": "a model gets 8,000 characters of a tool's result at a time, and can ask for the rest.",
    "tracked_conversations": "16 conversations are looked after at a time.",
    "truncate_dimensions": "requests that ask for `dimensions` get them.",
    "turns_to_cold": "an unused branch leaves RAM for the disk after four turns of its conversation.",
    "turns_to_warm": "an unused branch leaves the engine for RAM after two turns of its conversation.",
    "vector_budget": "vectors of embeddings take a twentieth of disk_budget.",
}
"""Each name with a sentence that goes on after "is gone: "."""


def why_gone(key: str, written: str) -> str | None:
    """What to tell who still uses a setting, as it was `written`; None where there never was such a setting."""
    instead = REMOVED.get(key)
    return None if instead is None else f"{written} is gone: {instead}"
