"""Every case of shared/vectors/direct.json is a test somewhere, or left out for a reason."""

import json

from tests.helpers.shared import SHARED, needs
from tests.helpers.tiny import ROOT

VECTORS = SHARED / "vectors" / "direct.json"
LOSSES, SELECTION = "tests/direct/test_losses.py", "tests/rl/test_selection.py"
OUTCOME = "tests/reward/test_outcome.py"
# (kind, convention) -> the tests that run its cases.
TESTED = {
    ("preference_loss.dpo", "reduce=sum"): LOSSES,
    ("preference_loss.cdpo", "noise=smoothed"): LOSSES,
    ("preference_loss.robust_dpo", "noise=unbiased"): LOSSES,
    ("preference_loss.offset_dpo", "offset=margin"): LOSSES,
    ("preference_loss.rpo", "nll=row-mean"): LOSSES,
    ("preference_loss.dpo_norm", "reduce=token-mean"): LOSSES,
    ("preference_loss.ipo", "reduce=token-mean"): LOSSES,
    ("preference_loss.ipo", "reduce=sum"): LOSSES,
    ("preference_loss.hinge", "margin=1"): LOSSES,
    ("preference_loss.apo_zero", "constant=0"): LOSSES,
    ("preference_loss.apo_down", "constant=0"): LOSSES,
    ("preference_loss.simpo", "gamma=absolute"): LOSSES,
    ("preference_loss.orpo", "nll=row-mean"): LOSSES,
    ("pair_accumulation", "agg=pair-mean"): LOSSES,
    ("group_pairs", "pairs=best-worst;ties=skip"): SELECTION,
    ("online_dpo", "pairs=best-worst;ties=skip;loss=sigmoid"): SELECTION,
    ("rejection_sampling", "select=best-of-group"): SELECTION,
    ("policy_loss.raft", "select=best-of-group;agg=token-mean"): SELECTION,
    ("policy_loss.raft", "select=best-of-group;agg=seq-mean-token-mean"): SELECTION,
    ("orm", "target=every-token"): OUTCOME,
    ("orm", "target=last-token"): OUTCOME,
    ("orm_ranking", "ties=half"): OUTCOME,
}
KTO = "its reference point couples all pairs of a batch, so micro-batches would change the gradient"
TRL_PAIRS = "two samples a prompt, and a tie trains; here best and worst, and a tie is left out"
LEFT_OUT = {
    ("preference_loss.offset_dpo", "offset=log-gap"): "ODPO needs scores of both answers of a pair",
    ("preference_loss.rpo", "nll=token-mean"): "each row by its own tokens, as in the paper",
    ("preference_loss.apo_zero", "constant=1"): "no constant, as in the paper; the same gradient",
    ("preference_loss.simpo", "gamma=ratio"): "gamma is the margin itself, as in the paper",
    ("preference_loss.kto", "kl=mismatched;agg=all-rows"): KTO,
    ("preference_loss.kto", "kl=rejected-mean;agg=class-means"): KTO,
    ("online_dpo", "pairs=first-two;ties=first-wins;loss=sigmoid"): TRL_PAIRS,
    ("online_dpo", "pairs=first-two;ties=first-wins;loss=ipo"): TRL_PAIRS,
    ("rejection_sampling", "select=best-of-all"): "the best of each group, as in the paper of RAFT",
    ("prm", "target=step-end"): "there is no process reward model",
}


@needs(VECTORS)
def test_every_case_is_tested_or_left_out_with_a_reason():
    cases = json.loads(VECTORS.read_text())
    found = {(case["kind"], case["convention"]["name"]) for case in cases}
    assert TESTED.keys() | LEFT_OUT.keys() == found
    assert not TESTED.keys() & LEFT_OUT.keys()


@needs(VECTORS)
def test_a_module_that_is_named_reads_the_cases_of_that_kind():
    for (kind, _), path in TESTED.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        assert kind.removeprefix("preference_loss.") in text, (kind, path)
