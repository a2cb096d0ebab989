"""Ids and label masks for chat templates of every sort.

Expected texts are written out by hand; expected ids come from the tokenizer's own template call, or
from tokenizing hand-split pieces. Cases named Cxx are those of the project's list of faults.
"""

import json
import random
from itertools import groupby, pairwise

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from stages.base.errors import InputError
from stages.text import templates
from stages.text.chat import (
    IGNORED,
    Dropped,
    Encoded,
    EncodedPair,
    encode_conversation,
    encode_conversations,
    encode_pair,
    encode_pairs,
    encode_prompts,
    encode_text,
    encode_texts,
    prompt_ids,
    stop_token_ids,
)
from stages.text.templates import tools_unseen
from tests.helpers.shared import SHARED

DATA = SHARED / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no trial data at {DATA}")

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "</s>",
    "<bos>",
    "<eos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<|call|>",
]

CORPUS = [
    "the answer is forty two because two and forty make the answer",
    "def f(x):\n    return x",
]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_CALLS = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}",
)
# A system turn of its own, and EOS = pad = the turn end.
SMOLLM2 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are SmolLM<|im_end|>\n{% endif %}"
) + CHATML
CHATML_WITHOUT_FLAG = CHATML.partition("{% if add_generation_prompt")[0]
CHATML_GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}"
    "{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content.strip() }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content.strip() }} {{ eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    "{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# As Qwen3's: reasoning of turns before the last question is dropped, the others get a block.
QWEN3 = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}"
    "{% set text = m.content %}{% set thought = m.reasoning_content or '' %}"
    "{% if not thought and '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "<think>\n{{ thought.strip('\n') }}\n</think>\n\n{{ text.lstrip('\n') }}"
    "{% else %}{{ text }}{% endif %}"
    "{% for call in m.tool_calls or [] %}"
    "{% if loop.index0 or text %}\n{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}"
    "<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# An empty block before every answer that does not open one itself.
NAIVE_REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and '<think>' not in m.content %}"
    "<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPEN_HEADER = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
EMPTY_BLOCK_HEADER = CHATML.replace(
    "assistant\n{% endif", "assistant\n<think>\n\n</think>\n\n{% endif"
)
NO_TURN_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
NOTHING_AFTER = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}" + (
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
EOS_ONLY_AT_THE_END = NOTHING_AFTER.replace(
    "{% if", "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}{% if", 1
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)


def byte_tokenizer(template, *, eos="<|endoftext|>", bos=None, merges=0, trim=False, **options):
    """Byte-level BPE; with `merges`, words of CORPUS and runs of white space become one token."""
    raw = Tokenizer(models.BPE())
    pattern = options.pop("pattern", None)
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)
    if pattern:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        raw.pre_tokenizer = pre_tokenizers.Sequence([split, raw.pre_tokenizer])
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(SPECIAL) + merges,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [text + blank for text in CORPUS for blank in ("\n\n", "  ", "\n\n\n\n", "    ")]
    raw.train_from_iterator(corpus * 3 + ["\n\n"] * 50, trainer)
    if trim:
        raw.post_processor = processors.ByteLevel(trim_offsets=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=eos, bos_token=bos, chat_template=template, **options
    )


def llama_tokenizer(template):
    """SentencePiece-like: spaces as ▁, byte fallback, a BOS added to plain text."""
    raw = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", "<s>", "</s>", *fallback],
        initial_alphabet=list("abcdefghijklmnopqrstuvwxyz[]/INST0123456789:"),
        show_progress=False,
    )
    raw.train_from_iterator([f" {text} [INST] [/INST]" for text in CORPUS] * 3, trainer)
    raw.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", raw.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="</s>", bos_token="<s>", chat_template=template
    )


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def talk(*contents):
    """Turns of user and assistant, in turn."""
    roles = ("user", "assistant")
    return [said(roles[number % 2], content) for number, content in enumerate(contents)]


def full_ids(tokenizer, messages):
    call = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)
    return call["input_ids"]


def trained(tokenizer, row):
    """Text of each run of trained tokens; checks on the way that labels are ids or -100."""
    assert isinstance(row, Encoded), row
    assert len(row.labels) == len(row.input_ids)
    assert all(
        label in (IGNORED, index) for label, index in zip(row.labels, row.input_ids, strict=True)
    )
    runs = groupby(row.labels, key=lambda label: label != IGNORED)
    return [tokenizer.decode(list(run)) for is_trained, run in runs if is_trained]


def untrained_front(row):
    return next(index for index, label in enumerate(row.labels) if label != IGNORED)


def last(tokenizer, messages, max_length=None):
    return encode_conversation(tokenizer, messages, "last_assistant", max_length)


def every(tokenizer, messages, max_length=None):
    return encode_conversation(tokenizer, messages, "all_assistants", max_length)


# C01 -----------------------------------------------------------------------------------------


def test_c01_prompt_ids_are_the_ids_of_the_prompt_with_its_header():
    tokenizer = byte_tokenizer(CHATML)
    ids = prompt_ids(tokenizer, talk("hello"))
    # 1 + "user\n" + "hello" + 1 + "\n" + 1 + "assistant\n" as bytes
    assert len(ids) == 1 + 5 + 5 + 1 + 1 + 1 + 10
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert ids == tokenizer(text)["input_ids"]


@pytest.mark.parametrize("length", [1, 2, 20, 300])
def test_c01_as_many_labels_are_ignored_as_the_prompt_has_ids(length):
    tokenizer = byte_tokenizer(CHATML)
    row = last(tokenizer, talk("x" * length, "yes"))
    ids = prompt_ids(tokenizer, talk("x" * length))
    assert untrained_front(row) == len(ids) == length + 19
    assert row.input_ids[: len(ids)] == ids
    assert row.route == "prefix"


# C02 -----------------------------------------------------------------------------------------


def test_c02_a_header_of_several_tokens_is_not_trained():
    tokenizer = byte_tokenizer(CHATML, merges=60)
    row = last(tokenizer, talk("the answer", "forty two"))
    assert trained(tokenizer, row) == ["forty two<|im_end|>"]
    assert row.input_ids == full_ids(tokenizer, talk("the answer", "forty two"))


def test_c02_a_template_that_takes_no_notice_of_the_flag_still_prompts_with_the_header():
    with_flag, without = byte_tokenizer(CHATML), byte_tokenizer(CHATML_WITHOUT_FLAG)
    messages = talk("q", "a", "q2", "a2")
    assert prompt_ids(without, messages[:3]) == prompt_ids(with_flag, messages[:3])
    assert trained(without, every(without, messages)) == ["a<|im_end|>", "a2<|im_end|>"]


@pytest.mark.parametrize("answer", ["five", "<think>", "<thick paste", "assistant\nfive"])
def test_c02_a_header_that_the_full_render_lacks_eats_nothing_of_the_answer(answer):
    tokenizer = byte_tokenizer(EMPTY_BLOCK_HEADER, merges=60, trim=True)
    messages = talk("two and three", answer)
    row = last(tokenizer, messages)
    assert trained(tokenizer, row) == [f"{answer}<|im_end|>"]
    assert row.input_ids == full_ids(tokenizer, messages)
    assert row.route == "offsets"


@pytest.mark.parametrize(
    "answer",
    [
        said("assistant", "<think>\nplan\n</think>\n\nresult"),
        said("assistant", "result", reasoning_content="plan"),
    ],
)
def test_c02_reasoning_behind_a_closed_header_is_trained_with_its_opening_tag(answer):
    tokenizer = byte_tokenizer("{% set enable_thinking = false %}" + QWEN3)
    assert tokenizer.decode(prompt_ids(tokenizer, talk("q"))).endswith("<think>\n\n</think>\n\n")
    row = last(tokenizer, [said("user", "q"), answer])
    assert trained(tokenizer, row) == ["<think>\nplan\n</think>\n\nresult<|im_end|>"]
    assert row.route == "offsets"


