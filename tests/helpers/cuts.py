"""A machine that goes away in the middle of a training."""

from stages.base.scratch import save_state


class Cut(Exception):
    """The machine goes away."""


def cutting(after: int):
    """save_state, and the end once so many states are saved."""
    left = [after]

    def save(*arguments):
        save_state(*arguments)
        left[0] -= 1
        if not left[0]:
            raise Cut

    return save
