"""Combinations of models, optimizers, devices, microbatches and budgets, for runs in waves.

Each value occurs in some combination of a draw: every model once, with every number of waves that
its microbatches allow and every budget. Another seed combines them in another way.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from optimizers import OPTIMIZERS, SIGN_LIKE
from zoo import CASES

# Numbers of devices and of microbatches of 8 examples; a microbatch has one for each device.
DIVISIONS = ((1, 2), (1, 4), (1, 8), (2, 2), (2, 4))

# Models with a parameter that several groups use: waves add up its gradient in another order.
SHARED = frozenset({"nnx_tied", "shared_block", "while_two"})

# Models with stacked layers, and optimizers that would take a stack for one matrix.
_STACKED = frozenset({"nnx_scan", "linen_scan_remat", "lax_scan_pytree", "scan_of_lists"})
_COUPLING = frozenset({"muon", "adaptive_grad_clip"})


@dataclass(frozen=True, kw_only=True)
class Combination:
    """The values of a comparison between one wave and several.

    Attributes:
        model: Name of a case of the zoo.
        optimizer: Name of an optimizer.
        devices: Number of devices.
        microbatches: Number of microbatches.
        budget: A budget of device memory between the least, 0, and all that is used, 1.
    """

    model: str
    optimizer: str
    devices: int
    microbatches: int
    budget: float = 0.5

    @property
    def waves(self) -> list[int]:
        """The numbers of waves above one."""
        return [n for n in (2, 4, 8) if self.microbatches % n == 0]


def pairs() -> list[tuple[str, str]]:
    """All models that can go in waves, with all optimizers whose results can be compared."""

    def fit(model: str, optimizer: str) -> bool:
        # Another order of additions changes the sign of a gradient that is only rounding.
        compares = model not in SHARED or optimizer not in SIGN_LIKE
        return compares and (model not in _STACKED or optimizer not in _COUPLING)

    models = [case.name for case in CASES.values() if case.microbatches]
    return [pair for pair in itertools.product(models, OPTIMIZERS) if fit(*pair)]


def draw(seed: str) -> dict[str, Combination]:
    """A combination for each model, by its name; equal for equal seeds."""
    rng, possible = random.Random(seed), set(pairs())
    models = sorted({model for model, _ in possible})
    rng.shuffle(models)
    # Those that not every optimizer suits choose first.
    models.sort(key=lambda model: model not in SHARED | _STACKED)
    optimizers, divisions = [*OPTIMIZERS], _dealt(rng, DIVISIONS)
    left, drawn = list[str](), {}
    for model in models:
        left = left or rng.sample(optimizers, len(optimizers))
        optimizer = next(o for o in left if (model, o) in possible)
        left.remove(optimizer)
        devices, microbatches = next(divisions)
        drawn[model] = Combination(
            model=model,
            optimizer=optimizer,
            devices=devices,
            microbatches=microbatches,
            budget=rng.uniform(0.2, 0.8),
        )
    return drawn


def _dealt(rng: random.Random, values: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int]]:
    """The values in random order, over and over."""
    return itertools.cycle(rng.sample(values, len(values)))