def test_c02_white_space_that_a_tokenizer_splits_by_what_follows_still_gives_exact_masks():
    # The prompt alone ends in one token "\n\n"; before a word the same text is two tokens.
    template = CHATML.replace("assistant\n{% endif", "assistant\n\n{% endif").replace(
        "{{ m.role }}\n{{", "{{ m.role }}{{ '\n\n' if m.role == 'assistant' else '\n' }}{{"
    )
    tokenizer = byte_tokenizer(template, merges=60, trim=True)
    row = last(tokenizer, talk("q", "five"))
    assert prompt_ids(tokenizer, talk("q")) != row.input_ids[: untrained_front(row)]
    assert trained(tokenizer, row) == ["five<|im_end|>"]
    assert row.route == "offsets"


@pytest.mark.parametrize("trim", [False, True])
def test_c02_a_token_across_the_border_drops_the_row_whatever_the_offsets_leave_out(trim):
    # The header ends with a space which belongs to the first word of the answer.
    template = CHATML.replace("<|im_start|>{{ m.role }}\n", "{{ m.role }}: ").replace(
        "<|im_start|>assistant\n", "assistant: "
    )
    tokenizer = byte_tokenizer(template, merges=60, trim=trim)
    row = last(tokenizer, talk("q", "the answer"))
    assert row == Dropped("a token spans the border between prompt and answer")
    assert trained(tokenizer, last(tokenizer, talk("q", "!"))) == ["!<|im_end|>"]


@pytest.mark.parametrize(
    "template", [CHATML, SMOLLM2, LLAMA2, GEMMA, QWEN3, NO_TURN_END, NOTHING_AFTER, PHI, None]
)
@pytest.mark.parametrize("merges", [0, 60])
def test_c02_prompt_ids_are_the_same_in_sft_preferences_and_rollout(template, merges):
    tokenizer = byte_tokenizer(template, merges=merges, trim=bool(merges), bos="<s>")
    prompt = talk("the first", "forty", "and two?")
    rollout = prompt_ids(tokenizer, prompt)
    assert rollout == encode_prompts(tokenizer, [talk("other"), prompt])[1]
    row = last(tokenizer, [*prompt, said("assistant", "forty two")])
    pair = encode_pair(
        tokenizer, prompt, [said("assistant", "forty two")], [said("assistant", "no")], None
    )
    assert row.route == pair.route == "prefix"
    assert row.input_ids[: untrained_front(row)] == rollout == pair.prompt_ids


# C03 -----------------------------------------------------------------------------------------

PLAN_1, PLAN_2 = "<think>\nplan one\n</think>\n\nfirst", "<think>\nplan two\n</think>\n\nsecond"


def test_c03_reasoning_dropped_from_earlier_turns_leaves_ids_and_mask_in_step():
    tokenizer = byte_tokenizer(QWEN3, merges=60, trim=True)
    messages = talk("q1", PLAN_1, "q2", PLAN_2)
    row = every(tokenizer, messages)
    assert row.input_ids == full_ids(tokenizer, messages)
    assert trained(tokenizer, row) == ["first<|im_end|>", f"{PLAN_2}<|im_end|>"]
    assert trained(tokenizer, last(tokenizer, messages)) == [f"{PLAN_2}<|im_end|>"]


def test_c03_reasoning_in_a_field_of_its_own_is_trained_like_reasoning_in_the_text():
    tokenizer = byte_tokenizer(QWEN3)
    apart = [said("user", "q"), said("assistant", "first", reasoning_content="plan one")]
    assert last(tokenizer, apart) == last(tokenizer, talk("q", PLAN_1))


@pytest.mark.parametrize("template", [QWEN3, NAIVE_REASONING, OPEN_HEADER])
def test_c03_an_answer_with_only_the_closing_tag_gets_no_empty_block_before_it(template):
    tokenizer = byte_tokenizer(template)
    row = last(tokenizer, talk("q", "plan one\n</think>\n\nfirst"))
    shown = tokenizer.decode(row.input_ids)
    assert shown.count("<think>") == shown.count("</think>") == 1
    assert "<think>\nplan one\n</think>\n\nfirst<|im_end|>" in shown
    lost = "<think>\n" if template == OPEN_HEADER else ""  # it stands in the prompt
    assert trained(tokenizer, row) == [f"{PLAN_1}<|im_end|>".removeprefix(lost)]
    assert row.route == "prefix"


def test_c03_a_template_without_reasoning_leaves_the_text_as_it_is():
    tokenizer = byte_tokenizer(CHATML)
    row = last(tokenizer, talk("q", "plan</think>first"))
    assert trained(tokenizer, row) == ["plan</think>first<|im_end|>"]


def test_c03_assistant_turns_in_a_row_are_told_apart():
    tokenizer = byte_tokenizer(QWEN3)
    messages = [*talk("q1", PLAN_1), said("assistant", PLAN_2)]
    row = every(tokenizer, messages)
    assert row.input_ids == full_ids(tokenizer, messages)
    assert trained(tokenizer, row) == [f"{PLAN_1}<|im_end|>", f"{PLAN_2}<|im_end|>"]


# C06 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "stop"),
    [
        (CHATML, "<|im_end|>"),
        (LLAMA2, "<|endoftext|>"),
        (GEMMA, "<end_of_turn>"),
        (QWEN3, "<|im_end|>"),
        (NO_TURN_END, "<|endoftext|>"),
        (NOTHING_AFTER, "<|endoftext|>"),
        (EOS_ONLY_AT_THE_END, "<|endoftext|>"),
        (PHI, "<|end|>"),
        (None, "<|endoftext|>"),
    ],
)
@pytest.mark.parametrize("answer", ["forty two", "x"])
def test_c06_a_row_ends_with_one_trained_stop_token_at_which_rollouts_stop(template, stop, answer):
    tokenizer = byte_tokenizer(template, bos="<s>", merges=60)
    stops = stop_token_ids(tokenizer, None)
    index = tokenizer.convert_tokens_to_ids(stop)
    assert set(stops) == {index, tokenizer.eos_token_id}
    for train_on in ("last_assistant", "all_assistants"):
        row = encode_conversation(tokenizer, talk("q", answer), train_on, None)
        labels = [label for label in row.labels if label != IGNORED]
        assert labels[-1] == index
        assert sum(label in stops for label in labels) == 1
        full = full_ids(tokenizer, talk("q", answer)) if template else row.input_ids
        appended = [] if tokenizer.eos_token_id in full or index in full else [index]
        assert row.input_ids == full + appended


def test_c06_what_follows_the_stop_token_is_kept_but_not_trained():
    tokenizer = byte_tokenizer(PHI)
    row = last(tokenizer, talk("q", "a"))
    assert tokenizer.decode(row.input_ids).endswith("a<|end|>\n<|endoftext|>")
    assert row.labels[-2:] == [IGNORED, IGNORED]
    assert trained(tokenizer, row) == ["a<|end|>"]


def test_c06_a_turn_without_an_end_of_its_own_does_not_run_into_the_next_question():
    tokenizer = byte_tokenizer(EOS_ONLY_AT_THE_END)
    row = every(tokenizer, talk("q1", "first", "q2", "second"))
    assert trained(tokenizer, row) == ["first", "second<|endoftext|>"]
    tokenizer = byte_tokenizer(NO_TURN_END, merges=60, trim=True)
    row = every(tokenizer, talk("q1", "first", "q2", "second"))
    assert trained(tokenizer, row) == [" first", " second\n<|endoftext|>"]


def test_c06_eos_may_be_the_turn_end_and_the_pad_token():
    tokenizer = byte_tokenizer(SMOLLM2, eos="<|im_end|>", pad_token="<|im_end|>")
    row = every(tokenizer, talk("q", "a", "r", "b"))
    assert row.input_ids == full_ids(tokenizer, talk("q", "a", "r", "b"))
    assert trained(tokenizer, row) == ["a<|im_end|>", "b<|im_end|>"]
    assert stop_token_ids(tokenizer, tokenizer.eos_token_id) == [tokenizer.eos_token_id]
    assert prompt_ids(tokenizer, talk("q")) == row.input_ids[: untrained_front(row)]


