"""What a round continues from: optimizers, counters and the critic beside a policy."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from stages.base.errors import InputError
from stages.models.checkpoints import load_policy, load_scorer
from stages.models.trainer_state import (
    TrainerState,
    load_optimizer,
    load_trainer,
    policy_bytes,
    save_optimizer,
    save_policy,
)
from stages.training.steps import adamw, update
from tests.helpers.models import (
    byte_tokenizer,
    cpu_accelerator,
    gpt2,
    llama,
    llama_scorer,
    same_weights,
    saved,
    weights_of,
)

CPU = torch.device("cpu")
IDS = torch.tensor([[3, 9, 27, 1, 250]])
SIZE = len(byte_tokenizer())


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


@pytest.mark.parametrize("weights", ["float32", "bf16"])
@pytest.mark.parametrize("moments", ["float32", "bf16", "none"])
def test_what_is_kept_has_the_precision_asked_for_and_the_size_foretold(weights, moments, tmp_path):
    policy, critic = llama(vocabulary=SIZE), llama_scorer(vocabulary=SIZE, seed=5)
    optimizer = adamw(policy, 1e-2, 0.0)
    stepped(policy, optimizer, 2)
    pairs = {"policy": (optimizer, policy), "critic": (adamw(critic, 1e-2, 0.0), critic)}
    told = policy_bytes([policy, critic], weights, moments)
    was = weights_of(policy)
    exact = {n: dict(optimizer.state[p]) for n, p in policy.named_parameters()}
    save_policy(
        tmp_path / "1", policy, byte_tokenizer(), TrainerState(5, 6, [1]), pairs, critic,
        weights, moments,
    )  # fmt: skip

    tensors = [load_file(path) for path in (tmp_path / "1").rglob("*.safetensors")]
    size = sum(t.nbytes for file in tensors for t in file.values())
    steps = 4 * len([n for file in tensors for n in file if n.endswith("/step")])
    assert size - steps == told
    rounded = torch.bfloat16 if weights == "bf16" else torch.float32
    loaded = load_policy(tmp_path / "1", "sdpa", CPU)
    assert same_weights(weights_of(loaded), {n: w.to(rounded).float() for n, w in was.items()})
    found = load_trainer(tmp_path / "1")
    assert (found.step, found.prompt_cursor, found.rounds) == (5, 6, [1])
    assert sorted(found.optimizers) == ([] if moments == "none" else ["critic", "policy"])
    assert load_scorer(found.critic, "sdpa", CPU).score.weight.dtype == torch.float32
    if moments == "none":
        return
    again = adamw(loaded, 1e-2, 0.0)
    load_optimizer(found.optimizers["policy"], again, loaded)
    kept = torch.bfloat16 if moments == "bf16" else torch.float32
    for name, parameter in loaded.named_parameters():
        state = again.state[parameter]
        assert torch.equal(state["step"], exact[name]["step"])
        for entry in ("exp_avg", "exp_avg_sq"):
            assert state[entry].dtype == torch.float32
            assert torch.equal(state[entry], exact[name][entry].to(kept).float())


def test_moments_that_state_json_says_were_dropped_are_not_read(tmp_path):
    policy = llama(vocabulary=SIZE)
    pairs = {"policy": (adamw(policy, 1e-2, 0.0), policy)}
    save_policy(tmp_path / "1", policy, byte_tokenizer(), TrainerState(3), pairs, None)
    state = tmp_path / "1" / "trainer" / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"moments": "none"}))
    assert load_trainer(tmp_path / "1") == TrainerState(3)


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
