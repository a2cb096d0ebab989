import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from stages.base.errors import InputError
from stages.base.tokenizers import load_tokenizer
from stages.models.checkpoints import load_policy, load_scorer, new_scorer
from stages.models.scorers import reference_log_probs, scores
from stages.rollouts.sampling import Sampling, sample
from stages.sources.published import load_foreign
from stages.text.chat import stop_token_ids
from stages.training.sft import micro_batch_loss
from stages.training.steps import adamw, update
from tests.conftest import forget_code
from tests.helpers.models import (
    POLICIES,
    SCORERS,
    byte_tokenizer,
    cpu_accelerator,
    gpt2,
    llama,
    llama_scorer,
    same_weights,
    saved,
    weights_of,
)
from tests.helpers.own_code import AUTO_MAP, CODE, bring_code, edit

CPU = torch.device("cpu")
IDS = torch.tensor([[3, 9, 27, 1, 250]])
SIZE = len(byte_tokenizer())
LOADERS = (
    lambda folder, trust: load_policy(folder, "sdpa", CPU, trust),
    lambda folder, trust: new_scorer(folder, "sdpa", CPU, trust),
    load_tokenizer,
)
each_model = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
each_scorer = pytest.mark.parametrize("make", SCORERS.values(), ids=SCORERS)
each_pad = pytest.mark.parametrize("pad_is_eos", [False, True], ids=["own pad", "pad is EOS"])


def load_own(folder, trust):
    return load_foreign(str(folder), None, trust)


@torch.no_grad()
def logits_of(model) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits


@each_pad
@each_model
def test_a_saved_policy_gives_bit_equal_logits(make, pad_is_eos, tmp_path):
    model = make(vocabulary=SIZE)
    folder = saved(tmp_path / "policy", model, byte_tokenizer(pad_is_eos))
    loaded = load_policy(folder, "sdpa", CPU)
    assert torch.equal(logits_of(loaded), logits_of(model))
    assert not loaded.training
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(logits_of(plain.eval()), logits_of(model))


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_stay_tied_and_untied_ones_apart(make, tied, tmp_path):
    model = make(vocabulary=SIZE, tied=tied)
    loaded = load_policy(saved(tmp_path / "policy", model), "sdpa", CPU)
    embedding, head = loaded.get_input_embeddings().weight, loaded.get_output_embeddings().weight
    assert (embedding is head) == tied
    assert torch.equal(embedding, model.get_input_embeddings().weight)
    assert torch.equal(head, model.get_output_embeddings().weight)


def test_a_resized_tied_model_keeps_its_logits_and_its_tie(tmp_path):
    model, tokenizer = llama(vocabulary=SIZE), byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|more|>"]})
    model.resize_token_embeddings(len(tokenizer))
    loaded = load_policy(saved(tmp_path / "policy", model, tokenizer), "sdpa", CPU)
    assert loaded.get_input_embeddings().weight.shape[0] == SIZE + 1
    assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    assert torch.equal(logits_of(loaded), logits_of(model))


def test_a_tokenizer_with_more_tokens_than_the_model_embeds_is_refused(tmp_path):
    with pytest.raises(InputError, match=f"{SIZE} tokens, the model embeds only {SIZE - 1}"):
        saved(tmp_path / "policy", llama(vocabulary=SIZE - 1))
    assert not list(tmp_path.iterdir())


@each_pad
@each_model
def test_w02_config_generation_config_and_tokenizer_name_one_pad_id(make, pad_is_eos, tmp_path):
    tokenizer = byte_tokenizer(pad_is_eos)
    loaded = load_policy(saved(tmp_path / "policy", make(vocabulary=SIZE), tokenizer), "sdpa", CPU)
    assert loaded.config.pad_token_id == tokenizer.pad_token_id
    assert loaded.generation_config.pad_token_id == tokenizer.pad_token_id
    assert load_tokenizer(tmp_path / "policy").pad_token_id == tokenizer.pad_token_id
    assert tokenizer.pad_token_id < loaded.get_input_embeddings().num_embeddings


