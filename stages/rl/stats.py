"""What an update did to each completion, as it stood when last trained on.

Letters: N completions of the buffer, B of a micro-batch, T completion tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stages.models import processes
from stages.rl.objectives import ratio_diagnostics
from stages.rl.targets import cut


@dataclass(frozen=True)
class TokenFigures:
    """A forward pass over a micro-batch, token by token; all (B, T), 0 outside `action_mask`.

    clipped  bool: the clip holds the token's gradient back
    kl_ref   KL estimate against the reference; None without one
    """

    log_probs: Tensor
    log_probs_old: Tensor
    action_mask: Tensor
    clipped: Tensor
    entropy: Tensor
    kl_ref: Tensor | None


FIGURES = ("ratio_mean", "ratio_max", "clipped_fraction", "kl", "kl_ref", "entropy")


@dataclass
class CompletionStats:
    """Per completion, as it stood when last trained on; NaN where it never was. All (N,).

    `ratios` holds new / old of each token: (T,) a completion, None where it never was trained on.
    """

    count: int
    ratios: list[Tensor | None] = field(init=False)
    ratio_mean: Tensor = field(init=False)
    ratio_max: Tensor = field(init=False)
    clipped_fraction: Tensor = field(init=False)
    kl: Tensor = field(init=False)
    kl_ref: Tensor = field(init=False)
    entropy: Tensor = field(init=False)

    def __post_init__(self):
        for name in FIGURES:
            setattr(self, name, torch.full((self.count,), torch.nan))
        self.ratios = [None] * self.count

    def tensors(self) -> dict[str, Tensor]:
        """All of it as tensors by name, for a saved state; -1 is the length of a row not seen."""
        lengths = [-1 if ratio is None else len(ratio) for ratio in self.ratios]
        known = [ratio for ratio in self.ratios if ratio is not None]
        found = {name: getattr(self, name).clone() for name in FIGURES}
        ratios = torch.cat(known) if known else torch.zeros(0)
        return found | {"ratios": ratios, "lengths": torch.tensor(lengths)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave."""
        for name in FIGURES:
            getattr(self, name).copy_(tensors[name])
        lengths = tensors["lengths"].tolist()
        parts = iter(tensors["ratios"].split([length for length in lengths if length >= 0]))
        self.ratios = [None if length < 0 else next(parts).clone() for length in lengths]

    @torch.no_grad()
    def note(self, batch: Sequence[int], tokens: TokenFigures) -> None:
        """Keep what a micro-batch shows of its rows."""
        mask, old = tokens.action_mask, tokens.log_probs_old
        lengths = mask.sum(1)  # (B,)
        figures = ratio_diagnostics(tokens.log_probs, old, tokens.clipped, mask)._asdict()
        figures["entropy"] = tokens.entropy.sum(1) / lengths
        if tokens.kl_ref is not None:
            figures["kl_ref"] = tokens.kl_ref.sum(1) / lengths
        for name, figure in figures.items():
            getattr(self, name)[torch.tensor(batch)] = figure.cpu()
        ratios = cut((tokens.log_probs - old).exp().cpu(), lengths)
        for row, ratio in zip(batch, ratios, strict=True):
            self.ratios[row] = ratio

    def share(self, rows: Sequence[int], own: Sequence[int], lengths: Tensor) -> None:
        """Let all processes know what each noted of `rows`; this one noted `own` of them.

        `lengths` (N,) counts the tokens of each completion. A row belongs to one process, so that
        what it noted is added to 0.
        """
        if processes.count() == 1:
            return
        places, noted = torch.tensor(rows), set(own)
        here = torch.tensor([row in noted for row in rows])
        figures = torch.stack([getattr(self, name)[places] for name in FIGURES])
        ratios = [
            self.ratios[row] if row in noted else torch.zeros(int(lengths[row])) for row in rows
        ]
        figures = processes.summed(torch.where(here, figures, 0.0))
        for name, figure in zip(FIGURES, figures, strict=True):
            getattr(self, name)[places] = figure
        ratios = processes.summed(torch.cat(ratios)).split(lengths[places].tolist())
        for row, ratio in zip(rows, ratios, strict=True):
            self.ratios[row] = ratio.clone()


def token_mean(row_means: Tensor, lengths: Tensor) -> float:
    """(N,) token means of rows, (N,) lengths -> mean over all tokens; NaN rows are left out."""
    known = ~row_means.isnan()
    weights = torch.where(known, lengths, 0)
    return (torch.where(known, row_means, 0.0) * weights).sum().item() / max(1, int(weights.sum()))


def explained_variance(values: Sequence[Tensor], returns: Sequence[Tensor]) -> float | None:
    """1 - Var(returns - values) / Var(returns) over all tokens; None if returns have no spread."""
    values, returns = torch.cat(list(values)), torch.cat(list(returns))
    if len(returns) < 2 or returns.max() == returns.min():
        return None
    return 1 - ((returns - values).var() / returns.var()).item()
