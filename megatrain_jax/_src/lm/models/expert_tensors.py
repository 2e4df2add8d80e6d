"""Two file formats of experts: one tensor per expert, or one tensor for all of a layer.

In the second format, gate and up matrices share one tensor, (experts, 2 · inside, width), with the
gate's rows first. The library works with the first format only; this module converts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatrain_jax._src.lm.models.tensors import Tensor

_GATES, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def split_experts(
    tensors: Mapping[str, Tensor], keep: Callable[[str], bool]
) -> tuple[dict[str, Tensor], bool]:
    """Replaces tensors of all experts by tensors of single experts, and returns if there were any.

    Args:
        tensors: The tensors of a checkpoint, by name.
        keep: Whether a tensor with this name must stay unchanged.
    """
    found, any_stacked = {}, False
    for name, tensor in tensors.items():
        stacked = name.endswith((_GATES, _DOWN)) and len(tensor.shape) == 3
        if not stacked or keep(name):
            found[name] = tensor
            continue
        any_stacked = True
        parts = ("gate_proj", "up_proj") if name.endswith(_GATES) else ("down_proj",)
        base = name.rpartition(".")[0]
        num, rows, width = tensor.shape
        # Gate and up matrices are halves of one tensor's rows.
        rows //= len(parts)
        for expert in range(num):
            for i, part in enumerate(parts):
                found[f"{base}.{expert}.{part}.weight"] = replace(
                    tensor,
                    shape=(rows, width),
                    part=(expert, slice(i * rows, (i + 1) * rows)),
                )
    return found, any_stacked


@dataclass(frozen=True, kw_only=True)
class StackedExperts:
    """A tensor of all experts of a layer, assembled when it is converted to an array.

    Attributes:
        parts: For each expert, the arrays that form one matrix, from its first row on.
        shape: Its shape.
    """

    parts: tuple[tuple[Any, ...], ...]
    shape: tuple[int, ...]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Assembles the numbers; nothing is kept here."""
        if copy is False:
            raise ValueError("experts can't be stacked without copying them")
        # The dtype of a part with adapters is known only when it is computed.
        dtype = np.asarray(self.parts[0][0]).dtype if dtype is None else dtype
        array = np.empty(self.shape, dtype)
        for expert, parts in zip(array, self.parts, strict=True):
            rows = np.split(expert, len(parts))
            for to, part in zip(rows, parts, strict=True):
                to[...] = np.asarray(part)
        return array


def stack_experts(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Joins the tensors of single experts to one for each layer: the inverse of `split_experts`."""
    found: dict[str, Any] = {}
    experts: dict[str, dict[int, dict[str, Any]]] = {}
    for name, array in arrays.items():
        base, at, rest = name.partition(".experts.")
        number, _, part = rest.partition(".")
        if at and number.isdecimal():
            experts.setdefault(base, {}).setdefault(int(number), {})[part] = array
        else:
            found[name] = array
    for base, by_number in experts.items():
        ordered = [by_number[i] for i in range(len(by_number))]
        for last, names in (
            (_GATES, ("gate_proj.weight", "up_proj.weight")),
            (_DOWN, ("down_proj.weight",)),
        ):
            parts = tuple(tuple(of_one[name] for name in names) for of_one in ordered)
            rows, width = parts[0][0].shape
            found[base + last] = StackedExperts(
                parts=parts,
                shape=(len(parts), len(names) * rows, width),
            )
    return found
