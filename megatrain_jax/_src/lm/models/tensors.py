"""Tensors in safetensors files, read from the mapped file only when their numbers are needed.

The safetensors library maps a file, checks its header against its size, and returns NumPy arrays of
all dtypes that parameters have (bfloat16 through ml_dtypes), each as a copy. It can't return 8-bit
floats as NumPy arrays, so their bytes are read here.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from megatrain_jax._src.lm.common.hf_folder import name_within, read_json, regular_file

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
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


class LazyArray:
    """An array in files, with shape and dtype; its numbers exist only while they are used.

    Attributes:
        shape: Its shape.
        dtype: Its dtype in the files.
        source_files: Paths of the files, for a run that reads them ahead.
    """

    def __init__(self, tensors: tuple[Tensor, ...], *, stacked: bool, finite: bool = False):
        """Refers to one tensor, or to several of one shape to be stacked along a first axis.

        Args:
            tensors: The tensors.
            stacked: Whether they are stacked.
            finite: Whether reading numbers that are not finite is an error.
        """
        self._tensors, self._stacked = tensors, stacked
        self._read = finite_numbers if finite else Tensor.read
        first = tensors[0]
        self.shape = (len(tensors), *first.shape) if stacked else first.shape
        self.dtype = DTYPES[first.dtype]
        self.source_files = tuple(dict.fromkeys(path for t in tensors for path in t.paths))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Reads the numbers; nothing is kept here."""
        if copy is False:
            raise ValueError("an array in a file can't be had without copying it")
        dtype = self.dtype if dtype is None else np.dtype(dtype)
        if not self._stacked:
            return self._read(self._tensors[0]).astype(dtype, copy=False)
        # Tensor by tensor, so that at most one exists twice.
        array = np.empty(self.shape, dtype)
        for i, tensor in enumerate(self._tensors):
            array[i] = self._read(tensor)
        return array

    def __repr__(self) -> str:
        """Names shape, dtype and tensor."""
        return f"LazyArray({self.shape}, {self.dtype}, {self._tensors[0].name!r})"


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
    weight_map = _weight_map(index)
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


def _weight_map(index: Path) -> Mapping[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        raise ValueError(f"{index} is damaged: it holds no `weight_map` of files")
    return weight_map


def open_file(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file, by name.

    Raises:
        ModuleNotFoundError: If safetensors is not installed.
        ValueError: If the file is damaged.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'reading checkpoints needs safetensors: pip install "megatrain-jax[finetune]"'
        ) from error
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