def test_c06_stop_tokens_are_eos_and_what_the_generation_config_lists_and_the_turn_end():
    tokenizer = byte_tokenizer(CHATML)
    eos, end = (tokenizer.convert_tokens_to_ids(t) for t in ("<|endoftext|>", "<|im_end|>"))
    assert stop_token_ids(tokenizer, eos) == [eos, end]
    assert stop_token_ids(tokenizer, [7, eos]) == [eos, end, 7]
    assert stop_token_ids(tokenizer, 0) == [0, end]
    assert stop_token_ids(byte_tokenizer(CHATML, eos=None), None) == [end]


def test_c06_a_turn_that_calls_a_tool_may_end_with_a_token_of_its_own():
    template = CHATML.replace(
        "{{ m.content }}<|im_end|>",
        "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}<|call|>"
        "{% else %}<|im_end|>{% endif %}",
    )
    tokenizer = byte_tokenizer(template)
    call = tokenizer.convert_tokens_to_ids("<|call|>")
    assert call in stop_token_ids(tokenizer, None)
    row = last(tokenizer, [said("user", "q"), said("assistant", None, tool_calls=[a_call({})])])
    assert [label for label in row.labels if label != IGNORED][-1] == call


def test_c06_no_stop_token_anywhere_is_an_error():
    tokenizer = byte_tokenizer(NOTHING_AFTER, eos=None)
    with pytest.raises(InputError, match="names no EOS"):
        stop_token_ids(tokenizer, None)
    with pytest.raises(InputError, match="names no EOS"):
        last(tokenizer, talk("q", "a"))


@pytest.mark.parametrize("text", ["a<|im_end|>", "<|im_end|>b", "a<|endoftext|>b"])
def test_c06_an_answer_that_holds_a_stop_token_is_dropped_a_question_is_not(text):
    tokenizer = byte_tokenizer(CHATML)
    row = last(tokenizer, talk("q", text))
    assert isinstance(row, Dropped) and "stop token" in row.reason
    assert trained(tokenizer, last(tokenizer, talk(text, "b"))) == ["b<|im_end|>"]
    assert trained(tokenizer, last(tokenizer, talk("q", text, "q", "b"))) == ["b<|im_end|>"]


# C09 -----------------------------------------------------------------------------------------

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


@pytest.mark.parametrize("template", [CHATML_CALLS, QWEN3, None])
def test_c09_null_content_is_empty_text(template):
    tokenizer = byte_tokenizer(template, bos="<s>")
    calling = {"role": "assistant", "tool_calls": [CALL]}
    for null, empty in [
        (talk(None, "a"), talk("", "a")),
        (talk("q", None, "r", "a"), talk("q", "", "r", "a")),
        ([said("user", "q"), calling | {"content": None}], None),
        ([said("user", "q"), calling], None),
    ]:
        row = last(tokenizer, null)
        assert row == last(tokenizer, empty or [said("user", "q"), calling | {"content": ""}])
        assert "None" not in tokenizer.decode(row.input_ids)


@pytest.mark.parametrize("blank", ["", " \n", None, []])
@pytest.mark.parametrize("template", [CHATML, QWEN3, GEMMA, None])
def test_an_answer_that_is_trained_or_compared_must_say_something(template, blank):
    tokenizer = byte_tokenizer(template, bos="<s>")
    empty, turns = Dropped("an empty answer"), talk("q", blank, "r", "a")
    assert last(tokenizer, turns[:2]) == every(tokenizer, turns[:2]) == empty
    assert every(tokenizer, turns) == empty
    assert trained(tokenizer, last(tokenizer, turns))[0].strip().endswith(("a", ">"))
    for pair in ((turns[1:2], turns[3:]), (turns[3:], turns[1:2]), (turns[1:], turns[3:])):
        assert encode_pair(tokenizer, talk("q"), *pair, None) == empty
    assert prompt_ids(tokenizer, turns[:3])


def test_an_answer_may_say_nothing_but_reasoning_where_the_template_shows_it():
    row = [said("user", "q"), said("assistant", "", reasoning_content="plan")]
    shown = "<think>\nplan\n</think>\n\n<|im_end|>"
    qwen, chatml = byte_tokenizer(QWEN3), byte_tokenizer(CHATML)
    assert trained(qwen, last(qwen, row)) == [shown]
    unseen = Dropped("the chat template does not show reasoning")
    assert last(chatml, row) == every(chatml, row) == unseen
    assert encode_pair(chatml, row[:1], row[1:], talk("q", "a")[1:], None) == unseen


@pytest.mark.parametrize("message", [{}, {"value": "yo"}, {"text": "yo", "tool_calls": []}])
def test_a_message_without_content_is_dropped_and_not_taken_for_an_empty_one(message):
    tokenizer = byte_tokenizer(CHATML)
    for messages in (
        [said("user", "q"), {"role": "assistant"} | message],
        [{"role": "user"} | message, said("assistant", "a")],
    ):
        assert last(tokenizer, messages) == Dropped("a message without 'content'")
    thought = [said("user", "q"), {"role": "assistant", "reasoning_content": "plan"}]
    assert isinstance(last(byte_tokenizer(QWEN3), thought), Encoded)


def test_role_names_are_compared_in_lower_case():
    tokenizer = byte_tokenizer(CHATML)
    for user, assistant in (("User", "Assistant"), ("HUMAN", "GPT"), ("Human", "ChatGPT")):
        row = last(tokenizer, [said("System", "s"), said(user, "q"), said(assistant, "a")])
        assert row == last(tokenizer, [said("system", "s"), *talk("q", "a")])


@pytest.mark.parametrize("role", ["x" * 500, "\x1b[31m", "\ud800", "a\nb", {"x": ["y"] * 99}, 7])
def test_what_a_reason_shows_of_a_row_is_short_and_has_no_control_characters(role):
    row = last(byte_tokenizer(CHATML), [said(role, "q"), said("assistant", "a")])
    assert row.reason.startswith("unknown role ")
    assert row.reason.isprintable() and len(row.reason) <= len("unknown role ") + 40
    row = last(byte_tokenizer(CHATML), talk([{"type": "x\n" * 99}], "a"))
    assert row.reason.isprintable() and len(row.reason) < 100


def test_c09_text_parts_are_joined_and_null_parts_of_a_struct_are_left_out():
    tokenizer = byte_tokenizer(CHATML)
    part = {"type": "text", "image_url": None}
    for parts in (
        [{**part, "text": "one two"}],
        [{**part, "text": "one"}, {"type": "text", "text": " two"}],
        ["one", {"text": " two"}, {"type": "text", "text": None}],
    ):
        row = last(tokenizer, talk(parts, parts))
        assert row == last(tokenizer, talk("one two", "one two"))
        assert prompt_ids(tokenizer, talk(parts)) == prompt_ids(tokenizer, talk("one two"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([{"type": "image", "image": "x.png"}], "type 'image'"),
        ([{"type": "text", "text": "a"}, {"type": "audio", "audio": "x"}], "type 'audio'"),
        ([{"type": "text", "text": "a"}, None], "part is null"),
        ([3], "part is a number"),
        (7, "is a number"),
        ({"text": "a"}, "is an object"),
    ],
)
def test_c09_other_content_is_refused_by_name(content, reason):
    tokenizer = byte_tokenizer(CHATML)
    for row in (last(tokenizer, talk(content, "a")), last(tokenizer, talk("q", content))):
        assert isinstance(row, Dropped) and reason in row.reason
    with pytest.raises(InputError, match=reason):
        prompt_ids(tokenizer, talk(content))


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "without messages"),
        (None, "is null"),
        ("hello", "is text"),
        ([None], "a message is null"),
        ([said("user", "q"), None, said("assistant", "a")], "a message is null"),
        ([said(None, "q")], "unknown role None"),
        ([said("user", "q"), said("asistant", "a")], "unknown role 'asistant'"),
        ([said("user", "q"), said("user", "r")], "no assistant turn"),
        ([said("user", "q"), said("assistant", "\ud800")], "not valid Unicode"),
    ],
)
def test_rows_without_a_usable_conversation_are_dropped_with_the_reason(messages, reason):
    tokenizer = byte_tokenizer(CHATML)
    bad, good = encode_conversations(tokenizer, [messages, talk("q", "a")], "last_assistant", 99)
    assert isinstance(bad, Dropped) and reason in bad.reason
    assert trained(tokenizer, good) == ["a<|im_end|>"]


