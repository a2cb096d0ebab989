"""Model folders: Hugging Face files, float32 safetensors; a policy's also hold its training state.
Nothing here unpickles. A folder is written whole or not at all.
"""

import shutil
from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from stages.base.errors import BadKnob, InputError
from stages.base.files import replacing
from stages.base.metrics import read_json, write_json
from stages.base.trust import PICKLES, check_code, check_own, check_pickles, files_of
from stages.models.compute import all_finite
from stages.models.forward import check_head, find_backbone
from stages.models.heads import scorer_class

logging.set_verbosity_error()
logging.disable_progress_bar()

MOMENTS = ("exp_avg", "exp_avg_sq")


def check_folder(folder: Path) -> None:
    """Raise InputError unless the folder holds a config and safetensors weights."""
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder}: no config.json; expected a Hugging Face model folder")
    weights = ("model.safetensors", "model.safetensors.index.json")
    if not any((folder / name).is_file() for name in weights):
        found = files_of(folder, *PICKLES)
        also = f" (found {found}, and pickles are never read)" if found else ""
        raise InputError(f"{folder}: no model.safetensors{also}; expected safetensors weights")


def load_policy(
    folder: Path, attention: str, device: torch.device, trust: bool = False
) -> PreTrainedModel:
    """A causal language model in float32 and evaluation mode; its own code needs `trust`."""
    config = _config(folder, trust)
    if not any("CausalLM" in name or "LMHead" in name for name in config.architectures or []):
        raise InputError(
            f"{folder}: architecture {config.architectures}, expected a causal language model"
        )
    policy = _load(AutoModelForCausalLM, folder, attention, device, trust)
    try:
        check_head(policy)
    except ValueError as error:
        raise InputError(f"{folder}: {error}") from error
    return policy


def load_foreign(source: str, revision: str | None, trust: bool, ignore_pickles: bool = False):
    """Model (float32) and tokenizer from a hub id, a local folder or a GGUF file."""
    path, options, weights = Path(source), {}, {"use_safetensors": True}
    if path.suffix == ".gguf":
        if not path.is_file():
            raise BadKnob("model.source", f"no such file {source}")
        options = {"gguf_file": path.name}
        weights = {"quantization_config": GgufConfig(dequantize=True)}
        source = str(path.parent)
    elif path.is_dir():
        check_folder(path)
        if not ignore_pickles:
            check_pickles(path, "model.ignore_pickles: true would accept the folder all the same")
        check_code(path, trust)
    options |= {"revision": revision, "trust_remote_code": trust}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, **weights, **options
        )
        if trust and not Path(source).exists():
            model.config.name_or_path = snapshot_download(
                source, revision=revision, allow_patterns="*.py"
            )
    except (OSError, ValueError, ImportError) as error:
        hint = ""
        if not trust and "trust_remote_code" in str(error):
            hint = "model.trust_remote_code: true would run the code that it brings along. "
        raise BadKnob("model.source", f"cannot load {source!r}: {hint}{error}") from error
    return model, tokenizer


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
    folder: Path, attention: str, device: torch.device, trust: bool = False
) -> PreTrainedModel:
    """A reward model or critic, with its one-value head `score`, in float32 and evaluation mode.

    A folder without that head (a plain language model) is refused: its head would be random.
    """
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
    scorer = _load(kind, folder, attention, device, trust)
    if scorer.config.num_labels != 1:
        raise InputError(f"{folder}: {scorer.config.num_labels} labels, expected one score")
    return scorer


