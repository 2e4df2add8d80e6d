"""The settings of `megatrain-jax plan`."""

from dataclasses import dataclass
from typing import Any

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.sizes import counted
from megatrain_jax._src.lm.cli.setting_rules import (
    Compute,
    Frozen,
    Master,
    Microbatches,
    PrecisionName,
    Products,
    State,
    Sums,
    check_optimizer,
    check_unused_options,
)


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """Plans a training run on any machine; without --tokens, finds the largest run that fits.

    Attributes:
        model: A checkpoint's folder, its config.json, or the name of a known model.
        gpu: Name of the GPU, such as H100; default: this machine's.
        gpus: Number of GPUs, which share the state and the batch.
        host: Host memory in bytes, or such as 512GiB; default: this machine's or a typical host's.
        tokens: Tokens per step, over all GPUs; without it, the largest sizes that fit.
        length: Tokens of a row.
        microbatches: Equal parts that each batch is cut into; auto lets the plan choose.
        precision: Forms of masters, optimizer state and computation together: compact has masters
            in bfloat16 and state in int8, two_bytes int8 and int4; the other names are a compute
            dtype. The next four options override parts of it.
        state: Form of optimizer state at rest; default: that of `precision`, or float32.
        master: Form of the masters at rest; default: that of `precision`, or float32.
        sums: Form of sums of gradients over microbatches.
        compute: dtype of the computation; default: that of `precision`, or bfloat16, or float16 on
            a GPU without bfloat16.
        products: Form of large products with parameters, or float8-all for small ones, too;
            default: as `compute`.
        optimizer: adamw, lion, muon, adafactor or sgd; or module:function, a function from the
            learning rate and optimizer_options to an Optax optimizer.
        optimizer_options: Further keywords of the optimizer in Optax, such as {momentum: 0.9}.
        clip: Maximum global norm of the gradients; null for no clipping.
        trainable: Regular expression on paths of the trained parameters, one or several; default:
            all.
        frozen: Form of frozen parameters at rest, "nf4" for 4 bits as in QLoRA; default: the
            masters' form, or with adapters bfloat16, unless the model's config.json has another
            dtype.
        lora_rank: Rank of adapters (LoRA), which are trained instead of all parameters; null for
            none.
        lora_dora: Whether to train the norms of matrices' rows, too (DoRA).
        lora_targets: Regular expression on paths of the matrices that have adapters.
        lora_modules_to_save: Modules to train whole beside adapters, such as embed_tokens and
            lm_head, one or several.
        device_budget: GPU memory for state and activations, such as 22GiB, or minimum.
        host_budget: Maximum host memory of the process, such as 200GiB; default: all that the host
            has.
    """

    model: str | None = None
    gpu: str | None = None
    gpus: int = 1
    host: int | str | None = None
    tokens: int | None = None
    length: int = 4096
    microbatches: Microbatches = 1
    precision: PrecisionName = "auto"
    state: State | None = None
    master: Master | None = None
    sums: Sums = "float32"
    compute: Compute | None = None
    products: Products | None = None
    optimizer: str = "adamw"
    optimizer_options: dict[str, Any] | None = None
    clip: float | None = 1.0
    trainable: list[str] | str | None = None
    frozen: Frozen | None = None
    lora_rank: int | None = None
    lora_dora: bool = False
    lora_targets: str = "layers/.*_proj"
    lora_modules_to_save: list[str] | str | None = None
    device_budget: int | str | None = None
    host_budget: int | str | None = None

    def __post_init__(self) -> None:
        """Checks the sizes.

        Raises:
            ValueError: If one is out of range, or needs an option that is missing.
        """
        for name in ("gpus", "length"):
            checks.integer(name, getattr(self, name))
        if self.microbatches != "auto":
            checks.integer("microbatches", self.microbatches)
        elif self.tokens is None:
            raise ValueError("`microbatches`=auto needs `tokens`: any batch fits in small parts")
        check_optimizer(self.optimizer)
        if self.clip is not None:
            checks.number("clip", self.clip, above=0)
        check_unused_options(
            self,
            ("frozen",),
            is_there=self.trainable is not None or self.lora_rank is not None,
            needed="parameters that are not trained: set `trainable` or `lora_rank`",
        )
        if self.lora_rank is not None:
            checks.integer("lora_rank", self.lora_rank)
        check_unused_options(
            self,
            ("lora_dora", "lora_targets", "lora_modules_to_save"),
            is_there=self.lora_rank is not None,
            needed="adapters: set `lora_rank`",
        )

    def check_batch(self) -> None:
        """Checks the sizes of the batch.

        Raises:
            ValueError: If they are inconsistent.
        """
        if self.tokens is None:
            return
        if self.model is None:
            raise ValueError("`tokens` needs a model: a folder, a config.json or a known name")
        rows, rest = divmod(checks.integer("tokens", self.tokens), self.length)
        if rest or not rows:
            raise ValueError(f"`tokens`={self.tokens} is no multiple of `length`={self.length}")
        if rows % self.least_rows:
            raise ValueError(
                f"`tokens`={self.tokens} are {counted(rows, 'row')} of `length`={self.length}, and "
                f"{self.least_rows} must divide their number: `gpus`={self.gpus} times "
                f"`microbatches`={self.microbatches}"
            )

    @property
    def least_rows(self) -> int:
        """Rows of the smallest batch that GPUs and microbatches can share."""
        return self.gpus * (1 if isinstance(self.microbatches, str) else self.microbatches)

    @property
    def batch(self) -> str:
        """The batch in words."""
        assert self.tokens is not None
        is_whole = self.microbatches in (1, "auto")
        parts = "" if is_whole else f" in {self.microbatches} microbatches"
        return f"{rows_of(self.tokens // self.length, self.length)} a step{parts}"


def rows_of(rows: int, length: int) -> str:
    """A number of rows in words."""
    return f"{counted(rows, 'row')} of {counted(length, 'token')}"
