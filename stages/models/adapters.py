"""LoRA adapters (Hu et al. 2022): low-rank matrices beside frozen weights, in folders as peft's.

Such a folder names the whole model that its adapters are for, their base, by its path in the
workspace. It holds adapter_config.json and adapter_model.safetensors, which peft, transformers and
vLLM read, and the tokenizer; no config.json, by which transformers would take it for a whole model.

Here adapters stand in the model itself, which stays of its class, and not in a wrapper of peft's:
every forward pass runs as it does for a whole model. A reward model's head is trained whole.

peft is imported where there are adapters: it takes two seconds, and most runs have none.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from stages.base.bases import CONFIG, base_of
from stages.base.errors import BadKnob, InputError
from stages.base.knobs import Lora
from stages.base.metrics import write_json
from stages.base.trust import object_of
from stages.models.compute import all_finite

WEIGHTS = "adapter_model.safetensors"
NAME = "default"  # what peft calls a model's only adapter
HEAD = "score.weight"
PREFIX = "base_model.model."  # of every name in a file of peft's


def has_adapters(model: nn.Module) -> bool:
    """Whether adapters stand in a model."""
    return hasattr(model, "peft_config")


def shape_of(folder: Path) -> Lora:
    """The shape of the adapters of a folder; InputError where a stage would not have made them."""
    told = object_of(folder / CONFIG)
    names = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout"}
    found = {name: told.get(key) for name, key in (names | {"targets": "target_modules"}).items()}
    try:
        return Lora.model_validate(found)
    except ValueError as error:
        raise InputError(f"{folder / CONFIG}: {found}, expected a stage's adapters") from error


def targets_in(model: PreTrainedModel, lora: Lora) -> list[str]:
    """Sorted names of the modules that get adapters, as peft takes them; `all-linear` spelled out.

    Those are the linear layers apart from the head. Short names stand for all of them (q_proj)
    where no other module has such a name.
    """
    if lora.targets != "all-linear":
        return sorted(set(lora.targets))
    heads = (model.get_output_embeddings(), getattr(model, "score", None))
    names, others = set(), set()
    for name, module in model.named_modules():
        if ".base_layer" in name or ".lora_" in name:
            continue  # of adapters that stand there already
        linear = isinstance(module, nn.Linear | Conv1D) or hasattr(module, "base_layer")
        (names if linear and module not in heads else others).add(name)
    short = {name.rpartition(".")[2] for name in names}
    clash = short & {name.rpartition(".")[2] for name in others}
    return sorted(name for name in names if name.rpartition(".")[2] in clash) + sorted(
        short - clash
    )


def add_adapters(model: PreTrainedModel, base: Path, lora: Lora) -> None:
    """Put new adapters into a model of the folder `base`, and freeze all else.

    The first matrix of each comes from the global generator, the second is 0, so that nothing
    changes yet. BadKnob for targets that the model does not have. Training or evaluation mode
    stays.
    """
    from peft import LoraConfig, inject_adapter_in_model

    model.requires_grad_(False)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets_in(model, lora),
        task_type="SEQ_CLS" if hasattr(model, "score") else "CAUSAL_LM",
        base_model_name_or_path=os.path.relpath(base),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    try:
        inject_adapter_in_model(config, model, NAME)
    except ValueError as error:
        line = str(error).strip().partition("\n")[0]
        raise BadKnob("lora.targets", f"found {lora.targets!r}, but {line}") from error
    model.train(model.training)  # the new layers come in training mode


def attach_adapters(model: PreTrainedModel, folder: Path, new_head: bool = False) -> None:
    """Put the adapters of a folder into its base, frozen; InputError where they do not fit.

    With `new_head` the model is a scorer, which keeps its head, and the adapters a policy's.
    """
    add_adapters(model, base_of(folder), shape_of(folder))
    weights = {file_name(name): p for name, p in adapter_weights(model).items()}
    if new_head:
        weights.pop(PREFIX + HEAD)
    path = folder / WEIGHTS
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not readable as safetensors ({error})") from error
    if odd := sorted(tensors.keys() ^ weights.keys()):
        raise InputError(f"{path}: not the adapters of {CONFIG}: differs in {odd[:4]}")
    for name, weight in weights.items():
        if tensors[name].shape != weight.shape or not all_finite(tensors[name]):
            raise InputError(
                f"{path}: {name} is {tuple(tensors[name].shape)} or not finite, expected"
                f" {tuple(weight.shape)} finite numbers"
            )
        weight.data.copy_(tensors[name])
    model.requires_grad_(False)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, a model that is only read computes what it did before adapters came into it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def adapter_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """What is trained of a model with adapters: their matrices, and a scorer's head."""
    named = model.named_parameters()
    return {name: p for name, p in named if f".{NAME}." in name or name == HEAD}


def file_name(name: str) -> str:
    """A parameter's name -> that in peft's files."""
    return PREFIX + name.replace(f".{NAME}.", ".")


def make_trainable(model: PreTrainedModel, start: Path, lora: Lora | None, knob: str) -> None:
    """Let what `lora` says be trained of a model that was loaded from `start`.

    None: all weights; adapters are added to a copy of what they stand beside. Else adapters alone:
    those that stand in it, which must be of that shape, or new ones whose base is `start`. `knob`
    is the name of `lora` for the error.
    """
    if lora is None:
        if has_adapters(model):
            merge(model)
        return
    if has_adapters(model):
        check_shape(start, lora, targets_in(model, lora), knob)
    else:
        add_adapters(model, start, lora)
    for weight in adapter_weights(model).values():
        weight.requires_grad_(True)


def check_shape(start: Path, lora: Lora, targets: list[str], knob: str) -> None:
    """Raise BadKnob unless the adapters of `start` are of the shape that the knob asks for."""
    there, asked = shape_of(start), lora.model_copy(update={"targets": targets})
    for name in Lora.model_fields:
        if getattr(there, name) != getattr(asked, name):
            raise BadKnob(
                f"{knob}.{name}",
                f"found {getattr(lora, name)!r}, but {start} has adapters of"
                f" {getattr(there, name)!r}, which are trained on; expected the same",
            )


@torch.no_grad()
def merge(model: PreTrainedModel) -> None:
    """Add adapters to the weights that they stand beside, for good: a whole model is left.

    It differs from the model with adapters by rounding. Nothing is ever taken out again.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge(safe_merge=True)
            model.set_submodule(name, module.get_base_layer())
    del model.peft_config
    model.requires_grad_(True)


def save_adapters(folder: Path, model: PreTrainedModel) -> None:
    """Write a model's adapters into an existing folder.

    peft writes what it keeps as sets in an order of its own in every run; here it is sorted.
    """
    config = model.peft_config[NAME].to_dict() | {"inference_mode": True}
    if hasattr(model, "score"):
        config["modules_to_save"] = ["score"]
    told = {name: sorted(v) if isinstance(v, set) else v for name, v in config.items()}
    write_json(folder / CONFIG, dict(sorted(told.items())))
    tensors = {file_name(name): p.detach().cpu() for name, p in adapter_weights(model).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
