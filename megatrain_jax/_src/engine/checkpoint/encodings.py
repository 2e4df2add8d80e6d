"""The forms of arrays in a checkpoint: numbers of some dtype, or codes with scales.

A checkpoint with codes describes their coding in its manifest, so they can be decoded without the
run that wrote them. A run can also continue from a checkpoint in a different form: an fp32
checkpoint can start a compact run, and vice versa.

Example: the first moment of a (2, 6, 50) stack of layers that is trained layer by layer::

    opt_state/0/mu/w/codes    int8[2, 6, 50]
    opt_state/0/mu/w/scales   float32[2, 3]
    manifest: "coded": {"opt_state/0/mu/w": {"code": "dynamic", "bits": 8, "signed": true,
                        "block": 128, "shape": [2, 6, 50], "axes": [0]}}
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from megatrain_jax._src.engine.checkpoint.contents import ArrayEntry, TreePath, layout_at, pointer
from megatrain_jax._src.engine.program.layers.index import sliced_axes
from megatrain_jax._src.engine.spec.run_spec import RunSpec
from megatrain_jax._src.engine.state.codec import Blockwise, Nf4

_FLOATS = ("bfloat16", "float32")


def coding_of(spec: RunSpec, entries: Sequence[ArrayEntry]) -> dict[str, dict[str, Any]]:
    """The coding of each array that a run stores as codes, by the pointer of its path, as JSON."""
    found = {}
    for first, *others in _by_array(entries).values():
        if not others:
            continue
        layout, i = layout_at(spec, first.places[0])
        codec = layout.segment_of(i)[0].codec
        assert isinstance(codec, Blockwise | Nf4)
        found[pointer(first.array)] = {
            **codec.coding,
            "shape": list(first.whole),
            "axes": list(sliced_axes(first.cuts[0])),
        }
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertedArray:
    """An array that a checkpoint stores in a different form than the run.

    Attributes:
        sources: Entries of the checkpoint's arrays that represent it.
        coding: The array's coding in the checkpoint; None for numbers.
    """

    sources: tuple[ArrayEntry, ...]
    coding: Mapping[str, Any] | None = None

    def numbers(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """The array's numbers, from the arrays that represent it; fp32 or narrower."""
        return arrays[0] if self.coding is None else decoded(self.coding, *arrays)


def _codec_of(coding: Mapping[str, Any]) -> Blockwise | Nf4:
    if coding["code"] == "nf4":
        return Nf4()
    codec = Blockwise(code=coding["code"], bits=coding["bits"], signed=coding["signed"])
    assert coding["block"] == codec.block
    return codec


def part_names(coding: Mapping[str, Any]) -> list[str]:
    """The names of the arrays that represent an array, below its path; codes come first."""
    return [part.name for part in _codec_of(coding).parts("float32")]


def decoded(coding: Mapping[str, Any], codes: np.ndarray, *scales: np.ndarray) -> np.ndarray:
    """Decodes codes and scales of a checkpoint to fp32.

    Args:
        coding: The array's coding, from `coding_of`.
        codes: The codes.
        *scales: The scales, in the order of `part_names`.
    """
    codec = _codec_of(coding)
    shape, axes = tuple(coding["shape"]), tuple(coding["axes"])
    # Each slice of a stack was coded separately. 8-bit codes have the array's axes. Two 4-bit codes
    # share a byte, so these are laid out like scales: a row for each slice.
    front = tuple(range(len(axes)))
    moved = np.moveaxis(np.empty(shape, bool), axes, front).shape
    if coding["bits"] == 8:
        codes = np.moveaxis(codes, axes, front)
    slices = int(np.prod(moved[: len(axes)]))
    size = int(np.prod(moved[len(axes) :]))
    rows = zip(*(part.reshape(slices, -1) for part in (codes, *scales)), strict=True)
    whole = np.stack([codec.decode(row, np.float32)[:size] for row in rows])
    return np.moveaxis(whole.reshape(moved), front, axes)


def arrays_to_convert(
    entries: Sequence[ArrayEntry],
    here: Mapping[str, Mapping[str, Any]],
    there: Mapping[TreePath, Any],
    coded: Mapping[str, Mapping[str, Any]],
) -> dict[TreePath, ConvertedArray]:
    """Finds the arrays that a checkpoint stores in a different, but readable form.

    Args:
        entries: Entries of the run's arrays.
        here: Codings of the run's arrays, from `coding_of`.
        there: Orbax's metadata of the checkpoint's arrays, by path.
        coded: Codings of the checkpoint's arrays.
    """
    found = {}
    for array, rows in _by_array(entries).items():
        # Arrays in no group, integers and float64 are never converted: a different dtype is a
        # mistake, which `check_arrays` reports.
        if not rows[0].groups or (len(rows) == 1 and rows[0].dtype not in _FLOATS):
            continue
        coding, own = coded.get(pointer(array)), here.get(pointer(array))
        same = all(_dtype(there.get(row.path)) == row.dtype for row in rows)
        if same and coding == own:
            continue
        if coding is not None and tuple(coding["shape"]) == rows[0].whole:
            paths = [(*array, name) for name in part_names(coding)]
        elif _dtype(there.get(array)) in _FLOATS:
            paths, coding = [array], None
        else:
            continue
        sources = tuple(_source(path, there[path], rows[0]) for path in paths if path in there)
        if coding is None and sources[0].shape != rows[0].whole:
            continue
        found[array] = ConvertedArray(sources=sources, coding=coding)
    return found


def _by_array(entries: Sequence[ArrayEntry]) -> dict[TreePath, list[ArrayEntry]]:
    found: dict[TreePath, list[ArrayEntry]] = defaultdict(list)
    for entry in entries:
        found[entry.array].append(entry)
    return found


def _dtype(metadata: Any) -> str | None:
    return jnp.dtype(metadata.dtype).name if hasattr(metadata, "shape") else None


def _source(path: TreePath, metadata: Any, like: ArrayEntry) -> ArrayEntry:
    """The entry of a checkpoint's array, in its form there."""
    shape, dtype = tuple(metadata.shape), jnp.dtype(metadata.dtype).name
    return dataclasses.replace(like, path=path, shape=shape, dtype=dtype)
