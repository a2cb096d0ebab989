"""Model folders of the stages: Hugging Face files, safetensors in float32 or, if asked for, bf16.

Stages that train hold weights in float32. Those that only read a model load it in the precision
that its products are made in. Nothing here unpickles.
"""

import shutil
from collections.abc import Set
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.utils import logging

from stages.base.errors import BadKnob, InputError
from stages.base.trust import PICKLES, check_own, files_of
from stages.models.adapters import (
    adapter_weights,
    attach_adapters,
    base_of,
    has_adapters,
    save_adapters,
)
from stages.models.compute import all_finite
from stages.models.forward import check_head, find_backbone
from stages.models.heads import scorer_class

logging.set_verbosity_error()
logging.disable_progress_bar()


DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}

# What transformers notes of how a tokenizer was loaded and then saves with it, though nothing reads
# it again: HF_HUB_OFFLINE would change the bytes of a model.
HOW_LOADED = ("local_files_only", "is_local")


def check_folder(folder: Path) -> None:
    """Raise InputError unless the folder holds a config and safetensors weights."""
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder}: no config.json; expected a Hugging Face model folder")
    weights = ("model.safetensors", "model.safetensors.index.json")
    if not any((folder / name).is_file() for name in weights):
        found = files_of(folder, *PICKLES)
        also = f" (found {found}, and pickles are never read)" if found else ""
        raise InputError(f"{folder}: no model.safetensors{also}; expected safetensors weights")


def check_causal(place: object, architectures: list[str] | None) -> None:
    """Raise InputError unless a config's architectures are those of causal language models."""
    if not any("CausalLM" in name or "LMHead" in name for name in architectures or []):
        raise InputError(f"{place}: architecture {architectures}, expected a causal language model")


def learn_padding(model: nn.Module) -> None:
    """Let the embedding of the pad id learn like any other; the values stay as they are.

    Llama and others make that id the `padding_idx` of their embedding, which then gets no gradient:
    wrong where text holds it (pad may equal EOS), and of no use here, where masks come from
    lengths.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.padding_idx = None


def load_policy(
    folder: Path,
    attention: str,
    device: torch.device,
    trust: bool = False,
    precision: str = "float32",
) -> PreTrainedModel:
    """A causal language model in evaluation mode; its own code needs `trust`.

    `precision` is that of the weights: bf16 for stages that read the model and do not train it.
    Of a folder of adapters it is their base with them in it, frozen.
    """
    base = base_of(folder)
    check_causal(base, _config(base, trust).architectures)
    policy = _load(AutoModelForCausalLM, base, attention, device, trust, dtype=DTYPES[precision])
    try:
        check_head(policy)
    except ValueError as error:
        raise InputError(f"{folder}: {error}") from error
    if base != folder:
        attach_adapters(policy, folder)
    return policy


def _config(folder: Path, trust: bool):
    """The config of a stage's model folder, once the folder was checked."""
    check_folder(folder)
    check_own(folder, trust)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    except ValueError as error:
        line = str(error).strip().splitlines()[0]
        raise InputError(f"{folder}: {line}") from error


def load_scorer(
    folder: Path,
    attention: str,
    device: torch.device,
    trust: bool = False,
    precision: str = "float32",
) -> PreTrainedModel:
    """A reward model or critic, with its one-value head `score`, in evaluation mode.

    `precision` is that of the weights, as in `load_policy`. A folder without that head (a plain
    language model) is refused: its head would be random.
    """
    if (base := base_of(folder)) != folder:
        scorer = _load_headless(base, attention, device, trust, DTYPES[precision])
        attach_adapters(scorer, folder)
        return scorer
    check_folder(folder)
    with_head = [
        name
        for file in folder.glob("*.safetensors")
        for name in _names(file)
        if name == "score.weight"
    ]
    if not with_head:
        raise InputError(f"{folder}: no weight 'score.weight'; expected a reward model or critic")
    kind = scorer_class(_config(folder, trust))
    scorer = _load(kind, folder, attention, device, trust, dtype=DTYPES[precision])
    if scorer.config.num_labels != 1:
        raise InputError(f"{folder}: {scorer.config.num_labels} labels, expected one score")
    return scorer


