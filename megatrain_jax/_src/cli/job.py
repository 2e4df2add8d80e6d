"""The part of a run in which `finetune` and `pretrain` differ: what is trained, read, exported."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

import megatrain_jax as mt
from megatrain_jax import data, models
from megatrain_jax._src.cli.choices import Frozen


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model to train, its loss, how its data is read and how it is exported.

    Attributes:
        model: Function that builds the model.
        params: Parameters to start from; None for those that the model is built with.
        trainable: Pattern of the parameters that are trained; None for all.
        frozen: Form of the other parameters at rest.
        loss_fn: The loss. One of its metrics is `tokens`, the tokens of a step without padding.
        shapes: Shapes of a batch.
        reference: Folder of the checkpoint by which a reference's numbers are computed before
            training; None where the loss needs none.
        prompting: Function that gives the tokenizer by which prompts are continued, and turns a
            prompt into what it continues.
        dataset: Function from files, and how often they are seen, to their batches.
        export: Function that writes a trained model: the trainer, the name of one of the settings'
            `exports`, the folder to write and the chat template of the data.
    """

    model: Callable[[], models.Decoder]
    params: Any = None
    trainable: str | None = None
    frozen: Frozen | None = None
    loss_fn: Callable[..., Any]
    shapes: Mapping[str, jax.ShapeDtypeStruct]
    reference: str | None = None
    prompting: Callable[[], tuple[Any, Callable[[str], Any]]]
    dataset: Callable[[Sequence[str] | str, int | None], data.Dataset]
    export: Callable[[mt.Trainer, str, Path, str | None], Path]
