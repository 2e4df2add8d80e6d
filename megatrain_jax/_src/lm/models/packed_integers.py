"""Weights of integers packed in 32-bit words: compressed-tensors' `pack-quantized`, GPTQ and AWQ.

A weight `W` of shape (outputs, inputs) has a scale and a zero for each output and group of inputs::

    number = (code - zero) * scale

Each format has its tensors and its directions::

                      codes                     scales     zeros, packed along outputs
    pack-quantized    W_packed, along inputs    W_scale    W_zero_point, or the middle code
    gptq              qweight, along inputs     scales     qzeros, less one
    awq               qweight, along outputs    scales     qzeros

Tensors of GPTQ and AWQ are transposed. Codes follow one another without gaps, the lowest bits
first; AWQ exchanges the eight of a word. Sources: the packages compressed-tensors, GPTQModel and
AutoAWQ.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models.coded_weights import CHUNK, check_fit, weight_of
from megatrain_jax._src.lm.models.tensors import DTYPES, Tensor

_BITS_OF_WORD = 32
# The place of each of eight codes in a word of AWQ.
_PLACES_OF_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, kw_only=True)
class _Format:
    """How a format stores a weight.

    Attributes:
        bits: Bits of a code.
        sizes: Numbers of inputs that may share a scale.
        transposed: Whether tensors have inputs, or groups of them, along their first axis.
        along_outputs: Whether the codes of a word belong to one input.
        places: The place of each code among the codes of a word; None for their order.
        lacking: The number that stored zeros lack.
    """

    bits: int
    sizes: tuple[int, ...]
    transposed: bool = True
    along_outputs: bool = False
    places: tuple[int, ...] | None = None
    lacking: int = 0

    def words(self, numbers: int) -> int:
        """The number of words of this many codes."""
        return -(-numbers * self.bits // _BITS_OF_WORD)

    def unpacked(self, words: np.ndarray, count: int, axis: int) -> np.ndarray:
        """The codes of words, as bytes.

        Args:
            words: A matrix of 32-bit integers.
            count: Number of codes along the axis.
            axis: The axis along which codes follow one another.
        """
        rows = np.moveaxis(words, axis, -1).astype(np.uint32).astype(np.uint64)
        # A code may lie in two words.
        pairs = rows | np.pad(rows[:, 1:], ((0, 0), (0, 1))) << np.uint64(_BITS_OF_WORD)
        at, shifts = np.divmod(np.arange(count) * self.bits, _BITS_OF_WORD)
        mask = np.uint64(2**self.bits - 1)
        codes = (np.take(pairs, at, axis=1) >> shifts.astype(np.uint64) & mask).astype(np.uint8)
        if self.places is not None:
            codes = codes.reshape(len(rows), -1, len(self.places))[..., self.places]
        return np.moveaxis(codes.reshape(len(rows), count), -1, axis)


def read_gptq(tensors: Mapping[str, Tensor], about: Any, code: str) -> dict[str, Tensor]:
    """Replaces the codes of each weight by the weight; see `open_weights`."""
    layout = about.get("checkpoint_format") or "gptq"
    _check_known("checkpoint_format", layout, ("gptq", "gptq_v2"))
    bits = about.get("bits")
    _check_known("bits", bits, (2, 3, 4, 8))  # GPTQModel packs 5 to 7 bits otherwise
    form = _Format(bits=bits, sizes=(_group_size(about),), lacking=int(layout == "gptq"))
    return _replaced(tensors, form, code)


def read_awq(tensors: Mapping[str, Tensor], about: Any, code: str) -> dict[str, Tensor]:
    """Replaces the codes of each weight by the weight; see `open_weights`."""
    for name, known in (("version", "gemm"), ("backend", "autoawq")):
        _check_known(name, str(about.get(name) or known).lower(), (known,))
    _check_known("bits", about.get("bits"), (4,))
    sizes = (_group_size(about),)
    form = _Format(bits=4, sizes=sizes, along_outputs=True, places=_PLACES_OF_AWQ)
    return _replaced(tensors, form, code)


def _replaced(tensors: Mapping[str, Tensor], form: _Format, code: str) -> dict[str, Tensor]:
    """The tensors with weights in place of the tensors of GPTQ or AWQ."""
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith(".qweight")]:
        base = name.removesuffix("qweight")
        rows, columns = [*tensors[name].shape, 0, 0][:2]  # what has other axes doesn't fit
        in_word = _BITS_OF_WORD / form.bits
        shape = (columns, int(rows * in_word))
        if form.along_outputs:
            shape = (int(columns * in_word), rows)
        names = [f"{base}{part}" for part in ("qweight", "scales", "qzeros", "g_idx")]
        parts = [found.pop(name, None) for name in names]
        found[f"{base}weight"] = _weight(f"{base}weight", parts, shape, form, code)
    return found


def read_packed(
    tensors: Mapping[str, Tensor], weights: list[Mapping[str, Any]], code: str
) -> dict[str, Tensor]:
    """Replaces the packed codes of compressed-tensors by their weights.

    Args:
        tensors: The tensors in the files.
        weights: What the configuration says of weights, for each group of layers.
        code: dtype of the decoded weights.
    """
    packed = [name for name in tensors if name.endswith(".weight_packed")]
    if not packed:
        return dict(tensors)
    found = dict(tensors)
    sizes = {_group_size(own) for own in weights if own.get("group_size") is not None}
    every = {_integer("num_bits", own.get("num_bits"), 2, 8) for own in weights}
    needed = bool(weights) and all(own.get("symmetric") is False for own in weights)
    for name in packed:
        base = name.removesuffix("_packed")
        shape = _shape_of(found.pop(f"{base}_shape", None), base)
        ends = ("packed", "scale", "zero_point", "g_idx")
        parts = [found.pop(f"{base}_{part}", None) for part in ends]
        forms = [_Format(bits=n, sizes=(*sizes, -1), transposed=False) for n in every]
        stored = tensors[name].shape
        fitting = [form for form in forms if stored == (shape[0], form.words(shape[1]))]
        fits = len(fitting) == 1 and (not needed or parts[2] is not None)
        said = f"{' or '.join(map(str, sorted(every)))} bits" + ", with zero points" * needed
        check_fit(base, [part for part in parts if part is not None], fits, said)
        found[base] = _weight(base, parts, shape, fitting[0], code)
    return found


def _weight(
    name: str, given: list[Tensor | None], shape: tuple[int, int], form: _Format, code: str
) -> Tensor:
    """The weight of a format's tensors.

    Args:
        name: Its name.
        given: Codes, scales, zeros, and the group of each input, or None for each that is missing.
        shape: Its shape.
        form: How the tensors store it.
        code: Its dtype.

    Raises:
        ValueError: The tensors don't fit each other.
    """
    words, scales, zeros, index = given
    (outputs, inputs), size = shape, 0
    parts = [part for part in given if part is not None]

    def is_of(tensor: Tensor | None, shape: tuple[int, int], *dtypes: str) -> bool:
        stored = shape[::-1] if form.transposed else shape
        return tensor is not None and tensor.shape == stored and tensor.dtype in dtypes

    if scales is not None and scales.shape and min(shape) > 0:
        in_words, count = form.words(outputs), int(scales.shape == (1,))
        count = count or scales.shape[0 if form.transposed else -1]
        packed = (in_words, inputs) if form.along_outputs else (outputs, form.words(inputs))
        if (
            is_of(words, packed, "I32")
            and (scales.shape == (1,) or is_of(scales, (outputs, count), *DTYPES))
            and (zeros is None and not form.transposed or is_of(zeros, (in_words, count), "I32"))
            and (index is None or (index.shape, index.dtype[0]) == ((inputs,), "I"))
        ):
            known = {-(-inputs // n) if n > 0 else 1: n if n > 0 else inputs for n in form.sizes}
            size = known.get(count, 0)
    groups = " or ".join("all inputs" if n < 0 else str(n) for n in sorted(form.sizes))
    said = f"{form.bits} bits, in groups of {groups}"
    check_fit(name, parts, size > 0, said)
    there = zeros is not None, index is not None
    decode = partial(_decoded, name=name, form=form, shape=shape, size=size, there=there)
    return weight_of(name, parts, shape, code, decode)


def _decoded(
    words: np.ndarray,
    scales: np.ndarray,
    *more: np.ndarray,
    name: str,
    form: _Format,
    shape: tuple[int, int],
    size: int,
    there: tuple[bool, bool],
    dtype: np.dtype,
) -> np.ndarray:
    """The numbers of a weight, shape (outputs, inputs).

    Args:
        words: Its codes, as stored.
        scales: Its scales, as stored.
        *more: The zeros and the group of each input, as far as they are `there`.
        name: Its name.
        form: How the tensors store it.
        shape: Its shape.
        size: Number of inputs of a group, if no tensor says the group of each input.
        there: Whether there are zeros, and groups of inputs.
        dtype: dtype of the result.
    """
    outputs, inputs = shape
    arrays = [array.T if form.transposed and array.ndim == 2 else array for array in more]
    zeros, index = (arrays.pop(0) if has else None for has in there)
    words, scales = (words.T, scales.T) if form.transposed else (words, scales)
    groups = np.arange(inputs) // size
    # compressed-tensors writes -1 where groups follow one another.
    if index is not None and (form.transposed or (index >= 0).all()):
        groups = index
    by = np.broadcast_to(
        scales.astype(np.float32).reshape(-1, scales.shape[-1]), (outputs, scales.shape[-1])
    )
    if not 0 <= groups.min() <= groups.max() < by.shape[1] or not np.isfinite(by).all():
        raise ValueError(f"{name[:200]} is damaged: its scales are not finite, or lack groups")
    if zeros is None:
        zeros = np.full((1, 1), 1 << (form.bits - 1), np.float32)
    else:
        zeros = form.unpacked(zeros, outputs, 0).astype(np.float32) + form.lacking
    zeros = np.broadcast_to(zeros, by.shape)
    array = np.empty(shape, dtype)
    # Whole words along outputs.
    step = max(1, CHUNK // (inputs * _BITS_OF_WORD)) * _BITS_OF_WORD
    for at in range(0, outputs, step):
        end = min(at + step, outputs)
        if form.along_outputs:
            span = slice(form.words(at), form.words(end))
            codes = form.unpacked(words[span], end - at, 0)
        else:
            codes = form.unpacked(words[at:end], inputs, 1)
        numbers = codes.astype(np.float32) - np.take(zeros[at:end], groups, axis=1)
        array[at:end] = numbers * np.take(by[at:end], groups, axis=1)
    return array


def _shape_of(tensor: Tensor | None, weight: str) -> tuple[int, int]:
    """The shape of a packed weight, which a tensor of two integers holds.

    Raises:
        ValueError: The tensor is missing or damaged.
    """
    if tensor is not None and (tensor.shape, tensor.dtype) in (((2,), "I64"), ((2,), "I32")):
        outputs, inputs = map(int, tensor.read())
        if 0 < min(outputs, inputs) and max(outputs, inputs) < 2**31:
            return outputs, inputs
    raise ValueError(f"{weight[:200]} can't be decoded: {weight[:200]}_shape is missing or damaged")


def _group_size(about: Mapping[str, Any]) -> int:
    """The number of inputs that share a scale, from the configuration; -1 for all of them."""
    size = about.get("group_size")
    return -1 if size == -1 else _integer("group_size", size, 1, 2**31)


def _integer(name: str, given: Any, least: int, most: int) -> int:
    if type(given) is int and least <= given <= most:
        return given
    allowed = f"an integer from {least} to {most}"
    raise ValueError(checks.refused(f"{name}` of `quantization_config", allowed, given))


def _check_known(name: str, given: Any, known: tuple[Any, ...]) -> None:
    if type(given) is not type(known[0]) or given not in known:
        allowed = " or ".join(map(repr, known))
        raise ValueError(checks.refused(f"{name}` of `quantization_config", allowed, given))
