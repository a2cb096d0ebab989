import pytest
import torch

from stages.rollouts.sampling import Sampling, sample
from stages.sources import tiny
from stages.text.chat import encode_conversations, encode_prompts, stop_token_ids
from stages.training.sft import micro_batch_loss, predicted

NOTHING_AFTER = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}" + (
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TALKS = [("sun", "nus"), ("a", "a"), ("moon", "noom")]


@pytest.mark.parametrize("template", [tiny.CHATML, NOTHING_AFTER], ids=["ChatML", "no turn end"])
def test_c06_three_rows_learned_by_heart_are_said_and_ended_before_the_cap(template):
    tokenizer = tiny.byte_tokenizer(64)
    tokenizer.chat_template = template
    torch.manual_seed(0)
    model = tiny.random_llama(tokenizer, 32, 64, 2, 2, 64, 0.06, 0.0)
    chats = [
        [{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in TALKS
    ]
    encoded = encode_conversations(tokenizer, chats, "last_assistant", None)
    rows = [{"input_ids": row.input_ids, "labels": row.labels} for row in encoded]
    count = sum(predicted(row["labels"]) for row in rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(120):
        loss = micro_batch_loss(model, rows, count)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    stops = tuple(stop_token_ids(tokenizer, None))
    prompts = encode_prompts(tokenizer, [chat[:1] for chat in chats])
    answers = sample(model.eval(), prompts, None, Sampling(1.0, 1.0, 0, 0.0, 12, stops))
    for (_, wanted), answer in zip(TALKS, answers, strict=True):
        assert answer.finished and answer.ids[-1] in stops
        assert tokenizer.decode(answer.ids, skip_special_tokens=True) == wanted
