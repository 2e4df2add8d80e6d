"""The settings of commands that train: those of all, and those of `finetune` and `pretrain`.

They need no JAX, so that settings are checked before anything heavy is imported.
"""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.suggestions import did_you_mean

PrecisionName = Literal["auto", "compact", "two_bytes", "bfloat16", "float16", "float32"]
State = Literal["float32", "bfloat16", "int8", "int4"]
Compute = Literal["bfloat16", "float16", "float32"]
Master = Literal["float32", "bfloat16", "int8"]
Frozen = Literal["float32", "bfloat16", "int8", "nf4"]
Sums = Literal["float32", "bfloat16"]
Products = Literal["float8", "float8-all"]
Microbatches = int | Literal["auto"]
StatePerProcess = bool | Literal["auto"]
Decay = Literal["cosine", "linear", "constant"]
OPTIMIZERS = ("adamw", "lion", "muon", "adafactor", "sgd")


def check_optimizer(name: str) -> None:
    """Checks the name of an optimizer.

    Args:
        name: The setting `optimizer`.

    Raises:
        ValueError: If it is neither a known name nor a function's.
    """
    if name not in OPTIMIZERS and not all(name.partition(":")):
        allowed = f"{', '.join(OPTIMIZERS)} or module:function"
        near = did_you_mean(name, OPTIMIZERS)
        raise ValueError(f"{checks.refused('optimizer', allowed, name)}{near}")


