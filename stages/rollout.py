"""Stage `rollout`: sample completions from the policy that a round starts with.

Reads   prompts (the task's, or what prompts.dataset names), the policy folder
Knobs   sampling, prompts, the reward rules, seed, device, precision, threads, attention,
        trust_remote_code
Writes  data/rollouts/round-k.parquet, one row per completion (base/tables.py: ROLLOUTS), figures

Reference log-probs, model rewards and advantages come later: a new reward model or clip must not
resample text.
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from stages.base import params
from stages.base.command import Bar, SharedStage, launched, paths, progress, say
from stages.base.environment import vllm
from stages.base.errors import InputError
from stages.base.kept import Kept
from stages.base.metrics import Means, write_json
from stages.base.scratch import work_of
from stages.base.tables import ROLLOUTS, write_table
from stages.base.tokenizers import load_tokenizer
from stages.knobs.rollout import Knobs
from stages.models import processes
from stages.models.adapters import base_of, shape_of
from stages.models.checkpoints import load_policy
from stages.models.compute import accelerator as make_accelerator
from stages.models.packing import packed
from stages.models.trainer_state import load_trainer
from stages.rollouts.engine import Counts, Engine, Prompt, stop_ids
from stages.rollouts.prompts import context_limit, load_prompts, reward_columns
from stages.rollouts.rewards import Rules, find_verifier
from stages.rollouts.sampling import Sampling
from stages.rollouts.vllm_client import VllmSampler

RULES = ("reward_correctness", "reward_format", "reward_length")


@click.command(cls=SharedStage)
@click.option("--round", "round_number", type=click.IntRange(min=1), required=True)
@paths("--policy", "--task", "--source", "--out", "--figures")
def rollout(
    round_number: int, policy: Path, task: Path, source: Path, out: Path, figures: Path
) -> None:
    """Sample one round of completions."""
    knobs = params.load(Knobs)
    several = params.processes() if knobs.sampler != "vllm" else 1  # vLLM shares its own work
    if launched(several, knobs.threads):
        return
    trust = knobs.model.trust_remote_code
    sys.path.insert(0, str(source))
    rules = make_rules(knobs)
    accelerator = make_accelerator(knobs.device, knobs.precision, knobs.threads)
    tokenizer = load_tokenizer(policy, trust)
    model = load_policy(policy, knobs.attention, accelerator.device, trust, knobs.precision)
    limit = min(knobs.prompts.max_length, context_limit(model, knobs.max_new_tokens))
    prompts, intake = load_prompts(knobs.prompts, task, tokenizer, limit, knobs.seed)
    sampler = None
    if knobs.sampler == "vllm":
        sampler = make_vllm(policy, model, prompts, knobs)
    engine = make_engine(model, tokenizer, rules, knobs, sampler)
    name, inputs = f"rollout-{round_number}", [policy, task, source]
    kept = Kept(work_of(name, inputs, knobs, accelerator.device, prompts))
    tally = Tally()

    def rest(_, last: dict | None) -> Iterator[tuple[list[dict], dict]]:
        start = Counts(**last) if last else Counts(cursor=load_trainer(policy).prompt_cursor)
        wanted, tries = knobs.prompts_per_step, knobs.dynamic_sampling
        for rows in engine.batches(prompts, round_number, start, wanted, tries):
            yield rows, asdict(engine.counts)

    with kept.watching(), accelerator.autocast(), sampler or packed(model):
        rows = (row for rows, _ in kept.rows("rows", ROLLOUTS, rest) for row in rows)
        total = knobs.prompts_per_step * knobs.num_rollouts
        rows = tally.watch(progress(rows, f"rollout {round_number}", total))
        if processes.follow(rows):
            return
        provenance = {"stage": "rollout", "round": round_number, "policy": str(policy)}
        provenance |= {"sampler": knobs.sampler} if sampler else {}
        write_table(
            out, ROLLOUTS, rows, lambda: provenance | {"prompt_cursor": engine.counts.cursor}
        )
    counts = engine.counts
    if not counts.kept:
        out.unlink()
        raise InputError(f"round {round_number}: {nothing_kept(counts)}")
    if counts.kept < knobs.prompts_per_step:
        click.echo(
            f"short buffer: {counts.kept} of {knobs.prompts_per_step} groups"
            f" after {counts.tried} tries"
        )
    found = tally.figures() | {
        "groups_kept": counts.kept,
        "groups_dropped": counts.dropped,
        "groups_tried": counts.tried,
        "prompts": intake.figures(),
    }
    write_json(figures, found)
    kept.done()
    say(found, round=round_number)


def nothing_kept(counts: Counts) -> str:
    """Why dynamic sampling left no group, and what helps."""
    told = f"all {counts.tried} groups were dropped by dynamic_sampling: "
    alike = "completions are all right or all wrong; raise dynamic_sampling or num_rollouts"
    unscored = "no answer that the verifier can check; expected prompts with answers"
    if not counts.unscored:
        return f"{told}their {alike}"
    if counts.unscored == counts.tried:
        return f"{told}their prompts have {unscored}"
    rest = counts.tried - counts.unscored
    return f"{told}{counts.unscored} have {unscored}; of the other {rest} the {alike}"


def make_rules(knobs) -> Rules:
    """The reward rules of the knobs; the verifier is looked up before any model loads."""
    verify = find_verifier(knobs.verifier, knobs.verifier_pattern)
    return Rules(verify, knobs.format_pattern, knobs.max_new_tokens, knobs.overlong_buffer)


def make_vllm(policy: Path, model, prompts: list[Prompt], knobs: Knobs) -> VllmSampler:
    """vLLM in place of our own sampling; `model` states its rows' log-probs."""
    base, adapter = base_of(policy), None
    if base != policy:
        adapter = {"folder": str(policy), "rank": shape_of(policy).rank}
    options = {
        "model": str(base),
        "adapter": adapter,
        "device": model.device.type,
        "dtype": "bfloat16" if knobs.precision == "bf16" else "float32",
        "positions": max(len(prompt.ids) for prompt in prompts) + knobs.max_new_tokens,
        "trust": knobs.model.trust_remote_code,
    }
    return VllmSampler(
        where=vllm(),
        options=options,
        threads=knobs.threads,
        policy=model,
        sampling=make_sampling(model, knobs),
        num_rollouts=knobs.num_rollouts,
        seed=knobs.seed,
        precision=knobs.precision,
    )


