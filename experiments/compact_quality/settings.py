"""The compared forms of masters and optimizer state, in runs that are equal in all else."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A row: one way to hold masters and optimizer state.

    Attributes:
        held: Arguments of `megatrain_jax.Precision` besides the dtype to compute in. The record
            is made when the row runs, so that one it refuses fails alone.
        optimizer: Which optimizer.
        yardstick: Name of the row that this one's loss is compared with.
        rate: Factor of the learning rate of `Sizes`, which is AdamW's.
        waves: Microbatches of a step, each a wave of its own. Each wave adds its gradients to their
            sums, and rounds them if the sums are in bfloat16.
    """

    held: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Literal["adamw", "muon", "lion", "adafactor"] = "adamw"
    yardstick: str = "fp32"
    rate: float = 1.0
    waves: int = 1


BYTES = 256
_BF16 = {"master": "bfloat16"}
_WIDE = {"*/scale/value": "float32", "*/embedding/*": "float32"}  # norms and the embedding
# Lion's updates are signs, several times as large as AdamW's.
_LION = 0.3
_INT8, _INT4 = {**_WIDE, "*": "int8"}, {**_WIDE, "*": "int4"}
SETTINGS = {
    "fp32": Setting(),
    "bf16 masters, int8 state": Setting(held={**_BF16, "state": _INT8}),
    # `megatrain_jax.Precision.compact()`.
    "bf16 masters, int8 state, embeddings too": Setting(held={**_BF16, "state": "int8"}),
    "int8 state": Setting(held={"state": _INT8}),
    "bf16 masters": Setting(held=_BF16),
    "bf16 masters to nearest": Setting(held={**_BF16, "rounding": "nearest"}),
    "bf16 masters, bf16 state": Setting(held={**_BF16, "state": "bfloat16"}),
    "bf16 masters, int4 state": Setting(held={**_BF16, "state": _INT4}),
    "muon": Setting(optimizer="muon"),
    "muon, bf16 masters, int8 state": Setting(
        held={**_BF16, "state": _INT8}, optimizer="muon", yardstick="muon"
    ),
    # From one to three bytes per parameter, but for the second. They code the embedding, too.
    "adafactor, bf16 masters": Setting(held=_BF16, optimizer="adafactor"),
    "int8 masters": Setting(held={"master": "int8"}),
    "int8 masters, int4 state": Setting(held={"master": "int8", "state": "int4"}),
    "muon, int8 masters, int8 state": Setting(
        held={"master": "int8", "state": "int8"}, optimizer="muon", yardstick="muon"
    ),
    "lion, int8 masters, int8 state": Setting(
        held={"master": "int8", "state": "int8"}, optimizer="lion", rate=_LION
    ),
    "lion, int8 masters, int4 state": Setting(
        held={"master": "int8", "state": "int4"}, optimizer="lion", rate=_LION
    ),
    "adafactor, int8 masters": Setting(held={"master": "int8"}, optimizer="adafactor"),
    "muon, int8 masters, int4 state": Setting(
        held={"master": "int8", "state": "int4"}, optimizer="muon", yardstick="muon"
    ),
    "muon, bf16 masters, int4 state": Setting(
        held={**_BF16, "state": "int4"}, optimizer="muon", yardstick="muon"
    ),
    "lion, bf16 masters, int4 state": Setting(
        held={**_BF16, "state": "int4"}, optimizer="lion", rate=_LION
    ),
}


# The decoder's products are too small to be chosen, so these rows name them. With the head named,
# too, all are in float8 but attention's own.
_FLOAT8 = {"blocks/*": "float8"}
SETTINGS |= {
    "float8 products": Setting(held={"products": _FLOAT8}),
    "float8 products, the head too": Setting(held={"products": {"*": "float8"}}),
    "float8 products but down": Setting(held={"products": {"*/down/*": None, **_FLOAT8}}),
    "float8 products, bf16 masters, int8 state": Setting(
        held={**_BF16, "state": _INT8, "products": _FLOAT8}, yardstick="bf16 masters, int8 state"
    ),
    "float8 products, adafactor, bf16 masters": Setting(
        held={**_BF16, "products": _FLOAT8},
        optimizer="adafactor",
        yardstick="adafactor, bf16 masters",
    ),
}

SETTINGS |= {
    "bf16 masters, int8 state, 4 waves": Setting(held={**_BF16, "state": _INT8}, waves=4),
    "bf16 masters, int8 state, 4 waves, bf16 sums": Setting(
        held={**_BF16, "state": _INT8, "sums": "bfloat16"},
        yardstick="bf16 masters, int8 state, 4 waves",
        waves=4,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of model, text and run.

    Attributes:
        dim: The decoder's width.
        heads: Attention heads of a block.
        layers: Blocks.
        vocab: Rows of the embedding and the head: 256 for bytes, more for tokens of so many kinds.
        seq_len: Bytes or tokens in a window.
        batch_size: Windows in a step.
        steps: Training steps.
        learning_rate: Its peak, after a twentieth of the steps.
        eval_every: Steps between two evaluations; it divides the steps.
        eval_batches: Held-out batches of `eval_batch_size` windows in each.
        final_batches: The same of the evaluation after the last step.
        eval_batch_size: Windows in a held-out batch.
        loss_every: Steps that a written training loss is the mean of; it divides the steps.
        packages: Whether installed packages are read too, not just the standard library.
    """

    dim: int = 1024
    heads: int = 8
    layers: int = 8
    vocab: int = BYTES
    seq_len: int = 256
    batch_size: int = 16
    steps: int = 3000
    learning_rate: float = 3e-4
    eval_every: int = 250
    eval_batches: int = 8
    final_batches: int = 32
    eval_batch_size: int = 64
    loss_every: int = 10
    packages: bool = True

    @property
    def loss_unit(self) -> str:
        """The unit of losses."""
        return "nats per byte" if self.vocab == BYTES else "nats per token"


FULL = Sizes()
TINY = Sizes(
    dim=32,
    heads=2,
    layers=2,
    seq_len=32,
    batch_size=4,
    steps=40,
    learning_rate=3e-3,
    eval_every=20,
    eval_batches=2,
    final_batches=4,
    eval_batch_size=8,
    packages=False,
)


def file_name(name: str, seed: int) -> str:
    """Returns the name of the JSON file of a row's run with a seed."""
    return f"{re.sub(r'[^a-z0-9]+', '-', name)}-seed-{seed}.json"
