"""Quantised weights of a checkpoint: codes and scales in files, read as the numbers they encode.

The formats, each named as in the `quantization_config` of `config.json`, with the tensors of a
weight `W`::

    mxfp4               W_blocks   two 4-bit floats per byte
                        W_scales   a power of two per 32 numbers of a row
    fp8                 W          8-bit floats
                        W_scale_inv    a scale per 128 x 128 numbers, or one for all
    compressed-tensors  W          8-bit floats or integers
                        W_scale    a scale per weight, per row or per group of a row
                        W_packed   integers of up to 8 bits; see packed_integers.py, as for
    gptq, awq           qweight    integers of up to 8 bits
    bitsandbytes        W          two 4-bit codes per byte, or 8-bit integers
                        W.absmax, …    scales per 64 numbers, in 8 bits with their own scales
                        SCB        a scale per row of integers

A weight is decoded when it is read, some rows at a time, in fp32, and rounded once. So at most one
weight exists beside its destination.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.outside import parsed_json
from megatrain_jax._src.lm.models.coded_weights import CHUNK, check_fit, weight_of
from megatrain_jax._src.lm.models.packed_integers import read_awq, read_gptq, read_packed
from megatrain_jax._src.lm.models.tensors import CODES, ITEM_BYTES, Tensor, open_folder, some


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


_SCALES = {
    "fp8": "_scale_inv",
    "compressed-tensors": "_scale",
    "bitsandbytes": ".quant_state.bitsandbytes__nf4",
}
# Transformers' default.
_FP8_BLOCK = (128, 128)
# Rows or columns of a block that is as large as any weight.
_WHOLE = 2**31
_OF_ACTIVATIONS = re.compile(r"(^|\.)(activation|input|output|[qkv])_(scale|zero_point)$")
# What the known formats store beside a weight, or in its place.
_BESIDE_WEIGHTS = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|SCB)$|(\.weight|_proj)\.?_?"
    r"(\w*scale\w*|\w*zero_point|packed|shape|g_idx|blocks|(nested_)?(absmax|quant_map)|quant_state.*)$"
)
_COMPRESSED = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
# The floats of 4 bits in the order of their codes, without signs.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


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
    checks.instance("quantization_config", about, Mapping, "an object")
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
    code = next((CODES[x] for x in names if isinstance(x, str) and x in CODES), "BF16")
    for about in (part.get("quantization_config") for part in parts):
        if isinstance(about, Mapping) and (read := _READERS.get(_method_of(about))):
            return read(tensors, about, code)
    return tensors


def check_decoded(folder: Path, tensors: Iterable[Tensor], config: str | None) -> None:
    """Checks that nothing of a quantised checkpoint was left as it is in its files.

    Args:
        folder: The checkpoint's folder.
        tensors: Tensors from `open_weights` that are going to be written.
        config: See `open_weights`.

    Raises:
        ValueError: If there are codes of 8 bits, or scales.
    """
    left = [
        tensor
        for tensor in tensors
        if tensor.dtype.startswith("F8_")
        # Old checkpoints have masks of bytes, such as `attention.bias`.
        or (tensor.dtype in ("I8", "U8") and not tensor.name.endswith("bias"))
        or _BESIDE_WEIGHTS.search(tensor.name)
    ]
    if left:
        missing = [name for tensor in left if (name := scales_of(tensor, config))]
        lacks = f", because the checkpoint lacks {some(missing)}" if missing else ""
        raise ValueError(
            f"{folder} has quantised weights that can't be decoded: "
            f"{some([f'{tensor.name} ({tensor.dtype})' for tensor in left])}{lacks}. Start from "
            "the checkpoint in bfloat16 that was quantised"
        )


def scales_of(weight: Tensor, config: str | None) -> str | None:
    """The name of the tensor without which codes of a weight can't be decoded.

    Args:
        weight: The weight as it is in its file.
        config: See `open_weights`.

    Returns:
        The name; None if the weight has no codes of 8 bits, or the checkpoint isn't quantised.
    """
    if ITEM_BYTES.get(weight.dtype) != 1:
        return None
    values = json.loads(config or "{}")
    for part in (values, values.get("text_config")):
        about = part.get("quantization_config") if isinstance(part, Mapping) else None
        if isinstance(about, Mapping) and (method := _method_of(about)) in _SCALES:
            if method == "bitsandbytes" and weight.dtype == "I8":
                return f"{weight.name.removesuffix('.weight')}.SCB"
            return f"{weight.name}{_SCALES[method]}"
    return None


def _method_of(about: Mapping[str, Any]) -> str:
    if about.get("quant_method") is None and (about.keys() & {"load_in_4bit", "load_in_8bit"}):
        return "bitsandbytes"  # its first checkpoints name no method
    return str(about.get("quant_method"))


def _mxfp4(tensors: Mapping[str, Tensor], about: Any, code: str) -> dict[str, Tensor]:
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith("_blocks")]:
        base = name.removesuffix("_blocks")
        if (scales := found.get(f"{base}_scales")) is None:
            raise ValueError(f"{name[:200]} can't be decoded: {base[:200]}_scales is missing")
        parts = found.pop(name), found.pop(scales.name)
        blocks = parts[0].shape
        both = all(part.dtype == "U8" for part in parts)
        check_fit(base, parts, both and len(blocks) == 4 and blocks == (*scales.shape, 16))
        # In the files a row has the inputs of one output; in the model it is a column.
        experts, outputs, groups, _ = blocks
        found[base] = weight_of(base, parts, (experts, groups * 32, outputs), code, _from_mxfp4)
    return found


def _from_mxfp4(blocks: np.ndarray, scales: np.ndarray, *, dtype: np.dtype) -> np.ndarray:
    experts, outputs, groups, _ = blocks.shape
    array = np.empty((experts, groups * 32, outputs), dtype)
    # Transformers' powers, also at the ends: the last one is infinite.
    with np.errstate(over="ignore"):
        powers = np.exp2(np.arange(256, dtype=np.float32) - np.float32(127))
    pairs, step = nibble_table((*_FP4, *(-x for x in _FP4)), high_first=False), max(1, CHUNK // 32)
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
    # Null means one scale for a weight; Transformers' default holds where nothing is said.
    given = about.get("weight_block_size", _FP8_BLOCK)
    block = (_WHOLE, _WHOLE) if given is None else _two_sizes("weight_block_size", given)
    floats = ("F8_E4M3", "F8_E5M2")
    return _scaled_weights(tensors, _SCALES["fp8"], {block}, floats, code)


def _compressed(tensors: Mapping[str, Tensor], about: Any, code: str) -> dict[str, Tensor]:
    groups = about.get("config_groups")
    rows = groups.values() if isinstance(groups, Mapping) else ()
    weights = [row.get("weights") for row in rows if isinstance(row, Mapping)]
    weights = [own for own in weights if isinstance(own, Mapping)]
    tensors = read_packed(tensors, weights, code)
    # One scale for a weight or for a row can't be mistaken for anything else.
    blocks = {(_WHOLE, _WHOLE), (1, _WHOLE)}
    for own in weights:
        size, structure = own.get("group_size"), own.get("block_structure")
        if size is not None and size != -1:  # -1 stands for rows
            blocks.add(_two_sizes("group_size", [1, size]))
        if structure is not None:
            blocks.add(_two_sizes("block_structure", structure))
    needed = bool(weights) and all(own.get("symmetric") is False for own in weights)
    numbers = ("F8_E4M3", "F8_E5M2", "I8")
    found = _scaled_weights(tensors, _SCALES["compressed-tensors"], blocks, numbers, code)
    for name in [name for name in found if f"{name}_scale" in tensors]:
        zero = found.pop(f"{name}_zero_point", None)
        if zero is None and not needed:
            continue
        if zero is None or zero.read().astype(np.float32).any():
            problem = "are missing" if zero is None else "are not zero"
            raise ValueError(
                f"{name[:200]} can't be decoded: its zero points, {name[:200]}_zero_point, "
                f"{problem}. Only symmetric codes (`symmetric` in `quantization_config`) can be "
                "read: start from the checkpoint in bfloat16 that was quantised"
            )
    return found


def _two_sizes(name: str, given: Any) -> tuple[int, int]:
    """Rows and columns that share a scale, from the configuration.

    Raises:
        ValueError: If they are not two integers above 0.
    """
    sizes = given.split("x") if isinstance(given, str) else given  # as in "128x128"
    if isinstance(sizes, list | tuple) and len(sizes) == 2:
        rows, columns = (int(x) if isinstance(x, str) and x.isdecimal() else x for x in sizes)
        if type(rows) is int and type(columns) is int and min(rows, columns) > 0:
            return min(rows, _WHOLE), min(columns, _WHOLE)
    allowed = "two integers above 0 (rows and columns that share a scale)"
    raise ValueError(checks.refused(f"{name}` of `quantization_config", allowed, given))


def _scaled_weights(
    tensors: Mapping[str, Tensor],
    suffix: str,
    blocks: Set[tuple[int, int]],
    codes: tuple[str, ...],
    code: str,
) -> dict[str, Tensor]:
    """Replaces weights that have a tensor of scales.

    Args:
        tensors: The tensors in the files.
        suffix: End of the names of scales.
        blocks: Rows and columns that may share a scale.
        codes: dtypes of the weights' codes.
        code: dtype of the decoded weights.
    """
    sizes = [["all" if size == _WHOLE else str(size) for size in both] for both in sorted(blocks)]
    shown = " or ".join(f"{tall} x {wide}" for tall, wide in sizes)
    # Scales of activations, and of cached keys and values, serve inference in 8 bits only.
    found = {name: x for name, x in tensors.items() if _OF_ACTIVATIONS.search(name) is None}
    for name in tensors:
        if (scales := tensors.get(f"{name}{suffix}")) is None or scales.name not in found:
            continue
        weight = tensors[name]
        parts = weight, found.pop(scales.name)
        known = weight.dtype in codes and scales.dtype in ("F32", "BF16", "F16", "F8_E8M0")
        tiles = _tiles(weight.shape, scales.shape, blocks)
        check_fit(name, parts, known and tiles is not None, f"blocks of {shown}")
        assert tiles is not None
        found[name] = weight_of(
            name, parts, weight.shape, code, partial(scaled, name=scales.name, tiles=tiles)
        )
    return found


def _tiles(
    shape: tuple[int, ...], scales: tuple[int, ...], blocks: Set[tuple[int, int]]
) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None if shapes of weight and scales don't fit.

    Args:
        shape: Shape of the weight.
        scales: Shape of its scales.
        blocks: Rows and columns that may share a scale; the last block may be incomplete.
    """
    if len(shape) < 2 or not all(shape):
        return None
    front, (rows, columns) = shape[:-2], shape[-2:]
    if len(scales) <= len(front) + 1 and math.prod(scales) == math.prod(front):
        return rows, columns
    fitting = {
        (min(tall, rows), min(wide, columns))
        for tall, wide in blocks
        if scales == (*front, -(-rows // tall), -(-columns // wide))
    }
    # With several, the configuration doesn't say which blocks this weight has.
    return fitting.pop() if len(fitting) == 1 else None


_Reader = Callable[[Mapping[str, Tensor], Any, str], dict[str, Tensor]]
_READERS: dict[str, _Reader] = {
    "mxfp4": _mxfp4,
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "bitsandbytes": read_bitsandbytes,
    "gptq": read_gptq,
    "awq": read_awq,
}
