"""A model so small that a test can run many of it, and damage done to its checkpoints."""

import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from orbax.checkpoint import v1

import megatrain_jax as mt
from inside import store_of

OPTIMIZER = optax.adam(1e-2)


def params() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"w": rng.normal(size=(64, 64)).astype(np.float32)} for _ in range(2)]


def loss_fn(params, batch):
    x = batch["x"]
    for layer in params:
        x = jnp.tanh(x @ layer["w"])
    return jnp.mean(x**2)


def batch(seed: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).normal(size=(4, 64)).astype(np.float32)}


def trainer(**options: Any) -> mt.Trainer:
    precision = mt.Precision(compute=jnp.float32)
    return mt.Trainer(
        params(),
        loss_fn,
        OPTIMIZER,
        batch(0),
        precision=precision,
        progress=False,
        **options,
    )


def trained() -> mt.Trainer:
    """A trainer after two steps."""
    made = trainer()
    for seed in range(2):
        made.read(made.step(batch(seed)))
    return made


def fit(folder: Path | str | None, steps: int | None, **options: Any) -> mt.FitResult:
    data = options.pop("data", None) or (batch(seed) for seed in itertools.count())
    return mt.fit(
        params(),
        loss_fn,
        data,
        OPTIMIZER,
        steps=steps,
        precision=mt.Precision(compute=jnp.float32),
        checkpoint_dir=folder,
        progress=False,
        **options,
    )


@functools.cache
def expected(steps: int | None) -> list[float]:
    """The losses of an undisturbed run."""
    return losses(fit(None, 8))[:steps]


def losses(result: mt.FitResult) -> list[float]:
    return [record["loss"] for record in result.history]


def state(trainer: mt.Trainer) -> Any:
    """A copy of all that training changes."""
    trainer.flush()
    return jax.tree.map(np.array, [trainer.params, trainer.opt_state, store_of(trainer).step])


def plain(path: Path) -> Any:
    """A checkpoint as Orbax alone reads it."""
    with v1.Context():
        return v1.load(str(path))


def files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file())


def flip(file: Path, at: int, bits: int = 1) -> None:
    """Flips bits of one byte of a file."""
    content = bytearray(file.read_bytes())
    content[at] ^= bits
    file.write_bytes(content)


def damage(path: Path, array: np.ndarray) -> None:
    """Changes one bit of an array in a checkpoint."""
    (found,) = ((p, at) for p in files(path) if (at := p.read_bytes().find(array.tobytes())) >= 0)
    flip(found[0], found[1] + 5)


def tree(folder: Path) -> dict[str, bytes]:
    """The contents of all files of a folder, by path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in files(folder)}