# C10 -----------------------------------------------------------------------------------------


def a_call(arguments, name="f"):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool_talk(arguments, **function):
    return [
        said("user", "weather?"),
        said("assistant", None, tool_calls=[a_call(arguments, **function)]),
        said("tool", "sunny"),
        said("assistant", "It is sunny."),
    ]


@pytest.mark.parametrize("template", [QWEN3, None])
def test_c10_only_the_rows_own_keys_are_shown(template):
    tokenizer = byte_tokenizer(template)
    own = every(tokenizer, tool_talk({"city": "Bonn"}))
    # What Arrow makes of it next to a row with other argument names.
    struct = tool_talk({"city": "Bonn", "where": None, "deep": None})
    struct = [
        {**message, "tool_calls": message.get("tool_calls"), "name": None} for message in struct
    ]
    assert every(tokenizer, struct) == own
    shown = tokenizer.decode(own.input_ids)
    assert shown.count('"arguments": {"city": "Bonn"}') == 1
    assert "null" not in shown and "None" not in shown and "where" not in shown


def test_c10_nulls_that_a_dataset_of_python_rows_adds_leave_no_trace():
    datasets = pytest.importorskip("datasets")
    rows = [tool_talk({"city": "Bonn"}), tool_talk({"where": {"lat": 1}})]
    table = datasets.Dataset.from_list([{"messages": row} for row in rows])
    assert "where" in str(table[0])  # the fault is there
    tokenizer = byte_tokenizer(QWEN3)
    for row, raw in zip(table, rows, strict=True):
        assert every(tokenizer, row["messages"]) == every(tokenizer, raw)


@pytest.mark.parametrize(
    "template",
    [
        QWEN3,
        None,
        # Wants text, as DeepSeek's does; and one that would print a Python dict.
        CHATML.replace(
            "{{ m.content }}",
            "{{ m.content }}{% for c in m.tool_calls or [] %}"
            "{{ '(' + c.function.arguments + ')' }}{% endfor %}",
        ),
        CHATML.replace(
            "{{ m.content }}",
            "{{ m.content }}{% for c in m.tool_calls or [] %}({{ c.function.arguments }})"
            "{% endfor %}",
        ),
    ],
)
def test_c10_arguments_as_text_and_as_object_give_the_same_ids_once_encoded(template):
    tokenizer = byte_tokenizer(template)
    arguments = {"city": "Köln", "days": [1, None, 2]}
    row = every(tokenizer, tool_talk(arguments))
    for text in (json.dumps(arguments), json.dumps({**arguments, "unit": None})):
        assert every(tokenizer, tool_talk(text)) == row
    assert '{"city": "Köln", "days": [1, null, 2]}' in tokenizer.decode(row.input_ids)
    assert '\\"' not in tokenizer.decode(row.input_ids)


def test_c10_tool_answers_are_not_trained_on_and_calls_are():
    tokenizer = byte_tokenizer(QWEN3)
    row = every(tokenizer, tool_talk({"city": "Bonn"}))
    call = '<tool_call>\n{"name": "f", "arguments": {"city": "Bonn"}}\n</tool_call><|im_end|>'
    answer = "<think>\n\n</think>\n\nIt is sunny.<|im_end|>"
    assert trained(tokenizer, row) == [call, answer]
    assert "sunny\n</tool_response>" in tokenizer.decode(row.input_ids)


ONE_TURN = (
    "{%% for m in messages %%}{%% if m.role == 'user' %%}<|user|>{{ m.content }}<|end|>"
    "{%% elif m.role == 'assistant' %%}%s"
    "{%% else %%}%s{%% endif %%}{%% endfor %%}"
    "{%% if add_generation_prompt%s %%}<|assistant|>{%% endif %%}"
)
CALLS = "{% for c in m.tool_calls or [] %}call {{ c.function.name }};{% endfor %}"
LOOK_BACK = "loop.index0 and messages[loop.index0 - 1].role == 'tool'"
RESULT = "result {{ m.content }};"
# Templates that print a call, its result and the answer in one turn of the assistant.
ONE_TURNS = {
    "calls open the turn": (
        f"{{% if m.tool_calls %}}<|assistant|>{CALLS}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}",
        RESULT,
    ),
    "the first message opens the turn": (
        f"{{% if not ({LOOK_BACK}) %}}<|assistant|>{{% endif %}}{CALLS}{{{{ m.content }}}}"
        "{% if not m.tool_calls %}<|im_end|>{% endif %}",
        RESULT,
    ),
    "the result is trimmed": (
        f"{{% if m.tool_calls %}}<|assistant|>{CALLS}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}",
        "result {{ (m.content + ' ') | trim }};",
    ),
    "the result is quoted": (
        f"{{% if m.tool_calls %}}<|assistant|>{CALLS}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}",
        "result {{ m.content | tojson }};",
    ),
    "the result depends on the call": (
        f"{{% if m.tool_calls %}}<|assistant|>{CALLS}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}",
        f"{{% if messages[loop.index0 - 1].tool_calls %}}{RESULT}{{% endif %}}",
    ),
    "the call fetches the result": (
        f"{{% if m.tool_calls %}}<|assistant|>{CALLS}{{% if not loop.last %}}"
        "result {{ messages[loop.index].content }};{% endif %}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}",
        "",
    ),
}
ASKED = [
    said("user", "q"),
    said("assistant", "", tool_calls=[{"function": {"name": "calc", "arguments": {}}}]),
    said("tool", "SECRET"),
    said("assistant", "two"),
]


@pytest.mark.parametrize("header", ["", " and messages[-1].role != 'tool'"])
@pytest.mark.parametrize("merges", [0, 60])
@pytest.mark.parametrize("name", ONE_TURNS)
def test_n12_what_a_tool_says_within_the_assistants_turn_is_not_trained(name, merges, header):
    tokenizer = byte_tokenizer(ONE_TURN % (*ONE_TURNS[name], header), merges=merges)
    answers = ["call calc;", "two<|im_end|>"]
    assert trained(tokenizer, every(tokenizer, ASKED)) == answers
    assert trained(tokenizer, last(tokenizer, ASKED)) == answers[1:]
    again = [*ASKED, said("user", "more"), *ASKED[1:]]
    assert trained(tokenizer, every(tokenizer, again)) == answers * 2
    assert trained(tokenizer, last(tokenizer, again)) == answers[1:]


def test_n12_several_results_within_a_turn_are_not_trained_and_every_call_is():
    tokenizer = byte_tokenizer(ONE_TURN % (*ONE_TURNS["calls open the turn"], ""))
    messages = [*ASKED[:3], said("tool", "OTHER"), *ASKED[1:3], said("assistant", "three")]
    assert trained(tokenizer, every(tokenizer, messages)) == [
        *["call calc;"] * 2,
        "three<|im_end|>",
    ]


@pytest.mark.parametrize("merges", [0, 60])
def test_n12_a_result_printed_with_the_answer_behind_the_header_is_not_trained(merges):
    turn = f"<|assistant|>{{% if {LOOK_BACK} %}}result {{{{ messages[loop.index0 - 1].content }}}};"
    template = ONE_TURN % (turn + "{% endif %}" + CALLS + "{{ m.content }}<|im_end|>", "", "")
    tokenizer = byte_tokenizer(template, merges=merges)
    row = every(tokenizer, ASKED)
    assert trained(tokenizer, row) == ["call calc;<|im_end|>", "two<|im_end|>"]
    assert trained(tokenizer, last(tokenizer, ASKED)) == ["two<|im_end|>"]


