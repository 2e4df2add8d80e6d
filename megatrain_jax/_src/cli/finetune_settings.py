"""The settings of `megatrain-jax finetune`: every option, its default and its check."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from megatrain_jax._src.cli.recipe import Decay, Frozen, Master, OptimizerName, State
from megatrain_jax._src.cli.sizes import budget_of
from megatrain_jax._src.common import checks

# Options that may be changed while a run goes on: no batch and no update follows from them.
FREE = frozenset(
    "checkpoint_every checkpoints device_budget eval_data eval_every export export_dtype keep "
    "log_every".split()
)


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings:
    """Fine-tunes a checkpoint and exports it for Transformers; the same command goes on or is done.

    Attributes:
        model: Folder of the checkpoint, in the format of Hugging Face, with its tokenizer.
        data: Files of conversations or texts, one or a list.
        weights: Shares of the rows that each of several files gives; without it, all give all.
        out: Folder of the run, for checkpoints, the exported model and the report.
        format: Whether rows are conversations (chat) or plain text.
        train_on: Tokens that the loss counts in conversations.
        chat_template: A Jinja template, its file or the name of one; the tokenizer's without it.
        template_variables: Further variables of the template, such as {enable_thinking: false}.
        invalid: Treatment of rows that can't be used.
        too_long: Treatment of longer documents; without it error for chat and split for text.
        held_out: Share of the documents that is held out to evaluate on; 0 for none.
        eval_data: Files to evaluate on in place of documents held out.
        length: Tokens of a row, into which documents are packed.
        batch: Rows of a step.
        microbatches: Equal parts that each batch is cut into.
        epochs: How often all documents are seen; null for ever, until --steps.
        steps: Number of steps; without it, all epochs.
        optimizer: Name of the optimizer.
        learning_rate: Highest learning rate.
        warmup: Share of the steps in which the learning rate rises.
        decay: How the learning rate falls afterwards.
        final_rate: Share of the highest learning rate that the decay ends with.
        weight_decay: Decay of weights, multiplied with the learning rate.
        b1: Decay of the mean of gradients.
        b2: Decay of the mean of their squares.
        clip: Largest global norm of the gradients; null for no clipping.
        state: Form of optimizer state at rest; compact is int8 beside masters in bfloat16.
        master: Form of the masters at rest; without it float32, or what compact says.
        compute: dtype of arithmetic; without it bfloat16 on a GPU and float32 elsewhere.
        trainable: Regular expression on paths of the parameters that are trained; all without it.
        frozen: Form of the other parameters at rest.
        device_budget: GPU memory for state and activations, in bytes, or least.
        on_nonfinite: Whether a loss or gradient that is not finite ends the run or skips the step.
        eval_every: Evaluate after each step whose number this divides, and at the end.
        checkpoints: Whether to save checkpoints, from which the same command goes on.
        checkpoint_every: Save after each step whose number this divides, and at the end.
        keep: Number of checkpoints to keep.
        export: Whether the model is exported when the run has finished, also when interrupted.
        export_dtype: dtype of the exported model; without it, that of the checkpoint.
        log_every: Print a line after each step whose number this divides.
        seed: Seed of the order of documents, of what is held out and of rounding.
    """

    model: str
    data: list[str] | str
    out: str
    weights: list[float] | None = None
    format: Literal["chat", "text"] = "chat"
    train_on: Literal["assistant", "all"] = "assistant"
    chat_template: str | None = None
    template_variables: dict[str, Any] | None = None
    invalid: Literal["error", "drop"] = "error"
    too_long: Literal["error", "cut", "split", "drop"] | None = None
    held_out: float = 0.02
    eval_data: list[str] | str | None = None
    length: int = 2048
    batch: int = 16
    microbatches: int = 1
    epochs: int | None = 1
    steps: int | None = None
    optimizer: OptimizerName = "adamw"
    learning_rate: float = 1e-5
    warmup: float = 0.03
    decay: Decay = "cosine"
    final_rate: float = 0.1
    weight_decay: float = 0.0
    b1: float = 0.9
    b2: float = 0.95
    clip: float | None = 1.0
    state: State = "float32"
    master: Master | None = None
    compute: Literal["bfloat16", "float32"] | None = None
    trainable: str | None = None
    frozen: Frozen | None = None
    device_budget: str | None = None
    on_nonfinite: Literal["raise", "skip"] = "raise"
    eval_every: int | None = None
    checkpoints: bool = True
    checkpoint_every: int | None = None
    keep: int = 1
    export: Literal["finished", "always", "never"] = "finished"
    export_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    log_every: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks what types don't say.

        Raises:
            ValueError: If an option is out of its range, or some contradict each other.
        """
        for name in ("model", "out"):
            checks.path(name, getattr(self, name))
        for name in ("length", "batch", "microbatches", "keep", "log_every"):
            checks.integer(name, getattr(self, name))
        for name in ("epochs", "steps", "eval_every", "checkpoint_every"):
            if (value := getattr(self, name)) is not None:
                checks.integer(name, value)
        checks.integer("seed", self.seed, least=0)
        for name in ("learning_rate", "clip"):
            if (value := getattr(self, name)) is not None:
                checks.number(name, value, above=0)
        for name in ("warmup", "final_rate", "held_out", "b1", "b2"):
            if not 0 <= (value := getattr(self, name)) <= 1 or math.isnan(value):
                raise ValueError(checks.refused(name, "a share from 0 to 1", value))
        checks.number("weight_decay", self.weight_decay, least=0)
        if self.weights is not None and not (len(self.files) == len(self.weights) > 1):
            raise ValueError(
                f"`weights` must be one for each of two or more files of `data`, but are "
                f"{len(self.weights)} for {len(self.files)}"
            )
        for weight in self.weights or ():
            checks.number("weights", weight, above=0)
        budget_of(self.device_budget)
        if self.epochs is None and self.steps is None:
            raise ValueError("`epochs`=null never ends: say `steps`")
        if self.batch % self.microbatches:
            raise ValueError(f"`microbatches`={self.microbatches} must divide `batch`={self.batch}")
        evaluates = self.held_out > 0 or self.eval_data is not None
        if self.eval_every is not None and not evaluates:
            raise ValueError(f"`eval_every`={self.eval_every} needs `held_out` or `eval_data`")
        if self.checkpoint_every is not None and not self.checkpoints:
            raise ValueError(f"`checkpoint_every`={self.checkpoint_every} needs `checkpoints`")

    @property
    def files(self) -> list[str]:
        """The files of `data`."""
        return [self.data] if isinstance(self.data, str) else list(self.data)

    @property
    def too_long_or_default(self) -> str:
        """The treatment of documents that are too long."""
        return self.too_long or {"chat": "error", "text": "split"}[self.format]
