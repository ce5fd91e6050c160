"""Where the weights of a model in a folder would go on this machine, and how fast that lets it answer."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from typing import Any

from emberkeep.cli.speeds import disk_speed
from emberkeep.config.kinds import readable_size
from emberkeep.config.settings import Config
from emberkeep.engine.hf.residency import HostPlan, Placing, ResidencyPlan, plan_host, plan_residency
from emberkeep.errors import EngineError, ModelError
from emberkeep.files import nearest_folder
from emberkeep.models.layer_sizes import LayerSizes, layer_sizes
from emberkeep.models.library import ModelFile
from emberkeep.runtime.hf_model import placing_of
from emberkeep.types.models import Quantization, Residency
from emberkeep.values import dataclass

_SAMPLE = 64 << 20
"""Bytes that are copied to know the speed of a link."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """In bytes per second; None: not known."""

    link: float | None = None
    """From RAM to the device."""
    disk: float | None = None


def explain_plan(
    plan: ResidencyPlan, host: HostPlan, layers: int, free: int, device: str, speeds: Speeds | None = None
) -> str:
    """What stays, what passes and what that means for answers. `free`: bytes of the device for weights. Pure."""
    weights = readable_size(plan.resident_bytes + plan.passing_bytes)
    begin = f"{weights} of weights, {readable_size(free)} for them on {device}"
    if not plan.streamed:
        return f"{begin}: all of them stay there"
    what = "feed-forward parts" if plan.mode is Residency.FFN else "layers"
    told = (
        f"{begin}, so {layers - len(plan.streamed)} of {layers} {what} stay there (residency {plan.mode}), and "
        f"{readable_size(plan.passing_bytes)} pass through it for every token"
    )
    if host.on_disk:
        told += f", {readable_size(host.disk_bytes)} of them from disk"
    most = _tokens_per_second(plan, host, speeds or Speeds())
    if most is None:
        return told
    return f"{told}: at most about {most:{',.0f' if most >= 10 else '.2g'}} tokens per second"


def _tokens_per_second(plan: ResidencyPlan, host: HostPlan, speeds: Speeds) -> float | None:
    """Copying and reading go on at the same time: the slower one counts."""
    ways = ((plan.passing_bytes, speeds.link), (host.disk_bytes, speeds.disk))
    seconds = [size / speed for size, speed in ways if size and speed]
    return 1 / max(seconds) if seconds else None


def explain_ram(weights: int, room: int) -> str:
    """For a device that computes from RAM. Pure."""
    fits = "they fit into RAM" if weights <= room else "more than RAM has room for: choose a smaller model"
    return f"{readable_size(weights)} of weights, {readable_size(room)} for them: {fits}"


@dataclass(frozen=True, slots=True)
class FolderFit:
    text: str
    is_good: bool = True


def fits(config: Config, models: Iterable[ModelFile]) -> Iterator[FolderFit]:
    """What the hf engine would do with each of these folders, and before that, whether it computes from RAM.

    Blocks for a moment. Raises EngineError for a device that is not here.
    """
    # Imported here because it needs torch.
    from emberkeep.engine.hf.device import choose_device, shares_ram

    device, placing = choose_device(config.device), placing_of(config).settled()
    room = (placing.ram or 0) + placing.promised_ram
    is_cpu = device.type == "cpu"
    in_ram = is_cpu or shares_ram(device)
    if in_ram:
        whose = "models of transformers run on the CPU" if is_cpu else f"{device} computes"
        yield FolderFit(f"{whose}, from RAM, which has room for {readable_size(room)} of weights")
    dtype = "float32" if is_cpu and config.dtype == "auto" else config.dtype
    for model in models:
        try:
            sizes = layer_sizes(model.path, dtype, Quantization(config.quantization))
            told = explain_ram(sizes.all, room) if in_ram else _explain_gpu(config, sizes, device, placing)
            yield FolderFit(f"{model.id}: {told}", not in_ram or sizes.all <= room)
        except (EngineError, ModelError) as error:
            yield FolderFit(f"{model.id}: {error}", is_good=False)


def _explain_gpu(config: Config, sizes: LayerSizes, device: Any, placing: Placing) -> str:
    from emberkeep.engine.hf.device import DeviceLimits, weights_budget
    from emberkeep.engine.hf.footprint import state_reserve

    budget = weights_budget(device, placing.gpu_memory)
    state = min(placing.context, sizes.context) * sizes.kv_bytes_per_token
    reserve = state_reserve(device, placing.gpu_memory, state)
    plan = plan_residency(sizes.layers, sizes.rest, budget, placing, reserve)
    folder = nearest_folder(config.data_dir)
    host = plan_host(plan.units, placing.ram or 0, shutil.disk_usage(folder).free)
    link = DeviceLimits(str(device)).load_speed(_SAMPLE) if plan.streamed else None
    disk = disk_speed(folder) if host.on_disk else None
    return explain_plan(plan, host, len(sizes.layers), budget, str(device), Speeds(link, disk))
