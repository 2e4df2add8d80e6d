"""Models and optimizers that run on several simulated devices."""

import itertools

from optimizers import OPTIMIZERS, SIGN_LIKE
from zoo import CASES

# Plain fp32 gradients are up to 2e-5 from those in float64, whatever adds them up.
ILL_CONDITIONED = ("custom_rule", "fori_two", "shared_block", "sliced_towers")


def pairs():
    """Every other model with the next optimizer in line."""
    optimizers = itertools.cycle(OPTIMIZERS)
    for case in CASES.values():
        if case.name not in ILL_CONDITIONED:
            fitting = (n for n in optimizers if not (case.zero_gradients and n in SIGN_LIKE))
            yield case.name, next(fitting)


PAIRS = list(pairs())
