"""Weights that are decoded from codes and scales when they are read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from megatrain_jax._src.lm.models.tensors import DTYPES, Tensor, some

# Numbers decoded at a time.
CHUNK = 2**18
# The notation of safetensors for each dtype.
CODES = {dtype.name: code for code, dtype in DTYPES.items()}


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


def scaled(
    codes: np.ndarray,
    scales: np.ndarray,
    *,
    name: str,
    tiles: tuple[int, int],
    dtype: np.dtype,
    factor: np.float32 | None = None,
) -> np.ndarray:
    """Codes times scales, and times a further factor, if any.

    Args:
        codes: Numbers of shape (..., rows, columns).
        scales: One number for each tile, or one for all.
        name: Name of the scales.
        tiles: Rows and columns that share a scale.
        dtype: dtype of the result.
        factor: The further factor.
    """
    rows, columns = codes.shape[-2:]
    tall, wide = tiles
    by_rows, by_columns = -(-rows // tall), -(-columns // wide)
    array = np.empty(codes.shape, dtype)
    grids = checked_scales(name, scales.astype(np.float32)).reshape(-1, by_rows, by_columns)
    matrices = codes.reshape(-1, rows, columns)
    for to, own, grid in zip(array.reshape(matrices.shape), matrices, grids, strict=True):
        step = max(1, CHUNK // columns)
        for at in range(0, rows, step):
            part = own[at : at + step].astype(np.float32)
            by = grid[np.arange(at, at + len(part)) // tall]
            part *= by if by_columns == 1 else np.repeat(by, wide, axis=1)[:, :columns]
            if factor is not None:
                part *= factor
            to[at : at + step] = part
    return array


def checked_scales(name: str, scales: np.ndarray) -> np.ndarray:
    """Returns scales.

    Raises:
        ValueError: If one is not a finite number from 0.
    """
    wrong = scales[~((scales >= 0) & (scales < np.inf))]
    if wrong.size:
        raise ValueError(
            f"{name[:200]} is damaged: {wrong.size:,} of its {scales.size:,} scales are negative "
            f"or not finite, such as {wrong.flat[0]:g}"
        )
    return scales


@cache
def nibble_table(levels: tuple[float, ...], *, high_first: bool) -> np.ndarray:
    """The two numbers of each byte: the levels of its halves, fp32 of shape (256, 2)."""
    table, byte = np.array(levels, np.float32), np.arange(256)
    halves = (byte >> 4, byte & 15) if high_first else (byte & 15, byte >> 4)
    return np.stack([table[half] for half in halves], axis=1)
