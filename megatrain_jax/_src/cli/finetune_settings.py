"""The settings of `megatrain-jax finetune`, in addition to those of all training."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from megatrain_jax._src.cli.setting_rules import Frozen, check_needed
from megatrain_jax._src.cli.training_settings import TrainingSettings, listed
from megatrain_jax._src.common import checks


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings(TrainingSettings):
    """Fine-tunes a checkpoint and exports it for Transformers; the same command resumes the run.

    Attributes:
        model: Folder of the checkpoint, in Hugging Face format, with its tokenizer.
        ignore: Fields of its config.json to ignore, because they are known not to matter.
        objective: The training objective: the next token (sft), or preferences between two answers
            (dpo).
        beta: How strongly dpo keeps the model close to its initial state.
        format: Whether rows are conversations (chat) or plain text; preferences with dpo.
        train_on: Tokens that the loss counts in conversations.
        chat_template: A Jinja template, its file or the name of one; default: the tokenizer's.
        template_variables: Further variables of the template, such as {enable_thinking: false}.
        merge: Text to put between consecutive turns of one role; without it, such rows are invalid.
        leading: Treatment of assistant turns before the first user turn.
        trainable: Regular expression on paths of the trained parameters, one or several; default:
            all. With adapters, parameters to train beside them.
        frozen: Form of frozen parameters at rest, "nf4" for 4 bits as in QLoRA; default: the
            masters' form, or with adapters bfloat16 if the checkpoint is.
        lora_rank: Rank of adapters (LoRA), which are trained instead of all parameters; null for
            none.
        lora_alpha: Scale of adapters, divided by the rank.
        lora_dropout: Fraction of a module's inputs hidden from its adapter.
        lora_rslora: Whether to divide by the square root of the rank instead.
        lora_targets: Regular expression on paths of the matrices that have adapters.
        export_as: Export of a run with adapters: a folder for PEFT (adapter), the merged model
            (model), or both; default: adapter. Without adapters, model.
    """

    model: str
    ignore: list[str] | None = None
    objective: Literal["sft", "dpo"] = "sft"
    beta: float = 0.1
    format: Literal["chat", "text"] = "chat"
    train_on: Literal["assistant", "all"] = "assistant"
    chat_template: str | None = None
    template_variables: dict[str, Any] | None = None
    merge: str | None = None
    leading: Literal["error", "keep", "drop"] = "error"
    trainable: list[str] | str | None = None
    frozen: Frozen | None = None
    lora_rank: int | None = None
    lora_alpha: float = 32.0
    lora_dropout: float = 0.0
    lora_rslora: bool = False
    lora_targets: str = "layers/.*_proj"
    export_as: Literal["model", "adapter", "both"] | None = None

    def __post_init__(self) -> None:
        """Checks constraints beyond types.

        Raises:
            ValueError: If an option is out of range, or some contradict each other.
        """
        super().__post_init__()
        checks.path("model", self.model)
        checks.number("beta", self.beta, above=0)
        for pattern in listed(self.trainable):
            _check_pattern("trainable", pattern)
        _check_pattern("lora_targets", self.lora_targets)
        if self.lora_rank is not None:
            checks.integer("lora_rank", self.lora_rank)
            checks.number("lora_alpha", self.lora_alpha, above=0)
            if not 0 <= self.lora_dropout < 1:
                allowed = "a share from 0, below 1"
                raise ValueError(checks.refused("lora_dropout", allowed, self.lora_dropout))
        if "adapter" in self.exports and self.lora_rank is None:
            raise ValueError(f"`export_as`={self.export_as} needs adapters: set `lora_rank`")
        if "adapter" in self.exports and self.trainable:
            raise ValueError(
                "an adapter's folder has no place for the parameters that `trainable` adds: set "
                "`export_as`=model"
            )
        if self.objective == "dpo":
            self._check_preferences()
        self._check_needed()

    def _check_needed(self) -> None:
        check_needed(
            self,
            ("lora_alpha", "lora_dropout", "lora_rslora", "lora_targets"),
            is_there=self.lora_rank is not None,
            needed="adapters: set `lora_rank`",
        )
        check_needed(
            self,
            ("beta",),
            is_there=self.objective == "dpo",
            needed="preferences: set `objective`=dpo",
        )
        check_needed(
            self,
            ("frozen",),
            is_there=self.lora_rank is not None or self.trainable is not None,
            needed="parameters that are not trained: set `trainable` or `lora_rank`",
        )
        check_needed(
            self,
            ("chat_template", "template_variables", "merge", "leading", "train_on"),
            is_there=self.format == "chat",
            needed="conversations, but `format` is text",
        )

    def _check_preferences(self) -> None:
        if self.too_long in ("cut", "split"):
            raise ValueError(
                f"`too_long`={self.too_long} would part pairs: set it to error or drop"
            )
        if self.format != "chat" or self.train_on != "assistant":
            raise ValueError("`objective`=dpo learns answers: leave `format` and `train_on` out")
        if self.trainable and self.lora_rank is not None:
            raise ValueError(
                "`objective`=dpo compares with the model without its adapters, which has to stay "
                "as it is: leave `trainable` out, or `lora_rank`"
            )

    @property
    def stores_reference(self) -> bool:
        """Whether preferences are compared with numbers computed before training."""
        return self.objective == "dpo" and self.lora_rank is None

    @property
    def exports(self) -> tuple[str, ...]:
        """The subfolders of `out` to export."""
        default = "model" if self.lora_rank is None else "adapter"
        kind = self.export_as or default
        return ("adapter", "model") if kind == "both" else (kind,)


def _check_pattern(name: str, given: str) -> None:
    try:
        re.compile(given)
    except re.error as error:
        raise ValueError(f"`{name}`={given!r} is no regular expression: {error}") from error
