"""A policy's folder with what the next round continues from beside it, in `trainer/`."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from stages.base.errors import InputError
from stages.base.files import replacing
from stages.base.metrics import read_json, write_json
from stages.models.checkpoints import DTYPES, open_as_others, save_model, saved_bytes
from stages.models.sharding import parted_as

MOMENTS = ("exp_avg", "exp_avg_sq")
FRESH = "none"  # what state.json says of moments that were not kept


@dataclass
class TrainerState:
    """What a round continues from: counters, optimizer states by name, and the critic's folder."""

    step: int = 0
    prompt_cursor: int = 0
    rounds: list[int] = field(default_factory=list)
    critic: Path | None = None
    optimizers: dict[str, Path] = field(default_factory=dict)


def load_trainer(policy: Path) -> TrainerState:
    """The trainer state beside a policy; a fresh one where the folder has none (models/sft).

    It has no optimizers where their moments were not kept.
    """
    folder = policy / "trainer"
    if not folder.is_dir():
        return TrainerState()
    counters = read_json(folder / "state.json")
    check_counters(folder / "state.json", counters)
    critic = folder / "critic"
    kept = counters.get("moments") != FRESH
    for name in ("policy", "critic") if critic.is_dir() else ("policy",):
        if kept and not (folder / f"{name}.safetensors").is_file():
            raise InputError(f"{folder}: no {name}.safetensors; expected the optimizer's state")
    return TrainerState(
        step=counters["step"],
        prompt_cursor=counters["prompt_cursor"],
        rounds=counters["rounds"],
        critic=critic if critic.is_dir() else None,
        optimizers={p.stem: p for p in sorted(folder.glob("*.safetensors")) if kept},
    )


def check_counters(path: Path, counters: object) -> None:
    """Raise InputError unless a trainer's state.json holds the counters that a round needs."""
    wanted = {"step": int, "prompt_cursor": int, "rounds": list}
    whole = isinstance(counters, dict) and all(
        isinstance(counters.get(name), kind) for name, kind in wanted.items()
    )
    if not whole:
        raise InputError(f"{path}: found {counters}, expected step, prompt_cursor and rounds")


def save_policy(
    folder: Path,
    policy: PreTrainedModel,
    tokenizer,
    state: TrainerState,
    optimizers: dict[str, tuple[torch.optim.Optimizer, nn.Module]],
    critic: PreTrainedModel | None,
    weights: str = "float32",
    moments: str = "float32",
) -> None:
    """Write a policy with `trainer/` beside it: state.json, <name>.safetensors, critic/.

    `weights` and `moments` are their precision on disk; moments "none" are not written. The
    optimizers' states, twice as large as their models, are written meanwhile.
    """
    with replacing(folder, folder=True) as temporary, ThreadPoolExecutor() as pool:
        trainer = temporary / "trainer"
        trainer.mkdir()
        states = [
            pool.submit(save_optimizer, trainer / f"{name}.safetensors", optimizer, model, moments)
            for name, (optimizer, model) in optimizers.items()
            if moments != FRESH
        ]
        save_model(temporary, policy, tokenizer, weights)
        if critic is not None:
            (trainer / "critic").mkdir()
            save_model(trainer / "critic", critic, tokenizer, weights)
        counters = {
            "step": state.step,
            "prompt_cursor": state.prompt_cursor,
            "rounds": state.rounds,
        }
        if moments == FRESH:
            counters["moments"] = FRESH
        write_json(trainer / "state.json", counters)
        for written in states:
            written.result()
        open_as_others(trainer)


def policy_bytes(models: Iterable[PreTrainedModel], weights: str, moments: str) -> int:
    """About how many bytes `save_policy` writes of a policy and a critic."""
    each = 0 if moments == FRESH else len(MOMENTS) * DTYPES[moments].itemsize
    return sum(
        saved_bytes(model, weights) + each * sum(p.numel() for p in _trained(model).values())
        for model in models
    )


def save_optimizer(
    path: Path, optimizer: torch.optim.Optimizer, model: nn.Module, moments: str = "float32"
) -> None:
    """Write AdamW's state as tensors named `<parameter>/<entry>`, moments in the given precision.

    What has had no gradient yet is written as AdamW would start it: at 0.
    """
    tensors = {}
    for name, parameter in _trained(model).items():
        state = optimizer.state.get(parameter) or _fresh(parameter)
        for entry, value in state.items():
            dtype = DTYPES[moments] if entry in MOMENTS else value.dtype
            tensors[f"{name}/{entry}"] = value.detach().to("cpu", dtype).contiguous()
    save_file(tensors, path)


def _fresh(parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    return {"step": torch.zeros(()), **{e: torch.zeros_like(parameter) for e in MOMENTS}}


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def load_optimizer(path: Path, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Fill AdamW's state from `save_optimizer`'s file; InputError where it does not fit."""
    try:
        with safe_open(path, framework="pt") as file:
            _fill(path, optimizer, model, file)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not a readable optimizer state ({error})") from error


def _fill(path: Path, optimizer: torch.optim.Optimizer, model: nn.Module, file) -> None:
    parameters = _trained(model)
    shapes = {
        f"{name}/{entry}": () if entry == "step" else tuple(parameter.shape)
        for name, parameter in parameters.items()
        for entry in ("step", *MOMENTS)
    }
    if odd := sorted(set(file.keys()) ^ shapes.keys()):
        raise InputError(f"{path}: the state of another model or cut off: differs in {odd[:4]}")
    for key in shapes:
        value = file.get_tensor(key)
        if tuple(value.shape) != shapes[key]:
            raise InputError(f"{path}: {key} is {tuple(value.shape)}, expected {shapes[key]}")
        name, _, entry = key.rpartition("/")
        parameter = parameters[name]
        if entry == "step":  # the fused AdamW wants it beside the weights
            value = value.to(parameter.device, torch.float32, copy=True)
        else:
            value = parted_as(value.to(torch.float32), parameter)
        optimizer.state[parameter][entry] = value
