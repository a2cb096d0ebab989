"""A tiny model folder with an architecture in Python files of its own: a Llama with a scaled norm.

The sequence classifier stands in a second file, which the language model does not import, and
the tokenizer in a third.
"""

import json
from pathlib import Path

CODE = ("modeling_odd.py", "scoring_odd.py", "tokenization_odd.py")
MODELING = """
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

SCALE = 1.0
open(MARKER, "a").close()


class OddConfig(LlamaConfig):
    model_type = "odd"


class OddNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        return SCALE * super().forward(hidden_states)


class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.norm = OddNorm(config.hidden_size, config.rms_norm_eps)
"""
SCORING = """
from torch import nn
from transformers import LlamaModel, LlamaPreTrainedModel

from .modeling_odd import OddConfig, OddNorm


class OddForSequenceClassification(LlamaPreTrainedModel):
    config_class = OddConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.model.norm = OddNorm(config.hidden_size, config.rms_norm_eps)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()
"""
TOKENIZATION = """
from transformers import PreTrainedTokenizerFast


class OddTokenizerFast(PreTrainedTokenizerFast):
    pass
"""
AUTO_MAP = {
    "AutoConfig": "modeling_odd.OddConfig",
    "AutoModelForCausalLM": "modeling_odd.OddForCausalLM",
    "AutoModelForSequenceClassification": "scoring_odd.OddForSequenceClassification",
}


def bring_code(folder: Path, marker: Path) -> Path:
    """Make a Llama's folder one of model type `odd`, whose code leaves `marker` behind when run."""
    model = {"model_type": "odd", "architectures": ["OddForCausalLM"], "auto_map": AUTO_MAP}
    tokenizer = {"AutoTokenizer": [None, "tokenization_odd.OddTokenizerFast"]}
    edit(folder / "config.json", model)
    edit(folder / "tokenizer_config.json", {"auto_map": tokenizer})
    for name, code in zip(CODE, (MODELING, SCORING, TOKENIZATION), strict=True):
        (folder / name).write_text(code.replace("MARKER", repr(str(marker))))
    return folder


def edit(path: Path, changes: dict) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
