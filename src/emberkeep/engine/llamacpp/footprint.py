"""What a llama.cpp engine needs of memory: nearly all of it is allocated when it is opened."""

from __future__ import annotations

from emberkeep.config import total_ram
from emberkeep.engine.base import Footprint
from emberkeep.engine.llamacpp import binding
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.llamacpp.shared_library import llama


def footprint_of(model: LlamaModel, cells: int, kv_bytes_per_token: int) -> Footprint | None:
    """Asked once, when the context was opened. None with layers on a GPU: nobody tells what is where."""
    told = binding.take_buffers()
    if model.offloads:
        return None
    least = int(llama().llama_model_size(model.handle)) + cells * kv_bytes_per_token
    return Footprint(
        device="cpu",
        capacity=total_ram(),
        fixed=model.resident_before + max(told, least),
        per_step_token=kv_bytes_per_token,  # what a step computed is copied out of the context
        per_context_token=0,
        per_pair=0,
        per_logits_row=0,
    )