def test_n12_a_result_printed_before_the_end_of_the_calls_turn_is_not_trained():
    result = "{% if m.tool_calls and not loop.last %}result {{ messages[loop.index].content }};"
    turn = f"<|assistant|>{CALLS}{{{{ m.content }}}}{result}{{% endif %}}<|im_end|>"
    tokenizer = byte_tokenizer(ONE_TURN % (turn, "", ""))
    assert trained(tokenizer, every(tokenizer, ASKED)) == ["call calc;", "two<|im_end|>"]


@pytest.mark.parametrize("content", ["SECRET", " SECRET ", "SECRET\n\n"])
def test_n12_a_result_whose_ends_the_template_trims_is_found_all_the_same(content):
    template = ONE_TURN % (ONE_TURNS["calls open the turn"][0], "{{ m.content | trim }};", "")
    tokenizer = byte_tokenizer(template)
    turns = [*ASKED[:2], said("tool", content), *ASKED[3:]]
    assert trained(tokenizer, every(tokenizer, turns)) == ["call calc;", "two<|im_end|>"]
    last_turn = (
        f"<|assistant|>{{% if {LOOK_BACK} %}}{{{{ messages[loop.index0 - 1].content | trim }}}}"
    )
    template = ONE_TURN % (f"{last_turn};{{% endif %}}{CALLS}{{{{ m.content }}}}<|im_end|>", "", "")
    row = every(byte_tokenizer(template), turns)
    assert trained(tokenizer, row) == ["call calc;<|im_end|>", "two<|im_end|>"]


def test_n12_a_result_printed_behind_the_answer_drops_the_row():
    result = f"{{% if {LOOK_BACK} %}}{{{{ messages[loop.index0 - 1].content }}}};{{% endif %}}"
    turn = f"<|assistant|>{CALLS}{{{{ m.content }}}};{result}<|im_end|>"
    tokenizer = byte_tokenizer(ONE_TURN % (turn, "", ""))
    reason = "the chat template shows what a tool said within an answer"
    assert every(tokenizer, ASKED) == last(tokenizer, ASKED) == Dropped(reason)


def test_n12_a_result_that_cannot_be_told_from_the_call_drops_the_row():
    turn = (
        f"<|assistant|>{CALLS}{{{{ m.content }}}}"
        "{% if m.tool_calls %}result {{ messages[loop.index].content }};{% endif %}<|im_end|>"
    )
    tokenizer = byte_tokenizer(ONE_TURN % (turn, "", ""))
    assert isinstance(every(tokenizer, ASKED), Dropped)
    assert trained(tokenizer, last(tokenizer, ASKED)) == ["two<|im_end|>"]


# Turns marked as not to train -----------------------------------------------------------------


MARKS = [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}]
MARKS += [{"loss": False}, {"loss_mask": 0}, {"step_loss_mask": 0}, {"weight": 1, "loss": 0}]


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("template", [CHATML, LLAMA2, GEMMA, None])
def test_n13_a_marked_turn_is_not_trained(template, mark):
    tokenizer = byte_tokenizer(template, bos="<s>")
    turns = talk("q1", "a1", "q2", "a2", "q3", "a3")
    whole = every(tokenizer, turns)
    texts = trained(tokenizer, whole)
    for number in (0, 1):
        marked = [m | mark if m["content"] == f"a{number + 1}" else m for m in turns]
        row = every(tokenizer, marked)
        assert row.input_ids == whole.input_ids
        assert trained(tokenizer, row) == [t for i, t in enumerate(texts) if i != number]
    marked = [*turns[:-1], turns[-1] | mark]
    assert every(tokenizer, marked) == every(tokenizer, turns[:4])


@pytest.mark.parametrize("mark", [{"weight": 1}, {"train": True}, {"weight": 1.0}, {"train": None}])
def test_n13_other_marks_change_nothing(mark):
    tokenizer = byte_tokenizer(CHATML)
    turns = talk("q1", "a1", "q2", "a2")
    assert every(tokenizer, [m | mark for m in turns]) == every(tokenizer, turns)


@pytest.mark.parametrize(
    ("train_on", "messages", "reason"),
    [
        (
            "last_assistant",
            [*talk("q", "a", "q"), said("assistant", "b", weight=0)],
            "no answer that is not marked",
        ),
        (
            "all_assistants",
            [said("user", "q"), said("assistant", "a", train=False)],
            "no answer that is not marked",
        ),
        ("all", [said("user", "q", train=False), said("assistant", "a")], "train_on is all"),
        (
            "last_assistant",
            [said("user", "q"), said("assistant", "a", weight=0.5)],
            "0.5, expected 0",
        ),
        (
            "all_assistants",
            [said("user", "q"), said("assistant", "a", train="no")],
            "train 'no', expected",
        ),
        (
            "last_assistant",
            [said("user", "q"), said("assistant", "a", loss_mask=[1, 0])],
            "loss_mask [1, 0], expected 0",
        ),
        (
            "all_assistants",
            [said("user", "q"), said("assistant", "a", train_detail=[{"begin_offset": 0}])],
            "train_detail, parts of it",
        ),
    ],
)
def test_n13_a_row_with_nothing_to_train_or_an_odd_mark_is_dropped(train_on, messages, reason):
    row = encode_conversation(byte_tokenizer(CHATML), messages, train_on, None)
    assert isinstance(row, Dropped) and reason in row.reason


# Reasoning that a template drops --------------------------------------------------------------


CUTS_REASONING = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
UNSEEN = Dropped("the chat template does not show reasoning")


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        (CUTS_REASONING, said("assistant", "<think>\nplan\n</think>\n\ntwo")),
        (CUTS_REASONING, said("assistant", "plan</think>two")),
        (CUTS_REASONING, said("assistant", "two", reasoning_content="plan")),
        (CHATML, said("assistant", "two", reasoning_content="plan")),
        (CHATML, said("assistant", "two", reasoning="plan")),
        (CHATML, said("assistant", "two", thinking="plan")),
        (None, said("assistant", "two", reasoning_content="plan")),
    ],
)
def test_n14_reasoning_that_the_template_leaves_out_drops_the_row_with_the_reason(template, answer):
    tokenizer = byte_tokenizer(template)
    question = [said("user", "q")]
    for row in (last, every):
        assert row(tokenizer, [*question, answer]) == UNSEEN
    assert encode_conversation(tokenizer, [*question, answer], "all", None) == UNSEEN
    other = [said("assistant", "three")]
    assert encode_pair(tokenizer, question, [answer], other, None) == UNSEEN
    assert encode_pair(tokenizer, question, other, [answer], None) == UNSEEN


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        (CHATML, said("assistant", "<think>\nplan\n</think>\n\ntwo")),
        (CHATML, said("assistant", "plan</think>two")),
        (CUTS_REASONING, said("assistant", "<think>\n\n</think>\n\ntwo")),
        (CUTS_REASONING, said("assistant", "two", reasoning_content=" ")),
        (QWEN3, said("assistant", "two", thinking="plan")),
        (QWEN3, said("assistant", "<think>\nplan\n</think>\n\ntwo")),
        (NAIVE_REASONING, said("assistant", "<think>\nplan\n</think>\n\ntwo")),
    ],
)
def test_n14_reasoning_that_is_shown_or_empty_keeps_the_row(template, answer):
    tokenizer = byte_tokenizer(template)
    for row in (last, every):
        assert trained(tokenizer, row(tokenizer, [said("user", "q"), answer]))[0].endswith(
            "two<|im_end|>"
        )


TAGS = ["<thought> </thought>", "<seed:think> </seed:think>", "[THINK] [/THINK]"]
TAGS += ["<|START_THINKING|> <|END_THINKING|>", "◁think▷ ◁/think▷"]


