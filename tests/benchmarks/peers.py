"""The peers' side of a comparison, in a process of its own; prints one JSON line.

    python -m tests.benchmarks.peers sft --model WORK/tiny/base --data WORK/sft.jsonl --steps 40

`sft`, `reward`, `direct` and `grpo` are TRL's trainers as they come, on the rows, the batch and the
learning rate that this project takes; nothing is logged elsewhere or saved. `loop` is what one
writes without a library: a prompt at a time through `generate`, then one pass for the log-probs.
Figures are medians of the second half of the steps: the first ones touch memory for the first time.
"""

import argparse
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path


def warm(figures: list[float]) -> float:
    return statistics.median(figures[len(figures) // 2 :])


def rows(args):
    from datasets import load_dataset

    place = tempfile.mkdtemp()  # read anew, as every stage reads its table
    return load_dataset("json", data_files=str(args.data), split="train", cache_dir=place)


def settings(args) -> dict:
    """What the trainers are told alike."""
    return {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": args.steps,
        "per_device_train_batch_size": args.batch,
        "learning_rate": 1e-5,
        "bf16": args.bf16,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def step_seconds(trainer) -> list[float]:
    """Train; the seconds of each optimizer step, its batch's preparation included."""
    from transformers import TrainerCallback

    ends = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            ends.append(time.perf_counter())

        on_step_end = on_train_begin

    trainer.add_callback(Clock())
    trainer.train()
    return [after - before for before, after in zip(ends, ends[1:], strict=False)]


def logged(trainer, name: str) -> list[float]:
    """A figure of each step, as the trainer logged it."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def sft(args) -> dict:
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(max_length=512, **settings(args))
    trainer = SFTTrainer(model=str(args.model), args=config, train_dataset=rows(args))
    seconds = step_seconds(trainer)
    seen = [0, *logged(trainer, "num_tokens")]  # since the start
    tokens = [after - before for before, after in zip(seen, seen[1:], strict=False)]
    return {"tokens_s": warm([n / s for n, s in zip(tokens, seconds, strict=True)])}


def reward(args) -> dict:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    scorer = AutoModelForSequenceClassification.from_pretrained(
        args.model, num_labels=1, dtype=torch.float32
    )
    trainer = RewardTrainer(
        model=scorer,
        args=RewardConfig(max_length=512, **settings(args)),
        train_dataset=rows(args),
        processing_class=AutoTokenizer.from_pretrained(args.model),
    )
    return {"pairs_s": args.batch / warm(step_seconds(trainer))}


def direct(args) -> dict:
    """DPO; the reference runs over all pairs before the first step."""
    from trl import DPOConfig, DPOTrainer

    config = DPOConfig(max_length=512, precompute_ref_log_probs=True, **settings(args))
    pairs = rows(args).select(range(args.pairs))
    trainer = DPOTrainer(model=str(args.model), args=config, train_dataset=pairs)
    return {"pairs_s": args.batch / warm(step_seconds(trainer))}


def grpo(args) -> dict:
    """Each step samples its prompts' completions and learns from them in micro-batches."""
    from trl import GRPOConfig, GRPOTrainer

    sampling = []

    class Timed(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            start = time.perf_counter()
            found = super()._generate_and_score_completions(inputs)
            sampling.append(time.perf_counter() - start)
            return found

    completions = args.prompts * args.samples
    config = GRPOConfig(
        num_generations=args.samples,
        gradient_accumulation_steps=completions // args.batch,
        steps_per_generation=completions // args.batch,
        max_completion_length=args.max_new,
        loss_type="grpo",
        beta=0.0,
        **settings(args),
    )
    trainer = Timed(
        model=str(args.model),
        reward_funcs=exact,
        args=config,
        train_dataset=rows(args),
        peft_config=adapters(args),
    )
    seconds = step_seconds(trainer)
    lengths = logged(trainer, "completions/mean_length")
    rates = [completions * n / s for n, s in zip(lengths, sampling, strict=True)]
    learning = [whole - part for whole, part in zip(seconds, sampling, strict=True)]
    learned = [completions * n / s for n, s in zip(lengths, learning, strict=True)]
    return {
        "rollout_s": warm(sampling),
        "rollout_tokens_s": warm(rates),
        "optimize_s": warm(learning),
        "optimize_completions_s": completions / warm(learning),
        "optimize_tokens_s": warm(learned),
    }


def adapters(args):
    """What peft is told under --lora; None: all weights are trained."""
    if not args.lora:
        return None
    from peft import LoraConfig

    return LoraConfig(r=args.lora, lora_alpha=2 * args.lora, target_modules="all-linear")


def exact(completions, answer, **_) -> list[float]:
    """1 for each completion that is the answer of its prompt."""
    texts = (messages[0]["content"].strip() for messages in completions)
    return [float(text == wanted) for text, wanted in zip(texts, answer, strict=True)]


def loop(args) -> dict:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = rows(args)[: args.prompts]["prompt"]
    tokens, start = 0, time.perf_counter()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
        for messages in prompts:
            prompt = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            whole = model.generate(
                **prompt,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                num_return_sequences=args.samples,
                max_new_tokens=args.max_new,
            )
            model(whole).logits.float().log_softmax(-1)
            for answer in whole[:, prompt["input_ids"].shape[1] :].tolist():
                ended = tokenizer.eos_token_id in answer
                tokens += answer.index(tokenizer.eos_token_id) + 1 if ended else len(answer)
    return {"rollout_tokens_s": tokens / (time.perf_counter() - start)}


WORKS = {work.__name__: work for work in (sft, reward, direct, grpo, loop)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    sizes = {"batch": 16, "steps": 4, "prompts": 16, "samples": 8, "max-new": 12, "pairs": 128}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters for grpo")
    parser.add_argument("--bf16", action="store_true", help="under bf16 autocast")
    args = parser.parse_args()
    figures = WORKS[args.work](args)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps(figures | {"peak_mb": peak}))


if __name__ == "__main__":
    main()
