"""A weight that is decoded from several tensors of a checkpoint when it is read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatrain_jax._src.lm.models.tensors import DTYPES, Tensor, some

# Numbers decoded at a time.
CHUNK = 2**18


@dataclass(frozen=True, kw_only=True)
class QuantisedTensor(Tensor):
    """A weight that is decoded from several tensors when it is read.

    Attributes:
        parts: The tensors: codes first, then scales.
        decode: Function from the parts' arrays, or those of one expert, to the weight's.
    """

    parts: tuple[Tensor, ...]
    decode: Callable[..., np.ndarray]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that contain the parts."""
        return tuple(part.path for part in self.parts)

    def slice(self, index: Any) -> np.ndarray:
        """Returns a part of the weight; see `Tensor.slice`."""
        if isinstance(index, tuple):  # rows of one expert
            expert, rows = index
            return self.decode(*(part.slice(expert) for part in self.parts))[rows]
        return self.decode(*(part.read() for part in self.parts))[index]


def weight_of(
    name: str,
    parts: Sequence[Tensor],
    shape: tuple[int, ...],
    code: str,
    decode: Callable[..., np.ndarray],
) -> QuantisedTensor:
    """A weight that is decoded when it is read.

    Args:
        name: Its name.
        parts: The tensors: codes first, then scales.
        shape: Its shape.
        code: Its dtype in the notation of safetensors.
        decode: Function from the parts' arrays and the keyword `dtype` to the weight's array.
    """
    first = parts[0]
    return QuantisedTensor(
        path=first.path,
        file=first.file,
        name=name,
        shape=shape,
        dtype=code,
        start=first.start,
        whole=shape,
        parts=tuple(parts),
        decode=partial(decode, dtype=DTYPES[code]),
    )


def check_fit(name: str, parts: Sequence[Tensor], fits: bool, said: str = "") -> None:
    """Refuses tensors of one weight that don't fit each other.

    Args:
        name: The weight.
        parts: The tensors.
        fits: Whether they fit.
        said: What the configuration says about them, for the message.

    Raises:
        ValueError: If they don't.
    """
    if not fits:
        shapes = [f"{part.name} {part.shape} {part.dtype}" for part in parts]
        end = f"; `quantization_config` says {said}" if said else ""
        raise ValueError(
            f"codes and scales of {name[:200]} don't fit each other: {some(shapes)}{end}"
        )
