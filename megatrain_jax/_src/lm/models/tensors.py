"""Tensors in safetensors files: read when their numbers are needed, and written one at a time.

The safetensors library maps a file, checks its header against its size, and returns NumPy arrays of
all dtypes that parameters have (bfloat16 through ml_dtypes), each as a copy. It can't return 8-bit
floats as NumPy arrays, so their bytes are read here. When it writes, it needs all tensors of a file
in memory, so files are written here, too.

Experts have two formats: one tensor per expert, or one tensor for all of a layer. In the second
format, gate and up matrices share one tensor, (experts, 2 · inside, width), with the gate's rows
first. The library works with the first format only; this module converts.
"""

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from megatrain_jax._src.common.computed_array import ComputedArray
from megatrain_jax._src.common.outside import needing
from megatrain_jax._src.lm.common.hf_folder import name_within, read_json, regular_file

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
CODES = {dtype.name: code for code, dtype in DTYPES.items()}
"""The notation of safetensors for each dtype."""
# Bytes per number in the dtypes of safetensors.
ITEM_BYTES: dict[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
_EIGHT_BITS: dict[str, np.dtype] = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_ROWS = 4096
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor in a file.

    Attributes:
        path: The file's path.
        file: The open file; all its tensors share it.
        name: The tensor's name there.
        shape: Its shape.
        dtype: Its dtype in the file's notation, such as "BF16".
        part: If it is only a part of the named tensor: an index along the first axis, and rows.
        start: The named tensor's first byte in the file.
        whole: Shape of the named tensor.
    """

    path: Path
    file: Any
    name: str
    shape: tuple[int, ...]
    dtype: str
    part: tuple[int, slice] | None = None
    start: int
    whole: tuple[int, ...]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that contain it."""
        return (self.path,)

    def read(self) -> np.ndarray:
        """Returns a copy of its numbers."""
        return self.slice(... if self.part is None else self.part)

    def slice(self, index: Any) -> np.ndarray:
        """Returns a copy of a part of the named tensor.

        Args:
            index: An index as of `safetensors`' slices; an ellipsis for all.
        """
        if (dtype := _EIGHT_BITS.get(self.dtype)) is not None:
            mapped = np.memmap(self.path, dtype, "r", self.start, self.whole)
            return np.array(mapped[index])
        if index is ...:
            return self.file.get_tensor(self.name)
        return self.file.get_slice(self.name)[index]


def finite_numbers(tensor: Tensor) -> np.ndarray:
    """Returns a copy of a tensor's numbers.

    Raises:
        ValueError: If one is not finite.
    """
    array = tensor.read()
    if not np.isfinite(array).all():
        raise ValueError(
            f"{tensor.path} is damaged: {tensor.name[:200]} has numbers that are not finite"
        )
    return array


def lazy_array(
    tensors: tuple[Tensor, ...], *, stacked: bool, finite: bool = False
) -> ComputedArray:
    """Returns one tensor, or several of one shape stacked along a first axis.

    Args:
        tensors: The tensors.
        stacked: Whether they are stacked.
        finite: Whether reading numbers that are not finite is an error.
    """
    first, read = tensors[0], finite_numbers if finite else Tensor.read
    shape = (len(tensors), *first.shape) if stacked else first.shape

    def numbers(dtype: Any) -> np.ndarray:
        if not stacked:
            return read(first)
        # Tensor by tensor, so that at most one exists twice.
        array = np.empty(shape, DTYPES[first.dtype] if dtype is None else dtype)
        for i, tensor in enumerate(tensors):
            array[i] = read(tensor)
        return array

    files = tuple(dict.fromkeys(path for tensor in tensors for path in tensor.paths))
    return ComputedArray(f"{first.name!r} in a file", shape, DTYPES[first.dtype], numbers, files)


def open_folder(folder: Path) -> dict[str, Tensor]:
    """Returns all tensors of a checkpoint in one file or several, by name.

    If both a single file and an index exist, the single file is read, as in Transformers.

    Raises:
        FileNotFoundError: If there is no such checkpoint, or one of its files is missing.
        ValueError: If a file or the index is damaged, not a regular file or outside the folder.
    """
    single = regular_file(folder, SINGLE)
    if single is not None:
        return open_file(single)
    index = regular_file(folder, INDEX)
    if index is None:
        raise FileNotFoundError(
            f"{folder} has neither {SINGLE} nor {INDEX}; weights in other formats (.bin, .pth)"
            " have to be saved as safetensors first"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(x, str) for x in weight_map.values()):
        raise ValueError(f"{index} is damaged: it holds no `weight_map` of files")
    names = sorted(set(weight_map.values()))
    files = {name: regular_file(folder, name_within(index, name)) for name in names}
    absent = [name for name, file in files.items() if file is None]
    if absent:
        raise FileNotFoundError(f"{INDEX} in {folder} names {some(absent)}, which isn't there")
    tensors: dict[str, Tensor] = {}
    for file in filter(None, files.values()):
        tensors |= open_file(file)
    # An interrupted download may leave files of an older version beside a new index.
    lost = [name for name in weight_map if name not in tensors]
    if lost:
        raise ValueError(f"{INDEX} in {folder} names tensors that its files lack: {some(lost)}")
    return tensors


def open_file(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file, by name.

    Raises:
        ModuleNotFoundError: If safetensors is not installed.
        ValueError: If the file is damaged.
    """
    needed = 'reading checkpoints needs safetensors: pip install "megatrain-jax[finetune]"'
    with needing(needed, ModuleNotFoundError):
        from safetensors import SafetensorError, safe_open
    try:
        file = safe_open(str(path), framework="numpy")
        slices = {name: file.get_slice(name) for name in file.keys()}
        starts = _starts(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut off: {error}") from error
    return {
        name: Tensor(
            path=path,
            file=file,
            name=name,
            shape=tuple(part.get_shape()),
            dtype=str(part.get_dtype()),
            start=starts[name],
            whole=tuple(part.get_shape()),
        )
        for name, part in slices.items()
    }


def _starts(path: Path) -> dict[str, int]:
    """The byte at which each tensor of a file begins; the library has checked the header."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {name: 8 + length + about["data_offsets"][0] for name, about in header.items()}


def check_known(folder: Path, codes: Mapping[str, str]) -> None:
    """Checks the dtypes of tensors by name, in the notation of safetensors, before writing them.

    Raises:
        ValueError: If one isn't known.
    """
    if unknown := [f"{name} ({code})" for name, code in codes.items() if code not in ITEM_BYTES]:
        raise ValueError(f"tensors in {folder} have a dtype that isn't known: {some(unknown)}")


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two matrices have the same bits, compared a few rows at a time."""
    if (one.shape, one.dtype) != (other.shape, other.dtype) or len(one.shape) != 2:
        return False
    rows = one.shape[0]
    spans = [slice(at, min(at + _ROWS, rows)) for at in range(0, rows, _ROWS)]
    return all(one.slice(span).tobytes() == other.slice(span).tobytes() for span in spans)


def some(names: list[str]) -> str:
    """Returns up to ten names, and the number of further ones."""
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(name[:200] for name in names[:10]) + more


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


def _stacked(parts: Sequence[Sequence[Any]], shape: tuple[int, ...]) -> ComputedArray:
    """A tensor of all experts of a layer, from the arrays that form each one's matrix in rows."""

    def numbers(dtype: Any) -> np.ndarray:
        # The dtype of a part with adapters is known only when it is computed.
        array = np.empty(shape, np.asarray(parts[0][0]).dtype if dtype is None else dtype)
        for expert, of_one in zip(array, parts, strict=True):
            for to, part in zip(np.split(expert, len(of_one)), of_one, strict=True):
                to[...] = np.asarray(part)
        return array

    return ComputedArray("a stack of experts", shape, None, numbers)


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
            parts = [[of_one[name] for name in names] for of_one in ordered]
            rows, width = parts[0][0].shape
            found[base + last] = _stacked(parts, (len(parts), len(names) * rows, width))
    return found


# Elements converted at a time; converting a whole embedding would need half its size again.
_CHUNK = 2**24


@dataclass(frozen=True, kw_only=True)
class NamedTensor:
    """A tensor to write.

    Attributes:
        name: Its name in the file.
        array: Its numbers, or an object that reads or computes them.
        code: Its dtype in the file, in safetensors' notation.
    """

    name: str
    array: np.ndarray | ComputedArray | Tensor
    code: str

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.array.shape) * ITEM_BYTES[self.code]


def write_tensors(folder: Path, tensors: Sequence[NamedTensor], max_shard_bytes: int) -> None:
    """Writes the files of a checkpoint into a folder.

    Args:
        folder: The folder.
        tensors: The tensors, in the order in which they are written.
        max_shard_bytes: Maximum bytes of a file, unless one tensor is larger.
    """
    shards: list[list[NamedTensor]] = [[]]
    room = max_shard_bytes
    for tensor in tensors:
        if tensor.num_bytes > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(tensor)
        room -= tensor.num_bytes
    if len(shards) == 1:
        _write_file(folder / SINGLE, shards[0])
        return
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / name, shard)
        weight_map |= {tensor.name: name for tensor in shard}
    about = {
        "total_parameters": sum(math.prod(tensor.array.shape) for tensor in tensors),
        "total_size": sum(tensor.num_bytes for tensor in tensors),
    }
    index = {"metadata": about, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _write_file(path: Path, tensors: Sequence[NamedTensor]) -> None:
    """Writes one file.

    The safetensors library needs all tensors of a file in memory, in their final dtype. The format
    is a length in 8 bytes, a header in JSON, and the numbers:
    https://huggingface.co/docs/safetensors.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.num_bytes
        shape = list(tensor.array.shape)
        header[tensor.name] = {"dtype": tensor.code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # Readers map the file, so numbers begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            if isinstance(tensor.array, Tensor):
                file.write(np.ascontiguousarray(tensor.array.read()).tobytes())
                continue
            flat = np.asarray(tensor.array).reshape(-1)
            for at in range(0, flat.size, _CHUNK):
                piece = flat[at : at + _CHUNK].astype(DTYPES[tensor.code], copy=False)
                file.write(np.ascontiguousarray(piece).view(np.uint8).data)


def listed(faults: Mapping[str, list[str]]) -> str:
    """Returns faults with some names of each; empty if no name has any."""
    return "; ".join(f"{fault}: {some(names)}" for fault, names in faults.items() if names)
