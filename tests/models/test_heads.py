"""Scorers of architectures that transformers has no sequence classifier for."""

import pytest
import torch
from transformers import AutoConfig, MambaConfig, Qwen2ForSequenceClassification

from stages.models.checkpoints import load_scorer, new_scorer, save_model
from stages.models.heads import check_scorer, scorer_class
from stages.models.scorers import scores
from tests.helpers.architectures import seeded
from tests.helpers.models import byte_tokenizer, random_ids, same_weights, weights_of

CPU = torch.device("cpu")
WITHOUT = ("Lfm2", "Granite", "Cohere", "Gemma3nText", "Gemma4Text", "Mamba", "Llama4Text")
PROMPTS, ANSWERS = random_ids(1, 4, 9, 2), random_ids(2, 3, 1, 5)


def policy_folder(path, name: str):
    tokenizer = byte_tokenizer()
    path.mkdir()
    save_model(path, seeded(name, len(tokenizer)), tokenizer)
    return path


def attention_of(name: str) -> str:
    return "eager" if name == "Mamba" else "sdpa"


@pytest.mark.parametrize("name", WITHOUT)
def test_n05_a_head_of_our_own_scores_and_loads_again(name, tmp_path):
    folder, attention = policy_folder(tmp_path / "policy", name), attention_of(name)
    torch.manual_seed(1)
    scorer = new_scorer(folder, attention, CPU)
    backbone = seeded(name, len(byte_tokenizer()))
    wanted = weights_of(backbone.base_model if name != "Llama4Text" else backbone.model)
    assert same_weights(weights_of(scorer.base_model), wanted)
    assert scorer.score.bias is None and scorer.score.weight.std() > 0
    (tmp_path / "rm").mkdir()
    save_model(tmp_path / "rm", scorer, byte_tokenizer())
    again = load_scorer(tmp_path / "rm", attention, CPU)
    assert same_weights(weights_of(again), weights_of(scorer))
    with torch.no_grad():
        found = scores(again, PROMPTS, ANSWERS)
        for score, prompt, answer in zip(found, PROMPTS, ANSWERS, strict=True):
            hidden = scorer.base_model(torch.tensor([prompt + answer]), use_cache=False)[0][0, -1]
            assert score.item() == pytest.approx(
                float(hidden @ scorer.score.weight[0]), rel=1e-4, abs=1e-4
            )


@pytest.mark.parametrize("name", WITHOUT)
def test_a_critic_of_our_own_starts_at_zero(name, tmp_path):
    folder = policy_folder(tmp_path / "policy", name)
    critic = new_scorer(folder, attention_of(name), CPU, zero_head=True)
    with torch.no_grad():
        assert not scores(critic, PROMPTS, ANSWERS).any()


def test_transformers_own_classifier_is_taken_where_it_has_a_linear_score(tmp_path):
    config = AutoConfig.from_pretrained(policy_folder(tmp_path / "policy", "Qwen2"))
    assert scorer_class(config) is Qwen2ForSequenceClassification


def test_a_classifier_without_score_gives_way_to_a_head_of_our_own():
    """CTRL's has its head under another name."""
    config = seeded("CTRL", 48).config
    kind = scorer_class(config)
    assert kind.__name__ == "CTRLForSequenceClassification"
    config.num_labels = 1
    assert isinstance(kind(config).score, torch.nn.Linear)


def test_code_of_a_models_own_without_a_classifier_is_told_before_anything_trains():
    class OddConfig(MambaConfig):
        model_type = "odd"

    with pytest.raises(ValueError, match="no class for AutoModelForSequenceClassification"):
        check_scorer(OddConfig())
