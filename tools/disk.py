"""What rounds of a model take on disk, as lines of the table in docs/disk.md:

    python tools/disk.py                              # four models, calculated from their shapes
    python tools/disk.py --measure tiny SmolLM2-135M  # written by save_policy, and added up
    python tools/disk.py models/base                  # calculated for the model of a folder

Sizes are what `optimize` compares with the free space, in GB of 10^9 bytes. Left out: the tables of
a round, and copies that DVC's cache would hold beside links.
"""

import argparse
import sys
import tempfile
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from stages.base.knobs import Lora  # noqa: E402
from stages.models.adapters import make_trainable  # noqa: E402
from stages.models.checkpoints import saved_bytes  # noqa: E402
from stages.models.trainer_state import TrainerState, policy_bytes, save_policy  # noqa: E402
from stages.sources.tiny import byte_tokenizer  # noqa: E402
from stages.training.steps import adamw  # noqa: E402


def llama(
    vocabulary: int, hidden: int, inner: int, layers: int, heads: int, keys: int, tied: bool = True
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        tie_word_embeddings=tied,
    )


CONFIGS = {
    "tiny": llama(262, 128, 512, 4, 4, 4),
    "SmolLM2-135M": llama(49152, 576, 1536, 30, 9, 3),
    "SmolLM2-1.7B": llama(49152, 2048, 8192, 24, 32, 32),
    "Llama 3.1 8B": llama(128256, 4096, 14336, 32, 32, 8, tied=False),
}
LORA = Lora(rank=16, alpha=32.0, dropout=0.0, targets="all-linear")


@dataclass(frozen=True)
class Way:
    """How rounds are trained and kept, under knobs of these names."""

    name: str
    lora: Lora | None = None
    keep_weights: str = "float32"
    keep_moments: str = "float32"


WAYS = [
    Way("all weights"),
    Way("all weights, kept in bf16", keep_weights="bf16", keep_moments="bf16"),
    Way("LoRA, rank 16", lora=LORA),
    Way("LoRA, whole models in bf16", lora=LORA, keep_weights="bf16"),
]


def model_of(config, device: str) -> PreTrainedModel:
    """Random weights; the config stays as it is."""
    with torch.device(device):
        return AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.float32)


def calculated(config, way: Way) -> tuple[int, int, int]:
    """Bytes of a round, of these its moments, and of a whole model of this kind."""
    model = model_of(config, "meta")
    whole = saved_bytes(model, way.keep_weights)
    make_trainable(model, Path("models/sft"), way.lora, "lora")
    size = policy_bytes([model], way.keep_weights, way.keep_moments)
    return size, size - policy_bytes([model], way.keep_weights, "none"), whole


def measured(config, way: Way) -> tuple[int, int, int]:
    """The same of folders that `save_policy` wrote."""
    model = model_of(config, "cpu")
    tokenizer = byte_tokenizer(512)
    with tempfile.TemporaryDirectory() as place:
        whole = written(Path(place) / "whole", model_of(config, "cpu"), tokenizer, way, "none")
        make_trainable(model, Path("models/sft"), way.lora, "lora")
        size = written(Path(place) / "round", model, tokenizer, way, way.keep_moments)
        states = (Path(place) / "round" / "trainer").glob("*.safetensors")
        return size, sum(path.stat().st_size for path in states), whole


def written(folder: Path, model, tokenizer, way: Way, moments: str) -> int:
    pairs = {"policy": (adamw(model, 1e-3, 0.0), model)}
    kept = (way.keep_weights, moments)
    save_policy(folder, model, tokenizer, TrainerState(), pairs, None, *kept)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def line(name: str, way: Way, sizes: tuple[int, int, int], how: str) -> str:
    """A line of the table: a round, six, six whose moments but the last were dropped, the rest."""
    each, moments, whole = sizes
    figures = (each, 6 * each, 6 * each - 5 * moments, 3 * whole)
    cells = " | ".join(f"{size / 1e9:.3g}" for size in figures)
    return f"| {name} | {way.name} | {cells} | {how} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=list(CONFIGS), help="names, or folders")
    parser.add_argument("--measure", action="store_true", help="write the folders and add them up")
    args = parser.parse_args()
    take, how = (measured, "measured") if args.measure else (calculated, "calculated")
    for name in args.models:
        config = CONFIGS.get(name) or AutoConfig.from_pretrained(name)
        for way in WAYS:
            print(line(name, way, take(config, way), how), flush=True)


if __name__ == "__main__":
    main()