@pytest.mark.parametrize("tags", TAGS)
def test_n14_each_familys_tags_of_reasoning_are_known(tags):
    opening, closing = tags.split()
    cuts = CUTS_REASONING.replace("</think>", closing)
    answer = said("assistant", f"{opening}plan{closing}two")
    assert last(byte_tokenizer(cuts), [said("user", "q"), answer]) == UNSEEN
    shown = last(byte_tokenizer(CHATML), [said("user", "q"), answer])
    assert not isinstance(shown, Dropped)


def test_c10_a_call_without_text_does_not_repeat_the_text_before_it():
    leaky = CHATML.replace(
        "{{ m.content }}",
        "{% if m.content is string %}{% set ns.text = m.content %}{% endif %}{{ ns.text }}"
        "{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}",
    )
    tokenizer = byte_tokenizer("{% set ns = namespace(text='') %}" + leaky)
    row = every(tokenizer, [*talk("q", "before", "r"), said("assistant", None, tool_calls=[CALL])])
    assert trained(tokenizer, row) == ["before<|im_end|>", "(f)<|im_end|>"]


def test_c10_a_template_that_writes_calls_as_python_does_gets_its_arguments_as_objects():
    template = CHATML.replace(
        "{{ m.content }}",
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}("
        "{% for key, value in c.function.arguments.items() %}{{ key }}='{{ value }}'"
        "{% endfor %}){% endfor %}",
    )
    tokenizer = byte_tokenizer(template)
    row = every(tokenizer, tool_talk({"city": "Bonn"}))
    assert trained(tokenizer, row)[0] == "f(city='Bonn')<|im_end|>"


FIRST_CALL_ONLY = CHATML.replace(
    "{{ m.content }}", "{{ m.content or (m.tool_calls or [''])[0] | tojson }}"
)


@pytest.mark.parametrize(
    ("template", "calls", "content", "shown"),
    [
        (CHATML, 1, "", False),
        (CHATML, 1, "call_number_0", False),
        (GEMMA, 1, "I call f", False),
        (CHATML_CALLS, 2, "f", True),
        (FIRST_CALL_ONLY, 1, "", True),
        (FIRST_CALL_ONLY, 2, "", False),
        (FIRST_CALL_ONLY, 1, "I call f", False),
        (QWEN3, 3, "", True),
        (None, 2, "", True),
    ],
)
def test_a_row_is_dropped_where_the_template_leaves_out_a_tool_call(
    template, calls, content, shown
):
    tokenizer = byte_tokenizer(template, bos="<s>")
    calling = said("assistant", content, tool_calls=[CALL] * calls)
    turns = [said("user", "q"), calling, said("tool", "seen"), said("assistant", "a")]
    for train_on in ("last_assistant", "all_assistants", "all"):
        row = encode_conversation(tokenizer, turns, train_on, None)
        assert shown or row == Dropped("the chat template does not show tool calls")
        assert not shown or tokenizer.decode(row.input_ids).count('"f"') == calls
    pair = encode_pair(tokenizer, turns[:3], turns[3:], talk("q", "b")[1:], None)
    (prompt,) = encode_prompts(tokenizer, [turns[:3]])
    assert [isinstance(each, Dropped) for each in (pair, prompt)] == [not shown] * 2


@pytest.mark.parametrize(
    ("template", "unseen"), [(CHATML, True), (QWEN3, True), (None, False), ("HEADED", False)]
)
def test_tools_are_unseen_where_the_render_is_the_same_without_them(template, unseen):
    tokenizer = byte_tokenizer(HEADED + CHATML if template == "HEADED" else template)
    for turns in (talk("q"), talk("q", "a"), tool_talk({"x": 1})[:1]):
        assert tools_unseen(tokenizer, turns, OFFERED) == unseen
        assert not tools_unseen(tokenizer, turns, None)


def test_the_plain_format_lists_tools_before_all_turns():
    tokenizer = byte_tokenizer(None)
    (row,) = encode_conversations(tokenizer, [talk("q", "a")], "all_assistants", None, [OFFERED])
    assert tokenizer.decode(row.input_ids) == (
        'Tools:\n{"name": "f"}\n{"name": "g"}\n\nUser:\nq\n\nAssistant:\na<|endoftext|>'
    )
    assert trained(tokenizer, row) == ["a<|endoftext|>"]
    ids = encode_prompts(tokenizer, [talk("q")], [OFFERED])[0]
    assert ids == row.input_ids[: untrained_front(row)]


def test_rows_without_tools_cost_no_render_more(monkeypatch):
    def refused(*arguments):
        raise AssertionError("a render for nothing")

    for name in ("_check_calls_shown", "_takes_objects", "WithTools"):
        monkeypatch.setattr(templates, name, refused)
    tokenizer = byte_tokenizer(CHATML)
    assert isinstance(last(tokenizer, talk("q", "a")), Encoded)
    assert not tools_unseen(tokenizer, talk("q", "a"), None)


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ([None], "a tool call is null"),
        ([{"type": "function"}], "without the name"),
        ([a_call("{not json")], "no JSON object"),
        ([a_call("[1]")], "no JSON object"),
        ([a_call(3)], "no JSON object"),
    ],
)
def test_c10_broken_calls_are_dropped_with_the_reason(calls, reason):
    row = last(byte_tokenizer(QWEN3), [said("user", "q"), said("assistant", "", tool_calls=calls)])
    assert isinstance(row, Dropped) and reason in row.reason


HEADED = "{% if tools %}Tools:{{ tools | map(attribute='name') | join(',') }}\n{% endif %}"
OFFERED = [{"name": "f"}, {"name": "g"}]


@pytest.mark.parametrize("template", [CHATML, CHATML_WITHOUT_FLAG, OPEN_HEADER])
def test_the_tools_of_a_row_head_its_render_in_every_stage_and_are_not_trained(template):
    tokenizer = byte_tokenizer(HEADED + template, eos="<|im_end|>")
    rows = [talk("q", "one"), talk("q", "one")]
    plain, told = encode_conversations(tokenizer, rows, "last_assistant", None, [None, OFFERED])
    assert tokenizer.decode(told.input_ids).startswith("Tools:f,g\n<|im_start|>user\nq")
    assert tokenizer.decode(plain.input_ids).startswith("<|im_start|>user\nq")
    ids = tokenizer.apply_chat_template(rows[1], tools=OFFERED)["input_ids"]
    assert told.input_ids == ids
    assert trained(tokenizer, told) == trained(tokenizer, plain)
    (prompt,) = encode_prompts(tokenizer, [rows[1][:1]], [OFFERED])
    pair = (rows[1][:1], rows[1][1:], talk("q", "two")[1:])
    (both,) = encode_pairs(tokenizer, [pair], None, [OFFERED])
    assert tokenizer.decode(both.prompt_ids).startswith("Tools:f,g\n")
    if told.route == "prefix":
        assert prompt == both.prompt_ids == told.input_ids[: len(prompt)]


def test_c10_a_flat_call_is_the_same_as_a_nested_one():
    tokenizer = byte_tokenizer(QWEN3)
    flat = [said("user", "q"), said("assistant", "", tool_calls=[{"name": "f", "arguments": None}])]
    nested = [said("user", "q"), said("assistant", "", tool_calls=[a_call({})])]
    assert last(tokenizer, flat) == last(tokenizer, nested)


# Templates and tokenizers of every sort ------------------------------------------------------


def test_the_masks_of_all_assistant_turns_are_those_of_the_generation_keyword():
    tokenizer = byte_tokenizer(CHATML_GENERATION, merges=60)
    messages = [said("system", "be the answer"), *talk("q1", "forty two", "q2", "x", "q3", "the é")]
    call = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    row = every(tokenizer, messages)
    assert row.input_ids == call["input_ids"]
    assert [label != IGNORED for label in row.labels] == [bool(m) for m in call["assistant_masks"]]