@each_pad
def test_template_special_ids_and_stop_ids_survive_two_rounds(pad_is_eos, tmp_path):
    model, tokenizer = llama(vocabulary=SIZE), byte_tokenizer(pad_is_eos)
    model.generation_config.eos_token_id = [2, 7]
    first = saved(tmp_path / "first", model, tokenizer)
    second = saved(tmp_path / "second", load_policy(first, "sdpa", CPU), load_tokenizer(first))
    messages = [{"role": "user", "content": "ab <|im_end|> é"}]
    for folder in (first, second):
        found = load_tokenizer(folder)
        assert found.chat_template == tokenizer.chat_template
        assert found.get_vocab() == tokenizer.get_vocab()
        assert found.all_special_ids == tokenizer.all_special_ids
        assert (found.pad_token_id, found.eos_token_id, found.bos_token_id) == (
            tokenizer.pad_token_id,
            tokenizer.eos_token_id,
            None,
        )
        assert found.apply_chat_template(messages, return_dict=False) == (
            tokenizer.apply_chat_template(messages, return_dict=False)
        )
        assert load_policy(folder, "sdpa", CPU).generation_config.eos_token_id == [2, 7]
    assert stop_token_ids(load_tokenizer(second), [2, 7])[:1] == [2]


# What is refused.


def test_a_folder_with_pickled_weights_only_is_refused_and_not_read(tmp_path):
    folder = saved(tmp_path / "policy", llama(vocabulary=SIZE))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    for load in (load_policy, load_scorer, new_scorer):
        with pytest.raises(InputError, match="pytorch_model.bin, and pickles are never read"):
            load(folder, "sdpa", CPU)
    for ignore in (False, True):
        with pytest.raises(InputError, match="pickles are never read.; expected safetensors"):
            load_foreign(str(folder), None, False, ignore_pickles=ignore)


class Bomb:
    """A pickle that leaves a file behind when something unpickles it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["training_args.bin", "checkpoint-5/optimizer.pt", "odd.PKL"])
def test_a_pickle_beside_the_weights_is_refused_or_left_unread(name, tmp_path):
    folder = saved(tmp_path / "policy", llama(vocabulary=SIZE))
    pickled = folder / name
    pickled.parent.mkdir(exist_ok=True)
    pickled.write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    found = f"policy: found {name}, and pickles are never read; "
    with pytest.raises(InputError, match=found + "model.ignore_pickles: true would accept"):
        load_foreign(str(folder), None, False)
    for load in LOADERS:
        with pytest.raises(InputError, match=found + "a model from elsewhere comes in through"):
            load(folder, False)
    load_foreign(str(folder), None, False, ignore_pickles=True)
    assert not (tmp_path / "exploded").exists()
    pickle.loads(pickled.read_bytes())
    assert (tmp_path / "exploded").exists()


def test_the_name_of_a_pickle_forges_no_line(tmp_path):
    folder = saved(tmp_path / "policy", llama(vocabulary=SIZE))
    (folder / "a\nb.pt").touch()
    with pytest.raises(InputError, match=r"found a\\nb\.pt, and pickles"):
        load_tokenizer(folder)


def test_of_many_pickles_six_are_named(tmp_path):
    folder = saved(tmp_path / "policy", llama(vocabulary=SIZE))
    for number in range(8):
        (folder / f"{number}.ckpt").touch()
    with pytest.raises(InputError, match="found 0.ckpt, .*, 5.ckpt and 2 more, and pickles"):
        load_tokenizer(folder)


@pytest.mark.usefixtures("modules_cache")
def test_code_of_a_model_folder_is_refused_or_run_as_the_knob_says(tmp_path):
    folder, marker = saved(tmp_path / "odd", llama(vocabulary=SIZE)), tmp_path / "ran"
    bring_code(folder, marker)
    refusal = f"found {', '.join(CODE)}: .* model.trust_remote_code: true would run"
    for load in (load_own, *LOADERS):
        with pytest.raises(InputError, match=refusal):
            load(folder, False)
    assert not marker.exists()
    load_own(folder, True)
    assert marker.exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_code_that_a_folder_names_without_holding_it_is_refused(name, tmp_path):
    folder = saved(tmp_path / "odd", llama(vocabulary=SIZE))
    edit(folder / name, {"auto_map": {"AutoConfig": "someone/odd--modeling_odd.OddConfig"}})
    for load in (load_own, *LOADERS):
        with pytest.raises(InputError, match=f"auto_map in {name}: .*model.trust_remote_code"):
            load(folder, False)


def test_trusted_code_goes_along_from_folder_to_folder(tmp_path, modules_cache):
    source = bring_code(saved(tmp_path / "odd", llama(vocabulary=SIZE)), tmp_path / "ran")
    base = saved(tmp_path / "base", *load_own(source, True))
    policy, tokenizer = load_policy(base, "sdpa", CPU, True), load_tokenizer(base, True)
    assert type(policy).__name__ == "OddForCausalLM"
    assert type(tokenizer).__name__ == "OddTokenizerFast"
    sft = saved(tmp_path / "sft", policy, tokenizer)
    rm = saved(tmp_path / "rm", new_scorer(sft, "sdpa", CPU, True), tokenizer)
    assert type(load_scorer(rm, "sdpa", CPU, True)).__name__ == "OddForSequenceClassification"
    for folder in (base, sft, rm):
        for name in CODE:
            assert (folder / name).read_bytes() == (source / name).read_bytes()
    plain = AutoModelForCausalLM.from_pretrained(sft, trust_remote_code=True)
    assert torch.equal(logits_of(plain.eval()), logits_of(policy))


def test_code_from_the_hub_is_refused_or_kept_whole(tmp_path, modules_cache, monkeypatch):
    """The hub is its own cache on this machine: a snapshot of a repository, and no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository, commit = tmp_path / "hub" / "models--me--odd", "a" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    folder = saved(repository / "snapshots" / commit, llama(vocabulary=SIZE))
    bring_code(folder, tmp_path / "ran")
    with pytest.raises(InputError, match="model.trust_remote_code: true would run the code"):
        load_foreign("me/odd", None, False)
    assert not (tmp_path / "ran").exists()
    base = saved(tmp_path / "base", *load_foreign("me/odd", None, True))
    assert [name for name in CODE if not (base / name).is_file()] == []
    assert type(new_scorer(base, "sdpa", CPU, True)).__name__ == "OddForSequenceClassification"


