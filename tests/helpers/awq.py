"""Checkpoints in AWQ's four bits, made of plain ones; and the same weights as they are after that, in full."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

GEMM_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PER_WORD = 8


def quantise(folder: Path, target: Path, *, group: int, version: str = "gemm") -> tuple[Path, Path]:
    """(the checkpoint in four bits, one of the same numbers in 32). Every matrix of a layer is rounded."""
    packed, whole = target / "awq", target / "dequantised"
    for each in (packed, whole):
        shutil.copytree(folder, each)
        for file in each.glob("*.safetensors*"):
            file.unlink()
    tensors = {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}
    full: dict[str, torch.Tensor] = {}
    small: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        is_matrix = ".layers." in name and name.endswith("_proj.weight")
        if not is_matrix:
            full[name] = small[name] = tensor
            continue
        codes, zeros, scales = _round(tensor.float(), group)
        each = scales.shape[1]
        full[name] = ((codes.unflatten(1, (each, -1)) - zeros[..., None]) * scales[..., None].float()).flatten(1)
        prefix = name.removesuffix("weight")
        small |= {prefix + n: t for n, t in _pack(codes, zeros, scales, version, group).items()}
    save_file(small, packed / "model.safetensors", {"format": "pt"})
    save_file(full, whole / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    said = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": version}
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return packed, whole


def _round(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes by output and input; zeros and scales by output and group."""
    groups = weight.unflatten(1, (-1, group))
    least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((most - least) / 15).clamp_min(1e-5).half()
    zeros = (-least / scales.float()).round().clamp(0, 15).int()
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15).int()
    return codes.flatten(1), zeros, scales


def _pack(
    codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, version: str, group: int
) -> dict[str, torch.Tensor]:
    if version == "gemm":
        words = [_words(part.T, GEMM_ORDER) for part in (codes, zeros)]
        return {"qweight": words[0], "qzeros": words[1], "scales": scales.T.contiguous()}
    # Zeros are padded to whole words, of which smaller groups have several at a time.
    together = {64: 2, 32: 4}.get(group, 1)
    width = -(-zeros.shape[1] // _PER_WORD)
    width = -(-width // together) * together
    spare = width * _PER_WORD - zeros.shape[1]
    zeros, scales = (torch.nn.functional.pad(part, (0, spare)) for part in (zeros, scales))
    order = range(_PER_WORD)
    return {"qweight": _words(codes, order), "qzeros": _words(zeros, order), "scales": scales.contiguous()}


def _words(numbers: torch.Tensor, order: tuple[int, ...] | range) -> torch.Tensor:
    """Eight to an int32, in this order."""
    words = torch.zeros(len(numbers), numbers.shape[1] // _PER_WORD, dtype=torch.int64)
    for place, number in enumerate(order):
        words |= numbers[:, number::_PER_WORD].long() << 4 * place
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int().contiguous()
