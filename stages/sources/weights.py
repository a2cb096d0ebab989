"""Whether a published folder's weights are all of the model, and nothing else's.

transformers fills what it misses with random numbers and leaves out what it does not know. Here
either is refused: the names in the files and those of the model are the same ones.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from stages.base.errors import InputError
from stages.base.metrics import read_json
from stages.base.trust import listed
from stages.models.compute import all_finite

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Mistral's own format of the same weights, which it publishes beside those of transformers.
SAME_AGAIN = re.compile(r"consolidated.*\.safetensors")
ADAPTER = re.compile(
    r"adapter_config\.json|(?!model-).*(adapter|lora).*\.(safetensors|npz|bin|pt)", re.I
)
FLOATS = {"F64", "F32", "F16", "BF16"}
SCALES = ("_scale_inv", "_scale")
# What wraps a model in training and then stands in the names of its weights.
WRAPPERS = re.compile(
    r"(^|\.)(_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_model"
    r"|pretrained_model)\."
)
MERGE = "merge it into its base first (peft: merge_and_unload), save that whole and name it here"


def few(names: Iterable[str]) -> str:
    """`listed`, but names of weights are long."""
    return listed(names, most=3)


def check_adapter(folder: Path) -> None:
    """Raise InputError where a folder holds an adapter, alone or beside a model's weights."""
    if found := [path.name for path in folder.iterdir() if ADAPTER.fullmatch(path.name)]:
        raise InputError(
            f"{folder}: found {listed(found)}: an adapter, which is never merged here; {MERGE}"
        )


def check_files(folder: Path) -> list[Path]:
    """The files that hold a folder's weights; InputError where some are absent or left over.

    What lies in folders below is another model (an earlier checkpoint, say) and is left alone.
    """
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    if SINGLE in names and INDEX in names:
        raise InputError(f"{folder}: found {SINGLE} and {INDEX}; expected one set of weights")
    wanted = [SINGLE] if INDEX not in names else _shards(folder / INDEX)
    if absent := sorted(set(wanted) - set(names)):
        raise InputError(f"{folder}: no {listed(absent)}; expected all shards that {INDEX} names")
    found = {name for name in names if name.endswith(".safetensors")}
    if others := sorted(n for n in found - set(wanted) if not SAME_AGAIN.fullmatch(n)):
        raise InputError(
            f"{folder}: found {listed(others)} beside {listed(wanted)}; expected no weights that"
            " would be left out"
        )
    return [folder / name for name in wanted]


def _shards(index: Path) -> list[str]:
    """The file names in an index of shards."""
    places = read_json(index)
    places = places.get("weight_map") if isinstance(places, dict) else None
    if not isinstance(places, dict) or not all(isinstance(p, str) for p in places.values()):
        raise InputError(f"{index}: no weight_map; expected the shard of each weight")
    return sorted(set(places.values()))


def dtypes_of(files: Iterable[Path]) -> dict[str, str]:
    """Name -> dtype ("BF16") of every tensor in safetensors files, from their headers alone."""
    found: dict[str, str] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():
                    if name in found:
                        raise InputError(f"{file}: {name} stands in another shard too")
                    found[name] = weights.get_slice(name).get_dtype()
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file}: not a readable safetensors file ({error})") from error
    return found


def check_dtypes(folder: Path, dtypes: Mapping[str, str], quantized: bool) -> None:
    """Raise InputError for numbers of 8 bits and fewer without the scales that make them weights.

    quantized  whether config.json has a quantization entry, without which scales are not read
    """
    low = {n for n, dtype in dtypes.items() if dtype[0] == "F" and dtype not in FLOATS}
    bare = {n for n in low if not any(f"{n}{scale}" in dtypes for scale in SCALES)}
    if found := bare if quantized else low:
        lacks = (
            "no scales lie beside them" if quantized else "config.json has no quantization_config"
        )
        raise InputError(
            f"{folder}: {few(found)}: {dtypes[min(found)]} weights, but {lacks}; expected float32,"
            " bfloat16 or float16 weights, or 8 bits with their scales and that entry"
        )


