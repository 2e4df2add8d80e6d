"""Quantised weights of a checkpoint: codes and scales in files, read as the numbers they encode.

The formats, each named as in the `quantization_config` of `config.json`, with the tensors of a
weight `W`::

    mxfp4               W_blocks   two 4-bit floats per byte
                        W_scales   a power of two per 32 numbers of a row
    fp8                 W          8-bit floats
                        W_scale_inv    a scale per 128 x 128 numbers, or one for all
    compressed-tensors  W          8-bit floats or integers
                        W_scale    a scale per weight, per row or per group of a row
    bitsandbytes        W          two 4-bit codes per byte, or 8-bit integers
                        W.absmax, …    scales per 64 numbers, in 8 bits with their own scales
                        SCB        a scale per row of integers

A weight is decoded when it is read, some rows at a time, in fp32, and rounded once. So at most one
weight exists beside its destination.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from megatrain_jax._src.common import checks
from megatrain_jax._src.models.tensors import DTYPES, ITEM_BYTES, Tensor, open_folder, some

# Numbers decoded at a time.
_CHUNK = 2**18
_CODES = {dtype.name: code for code, dtype in DTYPES.items()}
# The description of a bitsandbytes weight takes a few hundred bytes.
_MOST_STATE_BYTES = 2**16
_COMPRESSED = ("float-quantized", "int-quantized", "naive-quantized")
# The floats of 4 bits in the order of their codes, without signs.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# bitsandbytes multiplies by this number instead of dividing by 127.
_BY_127 = np.float32(7.874015718698502e-3)


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


def check_quantisation(config: Mapping[str, Any]) -> None:
    """Checks that a checkpoint's weights can be decoded, if they are quantised.

    Args:
        config: The object in its `config.json`, or its `text_config`.

    Raises:
        TypeError: If `quantization_config` is not an object.
        ValueError: If weights in this format can't be decoded.
    """
    about = config.get("quantization_config")
    if about is None:
        return
    if not isinstance(about, Mapping):
        raise TypeError(checks.refused("quantization_config", "an object", about))
    method, form = _method_of(about), about.get("format")
    known, found = ", ".join(_READERS), f"quantised by {str(method)[:60]!r}"
    if method == "compressed-tensors" and form not in _COMPRESSED:
        known = f"compressed-tensors as {', '.join(_COMPRESSED)}"
        found = f"in the format {str(form)[:60]!r} of compressed-tensors"
    elif method in _READERS:
        return
    raise ValueError(
        f"`quantization_config` says that weights are {found}, which can't be read; these can: "
        f"{known}. Start from the checkpoint in bfloat16 that was quantised, or have its own "
        "library decode and save it"
    )


def open_weights(folder: Path, config: str | None) -> dict[str, Tensor]:
    """Returns a checkpoint's tensors by name, with decoded weights in place of codes and scales.

    Args:
        folder: The checkpoint's folder.
        config: The text of its `config.json`. Its dtype, or bfloat16, becomes the dtype of decoded
            weights, except for 4-bit weights of bitsandbytes with dtypes of their own.

    Raises:
        FileNotFoundError: See `open_folder`.
        ValueError: See `open_folder`; or codes and scales don't fit each other.
    """
    tensors, values = open_folder(folder), json.loads(config or "{}")
    parts = [part for part in (values, values.get("text_config")) if isinstance(part, Mapping)]
    names = [part.get(name) for part in parts for name in ("dtype", "torch_dtype")]
    code = next((_CODES[x] for x in names if isinstance(x, str) and x in _CODES), "BF16")
    for about in (part.get("quantization_config") for part in parts):
        if isinstance(about, Mapping) and (read := _READERS.get(_method_of(about))):
            return read(tensors, about, code)
    return tensors


def _method_of(about: Mapping[str, Any]) -> str:
    if about.get("quant_method") is None and (about.keys() & {"load_in_4bit", "load_in_8bit"}):
        return "bitsandbytes"  # its first checkpoints name no method
    return str(about.get("quant_method"))


def _weight(
    name: str,
    parts: Sequence[Tensor],
    shape: tuple[int, ...],
    code: str,
    decode: Callable[..., np.ndarray],
) -> QuantisedTensor:
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


def _fit(name: str, parts: Sequence[Tensor], fits: bool) -> None:
    if not fits:
        shapes = [f"{part.name} {part.shape} {part.dtype}" for part in parts]
        raise ValueError(f"codes and scales of {name[:200]} don't fit each other: {some(shapes)}")


def _mxfp4(tensors: Mapping[str, Tensor], about: Any, code: str) -> dict[str, Tensor]:
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith("_blocks")]:
        base = name.removesuffix("_blocks")
        if (scales := found.get(f"{base}_scales")) is None:
            continue
        parts = found.pop(name), found.pop(scales.name)
        blocks = parts[0].shape
        both = all(part.dtype == "U8" for part in parts)
        _fit(base, parts, both and len(blocks) == 4 and blocks == (*scales.shape, 16))
        # In the files a row has the inputs of one output; in the model it is a column.
        experts, outputs, groups, _ = blocks
        found[base] = _weight(base, parts, (experts, groups * 32, outputs), code, _from_mxfp4)
    return found


def _from_mxfp4(blocks: np.ndarray, scales: np.ndarray, *, dtype: np.dtype) -> np.ndarray:
    experts, outputs, groups, _ = blocks.shape
    array = np.empty((experts, groups * 32, outputs), dtype)
    # Transformers' powers, also at the ends: the last one is infinite.
    with np.errstate(over="ignore"):
        powers = np.exp2(np.arange(256, dtype=np.float32) - np.float32(127))
    pairs, step = _pairs((*_FP4, *(-x for x in _FP4)), high_first=False), max(1, _CHUNK // 32)
    step = max(1, step // groups)
    for to, own, exponents in zip(array, blocks, scales, strict=True):
        for at in range(0, outputs, step):
            span = slice(at, at + step)
            values = pairs[own[span]].reshape(-1, groups, 32)
            with np.errstate(over="ignore", invalid="ignore"):
                values = values * powers[exponents[span]][..., None]
            to[:, span] = values.reshape(-1, groups * 32).T
    return array


def _fp8(tensors: Mapping[str, Tensor], about: Any, code: str) -> dict[str, Tensor]:
    return _scaled_weights(tensors, "_scale_inv", about.get("weight_block_size"), code)


def _compressed(tensors: Mapping[str, Tensor], about: Any, code: str) -> dict[str, Tensor]:
    groups = about.get("config_groups")
    rows = groups.values() if isinstance(groups, Mapping) else ()
    weights = [row.get("weights") for row in rows if isinstance(row, Mapping)]
    blocks = [w.get("block_structure") for w in weights if isinstance(w, Mapping)]
    return _scaled_weights(tensors, "_scale", next(filter(None, blocks), None), code)


def _scaled_weights(
    tensors: Mapping[str, Tensor], suffix: str, block: Any, code: str
) -> dict[str, Tensor]:
    """Replaces weights that have a tensor of scales, named with this suffix."""
    found = dict(tensors)
    for name in tensors:
        if (scales := tensors.get(f"{name}{suffix}")) is None:
            continue
        weight = tensors[name]
        parts = weight, found.pop(scales.name)
        known = weight.dtype in ("F8_E4M3", "F8_E5M2", "I8") and scales.dtype in (
            "F32",
            "BF16",
            "F16",
            "F8_E8M0",
        )
        tiles = _tiles(weight.shape, scales.shape, block)
        _fit(name, parts, known and tiles != (0, 0))
        found[name] = _weight(name, parts, weight.shape, code, partial(_scaled, tiles=tiles))
        # Scales of activations serve inference in 8 bits only.
        base = name.removesuffix("weight")
        for activation in (f"{base}activation_scale", f"{base}input_scale"):
            found.pop(activation, None)
    return found


def _tiles(shape: tuple[int, ...], scales: tuple[int, ...], block: Any) -> tuple[int, int]:
    """Rows and columns that share a scale; zeros if shapes of weight and scales don't fit.

    Args:
        shape: Shape of the weight.
        scales: Shape of its scales.
        block: Rows and columns from the configuration; the last block may be incomplete.
    """
    if len(shape) < 2 or not all(shape):
        return 0, 0
    front, (rows, columns) = shape[:-2], shape[-2:]
    if math.prod(scales) == math.prod(front):
        return rows, columns
    if scales[:-2] != front or len(scales) < 2:
        return 0, 0
    by_rows, by_columns = scales[-2:]
    given = isinstance(block, list | tuple) and len(block) == 2
    if given and all(type(x) is int and x > 0 for x in block):
        tall, wide = block
        if (by_rows, by_columns) == (-(-rows // tall), -(-columns // wide)):
            return tall, wide
    if by_rows and by_columns and rows % by_rows == 0 and columns % by_columns == 0:
        return rows // by_rows, columns // by_columns
    return 0, 0


def _scaled(
    codes: np.ndarray,
    scales: np.ndarray,
    *,
    tiles: tuple[int, int],
    dtype: np.dtype,
    factor: np.float32 | None = None,
) -> np.ndarray:
    """Codes times scales, and times a further factor, if any.

    Args:
        codes: Numbers of shape (..., rows, columns).
        scales: One number for each tile, or one for all.
        tiles: Rows and columns that share a scale.
        dtype: dtype of the result.
        factor: The further factor.
    """
    rows, columns = codes.shape[-2:]
    tall, wide = tiles
    by_rows, by_columns = -(-rows // tall), -(-columns // wide)
    array = np.empty(codes.shape, dtype)
    grids = scales.astype(np.float32).reshape(-1, by_rows, by_columns)
    matrices = codes.reshape(-1, rows, columns)
    for to, own, grid in zip(array.reshape(matrices.shape), matrices, grids, strict=True):
        step = max(1, _CHUNK // columns)
        for at in range(0, rows, step):
            part = own[at : at + step].astype(np.float32)
            by = grid[np.arange(at, at + len(part)) // tall]
            part *= by if by_columns == 1 else np.repeat(by, wide, axis=1)[:, :columns]
            if factor is not None:
                part *= factor
            to[at : at + step] = part
    return array


def _bitsandbytes(tensors: Mapping[str, Tensor], about: Any, code: str) -> dict[str, Tensor]:
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
            _fit(weight, parts, fits and [part.dtype for part in parts] == ["I8", "F32"])
            decode = partial(_scaled, tiles=(1, shape[1]), factor=_BY_127)
            found[weight] = _weight(weight, parts, shape, code, decode)
    return found


def _four_bits(found: dict[str, Tensor], name: str, state: Tensor) -> dict[str, Tensor]:
    """The weight of this name; takes its other tensors out of `found`."""
    about = _state(state)
    nested = "nested_blocksize" in about
    parts = [found.get(name)]
    for part in ("absmax", "quant_map", *(("nested_absmax", "nested_quant_map") if nested else ())):
        parts.append(found.pop(f"{name}.{part}", None))
    there = [part for part in parts if part is not None]
    shape, size, code = tuple(about["shape"]), math.prod(about["shape"]), _CODES[about["dtype"]]
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
    _fit(name, [*there, state], fits)
    numbers = about["blocksize"], about.get("nested_blocksize", 1), about.get("nested_offset", 0.0)
    decode = partial(_from_four_bits, shape=shape, numbers=numbers)
    return {name: _weight(name, there, shape, code, decode)}


def _state(tensor: Tensor) -> dict[str, Any]:
    """The description that bitsandbytes stores beside a weight, as JSON in a tensor of bytes.

    Raises:
        ValueError: If it is damaged.
    """
    about: Any = None
    if tensor.dtype == "U8" and math.prod(tensor.shape) <= _MOST_STATE_BYTES:
        try:
            about = json.loads(tensor.read().tobytes())
        except ValueError:
            about = None
    if isinstance(about, dict):
        numbers = about.get("blocksize"), about.get("nested_blocksize", 1)
        shape = about.get("shape")
        sizes = shape if isinstance(shape, list) and shape else [None]
        whole = all(type(x) is int and 0 < x < 2**40 for x in (*numbers, *sizes))
        whole = whole and about["blocksize"] % 2 == 0
        offset = isinstance(about.get("nested_offset", 0.0), int | float)
        if whole and offset and about.get("dtype") in _CODES:
            return about
    raise ValueError(f"{tensor.name[:200]} is damaged: it doesn't describe a weight")


def _from_four_bits(
    codes: np.ndarray,
    absmax: np.ndarray,
    levels: np.ndarray,
    nested: np.ndarray | None = None,
    nested_levels: np.ndarray | None = None,
    *,
    shape: tuple[int, ...],
    numbers: tuple[int, int, float],
    dtype: np.dtype,
) -> np.ndarray:
    size, (block, nested_block, offset) = math.prod(shape), numbers
    scales = absmax.reshape(-1)
    if nested is not None and nested_levels is not None:
        by = np.repeat(nested.reshape(-1), nested_block)[: scales.size]
        scales = nested_levels[scales] * by + np.float32(offset)
    packed, step = codes.reshape(-1).view(np.uint8), max(1, _CHUNK // block) * block
    pairs = _pairs(tuple(levels.reshape(-1).tolist()), high_first=True)
    array = np.empty(size, dtype)
    for at in range(0, size, step):
        values = pairs[packed[at // 2 : (at + step + 1) // 2]].reshape(-1)[: size - at]
        by = np.repeat(scales[at // block : -(-(at + step) // block)], block)[: values.size]
        array[at : at + step] = values * by
    return array.reshape(shape)


@cache
def _pairs(levels: tuple[float, ...], *, high_first: bool) -> np.ndarray:
    """The two numbers of each byte: the levels of its halves, fp32 of shape (256, 2)."""
    table, byte = np.array(levels, np.float32), np.arange(256)
    halves = (byte >> 4, byte & 15) if high_first else (byte & 15, byte >> 4)
    return np.stack([table[half] for half in halves], axis=1)


_Reader = Callable[[Mapping[str, Tensor], Any, str], dict[str, Tensor]]
_READERS: dict[str, _Reader] = {
    "mxfp4": _mxfp4,
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "bitsandbytes": _bitsandbytes,
}
