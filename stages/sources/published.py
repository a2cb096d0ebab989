"""Models as people publish them: a hub id, a local folder or a GGUF file.

Whatever it was, the model comes out whole and in float32, or is refused in one line. How it samples
(temperature, beams) is no business of a base model here, and is dropped.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    FineGrainedFP8Config,
    GenerationConfig,
    GgufConfig,
    Mxfp4Config,
    PretrainedConfig,
    PreTrainedModel,
)

from stages.base.command import spelled_out
from stages.base.errors import BadKnob, InputError
from stages.base.tokenizers import published_tokenizer
from stages.base.trust import check_code, check_pickles, object_of
from stages.models.checkpoints import check_causal, check_folder, learn_padding
from stages.sources import weights

# What a model needs of a hub repository; pickles and other formats stay there.
FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "model*.safetensors"]
# Quantized weights that transformers can turn into plain ones on any machine.
DEQUANTIZED = {"mxfp4": Mxfp4Config, "fp8": FineGrainedFP8Config}
COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "router_z_loss_coef")
NO_SAMPLING = {"use_cache", "output_attentions", "output_hidden_states", "transformers_version"}
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load_foreign(source: str, revision: str | None, trust: bool, ignore_pickles: bool = False):
    """Model (float32) and tokenizer from a hub id, a local folder or a GGUF file."""
    path = Path(source)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise BadKnob("model.source", f"no such file {source}")
        return from_gguf(path)
    if path.is_file():
        raise BadKnob("model.source", f"{source} is a file, expected its folder or a GGUF file")
    with loading(source, trust):
        folder = path if path.is_dir() else download(source, revision, trust)
    weights.check_adapter(folder)
    check_folder(folder)
    if path.is_dir():
        if not ignore_pickles:
            check_pickles(path, "model.ignore_pickles: true would accept the folder all the same")
        check_code(path, trust)
    return from_folder(source, folder, trust)


def download(source: str, revision: str | None, trust: bool) -> Path:
    """The folder of a hub repository in the local cache, fetched where it is not there yet."""
    code = ["*.py"] if trust else []
    return Path(snapshot_download(source, revision=revision, allow_patterns=FILES + code))


@contextmanager
def loading(source: str, trust: bool) -> Iterator[None]:
    """One line that names the knob for whatever transformers raises over a published file.

    It raises errors of every kind there (KeyError for an unknown architecture, TypeError for a
    field of config.json); what says nothing about the file passes.
    """
    try:
        yield
    except (InputError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        hint, words = "", " ".join(str(error).split())
        if not isinstance(error, OSError | ValueError | ImportError):
            words = f"{type(error).__name__}: {words}"
        if not trust and "trust_remote_code" in words:
            hint = "model.trust_remote_code: true would run the code that it brings along. "
        if not Path(source).exists():
            hint += "no such file or folder here; as a hub id: "
        words = spelled_out(words if len(words) < 400 else words[:400] + " ...")
        raise BadKnob("model.source", f"cannot load {source!r}: {hint}{words}") from error


def from_folder(source: str, folder: Path, trust: bool):
    """Model and tokenizer of a folder with safetensors weights."""
    files = weights.check_files(folder)
    config = object_of(folder / "config.json")
    if config.get("architectures"):
        check_causal(folder, config["architectures"])
    dtypes = weights.dtypes_of(files)
    quantization = config.get("quantization_config") or {}
    weights.check_dtypes(folder, dtypes, bool(quantization))
    options = {"use_safetensors": True, "trust_remote_code": trust}
    if quantization:
        options["quantization_config"] = dequantized(folder, quantization)
    with loading(source, trust):
        tokenizer = published_tokenizer(folder, trust)
        plan = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
        drop_sampling(plan)
        drop_running(plan)
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=plan,
            dtype=torch.float32,
            generation_config=GenerationConfig(),
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
    weights.check_loaded(folder, model, info)
    if not quantization:
        weights.check_integers(folder, model, dtypes)
    named = folder / "generation_config.json"
    return finished(folder, model, object_of(named) if named.is_file() else {}), tokenizer


def dequantized(folder: Path, entry: dict):
    """The transformers config that makes quantized weights plain; InputError where none does."""
    method = entry.get("quant_method") if isinstance(entry, dict) else entry
    if not isinstance(method, str) or method not in DEQUANTIZED:
        raise InputError(
            f"{folder}: config.json: quantization_config: found {method!r}, expected plain weights"
            f" (or {', '.join(DEQUANTIZED)}): quantized ones cannot be trained; name the model"
            " that they were made from"
        )
    return DEQUANTIZED[method](dequantize=True)


def from_gguf(path: Path):
    """Model and tokenizer of a GGUF file, dequantized."""
    with loading(str(path), False):
        from gguf import GGUFReader

        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model, info = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
        held = {tensor.name: int(tensor.n_elements) for tensor in GGUFReader(path).tensors}
    weights.check_loaded(path, model, info)
    weights.check_counted(path, model, held)
    return finished(path, model, {}), tokenizer


def finished(place: Path, model: PreTrainedModel, generation: dict) -> PreTrainedModel:
    """The model in float32, with its special ids and nothing else of how it was sampled.

    generation  what its generation_config.json says; config.json's ids are used where it says none
    """
    check_causal(place, [type(model).__name__])
    config = model.config
    ids = {name: generation.get(name) for name in SPECIAL_IDS}
    ids = {n: getattr(config, n, None) if value is None else value for n, value in ids.items()}
    if odd := {name: value for name, value in ids.items() if not is_ids(value)}:
        raise InputError(f"{place}: found {odd}, expected ids of tokens")
    model.generation_config = GenerationConfig(**ids)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None:
        raise InputError(
            f"{place}: {type(model).__name__} has no head, expected one over its tokens"
        )
    if head.weight is not embedding.weight:
        config.tie_word_embeddings = False  # as its files hold both, whatever config.json says
    model = model.to(torch.float32)
    learn_padding(model)
    return model


def drop_sampling(config: PretrainedConfig) -> None:
    """Remove what config.json says of sampling, which transformers would refuse to save again.

    What the architecture's own config has a field for is no sampling, whatever its name.
    """
    own = {field.name for field in fields(config)} | NO_SAMPLING
    for name in vars(GenerationConfig()).keys() & vars(config).keys() - own - set(SPECIAL_IDS):
        delattr(config, name)


def drop_running(config: PretrainedConfig) -> None:
    """Undo what config.json says of how a model was run: its attention, what a pass returns.

    The knob `attention` says the one; transformers refuses to save some pairs of them.
    """
    config._attn_implementation = None
    for part in (config, config.get_text_config(decoder=True)):
        part.output_attentions = part.output_hidden_states = False
        part.return_dict = True


def is_ids(value: object) -> bool:
    """Whether a special id of a config is one: none, a whole number, or a list of them."""
    return value is None or all(type(v) is int for v in (value if type(value) is list else [value]))


def drop_balancing(config: PretrainedConfig) -> str | None:
    """Switch the router's balancing loss off; a line that says so where a config asks for it.

    It is summed over a whole forward pass of the language model, with its logits; what is trained
    here are sums over chosen tokens.
    """
    text = config.get_text_config(decoder=True)
    if not getattr(text, "output_router_logits", False):
        return None
    text.output_router_logits = False
    names = [name for name in COEFFICIENTS if getattr(text, name, None)]
    weight = ", ".join(f"{name}: {getattr(text, name)}" for name in names)
    return (
        f"model.source: its config asks for a loss that balances the experts (output_router_logits;"
        f" {weight or 'no coefficient'}), which no stage here trains; it is switched off"
    )