def check_loaded(place: object, model: PreTrainedModel, info: Mapping) -> None:
    """Raise InputError unless a model was filled from its files whole, and with finite numbers.

    place  where the files came from, for the message
    info   transformers' loading info: sets of missing, unexpected and mismatched keys
    """
    kind, missing = type(model).__name__, set(info["missing_keys"])
    unexpected = set(info["unexpected_keys"])
    if missing and (prefix := _wrapper(missing, unexpected)):
        raise InputError(
            f"{place}: the names of weights hold {prefix!r}, which a wrapper of the model added"
            f" ({few(unexpected)}); expected those of {kind} ({few(missing)}): save the model"
            " without its wrapper"
        )
    if missing:
        other = f" (found instead {few(unexpected)})" if unexpected else ""
        raise InputError(
            f"{place}: no weights for {few(missing)}{other}; expected every weight of {kind}"
        )
    if shapes := sorted(info["mismatched_keys"]):
        name, found, expected = shapes[0]
        more = f" and {len(shapes) - 1} more" if len(shapes) > 1 else ""
        raise InputError(
            f"{place}: {listed([name])} has shape {tuple(found)}, expected {tuple(expected)} by"
            f" config.json{more}"
        )
    if unexpected:
        raise InputError(
            f"{place}: {kind} has no place for the weights {few(unexpected)}; expected its own"
            " alone, none of which is left out"
        )
    trained = dict(model.named_parameters())
    for name, weight in model.state_dict().items():
        # A buffer may be a mask, which -inf belongs in.
        if not all_finite(weight) if name in trained else weight.isnan().any():
            raise InputError(f"{place}: {name} holds NaN or infinite weights, expected finite ones")


def _wrapper(missing: set[str], unexpected: set[str]) -> str | None:
    """What stands in unexpected names and not in missing ones: `_orig_mod.`, or any prefix."""
    for name in sorted(unexpected):
        if found := WRAPPERS.search(name):
            return found[0].lstrip(".")
        for wanted in missing:
            if name.endswith(f".{wanted}"):
                return name.removesuffix(wanted)
    return None


def check_integers(folder: Path, model: PreTrainedModel, dtypes: Mapping[str, str]) -> None:
    """Raise InputError for integers where a weight belongs.

    Masks and positions, which old checkpoints hold and transformers leaves out, may be integers.
    """
    own = model.state_dict()
    left_out = model._keys_to_ignore_on_load_unexpected or set()
    masks = re.compile("|".join([r"position_ids$", *(f"(?:{p})" for p in left_out)]))
    odd = {name for name, dtype in dtypes.items() if dtype not in FLOATS}
    odd = {n for n in odd if not masks.search(n) and (n not in own or own[n].is_floating_point())}
    if odd:
        kinds = sorted({dtypes[name] for name in odd})
        raise InputError(
            f"{folder}: {few(odd)}: {', '.join(kinds)} numbers; expected float weights"
        )


def check_counted(file: Path, model: PreTrainedModel, held: Mapping[str, int]) -> None:
    """Raise InputError unless a GGUF file's tensors hold as many numbers as the model.

    transformers leaves out those it does not know and names none of them, `rope_freqs` (the scaled
    positions of Llama 3) above all; splitting and joining keeps the count.
    """
    expected, found = sum(p.numel() for p in model.parameters()), sum(held.values())
    if found != expected:
        odd = [n for n in held if not n.startswith(("blk.", "token_embd.", "output"))]
        raise InputError(
            f"{file}: its tensors hold {found} numbers, expected {expected} for"
            f" {type(model).__name__}: some are left out ({few(odd) or 'of its blocks'});"
            " expected the model as safetensors"
        )