def test_the_code_that_runs_is_the_folders_whatever_lies_in_the_cache(tmp_path, modules_cache):
    folder = bring_code(saved(tmp_path / "odd", llama(vocabulary=SIZE)), tmp_path / "ran")
    before = logits_of(load_policy(folder, "sdpa", CPU, True))
    for file in modules_cache.rglob("modeling_odd.py"):
        file.write_text(file.read_text().replace("SCALE = 1.0", "SCALE = 3.0"))
    forget_code()
    assert torch.equal(logits_of(load_policy(folder, "sdpa", CPU, True)), before)
    code = folder / "modeling_odd.py"
    code.write_text(code.read_text().replace("SCALE = 1.0", "SCALE = 2.0"))
    assert torch.equal(logits_of(load_policy(folder, "sdpa", CPU, True)), 2 * before)


@pytest.mark.usefixtures("modules_cache")
def test_code_without_a_sequence_classifier_gives_no_scorer(tmp_path):
    folder = bring_code(saved(tmp_path / "odd", llama(vocabulary=SIZE)), tmp_path / "ran")
    without = {name: code for name, code in AUTO_MAP.items() if "Sequence" not in name}
    edit(folder / "config.json", {"auto_map": without})
    message = "'OddForCausalLM'. has no class for AutoModelForSequenceClassification: expected one"
    with pytest.raises(InputError, match=message):
        new_scorer(folder, "sdpa", CPU, True)


def test_a_folder_that_holds_no_model_is_refused(tmp_path):
    with pytest.raises(InputError, match="no config.json"):
        load_policy(tmp_path, "sdpa", CPU)
    with pytest.raises(InputError, match="no config.json"):
        load_policy(tmp_path / "absent", "sdpa", CPU)


def test_a_language_model_is_refused_as_scorer(tmp_path):
    folder = saved(tmp_path / "policy", llama(vocabulary=SIZE))
    with pytest.raises(InputError, match="no weight 'score.weight'"):
        load_scorer(folder, "sdpa", CPU)


def test_a_scorer_is_refused_as_policy(tmp_path):
    folder = saved(tmp_path / "rm", llama_scorer(vocabulary=SIZE))
    with pytest.raises(InputError, match="expected a causal language model"):
        load_policy(folder, "sdpa", CPU)


