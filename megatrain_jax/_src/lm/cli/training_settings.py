"""The settings shared by `finetune` and `pretrain`: options, defaults and checks."""

from dataclasses import dataclass, field
from typing import Literal

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.cli.run_settings import RunSettings, check_shares, listed
from megatrain_jax._src.lm.cli.setting_rules import check_unused_options

# Options that may change when a run is resumed, because they affect neither batches nor updates;
# `out`, because a folder may be moved, or its path written differently.
CHANGEABLE_OPTIONS = frozenset(
    "checkpoint_every checkpoints data_cache device_budget eval_data eval_every export export_as "
    "export_dtype host_budget keep log_every logs mlflow out push push_private "
    "sample_temperatures sample_tokens samples wandb workers".split()
)
_POSITIVE = ("length", "batch", "sample_tokens")
_POSITIVE_OR_NONE = ("epochs", "steps", "eval_every", "stop_after")


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(RunSettings):
    """Trains and exports; the same command resumes the run.

    Attributes:
        weights: Proportion of the rows from each of several entries of data; default: all rows of
            all entries.
        too_long: Treatment of longer documents; default: split for text, else error.
        workers: Threads that build batches ahead.
        data_cache: Folder that keeps tokenised data for later starts, or none; default:
            megatrain_jax/tokens in the user's cache folder.
        held_out: Fraction of the documents in the evaluation set; 0 for none.
        eval_data: Files to evaluate on, instead of documents split off from data.
        length: Tokens of a row, into which documents are packed.
        batch: Rows per step.
        epochs: How often all documents are seen; default: once, or as often as --steps needs.
        steps: Number of steps; documents repeat as needed unless --epochs is given; default: all
            epochs.
        on_nonfinite: Whether a loss or gradient that is not finite ends the run or skips the step.
        eval_every: Evaluate after each multiple of this number of steps, and at the end.
        metric: Evaluation metric that determines the best evaluation.
        metric_mode: Whether a smaller metric is better (min), or a larger one (max).
        min_delta: Minimum improvement of the metric that counts.
        stop_after: Stop after this many evaluations in a row without improvement; null never stops
            early.
        keep_best: Whether to keep the checkpoint of the best evaluation, and to export it.
        push: Name of a repository on the Hugging Face Hub, such as someone/mine, to upload the
            export of a finished run to.
        push_private: Whether that repository is private if it is new.
        samples: Prompts that are continued at each evaluation, one or several, for the terminal,
            the logs and the report.
        sample_tokens: Maximum number of tokens of a continuation; each costs a pass through the
            model.
        sample_temperatures: Temperatures at which each prompt is continued; 0 takes the most likely
            token.
    """

    weights: list[float] | None = None
    too_long: Literal["error", "cut", "split", "drop"] | None = None
    workers: int = 0
    data_cache: str | None = None
    held_out: float = 0.02
    eval_data: list[str] | str | None = None
    length: int = 2048
    batch: int = 16
    epochs: int | None = None
    steps: int | None = None
    on_nonfinite: Literal["raise", "skip"] = "raise"
    eval_every: int | None = None
    metric: str = "eval_loss"
    metric_mode: Literal["min", "max"] = "min"
    min_delta: float = 0.0
    stop_after: int | None = None
    keep_best: bool = False
    push: str | None = None
    push_private: bool = True
    samples: list[str] | str | None = None
    sample_tokens: int = 32
    sample_temperatures: list[float] = field(default_factory=lambda: [0.0])

    def __post_init__(self) -> None:
        """Checks constraints beyond types.

        Raises:
            ValueError: If an option is out of range, or some contradict each other.
        """
        super().__post_init__()
        for name in _POSITIVE:
            checks.integer(name, getattr(self, name))
        for name in _POSITIVE_OR_NONE:
            if (value := getattr(self, name)) is not None:
                checks.integer(name, value)
        checks.integer("workers", self.workers, least=0)
        check_shares(self, ("held_out",))
        checks.number("min_delta", self.min_delta, least=0)
        self._check_data()
        self._check_push()
        self._check_evaluation()
        self._check_samples()

    def _check_data(self) -> None:
        if self.weights is not None and not (len(self.sources) == len(self.weights) > 1):
            raise ValueError(
                f"`weights` must be one for each of two or more files of `data`, but are "
                f"{len(self.weights)} for {len(self.sources)}"
            )
        for weight in self.weights or ():
            checks.number("weights", weight, above=0)
        if self.batch % self.least_microbatches:
            raise ValueError(f"`microbatches`={self.microbatches} must divide `batch`={self.batch}")

    def _check_push(self) -> None:
        if self.push is not None and self.export == "never":
            raise ValueError(f"`push`={self.push} uploads an export, but `export` is never")
        if self.push is not None and len(self.exports) > 1:
            raise ValueError(
                f"`push`={self.push} uploads one export, but there are {' and '.join(self.exports)}"
            )
        check_unused_options(
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
        check_unused_options(
            self,
            ("metric", "metric_mode", "min_delta"),
            is_there=self.keep_best or self.stop_after is not None,
            needed="an evaluation that decides: set `keep_best` or `stop_after`",
        )
        # `eval_data` already implies that no documents are held out.
        check_unused_options(
            self,
            ("held_out",),
            is_there=self.eval_data is None or not self.held_out,
            needed="documents of `data` to evaluate on, but `eval_data` names others",
        )

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
        check_unused_options(
            self,
            ("sample_tokens", "sample_temperatures"),
            is_there=self.samples is not None,
            needed="prompts: set `samples`",
        )

    @property
    def prompts(self) -> list[str]:
        """The entries of `samples`."""
        return listed(self.samples)
