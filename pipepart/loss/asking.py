"""What is asked of a user whose loss does not say what is needed, with the code that would say it."""

from __future__ import annotations

_PAIR = """

    def loss_fn(output, target):
        kept = (target != -100).float()                # 1 for what counts
        losses = ...                                   # one loss for each, not reduced
        return (losses * kept).sum(), kept.sum()       # the step divides the sum of sums by the sum of counts

"""


def ask_for_pair(what: str) -> str:
    """An error's text: what is wrong, and the form in which any mean can be written."""
    return (
        f"{what}. Return the sum over the samples and the number that it is to be divided by:{_PAIR}"
        "or, if it is a mean over samples after all, say so: Pipeline(..., reduction='mean')"
    )


def ask_for_count(of: str, missing: int, micro_batches: int) -> str:
    """An error's text: the counts are not known when the first backward needs their sum."""
    return (
        f"{of} returns (sum, count), and the first backward needs the counts of all {micro_batches} micro-batches, of "
        f"which {missing} are not known: they depend on what the model gives. Count the target alone:{_PAIR}"
        "or have all forwards run before any backward: schedule='gpipe' with recompute='never', or micro_batches=1"
    )
