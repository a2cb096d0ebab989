"""A machine that goes away in the middle of a stage."""

from stages.base.scratch import save_state


class Cut(Exception):
    """The machine goes away."""


def cutting(after: int, save=save_state):
    """A function that saves, with the machine's end once it has saved so often."""
    left = [after]

    def then_end(*arguments):
        done = save(*arguments)
        left[0] -= 1
        if not left[0]:
            raise Cut
        return done

    return then_end
