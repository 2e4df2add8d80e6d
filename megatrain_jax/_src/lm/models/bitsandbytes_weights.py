"""Weights of bitsandbytes, of 4 or 8 bits."""

import math
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.outside import parsed_json
from megatrain_jax._src.lm.models.quantised_tensors import (
    CHUNK,
    CODES,
    check_fit,
    checked_scales,
    nibble_table,
    scaled,
    weight_of,
)
from megatrain_jax._src.lm.models.tensors import ITEM_BYTES, Tensor

# The description of a bitsandbytes weight takes a few hundred bytes.
_MOST_STATE_BYTES = 2**16
# bitsandbytes multiplies by this number instead of dividing by 127.
_BY_127 = np.float32(7.874015718698502e-3)


def read_bitsandbytes(tensors: Mapping[str, Tensor], about: Any, code: str) -> dict[str, Tensor]:
    """Replaces the codes of each weight by the weight; see `open_weights` of quantised.py."""
    found = dict(tensors)
    for name in tensors:
        base, _, last = name.rpartition(".")
        if last.startswith("bitsandbytes__") and base.endswith(".quant_state"):
            weight = base.removesuffix(".quant_state")
            found |= _four_bits(found, weight, found.pop(name))
        elif last == "SCB" and (weight := f"{base}.weight") in tensors:
            parts = tensors[weight], found.pop(name)
            found.pop(f"{base}.weight_format", None)
            shape = parts[0].shape
            fits = len(shape) == 2 and math.prod(parts[1].shape) == shape[0]
            check_fit(weight, parts, fits and [part.dtype for part in parts] == ["I8", "F32"])
            decode = partial(scaled, name=name, tiles=(1, shape[1]), factor=_BY_127)
            found[weight] = weight_of(weight, parts, shape, code, decode)
    return found


def _four_bits(found: dict[str, Tensor], name: str, state: Tensor) -> dict[str, Tensor]:
    """The weight of this name; removes its further tensors from `found`."""
    about = _state(state)
    nested = "nested_blocksize" in about
    parts = [found.get(name)]
    for part in ("absmax", "quant_map", *(("nested_absmax", "nested_quant_map") if nested else ())):
        parts.append(found.pop(f"{name}.{part}", None))
    there = [part for part in parts if part is not None]
    shape, size, code = tuple(about["shape"]), math.prod(about["shape"]), CODES[about["dtype"]]
    blocks = -(-size // about["blocksize"])
    fits = len(there) == len(parts)
    if fits:
        counts = [math.prod(part.shape) for part in there]
        # Codes may be stored as numbers of any dtype, so only their bytes count.
        counts[0] *= ITEM_BYTES.get(there[0].dtype, 0)
        wanted = [-(-size // 2), blocks, 16]
        if nested:
            wanted += [-(-blocks // about["nested_blocksize"]), 256]
        kinds = ["U8" if nested else "F32", *["F32"] * (len(there) - 2)]
        fits = counts == wanted and [part.dtype for part in there[1:]] == kinds
    check_fit(name, [*there, state], fits)
    # Blocks may be longer than what they divide, which must not take memory.
    block = min(about["blocksize"], size + size % 2)
    numbers = block, min(about.get("nested_blocksize", 1), blocks), about["nested_offset"]
    decode = partial(_from_four_bits, name=name, shape=shape, numbers=numbers)
    return {name: weight_of(name, there, shape, code, decode)}


def _state(tensor: Tensor) -> dict[str, Any]:
    """The description that bitsandbytes stores beside a weight, as JSON in a tensor of bytes.

    Raises:
        ValueError: If it is damaged.
    """
    about: Any = None
    if tensor.dtype == "U8" and math.prod(tensor.shape) <= _MOST_STATE_BYTES:
        with suppress(ValueError):
            about = parsed_json(tensor.read().tobytes())
    if isinstance(about, dict):
        numbers = about.get("blocksize"), about.get("nested_blocksize", 1)
        shape = about.get("shape")
        sizes = shape if isinstance(shape, list) and shape else [None]
        whole = all(type(x) is int and 0 < x < 2**40 for x in (*numbers, *sizes))
        whole = whole and about["blocksize"] % 2 == 0
        known = about.get("dtype") in [*CODES]  # it may be no text
        with suppress(TypeError, ValueError):
            offset = checks.number("nested_offset", about.get("nested_offset", 0.0))
            if whole and known:
                return about | {"nested_offset": offset}
    raise ValueError(
        f"{tensor.name[:200]} is damaged: it doesn't describe a weight, in {tensor.path}"
    )


def _from_four_bits(
    codes: np.ndarray,
    absmax: np.ndarray,
    levels: np.ndarray,
    nested: np.ndarray | None = None,
    nested_levels: np.ndarray | None = None,
    *,
    name: str,
    shape: tuple[int, ...],
    numbers: tuple[int, int, float],
    dtype: np.dtype,
) -> np.ndarray:
    for part, table in (("quant_map", levels), ("nested_quant_map", nested_levels)):
        if table is not None and not np.isfinite(table).all():
            raise ValueError(f"{name[:200]}.{part} is damaged: it has numbers that are not finite")
    size, (block, nested_block, offset) = math.prod(shape), numbers
    scales = absmax.reshape(-1)
    if nested is None or nested_levels is None:
        checked_scales(f"{name}.absmax", scales)
    else:
        checked_scales(f"{name}.nested_absmax", nested)
        by = np.repeat(nested.reshape(-1), nested_block)[: scales.size]
        scales = nested_levels[scales] * by + np.float32(offset)
    packed, step = codes.reshape(-1).view(np.uint8), max(1, CHUNK // block) * block
    pairs = nibble_table(tuple(levels.reshape(-1).tolist()), high_first=True)
    array = np.empty(size, dtype)
    for at in range(0, size, step):
        values = pairs[packed[at // 2 : (at + step + 1) // 2]].reshape(-1)[: size - at]
        by = np.repeat(scales[at // block : -(-(at + step) // block)], block)[: values.size]
        array[at : at + step] = values * by
    return array.reshape(shape)
