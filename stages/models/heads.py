"""The class of a scorer: transformers' sequence classifier, or a head of ours on the backbone.

Ours is a linear `score` without bias, beside weights named as the language model names them, so
that a folder of the one loads as the other. The config alone decides which, so that what was saved
loads again.
"""

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModel,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification


def scorer_class(config: PreTrainedConfig) -> type:
    """Config of a language model or scorer -> what its scorer is loaded by.

    An architecture that transformers does not know brings its own classifier, or has none.
    """
    # transformers adds own code to its mapping once its language model was loaded.
    brought = type(config).__module__.startswith("transformers_modules.")
    if brought or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForSequenceClassification
    known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if known is not None and _fits(known, config):
        return known
    return own_classifier(config)


def check_scorer(config: PreTrainedConfig) -> None:
    """Raise ValueError where a reward model of a language model's architecture cannot be built."""
    kind = scorer_class(config)
    if kind is AutoModelForSequenceClassification:
        if kind.__name__ not in (getattr(config, "auto_map", None) or {}):
            raise ValueError(f"no class for {kind.__name__} in auto_map of its config.json")
    elif not _fits(kind, config):
        raise ValueError(f"{kind.__name__} has no linear head `score` on a backbone")


def _fits(known: type[PreTrainedModel], config: PreTrainedConfig) -> bool:
    """Whether a classifier is a linear `score` on a backbone; no memory is taken to find out."""
    with torch.device("meta"):
        model = known(type(config).from_dict(config.to_dict() | {"num_labels": 1}))
    return isinstance(getattr(model, "score", None), nn.Linear) and model.base_model is not model


def own_classifier(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """A class like transformers' own classifiers, of the family that the config belongs to."""
    language_model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    family = next(
        kind
        for kind in language_model.__mro__
        if kind.__name__.endswith("PreTrainedModel") and kind is not PreTrainedModel
    )

    def __init__(self, config):
        PreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        setattr(self, self.base_model_prefix, AutoModel.from_config(config))
        width = config.get_text_config(decoder=True).hidden_size
        self.score = nn.Linear(width, config.num_labels, bias=False)
        self.post_init()

    name = language_model.__name__.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    own = {
        "__init__": __init__,
        "__module__": language_model.__module__,
        "base_model_prefix": family.base_model_prefix or "model",
        "config_class": type(config),
    }
    return type(f"{name}ForSequenceClassification", (GenericForSequenceClassification, family), own)