def scorer_on(policy: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The scorer of a folder of adapters that are for the policy itself; both are only read.

    They share one backbone, in which the adapters then stand: the policy is what it was under
    `adapters_off`.
    """
    config = type(policy.config).from_dict(policy.config.to_dict() | {"num_labels": 1})
    with torch.device("meta"):
        scorer = scorer_class(config)(config)
    setattr(scorer, scorer.base_model_prefix, policy.base_model)
    scorer.score.to_empty(device=policy.device).to(policy.dtype)
    attach_adapters(scorer, folder)
    return scorer.eval()


def new_scorer(
    folder: Path,
    attention: str,
    device: torch.device,
    trust: bool = False,
    zero_head: bool = False,
) -> PreTrainedModel:
    """A scorer on a language model's weights, with a new head: from the global generator, or 0."""
    base = base_of(folder)
    scorer = _load_headless(base, attention, device, trust)
    if not isinstance(getattr(scorer, "score", None), nn.Linear):
        raise InputError(
            f"{folder}: {type(scorer).__name__} has no linear head `score`; expected an"
            " architecture whose sequence classifier has one (Llama, Qwen, Mistral, Gemma, GPT-2,"
            " ...)"
        )
    if zero_head:
        nn.init.zeros_(scorer.score.weight)
    if base != folder:
        attach_adapters(scorer, folder, new_head=True)
    return scorer


def _load_headless(
    folder: Path,
    attention: str,
    device: torch.device,
    trust: bool,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """A scorer whose head may be new: that of a language model's folder."""
    kind = scorer_class(_config(folder, trust))
    return _load(kind, folder, attention, device, trust, {"score.weight"}, dtype, num_labels=1)


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as weights:
        return list(weights.keys())


def _load(
    auto,
    folder: Path,
    attention: str,
    device: torch.device,
    trust: bool,
    new: Set[str] = frozenset(),
    dtype: torch.dtype = torch.float32,
    **config,
) -> PreTrainedModel:
    """A model in `dtype` and evaluation mode, all of whose weights but `new` lie in the folder."""
    architecture = _config(folder, trust).architectures
    try:
        model, found = auto.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            output_loading_info=True,
            trust_remote_code=trust,
            **config,
        )
    except (ValueError, ImportError) as error:
        if "attention" in str(error).lower():
            raise BadKnob("attention", _unusable(attention, error)) from error
        if f"for this kind of AutoModel: {auto.__name__}." not in str(error):
            raise
        raise InputError(
            f"{folder}: architecture {architecture} has no class for {auto.__name__}: expected one"
            " in transformers, or in auto_map of config.json"
        ) from error
    except (SafetensorError, RuntimeError) as error:
        raise InputError(f"{folder}: the weights do not fit the config: {error}") from error
    if missing := sorted(set(found["missing_keys"]) - new):
        raise InputError(f"{folder}: no weights {missing}; expected those that config.json implies")
    for name, parameter in model.named_parameters():
        if not all_finite(parameter):
            raise InputError(
                f"{folder}: {name} holds NaN or infinite weights, expected finite ones"
            )
        # What comes out of a file lies at any address, and the last bit of a product can depend on
        # it. In memory of torch's own a reloaded model computes what the saved one did.
        parameter.data = parameter.data.clone()
    learn_padding(model)
    find_backbone(model)
    return model.to(device).eval()


def _unusable(attention: str, error: Exception) -> str:
    reason = str(error).strip().partition("\n")[0].partition(". Please")[0]
    return f"found {attention!r}, but {reason}; eager runs with every model"


def open_as_others(folder: Path) -> None:
    """Let whoever may read a folder's JSON files read its weights too.

    safetensors makes its files readable to their owner alone, whatever the umask says.
    """
    for file in folder.glob("*.safetensors"):
        shutil.copymode(next(folder.glob("*.json")), file)


def saved_bytes(model: PreTrainedModel, weights: str = "float32") -> int:
    """About how many bytes `save_model` writes of a model: those of its weights."""
    if has_adapters(model):
        return sum(p.numel() for p in adapter_weights(model).values()) * torch.float32.itemsize
    return sum(p.numel() for p in model.parameters()) * DTYPES[weights].itemsize


def save_model(folder: Path, model: PreTrainedModel, tokenizer, weights: str = "float32") -> None:
    """Write model and tokenizer into an existing folder, as `from_pretrained` reads them.

    Of a model with adapters these alone are written; the rest is in their base. A whole model is
    written, and left, in the precision `weights`. Code that the model came with goes along; how and
    where they were loaded does not.
    """
    if model.get_input_embeddings().num_embeddings < len(tokenizer):
        raise InputError(
            f"{folder}: the tokenizer has {len(tokenizer)} tokens, the model embeds only"
            f" {model.get_input_embeddings().num_embeddings}"
        )
    model.config.pad_token_id = tokenizer.pad_token_id
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    if has_adapters(model):
        save_adapters(folder, model)
    else:
        model.to(DTYPES[weights]).save_pretrained(folder)
    for name in HOW_LOADED:
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(folder)
    open_as_others(folder)
    if getattr(model.config, "auto_map", None) and model.config.name_or_path:
        # transformers keeps the code of this class alone; another stage may load another class.
        for file in Path(model.config.name_or_path).glob("*.py"):
            shutil.copyfile(file, folder / file.name)
