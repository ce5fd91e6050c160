"""Model folders that are small and need no torch: what their weights say does not matter here."""

from __future__ import annotations

import json
from pathlib import Path

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "max_position_embeddings": 256,
    "vocab_size": 100,
}
WEIGHTS = {"a.weight": ("BF16", [100, 64]), "b.weight": ("F32", [64])}
PARAMETERS = 100 * 64 + 64
KV_BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 2


def safetensors(weights: dict[str, tuple[str, list[int]]] = WEIGHTS) -> bytes:
    header, offset = {}, 0
    for name, (dtype, shape) in weights.items():
        size = (2 if dtype == "BF16" else 4) * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + bytes(offset)


def model_files(**config: object) -> dict[str, bytes]:
    return {
        "config.json": json.dumps({**CONFIG, **config}).encode(),
        "model.safetensors": safetensors(),
        "tokenizer.json": b'{"model": "of words"}',
        "tokenizer_config.json": json.dumps({"chat_template": "{{ messages }}"}).encode(),
    }


def write_folder(folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True)
    for name, content in model_files(**config).items():
        (folder / name).write_bytes(content)
    return folder
