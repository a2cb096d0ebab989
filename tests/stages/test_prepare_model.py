"""What prepare_model finds out before anything trains, and what later folders inherit."""

import json

import pytest
from transformers import AutoModelForCausalLM

from stages.base.errors import BadKnob
from stages.prepare_model import check_fit
from tests.helpers.architectures import seeded
from tests.helpers.models import byte_tokenizer, gpt2
from tests.helpers.stage import refuse, succeed

SOURCE = {"model__source": "models/source/m"}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "models" / "source").mkdir(parents=True)
    return tmp_path


def bring(folder, model) -> None:
    source = folder / "models" / "source" / "m"
    model.save_pretrained(source)
    byte_tokenizer().save_pretrained(source)


def recorded(folder, name: str = "base") -> str:
    return json.loads((folder / "models" / name / "config.json").read_text())["rlhf_route"]


def test_the_default_model_shares_prompts_and_its_folder_says_so(folder):
    assert "rows shared" in succeed(folder, "prepare_model")
    assert recorded(folder) == "shared"
    model = AutoModelForCausalLM.from_pretrained(folder / "models" / "base")
    assert model.config.rlhf_route == "shared"


def test_the_trial_leaves_the_weights_as_they_were(folder):
    model = seeded("Mpt", len(byte_tokenizer()))
    bring(folder, model)
    succeed(folder, "prepare_model", **SOURCE, attention="eager")
    found = AutoModelForCausalLM.from_pretrained(folder / "models" / "base")
    for name, weight in found.named_parameters():
        assert weight.equal(model.get_parameter(name)), name


def test_the_route_of_a_source_is_measured_anew(folder):
    """A folder of this pipeline as model.source may carry a route that was measured elsewhere."""
    model = seeded("Mistral", len(byte_tokenizer()))
    model.config.rlhf_route = "shared"
    bring(folder, model)
    succeed(folder, "prepare_model", **SOURCE)
    assert recorded(folder) == "padded"


def test_n11_positions_below_max_new_tokens_are_refused_with_the_knob(folder):
    bring(folder, gpt2(vocabulary=len(byte_tokenizer())))
    message = refuse(folder, "prepare_model", **SOURCE, max_new_tokens=128)
    assert "max_new_tokens: found 128, but the model has only 128 positions" in message
    assert not (folder / "models" / "base").exists()


@pytest.mark.parametrize(
    "name, positions",
    [("GPT2", 128), ("Mpt", 128), ("Rwkv", 128), ("Llama", 128), ("Qwen3_5Text", 128)],
)
def test_n11_positions_are_found_under_each_of_their_names(name, positions):
    model = seeded(name, 48)
    check_fit(model, 48, [1], positions - 1)
    with pytest.raises(BadKnob, match=f"only {positions} positions"):
        check_fit(model, 48, [1], positions)


def test_n11_more_tokens_than_the_model_embeds_are_refused_by_the_knob(folder):
    bring(folder, gpt2(vocabulary=200))
    message = refuse(folder, "prepare_model", **SOURCE)
    wanted = f"the tokenizer has {len(byte_tokenizer())} tokens, but the model embeds only 200"
    assert f"params.yaml: model.source: {wanted}" in message
    assert not (folder / "models" / "base").exists()


def test_n11_a_stop_token_outside_the_vocabulary_is_refused(folder):
    model = gpt2(vocabulary=len(byte_tokenizer()))
    model.generation_config.eos_token_id = [2, 5000]
    bring(folder, model)
    message = refuse(folder, "prepare_model", **SOURCE)
    assert f"stop tokens [5000], but the model embeds only {len(byte_tokenizer())}" in message


def test_a_model_that_cannot_be_tried_is_refused_in_one_line(folder, monkeypatch):
    """Whatever an architecture raises in its forward pass."""

    def broken(self, *args, **more):
        raise KeyError("nobody thought\nof this")

    bring(folder, seeded("Olmo2", len(byte_tokenizer())))
    monkeypatch.setattr("transformers.models.olmo2.modeling_olmo2.Olmo2Model.forward", broken)
    message = refuse(folder, "prepare_model", **SOURCE)
    assert "params.yaml: model.source: Olmo2ForCausalLM: " in message
    assert "nobody thought" in message and ".partial" not in message
