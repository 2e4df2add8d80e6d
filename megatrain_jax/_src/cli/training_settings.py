"""The settings shared by `finetune` and `pretrain`: options, defaults and checks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatrain_jax._src.cli.setting_rules import (
    Compute,
    Decay,
    Master,
    Products,
    State,
    check_needed,
    check_optimizer,
)
from megatrain_jax._src.common import checks

LogName = Literal["csv", "jsonl", "tensorboard", "wandb", "mlflow"]

# Options that may change while a run continues, because they affect neither batches nor updates;
# `out`, because a folder may be moved, or named in another way.
FREE = frozenset(
    "checkpoint_every checkpoints data_cache device_budget eval_data eval_every export export_as "
    "export_dtype host_budget keep log_every logs mlflow out push push_private "
    "sample_temperatures sample_tokens samples wandb workers".split()
)
_POSITIVE = ("length", "batch", "microbatches", "keep", "log_every", "sample_tokens")
_POSITIVE_OR_NONE = ("epochs", "steps", "eval_every", "checkpoint_every", "stop_after")
_SHARES = ("warmup", "final_rate", "held_out", "b1", "b2")


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Trains and exports; the same command resumes the run.

    Attributes:
        data: Files, folders, patterns such as chats/*.jsonl.gz, and datasets on the Hugging Face
            Hub such as HuggingFaceH4/ultrachat_200k:train_sft, one or a list.
        weights: Proportion of the rows from each of several entries of data; default: all rows of
            all entries.
        out: Folder of the run, for checkpoints, exports, logs and the report.
        invalid: Treatment of unusable rows.
        too_long: Treatment of longer documents; default: split for text, else error.
        workers: Threads that build batches ahead.
        data_cache: Folder that keeps tokenised data for later starts, or none; default:
            megatrain_jax/tokens in the user's cache folder.
        held_out: Fraction of the documents in the evaluation set; 0 for none.
        eval_data: Files to evaluate on, instead of documents split off from data.
        length: Tokens of a row, into which documents are packed.
        batch: Rows per step.
        microbatches: Equal parts that each batch is cut into.
        epochs: How often all documents are seen; default: once, or as often as --steps needs.
        steps: Number of steps; documents repeat as needed unless --epochs is given; default: all
            epochs.
        optimizer: adamw, lion, muon, adafactor or sgd; or module:function, a function from the
            learning rate and optimizer_options to an Optax optimizer.
        optimizer_options: Further keywords of the optimizer in Optax, such as {eps: 1e-6}.
        learning_rate: Highest learning rate. The default is for adamw, and also for muon and
            adafactor; lion needs a third to a tenth of it, sgd far more.
        warmup: Fraction of the steps in which the learning rate rises, from above 0.
        decay: How the learning rate falls afterwards.
        final_rate: Fraction of the highest learning rate at the end of the decay.
        weight_decay: Weight decay, multiplied by the learning rate.
        b1: Decay of the mean of gradients, in adamw, lion and muon's adamw.
        b2: Decay of the mean of their squares; in lion, of its momentum.
        clip: Maximum global norm of the gradients; null for no clipping.
        state: Form of optimizer state at rest; compact is int8 beside masters in bfloat16,
            two_bytes is int4 beside masters in int8.
        master: Form of the masters at rest; default: float32, or as compact or two_bytes has it.
        compute: dtype of the computation; default: bfloat16 on a GPU, float16 on one without
            bfloat16, and float32 elsewhere. float16 scales the loss.
        products: Form of large products with parameters, or float8-all for small ones, too;
            default: as `compute`.
        device_budget: GPU memory for state and activations, such as 22GiB, or least.
        host_budget: Maximum host memory of the process, such as 200GiB; default: all that is
            available.
        on_nonfinite: Whether a loss or gradient that is not finite ends the run or skips the step.
        eval_every: Evaluate after each multiple of this number of steps, and at the end.
        metric: Evaluation metric that determines the best evaluation.
        metric_mode: Whether a smaller metric is better (min), or a larger one (max).
        min_delta: Minimum improvement of the metric that counts.
        stop_after: Stop after this many evaluations in a row without improvement; null never stops
            early.
        keep_best: Whether to keep the checkpoint of the best evaluation, and to export it.
        checkpoints: Whether to save checkpoints, from which the same command resumes.
        checkpoint_every: Save after each multiple of this number of steps, and at the end.
        keep: Number of checkpoints to keep.
        export: When to export: when the run has finished, also when interrupted, or never.
        export_dtype: dtype of the exported model; default: the checkpoint's.
        push: Name of a repository on the Hugging Face Hub, such as someone/mine, to upload the
            export of a finished run to.
        push_private: Whether that repository is private if it is new.
        logs: Where to log records besides the terminal, one or several.
        wandb: Arguments of wandb.init, such as {project: mine, mode: offline}.
        mlflow: Arguments of the callback MLflow, such as {experiment: mine}.
        samples: Prompts that are continued at each evaluation, one or several, for the terminal,
            the logs and the report.
        sample_tokens: Maximum number of tokens of a continuation; each costs a pass through the
            model.
        sample_temperatures: Temperatures at which each prompt is continued; 0 takes the most likely
            token.
        log_every: Print a line after each multiple of this number of steps.
        seed: Seed of the order of documents, of the evaluation split, of rounding and of fresh
            parameters.
    """

    data: list[str] | str
    out: str
    weights: list[float] | None = None
    invalid: Literal["error", "drop"] = "error"
    too_long: Literal["error", "cut", "split", "drop"] | None = None
    workers: int = 0
    data_cache: str | None = None
    held_out: float = 0.02
    eval_data: list[str] | str | None = None
    length: int = 2048
    batch: int = 16
    microbatches: int = 1
    epochs: int | None = None
    steps: int | None = None
    optimizer: str = "adamw"
    optimizer_options: dict[str, Any] | None = None
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
    compute: Compute | None = None
    products: Products | None = None
    device_budget: int | str | None = None
    host_budget: int | str | None = None
    on_nonfinite: Literal["raise", "skip"] = "raise"
    eval_every: int | None = None
    metric: str = "eval_loss"
    metric_mode: Literal["min", "max"] = "min"
    min_delta: float = 0.0
    stop_after: int | None = None
    keep_best: bool = False
    checkpoints: bool = True
    checkpoint_every: int | None = None
    keep: int = 1
    export: Literal["finished", "always", "never"] = "finished"
    export_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    push: str | None = None
    push_private: bool = True
    logs: list[LogName] | LogName | None = None
    wandb: dict[str, Any] | None = None
    mlflow: dict[str, Any] | None = None
    samples: list[str] | str | None = None
    sample_tokens: int = 32
    sample_temperatures: list[float] = field(default_factory=lambda: [0.0])
    log_every: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks constraints beyond types.

        Raises:
            ValueError: If an option is out of range, or some contradict each other.
        """
        checks.path("out", self.out)
        for name in _POSITIVE:
            checks.integer(name, getattr(self, name))
        for name in _POSITIVE_OR_NONE:
            if (value := getattr(self, name)) is not None:
                checks.integer(name, value)
        for name in ("seed", "workers"):
            checks.integer(name, getattr(self, name), least=0)
        for name in ("learning_rate", "clip"):
            if (value := getattr(self, name)) is not None:
                checks.number(name, value, above=0)
        for name in _SHARES:
            if not 0 <= (value := getattr(self, name)) <= 1 or math.isnan(value):
                raise ValueError(checks.refused(name, "a share from 0 to 1", value))
        for name in ("weight_decay", "min_delta"):
            checks.number(name, getattr(self, name), least=0)
        checks.num_bytes("device_budget", self.device_budget, "least")
        checks.num_bytes("host_budget", self.host_budget)
        self._check_optimizer()
        self._check_data()
        self._check_push()
        self._check_evaluation()
        self._check_logs()
        self._check_samples()

    def _check_optimizer(self) -> None:
        check_optimizer(self.optimizer)
        check_needed(
            self,
            ("b1", "b2"),
            is_there=self.optimizer in ("adamw", "lion", "muon"),
            needed="`optimizer`=adamw, lion or muon; others have `optimizer_options`",
        )
        check_needed(
            self,
            ("weight_decay",),
            is_there=":" not in self.optimizer,
            needed="an `optimizer` known by name; functions have `optimizer_options`",
        )

    def _check_data(self) -> None:
        if not self.sources:
            raise ValueError("`data` is empty: it names no file")
        if self.weights is not None and not (len(self.sources) == len(self.weights) > 1):
            raise ValueError(
                f"`weights` must be one for each of two or more files of `data`, but are "
                f"{len(self.weights)} for {len(self.sources)}"
            )
        for weight in self.weights or ():
            checks.number("weights", weight, above=0)
        if self.batch % self.microbatches:
            raise ValueError(f"`microbatches`={self.microbatches} must divide `batch`={self.batch}")

    def _check_push(self) -> None:
        if self.push is not None and self.export == "never":
            raise ValueError(f"`push`={self.push} uploads an export, but `export` is never")
        if self.push is not None and len(self.exports) > 1:
            raise ValueError(
                f"`push`={self.push} uploads one export, but there are {' and '.join(self.exports)}"
            )
        check_needed(
            self,
            ("push_private",),
            is_there=self.push is not None,
            needed="a repository to upload to: set `push`",
        )

    def _check_evaluation(self) -> None:
        evaluates = self.held_out > 0 or self.eval_data is not None
        if self.eval_every is not None and not evaluates:
            raise ValueError(f"`eval_every`={self.eval_every} needs `held_out` or `eval_data`")
        for name in ("stop_after", "keep_best"):
            if (value := getattr(self, name)) and self.eval_every is None:
                raise ValueError(f"`{name}`={value} needs evaluations: set `eval_every`")
        if not self.metric.startswith("eval_"):
            raise ValueError(checks.refused("metric", "one of evaluations, eval_...", self.metric))
        if self.keep_best and not self.checkpoints:
            raise ValueError("`keep_best` needs `checkpoints`")
        check_needed(
            self,
            ("metric", "metric_mode", "min_delta"),
            is_there=self.keep_best or self.stop_after is not None,
            needed="an evaluation that decides: set `keep_best` or `stop_after`",
        )
        check_needed(
            self,
            ("checkpoint_every", "keep"),
            is_there=self.checkpoints,
            needed="`checkpoints`, which are off",
        )
        check_needed(
            self,
            ("final_rate",),
            is_there=self.decay != "constant",
            needed="a rate that falls, but `decay` is constant",
        )
        # `eval_data` already implies that no documents are held out.
        check_needed(
            self,
            ("held_out",),
            is_there=self.eval_data is None or not self.held_out,
            needed="documents of `data` to evaluate on, but `eval_data` names others",
        )

    def _check_logs(self) -> None:
        for name in ("wandb", "mlflow"):
            if getattr(self, name) is not None and name not in self.log_names:
                raise ValueError(f"`{name}` says how to log there, but `logs` has no {name}")

    def _check_samples(self) -> None:
        evaluates = self.held_out > 0 or self.eval_data is not None
        if self.samples is not None and not evaluates:
            raise ValueError("`samples` are of evaluations: set `held_out` or `eval_data`")
        if self.samples is not None and not (self.prompts and all(self.prompts)):
            raise ValueError("`samples` must be prompts that are not empty")
        for temperature in self.sample_temperatures:
            checks.number("sample_temperatures", temperature, least=0)
        if not self.sample_temperatures:
            raise ValueError("`sample_temperatures` must not be empty")
        check_needed(
            self,
            ("sample_tokens", "sample_temperatures"),
            is_there=self.samples is not None,
            needed="prompts: set `samples`",
        )

    @property
    def prompts(self) -> list[str]:
        """The entries of `samples`."""
        return listed(self.samples)

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


def listed(given: Sequence[str] | str | None) -> list[str]:
    """The entries of a setting that may be one text or several."""
    if given is None:
        return []
    return [given] if isinstance(given, str) else list(given)