def make_sampling(model, knobs: Knobs) -> Sampling:
    """How tokens are drawn, and which of them end an answer."""
    return Sampling(
        knobs.temperature,
        knobs.top_p,
        knobs.top_k,
        knobs.min_p,
        knobs.max_new_tokens,
        stop_ids(model),
        knobs.forward_max_tokens,
    )


def make_engine(
    model, tokenizer, rules: Rules, knobs: Knobs, sampler: VllmSampler | None = None
) -> Engine:
    """The rollout engine over one policy."""

    def rewards(prompt: Prompt, text: str, ids) -> dict:
        return reward_columns(rules, knobs.verifier, prompt, text, len(ids))

    return Engine(
        policy=model,
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        sampling=make_sampling(model, knobs),
        num_rollouts=knobs.num_rollouts,
        batch_size=knobs.rollout_batch_size,
        rewards=rewards,
        seed=knobs.seed,
        sampler=sampler,
    )


class Tally:
    """Totals and means over the rows that pass by."""

    def __init__(self):
        self.count = self.tokens = 0
        self.means, self.rules = Means(), Means()

    def watch(self, bar: Bar) -> Iterator[dict]:
        for row in bar:
            length, score = len(row["completion_ids"]), row["reward_correctness"]
            self.count, self.tokens = self.count + 1, self.tokens + length
            right = None if score is None else score == 1.0
            self.means.add(accuracy=right, length=length, finished=row["finished"])
            self.rules.add(**{name: row[name] for name in RULES})
            bar.tell(length, **self.rules.known())
            yield row

    def figures(self) -> dict:
        """Totals, accuracy (share of what can be scored that scores exactly 1; None where nothing
        can), mean tokens, finished share, rule means.
        """
        figures = {"completions": self.count, "tokens": self.tokens}
        figures |= {name: self.means.of(name) for name in ("accuracy", "length", "finished")}
        return figures | self.rules.known()


if __name__ == "__main__":
    rollout()
