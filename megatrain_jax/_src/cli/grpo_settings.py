"""The settings of `megatrain-jax grpo`."""

from dataclasses import dataclass
from typing import Any, Literal

from megatrain_jax._src.cli.setting_rules import (
    Compute,
    Decay,
    Frozen,
    Master,
    Products,
    State,
    check_needed,
    check_optimizer,
)
from megatrain_jax._src.cli.training_settings import LogName, listed
from megatrain_jax._src.common import checks

_POSITIVE = ("steps", "microbatches", "keep", "log_every", "num_generations", "prompts_per_step")


@dataclass(frozen=True, kw_only=True)
class GrpoSettings:
    """Trains a checkpoint by rewards of its own completions (GRPO); the same command resumes.

    Attributes:
        model: Folder of the checkpoint, in Hugging Face format, with its tokenizer, or a name on
            the Hub.
        data: Files, folders and patterns with a prompt per row (a text or messages) and columns
            for reward functions.
        rewards: Reward functions, one or several, as file.py:function or module:function.
        reward_weights: Weight of each reward function; default: 1 each.
        out: Folder of the run, for checkpoints, exports, logs and the report.
        invalid: Treatment of rows without a prompt.
        ignore: Fields of the checkpoint's config.json to ignore, because they are known not to
            matter.
        steps: Number of updates.
        num_generations: Completions of each prompt, which are compared with each other.
        prompts_per_step: Prompts of a step.
        max_completion_length: Maximum number of tokens of a completion.
        temperature: Temperature of sampling.
        top_p: Tokens are drawn from the most likely ones with this probability together; 1 for all.
        top_k: Tokens are drawn from this number of the most likely ones; null for all.
        loss_type: Mean over tokens - grpo (of each completion first), dapo or bnpo (all tokens),
            dr_grpo (divided by the maximum length).
        epsilon: Relative change of a token's probability that is clipped.
        epsilon_high: The same for increases; default: epsilon.
        beta: Weight of the divergence from the initial model; 0 for no reference.
        use_bias_correction_kl: Whether the divergence is weighed by the ratio of probabilities.
        scale_rewards: Standard deviation that advantages are divided by.
        num_iterations: Updates on the same completions.
        mask_truncated_completions: Whether completions of maximum length don't count in the loss.
        log_completions: Add the first prompt's completions to the logs after each multiple of this
            number of steps; 0 for never.
        trainable: Regular expression on paths of the trained parameters, one or several; default:
            all.
        frozen: Form of frozen parameters at rest, also of a stored reference; default: int8 for a
            reference, else the masters' form, or with adapters bfloat16 if the checkpoint is.
        lora_rank: Rank of adapters (LoRA), which are trained instead of all parameters; null for
            none.
        lora_alpha: Scale of adapters, divided by the rank.
        lora_targets: Regular expression on paths of the matrices that have adapters.
        microbatches: Equal parts that each batch is cut into.
        optimizer: adamw, lion, muon, adafactor or sgd; or module:function, a function from the
            learning rate and optimizer_options to an Optax optimizer.
        optimizer_options: Further keywords of the optimizer in Optax, such as {eps: 1e-6}.
        learning_rate: Highest learning rate.
        warmup: Fraction of the steps in which the learning rate rises, from above 0.
        decay: How the learning rate falls afterwards.
        final_rate: Fraction of the highest learning rate at the end of the decay.
        weight_decay: Weight decay, multiplied by the learning rate.
        b1: Decay of the mean of gradients.
        b2: Decay of the mean of their squares.
        clip: Maximum global norm of the gradients; null for no clipping.
        state: Form of optimizer state at rest; compact is int8 beside masters in bfloat16,
            two_bytes is int4 beside masters in int8.
        master: Form of the masters at rest; default: float32, or as compact or two_bytes has it.
        compute: dtype of the computation; default: bfloat16 on a GPU, float16 on one without
            bfloat16, and float32 elsewhere.
        products: Form of large products with parameters, or float8-all for small ones, too.
        device_budget: GPU memory for state and activations, such as 22GiB, or least.
        host_budget: Maximum host memory of the process, such as 200GiB.
        checkpoints: Whether to save checkpoints, from which the same command resumes.
        checkpoint_every: Save after each multiple of this number of steps, and at the end.
        keep: Number of checkpoints to keep.
        export: When to export, when the run has finished or never.
        export_as: Export of a run with adapters - a folder for PEFT (adapter), the merged model
            (model), or both; default: adapter. Without adapters, model.
        export_dtype: dtype of the exported model; default: the checkpoint's.
        logs: Where to log records besides the terminal, one or several.
        wandb: Arguments of wandb.init, such as {project: mine, mode: offline}.
        mlflow: Arguments of the callback MLflow, such as {experiment: mine}.
        log_every: Print a line after each multiple of this number of steps.
        seed: Seed of the order of prompts, of sampling and of adapters.
    """

    model: str
    data: list[str] | str
    rewards: list[str] | str
    out: str
    steps: int
    reward_weights: list[float] | None = None
    invalid: Literal["error", "drop"] = "error"
    ignore: list[str] | None = None
    num_generations: int = 8
    prompts_per_step: int = 8
    max_completion_length: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "dapo"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    scale_rewards: Literal["group", "batch", "none"] = "group"
    num_iterations: int = 1
    mask_truncated_completions: bool = False
    log_completions: int = 0
    trainable: list[str] | str | None = None
    frozen: Frozen | None = None
    lora_rank: int | None = None
    lora_alpha: float = 32.0
    lora_targets: str = "layers/.*_proj"
    microbatches: int = 1
    optimizer: str = "adamw"
    optimizer_options: dict[str, Any] | None = None
    learning_rate: float = 1e-6
    warmup: float = 0.0
    decay: Decay = "constant"
    final_rate: float = 0.1
    weight_decay: float = 0.0
    b1: float = 0.9
    b2: float = 0.999
    clip: float | None = 1.0
    state: State = "float32"
    master: Master | None = None
    compute: Compute | None = None
    products: Products | None = None
    device_budget: int | str | None = None
    host_budget: int | str | None = None
    checkpoints: bool = True
    checkpoint_every: int | None = None
    keep: int = 1
    export: Literal["finished", "never"] = "finished"
    export_as: Literal["model", "adapter", "both"] | None = None
    export_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    logs: list[LogName] | LogName | None = None
    wandb: dict[str, Any] | None = None
    mlflow: dict[str, Any] | None = None
    log_every: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks constraints beyond types; `models.GrpoOptions` checks its own.

        Raises:
            ValueError: If an option is out of range, or some contradict each other.
        """
        for name in ("model", "out"):
            checks.path(name, getattr(self, name))
        for name in _POSITIVE:
            checks.integer(name, getattr(self, name))
        rows = self.num_generations * self.prompts_per_step
        if rows % self.microbatches:
            raise ValueError(
                f"`microbatches`={self.microbatches} must divide the {rows} completions of a step: "
                "`num_generations` times `prompts_per_step`"
            )
        if not listed(self.data) or not listed(self.rewards):
            raise ValueError("`data` and `rewards` must name at least one file and one function")
        check_optimizer(self.optimizer)
        weights, functions = self.reward_weights, listed(self.rewards)
        if weights is not None and len(weights) != len(functions):
            raise ValueError(
                f"`reward_weights` has {len(weights)} weights for {len(functions)} reward functions"
            )
        checks.num_bytes("device_budget", self.device_budget, "least")
        checks.num_bytes("host_budget", self.host_budget)
        if "adapter" in self.exports and self.lora_rank is None:
            raise ValueError(f"`export_as`={self.export_as} needs adapters: set `lora_rank`")
        if self.trainable is not None and self.lora_rank is not None:
            raise ValueError("`trainable` can't be set beside `lora_rank`, which trains adapters")
        check_needed(
            self,
            ("lora_alpha", "lora_targets"),
            is_there=self.lora_rank is not None,
            needed="adapters: set `lora_rank`",
        )
        check_needed(
            self,
            ("checkpoint_every", "keep"),
            is_there=self.checkpoints,
            needed="`checkpoints`, which are off",
        )

    @property
    def exports(self) -> tuple[str, ...]:
        """The subfolders of `out` to export."""
        kind = self.export_as or ("model" if self.lora_rank is None else "adapter")
        return ("adapter", "model") if kind == "both" else (kind,)

    @property
    def log_names(self) -> list[str]:
        """The entries of `logs`."""
        return listed(self.logs)
