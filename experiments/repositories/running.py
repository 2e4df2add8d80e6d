"""What the scripts of repositories share: a model of others is planned, or trained for some steps.

The script of a repository has a function `make`, which returns a `Training` of the repository's
own parts. Rows are drawn at random: whoever trains for real passes data of their own to `mt.fit`.
"""

import argparse
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import optax

import megatrain_jax as mt


@dataclass(frozen=True, kw_only=True)
class Training:
    """A repository's training, as `mt.fit` takes it.

    Attributes:
        model: The model, or a function that builds it.
        loss_fn: The loss.
        optimizer: The optimizer.
        draw: Returns a batch of random rows.
        options: Further options of `mt.fit`, such as `ema_decay`.
    """

    model: Any
    loss_fn: Callable[..., Any]
    optimizer: optax.GradientTransformation
    draw: Callable[[np.random.Generator], dict[str, np.ndarray]]
    options: dict[str, Any] = field(default_factory=dict)

    def batches(self, steps: int) -> list[dict[str, np.ndarray]]:
        """Batches for this number of steps, the same ones in each call."""
        rng = np.random.default_rng(0)
        return [self.draw(rng) for _ in range(steps)]

    def plan(self, **options: Any) -> mt.Plan:
        """The plan of the training."""
        parts = self.model, self.loss_fn, self.optimizer, self.batches(1)[0]
        return mt.plan(*parts, **{**self.options, **options})

    def fit(self, steps: int, **options: Any) -> mt.FitResult:
        """The result of this number of steps."""
        parts = self.model, self.loss_fn, self.batches(steps), self.optimizer
        return mt.fit(*parts, steps=steps, **{**self.options, **options})


def importable(folder: Path, package: str) -> None:
    """Makes a clone importable, before everything else that has its name.

    Args:
        folder: The folder that holds the package.
        package: The package's name, or that of a module.

    Raises:
        FileNotFoundError: If the folder doesn't hold it.
    """
    if not list(folder.glob(f"{package}*")):
        raise FileNotFoundError(f"{folder} is no clone of the repository: it has no {package}")
    sys.path.insert(0, str(folder.resolve()))


def part(name: str) -> Any:
    """A module of a repository."""
    return importlib.import_module(name)


def plain_bytes(plan: mt.Plan) -> int:
    """Bytes of parameters, gradients and two moments in fp32, which plain training keeps."""
    return 16 * plan.num_parameters


def main(text: str | None, make: Callable[[str, int], Training], package: str = "") -> None:
    """Plans or trains by the command line.

    Args:
        text: The script's own text.
        make: Makes the training of a configuration and a number of rows.
        package: The package of a clone, which is then the first argument; "" for one from pip.
    """
    parser = argparse.ArgumentParser(description=(text or "").split("\n", 1)[0])
    if package:
        parser.add_argument("clone", type=Path, help="folder of the repository")
    parser.add_argument("configuration", nargs="?", default="small", help="see the script")
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch")
    parser.add_argument("--steps", type=int, help="steps to train; without, the plan is printed")
    for name in ("hardware", "device-budget", "host-budget", "precision"):
        parser.add_argument(f"--{name}", help=f"see `mt.{'plan' if name == 'hardware' else 'fit'}`")
    parser.add_argument("--microbatches", type=int, help="parts of a batch")
    options = {name: x for name, x in vars(parser.parse_args()).items() if x is not None}
    if package:
        importable(options.pop("clone"), package)
    training = make(options.pop("configuration"), options.pop("rows"))
    if "steps" in options:
        print(training.fit(**options))
        return
    plan = training.plan(**options)
    print(plan)
    print(f"\nWithout this library, the state is {plain_bytes(plan) / 2**30:.1f} GiB on the GPU.")
