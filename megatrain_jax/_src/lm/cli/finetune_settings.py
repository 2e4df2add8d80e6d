"""The objectives of `megatrain-jax finetune` by name, and its settings beside the common ones.

The losses have the same names in `megatrain_jax.objectives`. This file needs no JAX.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.cli import run_settings

ObjectiveName = Literal["sft", "dpo", "ipo", "simpo", "orpo", "kto", "reward", "distill"]
RowKind = Literal["chat", "preferences", "margins", "unpaired", "distilled"]


@dataclass(frozen=True, kw_only=True)
class ObjectiveKind:
    """A training objective, as the settings see it.

    Attributes:
        options: Names of the settings that the objective reads beside the common ones.
        rows: The kind of its rows, which `finetune_data` reads.
        has_reference: Whether it compares the model with the model before training.
        scores: Whether it trains a reward model, with a score head.
        has_dropout: Whether adapters are trained with their dropout. TRL's trainers of preferences
            and of reward models switch it off (`disable_dropout`).
        adapter_rate: Default of the learning rate of adapters.
    """

    options: tuple[str, ...] = ()
    rows: RowKind = "preferences"
    has_reference: bool = False
    scores: bool = False
    has_dropout: bool = False
    adapter_rate: float = 1e-5


OBJECTIVE_KINDS: Mapping[str, ObjectiveKind] = {
    "sft": ObjectiveKind(rows="chat", has_dropout=True, adapter_rate=1e-4),
    "dpo": ObjectiveKind(options=("beta", "label_smoothing", "loss_type"), has_reference=True),
    "ipo": ObjectiveKind(options=("beta",), has_reference=True),
    "simpo": ObjectiveKind(options=("beta", "simpo_gamma", "cpo_alpha")),
    "orpo": ObjectiveKind(options=("beta",)),
    "kto": ObjectiveKind(
        options=("beta", "desirable_weight", "undesirable_weight"),
        rows="unpaired",
        has_reference=True,
    ),
    "distill": ObjectiveKind(
        options=("distill_alpha", "temperature", "tail", "topk"),
        rows="distilled",
        has_dropout=True,
        adapter_rate=1e-4,
    ),
    "reward": ObjectiveKind(
        options=("center_rewards_coefficient",), rows="margins", scores=True, adapter_rate=1e-4
    ),
}


def objectives_with(option: str) -> list[str]:
    """The names of the objectives that read an option; empty if it is no option of one."""
    return [name for name, kind in OBJECTIVE_KINDS.items() if option in kind.options]


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings(run_settings.TrainingSettings, run_settings.AdapterSettings):
    """Fine-tunes a checkpoint and exports it for Transformers; the same command resumes the run.

    Attributes:
        model: Folder of the checkpoint, in Hugging Face format, with its tokenizer, or its name on
            the Hub, such as Qwen/Qwen3-8B or Qwen/Qwen3-8B@REVISION.
        ignore: Fields of its config.json to ignore, because they are known not to matter.
        new_tokens: Tokens to add to the tokenizer and the vocabulary, one or several, or a file
            with one on each line. Their embeddings start around the mean of all.
        objective: The training objective: the next token (sft), or preferences between two answers
            (dpo, ipo, simpo, orpo), labels of single answers (kto), a
            reward model's scores (reward), or a teacher's stored predictions (distill).
        beta: How strongly dpo, ipo and kto keep the model close to its initial state; factor of
            rewards in simpo, and weight of the odds in orpo.
        label_smoothing: Fraction of pairs that dpo takes for exchanged, below 0.5, with loss_type
            sigmoid (conservative DPO) or robust.
        loss_type: Loss of a pair in dpo, named as in TRL.
        simpo_gamma: Margin of rewards that simpo asks for.
        cpo_alpha: Weight of the chosen answers' cross-entropy in simpo; 0 for the paper's loss.
        desirable_weight: Weight of desirable answers in kto.
        undesirable_weight: Weight of undesirable answers in kto.
        center_rewards_coefficient: Weight of the term that keeps a reward model's scores around 0,
            such as 0.01; null leaves it out.
        distill_alpha: Weight of the divergence from the teacher in distill; that of the next
            token's loss is the rest.
        temperature: Divisor of the logits of both in distill; only 1 goes with tail.
        tail: Whether the tokens beyond the stored ones count as one more token in distill; if not,
            probabilities are renormalised over the stored ones.
        topk: Number of the teacher's tokens per position in distill.
        format: Whether rows are conversations (chat) or plain text; only sft learns text.
        train_on: Tokens that the loss counts in conversations.
        chat_template: A Jinja template, its file or the name of one; default: the tokenizer's.
        template_variables: Further variables of the template, such as {enable_thinking: false}.
        neftune_noise_alpha: Size of the noise on embeddings in training (NEFTune), such as 5; null
            for none.
        merge: Text to put between consecutive turns of one role; without it, such rows are invalid.
        leading: Treatment of assistant turns before the first user turn.
        trainable: Name, or regular expression, in the paths of trained parameters, one or several;
            default: all. With adapters, parameters to train beside them.
        adapter: Folder of adapters (LoRA) for the model, of this command or of PEFT, to go on
            training them.
        lora_rank: Rank of fresh adapters, which are trained instead of all parameters; null for
            none.
        lora_alpha: Scale of adapters, divided by the rank.
        lora_dropout: Fraction of a module's inputs hidden from its adapter in training with sft and
            distill; other objectives train without dropout, as TRL does.
        lora_rslora: Whether to divide by the square root of the rank instead.
        lora_dora: Whether to train the norms of matrices' rows, too (DoRA).
        lora_modules_to_save: Modules to train whole beside fresh adapters and to save with them,
            such as embed_tokens and lm_head, one or several.
        learning_rate: Highest learning rate; default: 1e-5, and 1e-4 for adapters with sft, distill
            or reward. That is for adamw, and also for muon and adafactor; lion needs a third to a
            tenth of it, sgd far more.
        export_as: Export of a run with adapters: a folder for PEFT (adapter), the merged model
            (model), or both; default: adapter. Without adapters, model.
    """

    bounds: ClassVar = {
        **run_settings.Settings.bounds,
        **dict.fromkeys(("beta", "neftune_noise_alpha", "temperature", "lora_alpha"), {"above": 0}),
        "distill_alpha": {"least": 0, "most": 1},
        "lora_dropout": {"least": 0, "below": 1},
    }
    model: str
    ignore: list[str] | None = None
    new_tokens: list[str] | str | None = None
    objective: ObjectiveName = "sft"
    beta: float = 0.1
    label_smoothing: float = 0.0
    loss_type: Literal[
        "sigmoid", "robust", "hinge", "apo_zero", "apo_down", "bco_pair", "nca_pair", "sppo_hard"
    ] = "sigmoid"
    simpo_gamma: float = 0.5
    cpo_alpha: float = 1.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    center_rewards_coefficient: float | None = None
    distill_alpha: float = 0.5
    temperature: float = 1.0
    tail: bool = True
    topk: int = 16
    format: Literal["chat", "text"] = "chat"
    train_on: Literal["assistant", "all"] = "assistant"
    chat_template: str | None = None
    template_variables: dict[str, Any] | None = None
    neftune_noise_alpha: float | None = None
    merge: str | None = None
    leading: Literal["error", "keep", "drop"] = "error"
    adapter: str | None = None
    lora_alpha: float = 32.0
    lora_dropout: float = 0.0
    lora_rslora: bool = False
    lora_dora: bool = False
    lora_modules_to_save: list[str] | str | None = None
    export_as: Literal["model", "adapter", "both"] | None = None

    def __post_init__(self) -> None:
        """Checks constraints beyond types.

        Raises:
            ValueError: If an option is out of range, or some contradict each other.
        """
        super().__post_init__()
        checks.path("model", self.model)
        if self.temperature != 1 and self.tail:
            raise ValueError(
                f"`temperature`={self.temperature} needs `tail`=false: the probability of tokens "
                "beyond the stored ones is known at temperature 1 only"
            )
        patterns = [("trainable", pattern) for pattern in run_settings.listed(self.trainable)]
        for name, pattern in (*patterns, ("lora_targets", self.lora_targets)):
            checks.pattern(name, pattern)
        if self.adapter is not None:
            checks.path("adapter", self.adapter)
            if self.lora_rank is not None:
                raise ValueError("`adapter` has a rank: leave `lora_rank` out, or `adapter`")
        if self.new_tokens is not None:
            self._check_new_tokens()
        if "adapter" in self.exports and not self.has_adapters:
            raise ValueError(f"`export_as`={self.export_as} needs adapters: set `lora_rank`")
        if "adapter" in self.exports and self.trainable:
            raise ValueError(
                "an adapter's folder has no place for the parameters that `trainable` adds: set "
                "`export_as`=model"
            )
        if self._kind.rows != "chat":
            self._check_objective()
        self._check_needed()

    def _check_new_tokens(self) -> None:
        if not all(run_settings.listed(self.new_tokens)) or not self.new_tokens:
            raise ValueError("`new_tokens` must be texts that are not empty")
        trained = self.trainable or self.lora_modules_to_save
        if self.lora_rank is not None and not trained:
            raise ValueError(
                "`new_tokens` beside adapters have embeddings that are frozen as they begin: set "
                "`lora_modules_to_save`=[embed_tokens, lm_head], or, if these are one matrix, "
                "`trainable`=embed_tokens and `export_as`=model"
            )

    def _check_needed(self) -> None:
        self.check_use(
            "lora_alpha lora_dropout lora_rslora lora_dora lora_targets lora_modules_to_save",
            self.lora_rank is not None,
            "fresh adapters: set `lora_rank`",
        )
        for name in sorted({name for kind in OBJECTIVE_KINDS.values() for name in kind.options}):
            self.check_use(
                name,
                name in self._kind.options,
                f"`objective`={' or '.join(objectives_with(name))}",
            )
        self.check_use(
            "label_smoothing",
            self.loss_type in ("sigmoid", "robust"),
            "`loss_type`=sigmoid or robust",
        )
        self.check_use(
            "neftune_noise_alpha",
            self.objective == "sft",
            "`objective`=sft, which compares with no other model",
        )
        self.check_use(
            "frozen",
            self.has_adapters or self.trainable is not None,
            "parameters that are not trained: set `trainable` or `lora_rank`",
        )
        self.check_use(
            "chat_template template_variables merge leading train_on",
            self.format == "chat",
            "conversations, but `format` is text",
        )
        self.check_use(
            "chat_template template_variables merge leading",
            self._kind.rows != "distilled",
            "conversations, but `objective`=distill learns token ids",
        )

    def _check_objective(self) -> None:
        """Checks the options that objectives besides sft can't have."""
        if self.too_long in ("cut", "split") and self._kind.rows != "distilled":
            raise ValueError(
                f"`too_long`={self.too_long} would part pairs: set it to error or drop"
            )
        if self.format != "chat" or self.train_on != "assistant":
            raise ValueError(
                f"`objective`={self.objective} learns answers: leave `format` and `train_on` out"
            )
        if self._kind.has_reference and self.trainable and self.lora_rank is not None:
            raise ValueError(
                f"`objective`={self.objective} compares with the model without its adapters, which "
                "has to stay as it is: leave `trainable` out, or `lora_rank`"
            )
        if self._kind.scores and self.samples is not None:
            raise ValueError("`samples` are texts, but `objective`=reward trains scores")
        if self._kind.scores and "adapter" in self.exports:
            raise ValueError(
                "an adapter's folder has no place for the head of `objective`=reward: set "
                "`export_as`=model"
            )

    @property
    def _kind(self) -> ObjectiveKind:
        return OBJECTIVE_KINDS[self.objective]

    @property
    def _default_rate(self) -> float:
        return self._kind.adapter_rate if self.has_adapters else super()._default_rate

    @property
    def has_dropout(self) -> bool:
        """Whether adapters are trained with their dropout."""
        return self._kind.has_dropout

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained: fresh ones, or those in a folder."""
        return self.lora_rank is not None or self.adapter is not None

    @property
    def stores_reference(self) -> bool:
        """Whether the reference's log-probabilities are computed before training, and stored.

        They are not if only fresh adapters are trained: the model without them is the reference.
        """
        is_initial = self.lora_rank is not None and not self.lora_modules_to_save
        return self._kind.has_reference and not is_initial

    @property
    def trains_scores(self) -> bool:
        """Whether the model is a reward model."""
        return self._kind.scores

    @property
    def exports(self) -> tuple[str, ...]:
        """The subfolders of `out` to export."""
        default = "adapter" if self.has_adapters and not self._kind.scores else "model"
        return self.exports_as(self.export_as or default)
