import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages.base.errors import InputError
from stages.base.files import replacing
from stages.base.tokenizers import load_tokenizer
from stages.models.checkpoints import (
    TrainerState,
    load_foreign,
    load_optimizer,
    load_policy,
    load_scorer,
    load_trainer,
    new_scorer,
    save_model,
    save_optimizer,
    save_policy,
)
from stages.text.chat import stop_token_ids
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


def saved(folder, model, tokenizer=None):
    with replacing(folder, folder=True) as temporary:
        save_model(temporary, model, tokenizer or byte_tokenizer())
    return folder


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


# The training state.


def stepped(model, optimizer, steps: int) -> None:
    for number in range(steps):
        loss = model(input_ids=IDS.roll(number), use_cache=False).logits.square().mean()
        update(cpu_accelerator(), model, optimizer, [loss], 1e-2, 1.0, "stop")


@pytest.mark.parametrize("make", [llama, gpt2, llama_scorer])
def test_an_optimizer_continues_from_its_saved_state_bit_for_bit(make, tmp_path):
    model = make(vocabulary=SIZE)
    optimizer = adamw(model, 1e-2, 0.1)
    stepped(model, optimizer, 3)
    save_optimizer(tmp_path / "policy.safetensors", optimizer, model)
    at_save = weights_of(model)
    stepped(model, optimizer, 2)
    wanted = weights_of(model)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(at_save[name])
    resumed = adamw(model, 1e-2, 0.1)
    load_optimizer(tmp_path / "policy.safetensors", resumed, model)
    stepped(model, resumed, 2)
    assert same_weights(weights_of(model), wanted)
    fresh = adamw(model, 1e-2, 0.1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(at_save[name])
    stepped(model, fresh, 2)
    assert not same_weights(weights_of(model), wanted)


@pytest.fixture
def state_file(tmp_path):
    """Model, and the file of its optimizer after one step."""
    model = llama(vocabulary=SIZE)
    optimizer = adamw(model, 1e-2, 0.0)
    stepped(model, optimizer, 1)
    save_optimizer(tmp_path / "policy.safetensors", optimizer, model)
    return model, tmp_path / "policy.safetensors"


def refuses(model, path, match="policy.safetensors"):
    with pytest.raises(InputError, match=match):
        load_optimizer(path, adamw(model, 1e-2, 0.0), model)


@pytest.mark.parametrize("kept", [0, 4, 100, -1000])
def test_a_cut_off_optimizer_state_is_refused(state_file, kept):
    model, path = state_file
    path.write_bytes(path.read_bytes()[:kept])
    refuses(model, path)


def test_an_optimizer_state_of_another_shape_is_refused(state_file):
    _, path = state_file
    refuses(llama(vocabulary=SIZE + 1), path)
    refuses(gpt2(vocabulary=SIZE), path)


@pytest.mark.parametrize("entry", ["exp_avg", "exp_avg_sq", "step"])
def test_an_optimizer_state_that_lacks_an_entry_is_refused(state_file, entry):
    model, path = state_file
    tensors = load_file(path)
    tensors.pop(f"model.norm.weight/{entry}")
    save_file(tensors, path)
    refuses(model, path, match=f"model.norm.weight.*{entry}")


def test_an_optimizer_state_that_lacks_a_parameter_is_refused(state_file):
    model, path = state_file
    tensors = {k: v for k, v in load_file(path).items() if not k.startswith("model.norm.weight/")}
    save_file(tensors, path)
    refuses(model, path, match="model.norm.weight")


@pytest.mark.parametrize("frozen", [False, True], ids=["unused", "frozen"])
def test_parameters_without_a_gradient_so_far_continue_as_well(frozen, tmp_path):
    def network():
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({"used": torch.nn.Linear(3, 2), "late": torch.nn.Linear(2, 2)})
        model["late"].requires_grad_(not frozen)
        return model

    def train(model, optimizer, late):
        for _ in range(2):
            hidden = model["used"](torch.tensor([1.0, 2.0, 3.0]))
            loss = (model["late"](hidden) if late else hidden).square().sum()
            update(cpu_accelerator(), model, optimizer, [loss], 1e-2, 1.0, "stop")

    model = network()
    optimizer = adamw(model, 1e-2, 0.1)
    train(model, optimizer, late=False)
    save_optimizer(tmp_path / "policy.safetensors", optimizer, model)
    other = network()
    other.load_state_dict(model.state_dict())
    resumed = adamw(other, 1e-2, 0.1)
    load_optimizer(tmp_path / "policy.safetensors", resumed, other)
    train(model, optimizer, late=True)
    train(other, resumed, late=True)
    assert same_weights(weights_of(other), weights_of(model))


def test_a_policy_is_saved_with_its_trainer_and_loads_with_it(tmp_path):
    policy, critic = llama(vocabulary=SIZE), llama_scorer(vocabulary=SIZE, seed=5)
    optimizer = adamw(policy, 1e-2, 0.0)
    stepped(policy, optimizer, 1)
    state = TrainerState(step=7, prompt_cursor=40, rounds=[1, 3])
    pairs = {"policy": (optimizer, policy), "critic": (adamw(critic, 1e-2, 0.0), critic)}
    save_policy(tmp_path / "1", policy, byte_tokenizer(), state, pairs, critic)

    found = load_trainer(tmp_path / "1")
    assert (found.step, found.prompt_cursor, found.rounds) == (7, 40, [1, 3])
    assert sorted(found.optimizers) == ["critic", "policy"]
    loaded = load_scorer(found.critic, "sdpa", CPU)
    assert same_weights(weights_of(loaded), weights_of(critic))
    assert same_weights(weights_of(load_policy(tmp_path / "1", "sdpa", CPU)), weights_of(policy))
    assert len(AutoTokenizer.from_pretrained(tmp_path / "1")) == SIZE
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


@pytest.mark.parametrize("name", ["policy", "critic"])
def test_a_trainer_that_lost_an_optimizer_state_is_refused(name, tmp_path):
    policy, critic = llama(vocabulary=SIZE), llama_scorer(vocabulary=SIZE)
    models = {"policy": policy, "critic": critic}
    pairs = {key: (adamw(model, 1e-2, 0.0), model) for key, model in models.items()}
    save_policy(tmp_path / "1", policy, byte_tokenizer(), TrainerState(), pairs, critic)
    (tmp_path / "1" / "trainer" / f"{name}.safetensors").unlink()
    with pytest.raises(InputError, match=f"no {name}.safetensors"):
        load_trainer(tmp_path / "1")


def test_a_policy_without_a_trainer_starts_afresh(tmp_path):
    found = load_trainer(saved(tmp_path / "sft", llama(vocabulary=SIZE)))
    assert found == TrainerState(0, 0, [], None, {})


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"step": 1}', '{"step": null}'])
def test_a_broken_trainer_state_is_refused(text, tmp_path):
    folder = saved(tmp_path / "1", llama(vocabulary=SIZE))
    (folder / "trainer").mkdir()
    (folder / "trainer" / "state.json").write_text(text)
    with pytest.raises(InputError, match="state.json"):
        load_trainer(folder)


def test_a_failed_save_leaves_the_old_policy_and_nothing_else(tmp_path):
    policy = llama(vocabulary=SIZE)
    pairs = {"policy": (adamw(policy, 1e-2, 0.0), policy)}
    save_policy(tmp_path / "1", policy, byte_tokenizer(), TrainerState(step=1), pairs, None)
    with pytest.raises(InputError, match="embeds only"):
        save_policy(
            tmp_path / "1", llama(vocabulary=9), byte_tokenizer(), TrainerState(step=2), {}, None
        )
    assert load_trainer(tmp_path / "1").step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
