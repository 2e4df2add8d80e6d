"""The settings shared by all commands that train: data, optimizer, memory, checkpoints and logs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.cli.setting_rules import (
    Compute,
    Decay,
    Master,
    Microbatches,
    PrecisionName,
    Products,
    State,
    Sums,
    check_optimizer,
    check_unused_options,
)

LogName = Literal["csv", "jsonl", "tensorboard", "wandb", "mlflow"]

_SHARES = ("warmup", "final_rate", "b1", "b2")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Trains; the same command resumes the run.

    Attributes:
        data: Files, folders, patterns such as chats/*.jsonl.gz, and datasets on the Hugging Face
            Hub such as HuggingFaceH4/ultrachat_200k:train_sft, one or a list.
        out: Folder of the run, for checkpoints, exports, logs and the report.
        invalid: Treatment of unusable rows.
        columns: Names of the data's columns that differ from those of known formats, such as
            {prompt: task, completion: reply}.
        microbatches: Equal parts that each batch is cut into; auto lets the plan choose, once for a
            run.
        optimizer: adamw, lion, muon, adafactor or sgd; or module:function, a function from the
            learning rate and optimizer_options to an Optax optimizer.
        optimizer_options: Further keywords of the optimizer in Optax, such as {eps: 1e-6}.
        learning_rate: Highest learning rate; default: 1e-5. That is for adamw, and also for muon
            and adafactor; lion needs a third to a tenth of it, sgd far more.
        warmup: Fraction of the steps in which the learning rate rises, from above 0.
        decay: How the learning rate falls afterwards.
        final_rate: Fraction of the highest learning rate at the end of the decay.
        weight_decay: Weight decay, multiplied by the learning rate.
        b1: Decay of the mean of gradients, in adamw, lion and muon's adamw.
        b2: Decay of the mean of their squares; in lion, of its momentum.
        clip: Maximum global norm of the gradients; null for no clipping.
        precision: Forms of masters, optimizer state and computation together: compact has masters
            in bfloat16 and state in int8, two_bytes int8 and int4; the other names are a compute
            dtype. The next four options override parts of it.
        state: Form of optimizer state at rest; default: that of `precision`, or float32.
        master: Form of the masters at rest; default: that of `precision`, or float32.
        sums: Form of sums of gradients over microbatches.
        compute: dtype of the computation; default: that of `precision`, or bfloat16 on a GPU,
            float16 on one without bfloat16, and float32 elsewhere. float16 scales the loss.
        products: Form of large products with parameters, or float8-all for small ones, too;
            default: as `compute`.
        device_budget: GPU memory for state and activations, such as 22GiB, or minimum.
        host_budget: Maximum host memory of the process, such as 200GiB; default: all that is
            available.
        checkpoints: Whether to save checkpoints, from which the same command resumes.
        checkpoint_every: Save after each multiple of this number of steps, and at the end.
        keep: Number of checkpoints to keep.
        export: When to export: when the run has finished, also when interrupted, or never.
        export_dtype: dtype of the exported model; default: the checkpoint's.
        logs: Where to log records besides the terminal, one or several.
        wandb: Arguments of wandb.init, such as {project: mine, mode: offline}.
        mlflow: Arguments of the callback MLflow, such as {experiment: mine}.
        log_every: Print a line after each multiple of this number of steps.
        seed: Seed of the order of rows, of the evaluation split, of rounding, of sampling and of
            fresh parameters.
    """

    data: list[str] | str
    out: str
    invalid: Literal["error", "drop"] = "error"
    columns: dict[str, str] | None = None
    microbatches: Microbatches = 1
    optimizer: str = "adamw"
    optimizer_options: dict[str, Any] | None = None
    learning_rate: float | None = None
    warmup: float = 0.03
    decay: Decay = "cosine"
    final_rate: float = 0.1
    weight_decay: float = 0.0
    b1: float = 0.9
    b2: float = 0.95
    clip: float | None = 1.0
    precision: PrecisionName = "auto"
    state: State | None = None
    master: Master | None = None
    sums: Sums = "float32"
    compute: Compute | None = None
    products: Products | None = None
    device_budget: int | str | None = None
    host_budget: int | str | None = None
    checkpoints: bool = True
    checkpoint_every: int | None = None
    keep: int = 1
    export: Literal["finished", "always", "never"] = "finished"
    export_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    logs: list[LogName] | LogName | None = None
    wandb: dict[str, Any] | None = None
    mlflow: dict[str, Any] | None = None
    log_every: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks constraints beyond types.

        Raises:
            ValueError: If an option is out of range, or some contradict each other.
        """
        if self.learning_rate is None:
            # So that the settings of a run have the number, whatever later defaults are.
            object.__setattr__(self, "learning_rate", self._default_rate)
        checks.path("out", self.out)
        if not self.sources:
            raise ValueError("`data` is empty: it names no file")
        for name in ("keep", "log_every"):
            checks.integer(name, getattr(self, name))
        if self.microbatches != "auto":
            checks.integer("microbatches", self.microbatches)
        if self.checkpoint_every is not None:
            checks.integer("checkpoint_every", self.checkpoint_every)
        checks.integer("seed", self.seed, least=0)
        for name in ("learning_rate", "clip"):
            if (value := getattr(self, name)) is not None:
                checks.number(name, value, above=0)
        checks.number("weight_decay", self.weight_decay, least=0)
        check_shares(self, _SHARES)
        checks.device_budget(self.device_budget)
        checks.num_bytes("host_budget", self.host_budget)
        self._check_optimizer()
        for name in ("wandb", "mlflow"):
            if getattr(self, name) is not None and name not in self.log_names:
                raise ValueError(f"`{name}` says how to log there, but `logs` has no {name}")
        check_unused_options(
            self,
            ("checkpoint_every", "keep"),
            is_there=self.checkpoints,
            needed="`checkpoints`, which are off",
        )

    def _check_optimizer(self) -> None:
        check_optimizer(self.optimizer)
        check_unused_options(
            self,
            ("b1", "b2"),
            is_there=self.optimizer in ("adamw", "lion", "muon"),
            needed="`optimizer`=adamw, lion or muon; others have `optimizer_options`",
        )
        check_unused_options(
            self,
            ("weight_decay",),
            is_there=":" not in self.optimizer,
            needed="an `optimizer` known by name; functions have `optimizer_options`",
        )
        check_unused_options(
            self,
            ("final_rate",),
            is_there=self.decay != "constant",
            needed="a rate that falls, but `decay` is constant",
        )

    @property
    def _default_rate(self) -> float:
        return 1e-5

    @property
    def least_microbatches(self) -> int:
        """The number of microbatches; 1 if the plan chooses it."""
        return 1 if isinstance(self.microbatches, str) else self.microbatches

    @property
    def exports(self) -> tuple[str, ...]:
        """The subfolders of `out` to export."""
        return ("model",)

    @property
    def sources(self) -> list[str]:
        """The entries of `data`."""
        return listed(self.data)

    @property
    def log_names(self) -> list[str]:
        """The entries of `logs`."""
        return listed(self.logs)


def check_shares(settings: Any, names: Sequence[str]) -> None:
    """Checks settings that are shares.

    Args:
        settings: A dataclass of settings.
        names: The settings.

    Raises:
        ValueError: If one is not a number from 0 to 1.
    """
    for name in names:
        if not 0 <= (value := getattr(settings, name)) <= 1 or math.isnan(value):
            raise ValueError(checks.refused(name, "a share from 0 to 1", value))


def listed(given: Sequence[str] | str | None) -> list[str]:
    """The entries of a setting that may be one text or several."""
    if given is None:
        return []
    return [given] if isinstance(given, str) else list(given)
