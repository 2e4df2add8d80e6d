"""The settings of `megatrain-jax grpo`."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.cli import run_settings
from megatrain_jax._src.lm.common.grpo_fields import BOUNDS, GrpoFields


@dataclass(frozen=True, kw_only=True)
class GrpoSettings(run_settings.RunSettings, run_settings.AdapterSettings, GrpoFields):
    """Trains a checkpoint by rewards of its own completions (GRPO); the same command resumes.

    Attributes:
        model: Folder of the checkpoint, in Hugging Face format, with its tokenizer, or a name on
            the Hub.
        data: Files, folders, patterns and datasets on the Hugging Face Hub, one or a list, with a
            prompt per row (a text or messages) and columns for reward functions.
        rewards: Reward functions, one or several, as file.py:function or module:function.
        reward_weights: Weight of each reward function; default: 1 each.
        tools: Functions that completions may call, one or several, as file.py:function or
            module:function; prompts are messages then.
        ignore: Fields of the checkpoint's config.json to ignore, because they are known not to
            matter.
        steps: Number of updates.
        num_generations: Completions of each prompt, which are compared with each other.
        prompts_per_step: Prompts of a step.
        max_completion_length: Maximum number of tokens of a completion.
        temperature: Temperature of sampling.
        top_p: Tokens are drawn from the most likely ones with this probability together; 1 for all.
        top_k: Tokens are drawn from this number of the most likely ones; null for all.
        min_p: Tokens are drawn from those with at least this fraction of the most likely one's
            probability; 0 for all.
        repetition_penalty: Divisor of the positive logits, and factor of the negative ones, of
            tokens in the text so far; 1 for none.
        loss_type: Mean over tokens - grpo (of each completion first), dapo or bnpo (all tokens),
            dr_grpo (divided by the maximum length).
        epsilon: Relative change of a token's probability that is clipped.
        epsilon_high: The same for increases; default: epsilon.
        beta: Weight of the divergence from the initial model; 0 for no reference.
        use_bias_correction_kl: Whether the divergence is weighed by the ratio of probabilities.
        scale_rewards: Standard deviation that advantages are divided by.
        num_iterations: Updates on the same completions.
        max_tool_calling_iterations: Maximum number of a completion's turns whose calls of tools are
            made; default: all.
        mask_truncated_completions: Whether completions of maximum length don't count in the loss.
        log_completions: Add the first prompt's completions to the logs after each multiple of this
            number of steps; 0 for never.
        frozen: Form of frozen parameters at rest, also of a stored reference; default: int8 for a
            reference, else the masters' form, or with adapters bfloat16 if the checkpoint is.
        lora_alpha: Scale of adapters, divided by the rank.
        learning_rate: Highest learning rate; default: 1e-6, and 1e-5 for adapters.
        export: When to export, when the run has finished or never.
        export_as: Export of a run with adapters - a folder for PEFT (adapter), the merged model
            (model), or both; default: adapter. Without adapters, model.
    """

    bounds: ClassVar = run_settings.Settings.bounds | BOUNDS
    model: str
    rewards: list[str] | str
    steps: int
    reward_weights: list[float] | None = None
    tools: list[str] | str | None = None
    ignore: list[str] | None = None
    lora_alpha: float = 32.0
    warmup: float = 0.0
    decay: run_settings.Decay = "constant"
    b2: float = 0.999
    export: Literal["finished", "never"] = "finished"
    export_as: Literal["model", "adapter", "both"] | None = None

    def __post_init__(self) -> None:
        """Checks constraints beyond types; `models.GrpoOptions` checks its own.

        Raises:
            ValueError: If an option is out of range, or some contradict each other.
        """
        super().__post_init__()
        checks.path("model", self.model)
        rows = self.num_generations * self.prompts_per_step
        if rows % self.least_microbatches:
            raise ValueError(
                f"`microbatches`={self.microbatches} must divide the {rows} completions of a step: "
                "`num_generations` times `prompts_per_step`"
            )
        weights, functions = self.reward_weights, run_settings.listed(self.rewards)
        if not functions:
            raise ValueError("`rewards` is empty: it names no function")
        if weights is not None and len(weights) != len(functions):
            raise ValueError(
                f"`reward_weights` has {len(weights)} weights for {len(functions)} reward functions"
            )
        if "adapter" in self.exports and self.lora_rank is None:
            raise ValueError(f"`export_as`={self.export_as} needs adapters: set `lora_rank`")
        if self.trainable is not None and self.lora_rank is not None:
            raise ValueError("`trainable` can't be set beside `lora_rank`, which trains adapters")
        self.check_use(
            "lora_alpha lora_targets", self.lora_rank is not None, "adapters: set `lora_rank`"
        )

    @property
    def _default_rate(self) -> float:
        return 1e-6 if self.lora_rank is None else 1e-5

    @property
    def exports(self) -> tuple[str, ...]:
        """The subfolders of `out` to export."""
        default = "model" if self.lora_rank is None else "adapter"
        return self.exports_as(self.export_as or default)