def test_llama2_masks_each_answer_and_has_one_bos_a_turn():
    tokenizer = llama_tokenizer(LLAMA2)
    messages = talk("the answer", "forty two", "because", "make the answer")
    row = every(tokenizer, messages)
    assert row.input_ids == full_ids(tokenizer, messages)
    assert trained(tokenizer, row) == [" forty two </s>", " make the answer </s>"]
    bos = tokenizer.bos_token_id
    assert row.input_ids.count(bos) == 2  # the template's own, one a turn
    assert not any(pair == (bos, bos) for pair in pairwise(row.input_ids))
    assert prompt_ids(tokenizer, messages[:1]).count(bos) == 1


def test_a_template_that_refuses_a_system_turn_drops_the_row_with_its_words():
    tokenizer = byte_tokenizer(GEMMA, bos="<bos>")
    row = last(tokenizer, [said("system", "s"), *talk("q", "a")])
    assert row == Dropped("the chat template refuses it: System role not supported")
    with pytest.raises(InputError, match="System role not supported"):
        prompt_ids(tokenizer, [said("system", "s"), said("user", "q")])
    row = last(tokenizer, talk("q", " a "))
    assert trained(tokenizer, row) == ["a<end_of_turn>"]
    assert row.input_ids.count(tokenizer.bos_token_id) == 1


def test_a_broken_template_is_an_error_naming_the_line():
    with pytest.raises(InputError, match="broken at line 1"):
        last(byte_tokenizer("{% for m in messages %}"), talk("q", "a"))


def test_a_slow_tokenizer_is_refused():
    class Slow:
        is_fast = False

    for function in (lambda t: last(t, talk("q", "a")), lambda t: prompt_ids(t, talk("q"))):
        with pytest.raises(InputError, match="Slow is a slow tokenizer"):
            function(Slow())


def test_the_plain_format_stands_in_for_a_missing_template():
    tokenizer = byte_tokenizer(None, merges=60)
    row = every(tokenizer, [said("system", "be brief"), *talk("q1", "a1", "q2", "a2")])
    assert tokenizer.decode(row.input_ids) == (
        "System:\nbe brief\n\nUser:\nq1\n\nAssistant:\na1<|endoftext|>"
        "\n\nUser:\nq2\n\nAssistant:\na2<|endoftext|>"
    )
    assert trained(tokenizer, row) == ["a1<|endoftext|>", "a2<|endoftext|>"]


def test_the_plain_format_begins_with_bos_where_the_tokenizer_adds_one():
    tokenizer = llama_tokenizer(None)
    row = last(tokenizer, talk("the answer", "forty two"))
    assert row.input_ids[0] == tokenizer.bos_token_id
    assert row.input_ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.bos_token_id not in prompt_ids(byte_tokenizer(None, bos="<s>"), talk("q"))


def test_turns_after_the_last_answer_are_left_out_except_where_all_is_trained():
    tokenizer = byte_tokenizer(CHATML)
    messages = talk("q", "a", "thanks")
    assert last(tokenizer, messages) == last(tokenizer, messages[:2])
    row = encode_conversation(tokenizer, messages, "all", None)
    assert row.input_ids == row.labels == full_ids(tokenizer, messages)


def test_a_conversation_that_the_assistant_opens_is_masked_exactly():
    tokenizer = byte_tokenizer(CHATML)
    row = every(tokenizer, [said("assistant", "hello"), *talk("q", "a")])
    assert trained(tokenizer, row) == ["hello<|im_end|>", "a<|im_end|>"]


# What a template writes, by hand: texts of (untrained, trained) pieces.


def chatml_pieces(turns):
    for role, text in turns:
        yield f"<|im_start|>{role}\n", False
        yield f"{text}<|im_end|>", role == "assistant"
        yield "\n", False


def llama2_pieces(turns):
    for role, text in turns:
        if role == "user":
            yield f"<s>[INST] {text.strip()} [/INST]", False
        else:
            yield f" {text.strip()} <|endoftext|>", True


def gemma_pieces(turns):
    yield "<s>", False
    for role, text in turns:
        yield f"<start_of_turn>{'model' if role == 'assistant' else role}\n", False
        yield f"{text.strip()}<end_of_turn>", role == "assistant"
        yield "\n", False


def bare_pieces(turns):
    for role, text in turns:
        yield f"[{role}]", False
        yield text, role == "assistant"
    yield "<|endoftext|>", True


def random_turns(rng):
    pieces = [
        "the",
        " answer",
        "forty",
        "\n",
        "  ",
        "é",
        "日本",
        "🙂",
        "1",
        " ",
        "[INST]",
        "assistant",
    ]
    pieces += ["<think>", "</tool_call>", "User:", ".", "#### 42", "\t", "{{ x }}", "ﬁ", "e\u0301"]
    for number in range(2 * rng.randint(1, 3)):
        text = "".join(rng.choice(pieces) for _ in range(rng.randint(0, 8)))
        yield ("user", "assistant")[number % 2], text


@pytest.mark.parametrize("merges", [0, 60])
@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize(
    ("template", "pieces"),
    [
        (CHATML, chatml_pieces),
        (CHATML_WITHOUT_FLAG, chatml_pieces),
        (LLAMA2, llama2_pieces),
        (GEMMA, gemma_pieces),
        (EOS_ONLY_AT_THE_END, bare_pieces),
    ],
)
def test_random_conversations_train_what_the_hand_written_render_says_or_are_dropped(
    template, pieces, merges, trim
):
    tokenizer = byte_tokenizer(template, merges=merges, trim=trim, bos="<s>")
    rng = random.Random(f"{merges}/{trim}")
    conversations = [list(random_turns(rng)) for _ in range(150)]
    rows = encode_conversations(
        tokenizer,
        [[said(*turn) for turn in turns] for turns in conversations],
        "all_assistants",
        999,
    )
    kept = empty = 0
    for turns, row in zip(conversations, rows, strict=True):
        if any(role == "assistant" and not text.strip() for role, text in turns):
            assert row == Dropped("an empty answer")
            empty += 1
            continue
        if isinstance(row, Dropped):
            assert row.reason == "a token spans the border between prompt and answer"
            continue
        kept += 1
        written = [(text, flag) for text, flag in pieces(turns) if text]
        assert tokenizer.decode(row.input_ids) == "".join(text for text, _ in written)
        runs = groupby(written, key=lambda piece: piece[1])
        expected = ["".join(text for text, _ in run) for flag, run in runs if flag]
        assert trained(tokenizer, row) == expected
    assert 0 < empty < 75
    assert kept == 150 - empty if not merges else kept > 60


# Length --------------------------------------------------------------------------------------


def test_a_row_is_cut_on_the_right_and_dropped_when_no_target_is_left():
    tokenizer = byte_tokenizer(CHATML)
    whole = last(tokenizer, talk("q", "abc"))
    prompt = len(prompt_ids(tokenizer, talk("q")))
    assert not whole.truncated
    cut = last(tokenizer, talk("q", "abc"), prompt + 2)
    assert cut.truncated
    assert (cut.input_ids, cut.labels) == (
        whole.input_ids[: prompt + 2],
        whole.labels[: prompt + 2],
    )
    assert trained(tokenizer, cut) == ["ab"]
    assert last(tokenizer, talk("q", "abc"), prompt) == Dropped("no target left within max_length")
    assert last(tokenizer, talk("q", "abc"), len(whole.input_ids)) == whole


def test_a_label_at_the_first_position_is_no_target():
    tokenizer = byte_tokenizer(NOTHING_AFTER)
    assert encode_text(tokenizer, "abc", 1) == Dropped("no target left within max_length")
    assert encode_text(tokenizer, "abc", 2).labels == tokenizer("ab")["input_ids"]


# Plain text ----------------------------------------------------------------------------------


def test_text_is_trained_whole_and_ends_with_eos():
    tokenizer = byte_tokenizer(CHATML)
    ids = [*tokenizer("the answer")["input_ids"], tokenizer.eos_token_id]
    row = encode_text(tokenizer, "the answer", None)
    assert row == Encoded(ids, ids, truncated=False, route="all")
    assert encode_text(tokenizer, "the answer<|endoftext|>", None) == row


