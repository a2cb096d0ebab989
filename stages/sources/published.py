"""Models as people publish them: a hub id, a local folder or a GGUF file."""

from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from stages.base.errors import BadKnob
from stages.base.trust import check_code, check_pickles
from stages.models.checkpoints import check_folder


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
