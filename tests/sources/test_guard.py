"""Which route a model takes, and that by each route what is sampled is what plain rows give."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stages.models.forward import ROUTE, completion_states, head_logits
from stages.models.log_probs import token_log_probs
from stages.rollouts.sampling import Sampling, sample
from stages.sources import guard
from stages.sources.guard import find_route
from tests.helpers.architectures import seeded
from tests.helpers.models import gpt2, llama, plain_log_probs, random_ids, sliding_mistral

ROUTES = {"Llama": "shared", "Mistral": "padded", "Mpt": "padded", "GPTNeo": "padded"}
ROUTES |= {"Jamba": "unpadded", "Mamba": "unpadded", "OpenAIGPT": "uncached"}
# N03: one opening, then rests of very unequal length, beyond a window of 5.
OPENING = [3, 9, 27, 33, 1]
PROMPTS = [OPENING + rest for rest in random_ids(2, 1, 17, 2, 9, 2)]
COMPLETIONS = random_ids(3, 4, 1, 6, 2, 3)


def settings(**options) -> Sampling:
    plain = {"temperature": 0.8, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return Sampling(**plain | {"max_new_tokens": 8, "stop_ids": (4, 11, 30)} | options)


def on_route(name: str):
    """A model whose config carries the route that was found for another copy of it."""
    model = seeded(name, 48)
    setattr(model.config, ROUTE, find_route(seeded(name, 48)))
    return model


@pytest.mark.parametrize("name", ROUTES)
def test_n03_the_fastest_route_that_is_right_is_found_and_gives_plain_log_probs(name):
    model = on_route(name)
    assert getattr(model.config, ROUTE) == ROUTES[name]
    draws = torch.rand(len(PROMPTS), 3, 8, generator=torch.Generator().manual_seed(0))
    for number, row in enumerate(sample(model, PROMPTS, draws, settings())):
        with torch.no_grad():
            wanted = plain_log_probs(model, PROMPTS[number // 3], row.ids, 0.8)
        torch.testing.assert_close(torch.tensor(row.log_probs), wanted, rtol=0, atol=1e-4)
    with torch.no_grad():
        states = completion_states(model.base_model, PROMPTS, COMPLETIONS)
        found = token_log_probs(head_logits(model, states.hidden), states.ids, 1.0)
        for row, prompt, completion in zip(found, PROMPTS, COMPLETIONS, strict=True):
            wanted = plain_log_probs(model, prompt, completion)
            torch.testing.assert_close(row[: len(completion)], wanted, rtol=0, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", ROUTES)
def test_greedy_answers_are_those_of_generate_for_each_prompt_alone(name):
    model = on_route(name)
    found = sample(model, PROMPTS, None, settings(stop_ids=()))
    for prompt, row in zip(PROMPTS, found, strict=True):
        ids = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=8, eos_token_id=None
        )
        assert row.ids == ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ROUTES)
def test_samples_come_in_the_order_of_the_prompts_whatever_their_batch_mates(name):
    model = on_route(name)
    draws = torch.rand(len(PROMPTS), 2, 8, generator=torch.Generator().manual_seed(1))
    together = sample(model, PROMPTS, draws, settings())
    for place in range(len(PROMPTS)):
        alone = sample(model, PROMPTS[place : place + 1], draws[place : place + 1], settings())
        assert [row.ids for row in alone] == [
            row.ids for row in together[2 * place : 2 * place + 2]
        ]


def test_no_wrong_route_passes(monkeypatch):
    """The shared route is offered to models that it is wrong for; the guard alone stands then."""
    monkeypatch.setattr(guard, "can_share", lambda backbone: True)
    for name in ("Mistral", "Gemma3Text", "Mpt", "GPTNeo", "Olmo3"):
        assert find_route(seeded(name, 48)) == "padded"


def test_rows_reach_beyond_a_real_window():
    """GPT-Neo's local layers look back 40 tokens: rows of 14 do not show what sharing breaks."""
    model = seeded("GPTNeo", 48, window_size=40)
    assert find_route(model) == "padded"


def test_a_window_that_is_too_long_to_try_takes_the_route_that_pads_nothing(monkeypatch):
    monkeypatch.setattr(guard, "AFFORDABLE", 1e5)
    assert find_route(seeded("Mistral", 48, sliding_window=40)) == "unpadded"


def test_weights_of_zero_hide_nothing(monkeypatch):
    """A fresh model whose attention writes nothing yet would pass on every route."""
    monkeypatch.setattr(guard, "can_share", lambda backbone: True)
    model = sliding_mistral()
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    assert find_route(model) == "padded"


@pytest.mark.parametrize("make", [llama, gpt2])
def test_the_trial_draws_nothing_from_the_global_generator(make):
    model, before = make(), torch.get_rng_state()
    assert find_route(model) == "shared"
    assert torch.equal(torch.get_rng_state(), before)


class ReadsAhead(LlamaForCausalLM):
    def forward(self, input_ids, **more):
        output = super().forward(input_ids, **more)
        output.logits = output.logits + input_ids.float().mean()
        output.logits[..., 0] += input_ids.shape[1]
        return output


class ChangesItself(LlamaForCausalLM):
    def forward(self, *args, **more):
        with torch.no_grad():
            self.lm_head.weight.mul_(1.0)
        return super().forward(*args, **more)


def tiny(kind):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    return kind(LlamaConfig(**sizes, num_attention_heads=2, initializer_range=0.3)).eval()


def test_what_no_route_fits_is_refused(monkeypatch):
    monkeypatch.setattr(guard, "check_head", lambda model: None)
    with pytest.raises(ValueError, match="not causal"):
        find_route(tiny(ReadsAhead))
    with pytest.raises(ValueError, match="a forward pass changes its weights"):
        find_route(tiny(ChangesItself))


def test_a_cap_that_shows_only_in_large_logits_is_found():
    class Capped(LlamaForCausalLM):
        def forward(self, *args, **more):
            output = super().forward(*args, **more)
            output.logits = 1000 * torch.tanh(output.logits / 1000)
            return output

    with pytest.raises(ValueError, match="does more after its backbone"):
        find_route(tiny(Capped))