def test_a_classifier_with_two_labels_is_refused_as_scorer(tmp_path):
    torch.manual_seed(0)
    model = llama_scorer(vocabulary=SIZE)
    model.config.num_labels = 2
    folder = saved(tmp_path / "rm", type(model)(model.config))
    with pytest.raises(InputError, match="2 labels, expected one score"):
        load_scorer(folder, "sdpa", CPU)


def test_cut_off_weights_are_refused(tmp_path):
    folder = saved(tmp_path / "policy", llama(vocabulary=SIZE))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(InputError, match="policy"):
        load_policy(folder, "sdpa", CPU)


def test_weights_that_are_missing_or_of_another_shape_are_refused(tmp_path):
    folder = saved(tmp_path / "policy", llama(vocabulary=SIZE))
    weights = load_file(folder / "model.safetensors")
    norm = "model.layers.1.mlp.down_proj.weight"
    save_file(
        {k: v for k, v in weights.items() if k != norm},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(InputError, match="down_proj"):
        load_policy(folder, "sdpa", CPU)
    save_file(
        weights | {norm: weights[norm][:-1].clone()}, folder / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(InputError, match="policy"):
        load_policy(folder, "sdpa", CPU)


# Scorers.


@torch.no_grad()
@each_pad
@each_scorer
def test_a_saved_scorer_keeps_its_head_and_its_scores_bit_for_bit(make, pad_is_eos, tmp_path):
    model = make(vocabulary=SIZE)
    folder = saved(tmp_path / "rm", model, byte_tokenizer(pad_is_eos))
    loaded = load_scorer(folder, "sdpa", CPU)
    assert torch.equal(loaded.score.weight, model.score.weight)
    hidden = [
        m.score(m.base_model(input_ids=IDS, use_cache=False).last_hidden_state)
        for m in (model, loaded)
    ]
    assert torch.equal(*hidden)
    assert loaded.config.num_labels == 1 and not loaded.training


@each_model
def test_a_new_scorer_has_the_policys_backbone_and_one_label(make, tmp_path):
    policy = make(vocabulary=SIZE)
    folder = saved(tmp_path / "policy", policy)
    torch.manual_seed(3)
    first = new_scorer(folder, "sdpa", CPU)
    assert first.score.weight.shape == (1, 32) and first.score.weight.abs().sum() > 0
    assert same_weights(weights_of(first.base_model), weights_of(policy.base_model))
    torch.manual_seed(3)
    assert same_weights(weights_of(new_scorer(folder, "sdpa", CPU)), weights_of(first))
    zero = new_scorer(folder, "sdpa", CPU, zero_head=True)
    assert zero.score.weight.abs().sum() == 0


# Precision.


@each_model
def test_a_checkpoint_in_half_precision_is_trained_in_float32(make, tmp_path):
    policy = make(vocabulary=SIZE).to(torch.bfloat16)
    folder = tmp_path / "half"
    folder.mkdir()
    policy.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"

    loaded = load_policy(folder, "sdpa", CPU)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    before = weights_of(loaded)
    optimizer = adamw(loaded, 1e-5, 0.0)
    for _ in range(20):
        loss = loaded(input_ids=IDS, labels=IDS, use_cache=False).loss
        update(cpu_accelerator(), loaded, optimizer, [loss], 1e-5, 1.0, "stop")
    for state in optimizer.state.values():
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
    trained = {n: p for n, p in loaded.named_parameters() if "embed" not in n and "wte" not in n}
    changed = sum((p != before[n]).sum().item() for n, p in trained.items())
    assert changed > 0.9 * sum(p.numel() for n, p in trained.items() if "wpe" not in n)

    again = load_policy(saved(tmp_path / "trained", loaded), "sdpa", CPU)
    assert torch.equal(logits_of(again), logits_of(loaded))
    assert json.loads((tmp_path / "trained" / "config.json").read_text())["dtype"] == "float32"
    foreign, _ = load_foreign(str(folder), None, False)
    assert {p.dtype for p in foreign.parameters()} == {torch.float32}


# The pad id.


def learned(model, losses) -> dict[str, torch.Tensor]:
    """Weights of a model after a step of AdamW on each loss."""
    optimizer = adamw(model, 1e-2, 0.0)
    for loss in losses:
        update(cpu_accelerator(), model, optimizer, [loss(model)], 1e-2, 1.0, "stop")
    return weights_of(model)


def sft_loss(model):
    """Of two rows of unequal length, in which every id below 8 stands and counts."""
    rows = [{"input_ids": ids, "labels": ids} for ids in ([5, 0, 1, 2, 3, 4, 5], [2, 6, 7, 0])]
    return micro_batch_loss(model, rows, 9)


def score_loss(model):
    return scores(model, [[5, 0, 1], [2]], [[2, 3, 4], [6, 7]]).sum()


@pytest.mark.parametrize("pad", [0, 2, 5, 200])
@pytest.mark.parametrize("tied", [True, False])
def test_n15_weights_after_sft_do_not_depend_on_which_id_pads(tied, pad, tmp_path):
    model, tokenizer = llama(vocabulary=SIZE, tied=tied), byte_tokenizer()
    before = weights_of(model)["model.embed_tokens.weight"]
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    loaded = load_policy(saved(tmp_path / "base", model, tokenizer), "sdpa", CPU)
    assert loaded.config.pad_token_id == pad
    found = learned(loaded, [sft_loss, sft_loss])
    assert same_weights(found, learned(model, [sft_loss, sft_loss]))
    moved = (found["model.embed_tokens.weight"] - before).abs().amax(1)[:8]
    assert (moved > 1e-3).all()


@pytest.mark.parametrize("pad", [0, 2, 200])
def test_n15_nor_do_those_of_a_reward_model_or_critic(pad, tmp_path):
    policy, tokenizer = llama(vocabulary=SIZE), byte_tokenizer()
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    folder = saved(tmp_path / "base", policy, tokenizer)
    torch.manual_seed(3)
    scorer = new_scorer(folder, "sdpa", CPU)
    loaded = load_scorer(saved(tmp_path / "rm", scorer, tokenizer), "sdpa", CPU)
    plain = llama_scorer(vocabulary=SIZE)  # knows of no pad id
    plain.load_state_dict(scorer.state_dict())
    expected = learned(plain, [score_loss, score_loss])
    assert same_weights(learned(scorer, [score_loss, score_loss]), expected)
    assert same_weights(learned(loaded, [score_loss, score_loss]), expected)


def test_n15_the_embedding_of_a_foreign_models_pad_id_learns(tmp_path):
    folder = saved(tmp_path / "base", llama(vocabulary=SIZE, tied=False))
    loaded, _ = load_foreign(str(folder), None, False)
    before = weights_of(loaded)["model.embed_tokens.weight"]
    found = learned(loaded, [sft_loss])["model.embed_tokens.weight"]
    assert loaded.config.pad_token_id == 0 and (found[0] != before[0]).any()


def test_a_policy_read_in_bf16_samples_log_probs_that_a_step_under_autocast_finds_again(tmp_path):
    """The ratio at the first step is 1 but for bf16's rounding: of a state, then of the logits."""
    folder = saved(tmp_path / "policy", llama(vocabulary=SIZE))
    reader = load_policy(folder, "sdpa", CPU, precision="bf16")
    trained = load_policy(folder, "sdpa", CPU)
    assert {p.dtype for p in reader.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in trained.parameters()} == {torch.float32}
    prompts = [[5, 6, 7, 8], [9, 10]]
    uniform = torch.rand(2, 8, 24, generator=torch.Generator().manual_seed(0))
    settings = Sampling(1.0, 1.0, 0, 0.0, 24, (2,))
    with torch.autocast("cpu", torch.bfloat16):
        drawn = sample(reader, prompts, uniform, settings)
        rows = [
            {"prompt_ids": prompts[place // 8], "completion_ids": completion.ids}
            for place, completion in enumerate(drawn)
        ]
        again = reference_log_probs(trained, rows, 1.0)
    old = torch.tensor([value for completion in drawn for value in completion.log_probs])
    ratios = (torch.tensor([value for row in again for value in row]) - old).exp()
    assert 0 < (ratios - 1).abs().max() < 0.1
    assert (ratios - 1).abs().mean() < 0.02 and abs(ratios.mean() - 1) < 0.005
