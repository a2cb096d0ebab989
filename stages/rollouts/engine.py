"""The rollout engine: prompts in, the rows of one round's rollout table out.

Letters: U prompts, G completions of each. Prompts come in a shuffled order that runs on from round
to round; `position` counts in it, and each position has random draws of its own per round, so batch
size changes no sample.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stages.base.chunks import chunks, within
from stages.base.randomness import shuffled
from stages.models import processes
from stages.rollouts.sampling import Completion, Sampling, sample, uniforms


@dataclass(frozen=True)
class Prompt:
    """A prompt to sample from: its row number in the source, its ids, and what rules need of it."""

    index: int
    ids: list[int]
    text: str
    answer: str | None
    entry: dict | None


@dataclass
class Counts:
    """Groups a round kept and, under dynamic sampling, dropped; tried = kept + dropped.

    `unscored` of the dropped ones have no score at all: nothing checks their answers.
    """

    kept: int = 0
    dropped: int = 0
    unscored: int = 0
    cursor: int = 0

    @property
    def tried(self) -> int:
        return self.kept + self.dropped


Sampler = Callable[[Sequence[Prompt], int, Sequence[int]], list[list[Completion]]]


@dataclass(frozen=True)
class Engine:
    """A policy with all that a round of rollouts takes.

    `rewards(prompt, completion text, ids)` gives the rule columns. `sampler(prompts, round,
    positions)` takes the place of our own sampling; None: ours.
    """

    policy: PreTrainedModel
    decode: Callable[[Sequence[int]], str]
    sampling: Sampling
    num_rollouts: int
    batch_size: int
    rewards: Callable[[Prompt, str, Sequence[int]], dict]
    seed: int
    sampler: Sampler | None = None
    counts: Counts = field(default_factory=Counts)

    def rows(
        self,
        prompts: Sequence[Prompt],
        round_number: int,
        cursor: int,
        wanted: int,
        tries: int,
    ) -> Iterator[dict]:
        """Yield the rows of `wanted` groups, starting at `cursor` of the prompt order.

        With `tries` above 0 groups whose correctness is all alike are dropped and further prompts
        drawn, at most `tries * wanted` in all (DAPO, Yu et al. 2025, sec. 3.2). `counts` holds what
        became of them in this round.
        """
        start = Counts(cursor=cursor)
        for batch in self.batches(prompts, round_number, start, wanted, tries):
            yield from batch

    def batches(
        self,
        prompts: Sequence[Prompt],
        round_number: int,
        start: Counts,
        wanted: int,
        tries: int,
    ) -> Iterator[list[dict]]:
        """`rows`, as lists of those that were sampled together, after what `start` counts.

        Batches are whole, also where a few groups more would do: what stands behind the last group
        that is wanted is left out, and its prompts come again. So the bytes of a batch depend on
        nothing before it, and several processes sample batches side by side. `counts` holds what
        became of the groups up to the batch that was yielded last.
        """
        counts, limit = self.counts, wanted * max(1, tries)
        vars(counts).update(vars(start))
        at_once = groups_at_once(self.batch_size, self.num_rollouts)
        left = range(counts.cursor, counts.cursor + limit - counts.tried)
        parts = chunks(left if counts.kept < wanted else (), at_once)
        sample = partial(self._groups, prompts, round_number)
        for groups in processes.in_turn(sample, parts):
            rows = []
            for group in groups:
                if counts.kept == wanted:
                    break
                scores = {row["reward_correctness"] for row in group} - {None}
                if tries and len(scores) < 2:
                    counts.dropped += 1
                    counts.unscored += not scores
                else:
                    rows += [row | {"group": counts.kept} for row in group]
                    counts.kept += 1
                counts.cursor += 1
            yield rows
            if counts.kept == wanted:
                return

    def _groups(
        self, prompts: Sequence[Prompt], round_number: int, positions: Sequence[int]
    ) -> list[list[dict]]:
        """The rows of the groups at some positions of the prompt order, not yet numbered."""
        chosen = [prompts[prompt_at(p, len(prompts), self.seed)] for p in positions]
        groups = self._sample(chosen, round_number, positions)
        return [
            self._rows_of_group(prompt, completions, round_number)
            for prompt, completions in zip(chosen, groups, strict=True)
        ]

    def _sample(
        self, prompts: Sequence[Prompt], round_number: int, positions: Sequence[int]
    ) -> list[list[Completion]]:
        """(U prompts at U positions) -> U lists of G completions."""
        if self.sampler is not None:
            return self.sampler(prompts, round_number, positions)
        shape = (self.num_rollouts, self.sampling.max_new_tokens)
        draws = draws_of(self.seed, "rollout", round_number, positions, shape)
        return sample_groups(self.policy, prompts, draws, self.sampling)

    def _rows_of_group(self, prompt: Prompt, completions, round_number: int) -> list[dict]:
        rows = []
        for number, completion in enumerate(completions):
            text = self.decode(completion.ids)
            rows.append(
                {
                    "round": round_number,
                    "group": None,
                    "sample": number,
                    "prompt_index": prompt.index,
                    "prompt": prompt.text,
                    "answer": prompt.answer,
                    "completion": text,
                    "prompt_ids": prompt.ids,
                    "completion_ids": completion.ids,
                    "finished": completion.finished,
                    "log_probs_old": completion.log_probs,
                    "log_probs_sampler": completion.log_probs_sampler,
                    **self.rewards(prompt, text, completion.ids),
                }
            )
        return rows


def sample_groups(
    policy: PreTrainedModel, prompts: Sequence[Prompt], draws: Tensor | None, sampling: Sampling
) -> list[list[Completion]]:
    """(U prompts, draws (U, G, T)) -> U lists of G completions; without draws one greedy one.

    Prompts whose rows would hold more than `sampling.max_tokens` are decoded in turn, and so are
    the completions of a prompt that alone would.
    """
    group, limit = 1 if draws is None else draws.shape[1], sampling.max_tokens
    completions, cap = [], sampling.max_new_tokens
    for part in within(([len(prompt.ids) + cap] * group for prompt in prompts), limit):
        ids = [prompts[place].ids for place in part]
        size = group if limit is None else max(1, limit // (max(map(len, ids)) + cap))
        for start in range(0, group, size if len(part) == 1 else group):
            uniform = None if draws is None else draws[part, start : start + size]
            completions += sample(policy, ids, uniform, sampling)
    return list(chunks(completions, group))


def draws_of(
    seed: int, stage: str, round_number: int, positions: Sequence[int], shape: tuple[int, int]
) -> Tensor:
    """(U positions), (G, T) -> (U, G, T): each position's own uniforms, whatever its mates are."""
    return torch.stack([uniforms(seed, stage, round_number, p, shape) for p in positions])


def groups_at_once(completions: int, samples: int) -> int:
    """How many prompts are decoded side by side; always at least one."""
    return max(1, completions // samples)


def stop_ids(policy: PreTrainedModel) -> tuple[int, ...]:
    """The tokens that end a completion, as the model's folder says."""
    stops = policy.generation_config.eos_token_id
    return tuple([stops] if isinstance(stops, int) else stops)


def prompt_at(position: int, count: int, seed: int) -> int:
    """Which of `count` prompts stands at a position of the endless order: a permutation a pass."""
    return _pass_order(count, seed, position // count)[position % count]


@lru_cache(maxsize=2)
def _pass_order(count: int, seed: int, number: int) -> list[int]:
    return shuffled(count, seed, "rollout", "prompts", number)
