"""The training objectives by name: their options, their rows, and whether they have a reference.

This table needs no JAX, so that settings are checked before anything heavy is imported. The losses
have the same names in `megatrain_jax.objectives`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

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
    "dpo": ObjectiveKind(options=("beta",), has_reference=True),
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