def new_scorer(
    folder: Path,
    attention: str,
    device: torch.device,
    trust: bool = False,
    zero_head: bool = False,
) -> PreTrainedModel:
    """A scorer on a language model's weights, with a new head: from the global generator, or 0."""
    scorer = _load(
        scorer_class(_config(folder, trust)),
        folder,
        attention,
        device,
        trust,
        {"score.weight"},
        num_labels=1,
    )
    if not isinstance(getattr(scorer, "score", None), nn.Linear):
        raise InputError(
            f"{folder}: {type(scorer).__name__} has no linear head `score`; expected an"
            " architecture whose sequence classifier has one (Llama, Qwen, Mistral, Gemma, GPT-2,"
            " ...)"
        )
    if zero_head:
        nn.init.zeros_(scorer.score.weight)
    return scorer


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
    **config,
) -> PreTrainedModel:
    """A model in float32 and evaluation mode, all of whose weights but `new` lie in the folder."""
    architecture = _config(folder, trust).architectures
    try:
        model, found = auto.from_pretrained(
            folder,
            dtype=torch.float32,
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
    find_backbone(model)
    return model.to(device).eval()


def _unusable(attention: str, error: Exception) -> str:
    reason = str(error).strip().partition("\n")[0].partition(". Please")[0]
    return f"found {attention!r}, but {reason}; eager runs with every model"


def save_model(folder: Path, model: PreTrainedModel, tokenizer) -> None:
    """Write model and tokenizer into an existing folder, as `from_pretrained` reads them.

    Code that the model came with goes along.
    """
    if model.get_input_embeddings().num_embeddings < len(tokenizer):
        raise InputError(
            f"{folder}: the tokenizer has {len(tokenizer)} tokens, the model embeds only"
            f" {model.get_input_embeddings().num_embeddings}"
        )
    model.config.pad_token_id = tokenizer.pad_token_id
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if getattr(model.config, "auto_map", None) and model.config.name_or_path:
        # transformers keeps the code of this class alone; another stage may load another class.
        for file in Path(model.config.name_or_path).glob("*.py"):
            shutil.copyfile(file, folder / file.name)


@dataclass
class TrainerState:
    """What a round continues from: counters, optimizer states by name, and the critic's folder."""

    step: int = 0
    prompt_cursor: int = 0
    rounds: list[int] = field(default_factory=list)
    critic: Path | None = None
    optimizers: dict[str, Path] = field(default_factory=dict)


def load_trainer(policy: Path) -> TrainerState:
    """The trainer state beside a policy; a fresh one where the folder has none (models/sft)."""
    folder = policy / "trainer"
    if not folder.is_dir():
        return TrainerState()
    counters = read_json(folder / "state.json")
    check_counters(folder / "state.json", counters)
    critic = folder / "critic"
    for name in ("policy", "critic") if critic.is_dir() else ("policy",):
        if not (folder / f"{name}.safetensors").is_file():
            raise InputError(f"{folder}: no {name}.safetensors; expected the optimizer's state")
    return TrainerState(
        step=counters["step"],
        prompt_cursor=counters["prompt_cursor"],
        rounds=counters["rounds"],
        critic=critic if critic.is_dir() else None,
        optimizers={p.stem: p for p in sorted(folder.glob("*.safetensors"))},
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
) -> None:
    """Write a policy with `trainer/` beside it: state.json, <name>.safetensors, critic/.

    The optimizers' states, twice as large as their models, are written meanwhile.
    """
    with replacing(folder, folder=True) as temporary, ThreadPoolExecutor() as pool:
        trainer = temporary / "trainer"
        trainer.mkdir()
        states = [
            pool.submit(save_optimizer, trainer / f"{name}.safetensors", optimizer, model)
            for name, (optimizer, model) in optimizers.items()
        ]
        save_model(temporary, policy, tokenizer)
        if critic is not None:
            (trainer / "critic").mkdir()
            save_model(trainer / "critic", critic, tokenizer)
        counters = {
            "step": state.step,
            "prompt_cursor": state.prompt_cursor,
            "rounds": state.rounds,
        }
        write_json(trainer / "state.json", counters)
        for written in states:
            written.result()


def save_optimizer(path: Path, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Write AdamW's state as tensors named `<parameter>/<entry>`.

    What has had no gradient yet is written as AdamW would start it: at 0.
    """
    tensors = {}
    for name, parameter in _trained(model).items():
        state = optimizer.state.get(parameter) or _fresh(parameter)
        for entry, value in state.items():
            tensors[f"{name}/{entry}"] = value.detach().cpu().contiguous()
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
        # The step count too: the fused AdamW wants it beside the weights.
        optimizer.state[parameter][entry] = value.to(parameter.device, copy=True)
