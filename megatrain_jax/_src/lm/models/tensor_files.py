"""Writes safetensors files one tensor at a time: a single file, or several with an index."""

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatrain_jax._src.lm.models.expert_tensors import StackedExperts
from megatrain_jax._src.lm.models.low_rank import MergedMatrix
from megatrain_jax._src.lm.models.tensors import DTYPES, INDEX, ITEM_BYTES, SINGLE, Tensor

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
    array: np.ndarray | MergedMatrix | StackedExperts | Tensor
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
