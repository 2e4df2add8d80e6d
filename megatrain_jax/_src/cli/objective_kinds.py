"""The training objectives by name: their options, their rows, and whether they have a reference.

This table needs no JAX, so that settings are checked before anything heavy is imported. The losses
are in the table of `objectives.py`. A new objective is a line in both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ObjectiveName = Literal["sft", "dpo", "ipo", "simpo", "orpo"]
RowKind = Literal["chat", "preferences"]


@dataclass(frozen=True, kw_only=True)
class ObjectiveKind:
    """A training objective, as the settings see it.

    Attributes:
        options: Names of the settings that only this objective and its like read.
        rows: The kind of its rows: a function of `megatrain_jax.data` that reads them.
        has_reference: Whether it compares the model with the model before training.
    """

    options: tuple[str, ...] = ()
    rows: RowKind = "preferences"
    has_reference: bool = False


OBJECTIVE_KINDS: Mapping[str, ObjectiveKind] = {
    "sft": ObjectiveKind(rows="chat"),
    "dpo": ObjectiveKind(options=("beta",), has_reference=True),
    "ipo": ObjectiveKind(options=("beta",), has_reference=True),
    "simpo": ObjectiveKind(options=("beta", "simpo_gamma", "cpo_alpha")),
    "orpo": ObjectiveKind(options=("beta",)),
}


def objectives_with(option: str) -> list[str]:
    """The names of the objectives that read an option; empty if it is no option of one."""
    return [name for name, kind in OBJECTIVE_KINDS.items() if option in kind.options]
