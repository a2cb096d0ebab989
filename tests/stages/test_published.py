"""Stage `prepare_model` over folders as people publish them: a base model, or one line."""

import os

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from stages.base import command
from stages.prepare_model import prepare_model
from tests.helpers.models import byte_tokenizer, llama, mixtral, saved
from tests.helpers.own_code import edit
from tests.helpers.tiny import small_params, write

SIZE = len(byte_tokenizer())


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    """Runs the stage on models/source/it in an empty folder; gives exit code and output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "stop_with_parent", lambda: None)
    write(tmp_path / "params.yaml", small_params(model__source="models/source/it"))

    def run():
        options = ["--source", "models/source", "--out", "models/base"]
        result = CliRunner().invoke(prepare_model, options)
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result.exit_code, result.output

    return run


def test_n02_a_model_with_other_names_ends_in_one_line_and_no_base_model(prepare, tmp_path):
    file = (
        saved(tmp_path / "models" / "source" / "it", llama(vocabulary=SIZE)) / "model.safetensors"
    )
    weights = {f"_orig_mod.{name}": weight for name, weight in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    code, output = prepare()
    assert code == 1
    [line] = [line for line in output.splitlines() if line.startswith("Error: ")]
    assert "stage prepare_model: models/source/it: " in line and "'_orig_mod.'" in line
    assert not os.path.exists("models/base")


def test_n20_a_model_with_sampling_fields_becomes_a_base_model(prepare, tmp_path):
    folder = saved(tmp_path / "models" / "source" / "it", llama(vocabulary=SIZE))
    fields = {"eos_token_id": 2, "temperature": 0.9, "top_p": 0.6}
    edit(folder / "generation_config.json", fields)
    edit(folder / "config.json", fields | {"num_return_sequences": 3})
    code, output = prepare()
    assert code == 0 and "stop tokens <|im_end|>" in output
    files = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert [name for name in files if not (tmp_path / "models" / "base" / name).is_file()] == []


def test_n22_what_of_a_models_training_is_left_out_is_said(prepare, tmp_path):
    model = mixtral(SIZE, output_router_logits=True, router_aux_loss_coef=0.25)
    saved(tmp_path / "models" / "source" / "it", model)
    code, output = prepare()
    assert code == 0
    assert "router_aux_loss_coef: 0.25), which no stage here trains; it is switched off" in output
