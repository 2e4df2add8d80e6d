"""The parts of a run that differ between `finetune` and `pretrain`: model, data and export."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

import megatrain_jax as mt
from megatrain_jax import data, models
from megatrain_jax._src.lm.cli.setting_rules import Frozen


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model to train, its loss, and functions to read its data and to export it.

    Attributes:
        model: Function that builds the model.
        params: Parameters to start from; None for the initial ones of the built model.
        trainable: Patterns of the trained parameters; None for all.
        frozen: Form of frozen parameters at rest.
        loss_of: Function from the number of microbatches to the loss; equal numbers give the same
            object. One of the loss's metrics is `tokens`, the step's tokens without padding.
        shapes: Shapes of a batch.
        reference: Folders of the checkpoint, and of its adapters, that serve as reference model
            before training; empty if the loss needs none.
        prompting: Function that returns the tokenizer for samples, and a function that formats a
            prompt.
        dataset: Function from files and the number of epochs to their batches.
        export: Function that writes a trained model, given the trainer, the name of one of the
            settings' `exports`, the folder to write and the chat template of the data.
    """

    model: Callable[[], models.Decoder]
    params: Any = None
    trainable: list[str] | str | None = None
    frozen: Frozen | None = None
    loss_of: Callable[[int], Callable[..., Any]]
    shapes: Mapping[str, jax.ShapeDtypeStruct]
    reference: tuple[str, ...] = ()
    prompting: Callable[[], tuple[Any, Callable[[str], Any]]]
    dataset: Callable[[Sequence[str] | str, int | None], data.Dataset]
    export: Callable[[mt.Trainer, str, Path, str | None], Path]
