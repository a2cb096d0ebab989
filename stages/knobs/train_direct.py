"""Knobs of `train_direct`."""

from typing import Self

from pydantic import model_validator

from stages.base.knobs import Memory, Nonfinite, Seed, Training, choice, number, text


class Direct(Training):
    loss: text("Loss over pairs: a name of LOSSES in stages/direct/losses.py.")
    beta: number(
        "Weight of the log-ratios: a higher one stays closer to the reference (orpo: weight of the"
        " odds ratio).",
        ge=0,
    )
    label_smoothing: number(
        "dpo, dpo_norm: share of pairs whose label is taken to be wrong.", ge=0, lt=0.5
    )
    label_noise: choice(
        "How label_smoothing is taken: conservative (cDPO), or robust (unbiased).",
        "conservative",
        "robust",
    )
    margin_weight: number("dpo, dpo_norm: weight of the pairs' own margins.", ge=0)
    dpop_weight: number("dpo: weight of DPOP's penalty on chosen answers that lost.", ge=0)
    gamma: number("simpo: the margin, in units of its implicit reward.", ge=0)
    nll_weight: number("Weight of a fine-tuning term on the chosen answers, beside any loss.", ge=0)

    @model_validator(mode="after")
    def loss_fits(self) -> Self:
        from stages.direct.losses import LOSSES

        if self.loss not in LOSSES:
            raise ValueError(
                f"direct.loss: found {self.loss!r}, expected one of {', '.join(LOSSES)}"
            )
        if self.beta == 0 and self.loss in ("ipo", "ipo_sum"):
            raise ValueError(f"direct.beta: found 0, but loss {self.loss} divides by it")
        if self.beta == 0 and self.loss not in ("orpo", "sft") and not self.nll_weight:
            raise ValueError(
                f"direct.beta: found 0, which gives loss {self.loss} no gradient; expected above 0"
            )
        if self.loss == "sft" and self.nll_weight:
            raise ValueError(
                f"direct.nll_weight: found {self.nll_weight}, but loss sft is that term; expected 0"
            )
        for name in ("label_smoothing", "margin_weight", "dpop_weight", "gamma"):
            if getattr(self, name) and name not in LOSSES[self.loss].reads:
                raise ValueError(
                    f"direct.{name}: found {getattr(self, name)}, but loss {self.loss} does not"
                    " read it; expected 0"
                )
        return self


class Knobs(Memory):
    seed: Seed
    nonfinite: Nonfinite
    direct: Direct