LogName = Literal["csv", "jsonl", "tensorboard", "trackio", "wandb", "mlflow"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a command, with checks of several at once.

    Attributes:
        bounds: The bounds of numbers that differ from those of `checks.numbers`.
    """

    bounds: ClassVar[dict[str, Any]] = {
        **dict.fromkeys(("seed", "workers"), {"least": 0}),
        **dict.fromkeys(("learning_rate", "clip"), {"above": 0}),
        **dict.fromkeys(("warmup", "final_rate", "b1", "b2", "held_out"), {"least": 0, "most": 1}),
    }

    def __post_init__(self) -> None:
        """Checks all numbers.

        Raises:
            ValueError: If one is out of range.
        """
        checks.numbers(self, type(self), **self.bounds)

    def check_each(self, check: Callable[..., Any], names: str, **bounds: float) -> None:
        """Checks settings by a function of `checks`, except for None and "auto".

        Args:
            check: The function.
            names: The settings, with spaces between them.
            **bounds: Bounds of each.
        """
        for name in names.split():
            if (value := getattr(self, name)) is not None and value != "auto":
                check(name, value, **bounds)

    def check_use(self, names: str, is_used: bool, needed: str) -> None:
        """Checks that options without an effect have their default values.

        Args:
            names: Options that have an effect only with another one, with spaces between them.
            is_used: Whether the settings have that other option.
            needed: The needed option, in words, and how to set it.

        Raises:
            ValueError: If an option was given without the option that it needs.
        """
        if is_used:
            return
        defaults = {
            f.name: f.default if f.default_factory is MISSING else f.default_factory()
            for f in fields(self)
        }
        for name in names.split():
            if (value := getattr(self, name)) != defaults[name]:
                raise ValueError(f"`{name}`={value} counts only with {needed}")


@dataclass(frozen=True, kw_only=True)
class StepSettings(Settings):
    """The settings of a training step, planned or run.

    Attributes:
        microbatches: Equal parts that each batch is cut into; auto lets the plan choose.
        optimizer: adamw, lion, muon, adafactor or sgd; or module:function, a function from the
            learning rate and optimizer_options to an Optax optimizer.
        optimizer_options: Further keywords of the optimizer in Optax, such as {eps: 1e-6}.
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
        state_per_process: Whether each of several processes holds all state instead of a share:
            gradients then cross the network once per step, and weights never. Best with one process
            per host. auto takes the faster way, if it may cut each batch into a part per process.
    """

    microbatches: Microbatches = 1
    optimizer: str = "adamw"
    optimizer_options: dict[str, Any] | None = None
    clip: float | None = 1.0
    precision: PrecisionName = "auto"
    state: State | None = None
    master: Master | None = None
    sums: Sums = "float32"
    compute: Compute | None = None
    products: Products | None = None
    device_budget: int | str | None = None
    host_budget: int | str | None = None
    state_per_process: StatePerProcess = False

    def check_step(self) -> None:
        """Checks these settings.

        Raises:
            ValueError: If one is out of range.
        """
        self.check_each(checks.integer, "microbatches")
        checks.device_budget(self.device_budget)
        checks.num_bytes("host_budget", self.host_budget)
        check_optimizer(self.optimizer)

    @property
    def least_microbatches(self) -> int:
        """The number of microbatches; 1 if the plan chooses it."""
        return 1 if isinstance(self.microbatches, str) else self.microbatches


@dataclass(frozen=True, kw_only=True)
class AdapterSettings(Settings):
    """The settings of parameters that are not trained, and of adapters.

    Attributes:
        trainable: Name, or regular expression, in the paths of trained parameters, one or several;
            default: all.
        frozen: Form of frozen parameters at rest, "nf4" for 4 bits as in QLoRA; default: the
            masters' form, or with adapters bfloat16 if the checkpoint is.
        lora_rank: Rank of adapters (LoRA), which are trained instead of all parameters; null for
            none.
        lora_targets: Regular expression on paths of the matrices that have adapters.
    """

    trainable: list[str] | str | None = None
    frozen: Frozen | None = None
    lora_rank: int | None = None
    lora_targets: str = "layers/.*_proj"


@dataclass(frozen=True, kw_only=True)
class RunSettings(StepSettings):
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
        learning_rate: Highest learning rate; default: 1e-5. That is for adamw, and also for muon
            and adafactor; lion needs a third to a tenth of it, sgd far more.
        warmup: Fraction of the steps in which the learning rate rises, from above 0.
        decay: How the learning rate falls afterwards.
        final_rate: Fraction of the highest learning rate at the end of the decay.
        weight_decay: Weight decay, multiplied by the learning rate.
        b1: Decay of the mean of gradients, in adamw, lion and muon's adamw.
        b2: Decay of the mean of their squares; in lion, of its momentum.
        host_budget: Maximum host memory of the process, such as 200GiB; default: all that is
            available.
        disk_dir: Folder for the part of the state that the host's memory can't hold, or several of
            different drives; default: none.
        disk_budget: Maximum bytes that the process may take there, such as 500GiB; default: what is
            free.
        state_per_process: Whether each of several processes holds all state instead of a share:
            gradients then cross the network once per step, and weights never. Best with one process
            per host. auto takes the faster way, if it may cut each batch into a part per process.
        checkpoints: Whether to save checkpoints, from which the same command resumes.
        checkpoint_every: Save after each multiple of this number of steps, and at the end.
        keep: Number of checkpoints to keep.
        export: When to export: when the run has finished, also when interrupted, or never.
        export_dtype: dtype of the exported model; default: the checkpoint's.
        logs: Where to log records besides the terminal, one or several.
        trackio: Arguments of trackio.init, such as {project: mine, space_id: mine}.
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
    learning_rate: float | None = None
    warmup: float = 0.03
    decay: Decay = "cosine"
    final_rate: float = 0.1
    weight_decay: float = 0.0
    b1: float = 0.9
    b2: float = 0.95
    disk_dir: list[str] | str | None = None
    disk_budget: int | str | None = None
    checkpoints: bool = True
    checkpoint_every: int | None = None
    keep: int = 1
    export: Literal["finished", "always", "never"] = "finished"
    export_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    logs: list[LogName] | LogName | None = None
    trackio: dict[str, Any] | None = None
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
        if "://" in checks.path("out", self.out):
            raise ValueError(
                f"`out`={self.out} is a URL, but a run's folder is on a local or mounted disk"
            )
        if not self.sources:
            raise ValueError("`data` is empty: it names no file")
        super().__post_init__()
        self.check_step()
        checks.num_bytes("disk_budget", self.disk_budget)
        self.check_use("disk_budget", self.disk_dir is not None, "a folder: set `disk_dir`")
        self.check_use(
            "b1 b2",
            self.optimizer in ("adamw", "lion", "muon"),
            "`optimizer`=adamw, lion or muon; others have `optimizer_options`",
        )
        self.check_use(
            "weight_decay",
            ":" not in self.optimizer,
            "an `optimizer` known by name; functions have `optimizer_options`",
        )
        self.check_use(
            "final_rate",
            self.decay != "constant",
            "a rate that falls, but `decay` is constant",
        )
        for name in ("trackio", "wandb", "mlflow"):
            if getattr(self, name) is not None and name not in self.log_names:
                raise ValueError(f"`{name}` says how to log there, but `logs` has no {name}")
        self.check_use("checkpoint_every keep", self.checkpoints, "`checkpoints`, which are off")

    @property
    def _default_rate(self) -> float:
        return 1e-5

    @property
    def exports(self) -> tuple[str, ...]:
        """The subfolders of `out` to export."""
        return ("model",)

    def exports_as(self, kind: str) -> tuple[str, ...]:
        """The subfolders for a value of `export_as`."""
        return ("adapter", "model") if kind == "both" else (kind,)

    @property
    def sources(self) -> list[str]:
        """The entries of `data`."""
        return listed(self.data)

    @property
    def log_names(self) -> list[str]:
        """The entries of `logs`."""
        return listed(self.logs)


def listed(given: Any) -> list[Any]:
    """The entries of a setting that may be one value, several or None."""
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


# Options that may change when a run is resumed, because they affect neither batches nor updates;
# `out`, because a folder may be moved, or its path written differently.
CHANGEABLE_OPTIONS = frozenset(
    "checkpoint_every checkpoints data_cache device_budget disk_budget disk_dir eval_data "
    "eval_every export export_as export_dtype host_budget keep log_every logs mlflow out push "
    "push_private sample_temperatures sample_tokens samples state_per_process trackio wandb "
    "workers".split()
)


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
        held_out: Fraction of the documents, or of a single one, in the evaluation set; 0 for none.
        eval_data: Files to evaluate on, instead of documents split off from data.
        length: Tokens of a row, into which documents are packed.
        batch: Rows per step.
        epochs: How often all documents are seen; default: once, or as often as --steps needs.
        steps: Number of steps; documents repeat as needed unless --epochs is given; default: all
            epochs.
        ema_decay: Decay of a moving average of the trained parameters, such as 0.999, which is
            then evaluated, sampled and exported in their place; default: no average.
        on_nonfinite: Whether a loss or gradient that is not finite ends the run or skips the step.
        eval_every: Evaluate after each multiple of this number of steps, and at the end.
        metric: Evaluation metric that determines the best evaluation.
        metric_mode: Whether a smaller metric is better (min), or a larger one (max); auto goes by
            its name.
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
    ema_decay: float | None = None
    on_nonfinite: Literal["raise", "skip"] = "raise"
    eval_every: int | None = None
    metric: str = "eval_loss"
    metric_mode: Literal["auto", "min", "max"] = "auto"
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
        self.check_use(
            "push_private", self.push is not None, "a repository to upload to: set `push`"
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
        self.check_use(
            "metric metric_mode min_delta",
            self.keep_best or self.stop_after is not None,
            "an evaluation that decides: set `keep_best` or `stop_after`",
        )
        # `eval_data` already implies that no documents are held out.
        self.check_use(
            "held_out",
            self.eval_data is None or not self.held_out,
            "documents of `data` to evaluate on, but `eval_data` names others",
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
        self.check_use(
            "sample_tokens sample_temperatures",
            self.samples is not None,
            "prompts: set `samples`",
        )

    @property
    def params(self) -> Literal["trained", "ema"]:
        """The parameters that are evaluated, sampled and exported."""
        return "trained" if self.ema_decay is None else "ema"

    @property
    def prompts(self) -> list[str]:
        """The entries of `samples`."""
        return listed(self.samples)


@dataclass(frozen=True, kw_only=True)
class PretrainSettings(TrainingSettings):
    """Trains a model from random weights on text; the same command resumes the run.

    Attributes:
        model: Sizes of the model: a config.json or its folder, or the name of a known model.
        tokenizer: Folder of the tokenizer, or its name on the Hugging Face Hub; it is copied to
            the exported model too.
        sizes: Fields of config.json to set, such as {num_hidden_layers: 8, vocab_size: 32000}.
    """

    model: str
    tokenizer: str
    sizes: dict[str, Any] | None = None
    learning_rate: float = 3e-4
    warmup: float = 0.01
    weight_decay: float = 0.1
    held_out: float = 0.005

    def __post_init__(self) -> None:
        """Checks constraints beyond types.

        Raises:
            ValueError: If an option is out of range, or some contradict each other.
        """
        super().__post_init__()
        self.check_each(checks.path, "model tokenizer")