def test_text_has_one_bos_where_the_tokenizer_adds_one():
    tokenizer = llama_tokenizer(None)
    own = tokenizer("the answer")["input_ids"]
    assert own[0] == tokenizer.bos_token_id
    for text in ("the answer", "<s>the answer"):
        row = encode_text(tokenizer, text, None)
        assert row.input_ids.count(tokenizer.bos_token_id) == 1
        assert row.labels == row.input_ids
    assert encode_text(tokenizer, "the answer", None).input_ids == [*own, tokenizer.eos_token_id]


def test_text_that_is_none_is_dropped_in_its_place():
    tokenizer = byte_tokenizer(CHATML)
    rows = encode_texts(tokenizer, ["a", "", None, "\ud800", "b"], None)
    assert [row if isinstance(row, Dropped) else "kept" for row in rows] == [
        "kept",
        Dropped("no text"),
        Dropped("no text"),
        Dropped("text that is not valid Unicode"),
        "kept",
    ]


@pytest.mark.parametrize("template", [CHATML, NOTHING_AFTER, PHI])
def test_training_on_all_copies_the_ids_and_ends_with_a_stop_token(template):
    tokenizer = byte_tokenizer(template)
    row = encode_conversation(tokenizer, talk("q", "a"), "all", None)
    appended = [tokenizer.eos_token_id] if template == NOTHING_AFTER else []
    assert row.labels == row.input_ids == full_ids(tokenizer, talk("q", "a")) + appended


# Preferences ---------------------------------------------------------------------------------


def pair_of(tokenizer, chosen, rejected, max_length=None):
    answers = [[said("assistant", text)] for text in (chosen, rejected)]
    return encode_pair(tokenizer, talk("q"), *answers, max_length)


@pytest.mark.parametrize(
    ("template", "stop"),
    [
        (CHATML, "<|im_end|>"),
        (PHI, "<|end|>"),
        (NOTHING_AFTER, "<|endoftext|>"),
        (None, "<|endoftext|>"),
    ],
)
def test_a_pair_is_the_prompt_and_two_answers_that_end_as_completions_do(template, stop):
    tokenizer = byte_tokenizer(template)
    pair = pair_of(tokenizer, "good", "bad")
    assert pair.prompt_ids == prompt_ids(tokenizer, talk("q"))
    assert tokenizer.decode(pair.chosen_ids) == f"good{stop}"
    assert tokenizer.decode(pair.rejected_ids) == f"bad{stop}"
    row = last(tokenizer, talk("q", "good"))
    whole = pair.prompt_ids + pair.chosen_ids
    assert row.input_ids[: len(whole)] == whole
    assert [label for label in row.labels if label != IGNORED] == pair.chosen_ids


def test_identical_pairs_are_dropped_also_where_only_the_cut_makes_them_so():
    tokenizer = byte_tokenizer(CHATML)
    prompt = len(prompt_ids(tokenizer, talk("q")))
    assert pair_of(tokenizer, "same", "same") == Dropped("chosen and rejected are token-identical")
    cut = "chosen and rejected are token-identical once cut to max_length"
    assert pair_of(tokenizer, "same then", "same when", prompt + 5) == Dropped(cut)
    pair = pair_of(tokenizer, "same then", "same when", prompt + 6)
    assert pair.truncated
    assert (tokenizer.decode(pair.chosen_ids), tokenizer.decode(pair.rejected_ids)) == (
        "same t",
        "same w",
    )
    filled = Dropped("the prompt alone fills max_length")
    assert pair_of(tokenizer, "a", "b", prompt) == filled
    assert pair_of(tokenizer, "a", "b", prompt - 3) == filled


def test_answers_that_a_template_makes_equal_are_identical():
    tokenizer = byte_tokenizer(GEMMA, bos="<bos>")
    assert pair_of(tokenizer, "a", " a ") == Dropped("chosen and rejected are token-identical")


def test_an_answer_of_several_turns_keeps_them_all():
    tokenizer = byte_tokenizer(QWEN3)
    chosen = [*tool_talk({"city": "Bonn"})[1:]]
    pair = encode_pair(tokenizer, talk("weather?"), chosen, [said("assistant", "no")], None)
    shown = tokenizer.decode(pair.chosen_ids)
    assert shown.startswith("<tool_call>") and shown.endswith("It is sunny.<|im_end|>")


def test_a_pair_whose_answers_do_not_start_with_the_assistant_is_dropped():
    tokenizer = byte_tokenizer(CHATML)
    for answer in ([], [said("user", "x")], [said("assistant", "a"), said("user", "x")]):
        pair = encode_pair(tokenizer, talk("q"), answer, [said("assistant", "b")], None)
        assert pair == Dropped("an answer does not start and end with an assistant turn")


def test_a_pair_behind_a_header_that_the_render_lacks_shares_the_prompt_of_the_render():
    tokenizer = byte_tokenizer(EMPTY_BLOCK_HEADER)
    pair = pair_of(tokenizer, "good", "bad")
    assert pair.route == "offsets"
    assert pair.prompt_ids + pair.chosen_ids == full_ids(tokenizer, talk("q", "good"))[:-1]
    assert tokenizer.decode(pair.rejected_ids) == "bad<|im_end|>"


# Batches and real rows -----------------------------------------------------------------------


def test_a_batch_gives_what_its_rows_give_alone():
    tokenizer = byte_tokenizer(QWEN3, merges=60)
    rows = [
        talk("q", "a"),
        talk("q", PLAN_1, "r", PLAN_2),
        [],
        tool_talk({"x": 1}),
        talk("é", "日本"),
    ]
    for train_on in ("last_assistant", "all_assistants", "all"):
        alone = [encode_conversation(tokenizer, row, train_on, 60) for row in rows]
        assert encode_conversations(tokenizer, rows, train_on, 60) == alone
    assert encode_conversations(tokenizer, [], "all", None) == []
    pairs = [(talk("q"), talk("", text)[1:], talk("", "no")[1:]) for text in ("yes", "no", "")]
    assert encode_pairs(tokenizer, pairs, 60) == [encode_pair(tokenizer, *p, 60) for p in pairs]


def test_messages_are_left_as_they_were():
    tokenizer = byte_tokenizer(NAIVE_REASONING)
    messages = [*tool_talk('{"x": null}'), *talk("q", "plan</think>a")]
    before = json.dumps(messages)
    every(tokenizer, messages)
    assert json.dumps(messages) == before


@needs_data
def test_every_gsm8k_row_is_kept_with_the_answer_trained_and_nothing_else():
    tokenizer = byte_tokenizer(CHATML, merges=60)
    with (DATA / "gsm8k_sft.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line)["messages"] for line in file]
    encoded = encode_conversations(tokenizer, rows, "last_assistant", 4096)
    assert len(rows) == len(encoded) == 7473
    for messages, row in zip(rows, encoded, strict=True):
        assert row.route == "prefix"
        assert trained(tokenizer, row) == [messages[-1]["content"] + "<|im_end|>"]


@needs_data
def test_every_gsm8k_pair_is_kept_or_dropped_for_a_reason():
    tokenizer = byte_tokenizer(None, merges=60)
    with (DATA / "gsm8k_preferences.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    pairs = [(r["chosen"][:1], r["chosen"][1:], r["rejected"][1:]) for r in rows]
    encoded = encode_pairs(tokenizer, pairs, 4096)
    reasons = {row.reason for row in encoded if isinstance(row, Dropped)}
    assert reasons <= {
        "chosen and rejected are token-identical",
        "a token spans the border between prompt and answer",
    }
    kept = [row for row in encoded if isinstance(row, EncodedPair)]
    assert len(kept) > 0.95 * len(rows)
    assert all(row.chosen_ids[-1] == row.rejected_ids[-1] == tokenizer.eos_token_id for row in kept)
