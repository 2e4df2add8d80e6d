"""Uses of Orbax: its format and options, with workarounds for paths that it would misread.

Orbax's own `save` uses all devices, which must not happen during a step, and lets one process write
everything that is in host memory. So each process writes its own chunks to the TensorStore database
that Orbax would use, and the first process merges and describes them as Orbax does.
"""

import glob
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from orbax.checkpoint import type_handlers, v1

from megatrain_jax._src.common.object_paths import AnyPath, shared_context
from megatrain_jax._src.common.outside import parsed_json
from megatrain_jax._src.common.trees import described, listed
from megatrain_jax._src.engine.checkpoint import places
from megatrain_jax._src.engine.checkpoint.chunks import MOST_BYTES, Cell, Grid
from megatrain_jax._src.engine.checkpoint.contents import ArrayEntry, TreePath, flat, put
from megatrain_jax._src.engine.checkpoint.folder import (
    CheckpointError,
    UnreadError,
    has_manifest,
    numbered,
    read_error,
)

# Bytes that Orbax may use in addition to the arrays it reads.
_CONCURRENT_BYTES = 512 << 20
# Orbax's names: the folder of a checkpoint's arrays, each process's subfolder, and the files that
# describe them.
_ARRAYS, _OF_PROCESS = "state", "ocdbt.process_"
_DESCRIPTION, _TREE, _MARK = "_CHECKPOINT_METADATA", "_METADATA", "orbax.checkpoint"
_HANDLER = (
    "orbax.checkpoint.experimental.v1._src.handlers.stateful_checkpointable_handler."
    "StatefulCheckpointableHandler"
)
# Arrays and descriptions that have been read are not checked again.
_NO_RECHECK = {"recheck_cached_data": False, "recheck_cached_metadata": False}
_DICT_KEY = 2  # Orbax's number for dict keys
# How TensorStore's database is written.
_WRITING = {
    "target_data_file_size": MOST_BYTES,
    "assume_config": True,
    "config": {
        "max_inline_value_bytes": 1024,
        "max_decoded_node_bytes": 100_000_000,
        "manifest_kind": "single",
    },
}


def context() -> v1.Context:
    """Options with which Orbax copies little while reading, and waits for no other process."""
    context = v1.Context()
    context.memory.read_concurrent_bytes = _CONCURRENT_BYTES
    context.pytree.loading.partial_load = True
    # Otherwise Orbax would wait for processes that are at a different point of the run.
    context.multiprocessing.primary_host = jax.process_index()
    context.multiprocessing.active_processes = {jax.process_index()}
    return context


# TensorStore's descriptions of arrays and files are written here as Orbax would write them. Orbax
# asks TensorStore for a spec as JSON each time, and TensorStore 0.1.86 never frees it: memory would
# grow by some KiB for each array of each checkpoint.


def stores() -> ts.Context:
    """TensorStore's resources for reading or writing one checkpoint, as Orbax would have them."""
    own = type_handlers.get_ts_context(use_ocdbt=True)
    return ts.Context(own.spec, parent=shared_context())


def write_spec(
    folder: AnyPath, process: int, path: TreePath, grid: Grid, dtype: str
) -> dict[str, Any]:
    """TensorStore's description of an array for writing chunks.

    Compression would take more time than it saves. Orbax's default files of 2 GiB are written one
    after another; smaller ones in parallel.

    Args:
        folder: The checkpoint's folder.
        process: Number of the process.
        path: The array's path in the checkpoint.
        grid: The array's chunks.
        dtype: Name of its dtype.
    """
    kvstore = _kvstore(folder_of(folder, process), path) | _WRITING
    chunk = {"chunk_shape": list(grid.chunk)}
    plain = {"name": "bytes", "configuration": {"endian": "little"}}
    codec = {
        "codecs": [plain],
        "index_codecs": [plain, {"name": "crc32c"}],
        "index_location": "end",
    }
    return {
        "driver": "zarr3",
        "kvstore": kvstore,
        "dtype": dtype,
        "store_data_equal_to_fill_value": True,
        "metadata": {
            "shape": list(grid.shape),
            "chunk_grid": {"name": "regular", "configuration": chunk},
            "codecs": [{"name": "sharding_indexed", "configuration": chunk | codec}],
        },
        **_NO_RECHECK,
    }


def read_spec(folder: AnyPath, path: TreePath) -> dict[str, Any]:
    """TensorStore's description of a checkpoint's array whose chunks are in the manifest."""
    kvstore = _kvstore(folder / _ARRAYS, path)
    return {
        "driver": "zarr3",
        "kvstore": kvstore,
        "fill_missing_data_reads": False,
        **_NO_RECHECK,
    }


def _kvstore(folder: AnyPath, path: TreePath = ()) -> dict[str, Any]:
    """TensorStore's description of the files that hold all arrays, or one array."""
    return {
        "driver": "ocdbt",
        **places.files_of_database(folder),
        "path": ".".join(path),
        "cache_pool": "cache_pool#ocdbt",  # defined in the context that Orbax makes
    }


def folder_of(folder: AnyPath, process: int) -> AnyPath:
    """The subfolder of a checkpoint that a process writes to."""
    return folder / _ARRAYS / f"{_OF_PROCESS}{process}"


def candidates(path: AnyPath) -> list[int]:
    """The steps of checkpoints, and of folders that only lack a manifest; ascending."""
    found = ((number, path / str(number)) for number in numbered(path))
    return [n for n, at in found if has_manifest(at) or has_our_arrays(at)]


def has_our_arrays(folder: AnyPath) -> bool:
    """Whether a folder has arrays where this library writes them, and Orbax itself doesn't."""
    try:
        about = parsed_json((folder / _DESCRIPTION).read_bytes())
        return about["item_handlers"][_ARRAYS] == _HANDLER and (folder / _ARRAYS).is_dir()
    except (OSError, ValueError, LookupError, TypeError):
        return False


def is_described(folder: AnyPath) -> bool:
    """Whether a folder has one of Orbax's descriptions of arrays."""
    return any((folder / file).is_file() for file in (_DESCRIPTION, _TREE))


def join(folder: AnyPath, paths: Iterable[TreePath]) -> None:
    """Merges the files of all processes to an Orbax checkpoint.

    Args:
        folder: The checkpoint's folder.
        paths: Paths of its arrays.
    """
    arrays, context = folder / _ARRAYS, stores()
    whole = ts.KvStore.open(_kvstore(arrays) | _WRITING, context=context).result()
    transaction = ts.Transaction(atomic=True)
    for part in arrays.iterdir():
        if part.name.startswith(_OF_PROCESS):
            own = ts.KvStore.open(_kvstore(part), context=context).result()
            own.experimental_copy_range_to(whole.with_transaction(transaction)).result()
    transaction.commit_async().result()
    # Exactly the files that Orbax's own `save` would write, because it reads them too.
    leaf = {"value_type": "np.ndarray", "skip_deserialize": False}
    tree = {
        str(path): {
            "key_metadata": [{"key": key, "key_type": _DICT_KEY} for key in path],
            "value_metadata": leaf,
        }
        for path in paths
    }
    about_tree = {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    about = {"item_handlers": {_ARRAYS: _HANDLER}, "metrics": {}, "custom_metadata": {}}
    (folder / _ARRAYS / _TREE).write_text(json.dumps(about_tree), encoding="utf-8")
    (folder / _DESCRIPTION).write_text(json.dumps(about), encoding="utf-8")
    (folder / _MARK).touch()


@contextmanager
def plain_path(folder: Path) -> Iterator[Path]:
    """A path to the folder without ``*``, ``?`` and ``[``, which Orbax treats as patterns.

    With such characters in its path, a checkpoint would be finished without its arrays, or with
    arrays of a different folder that matches the pattern.
    """
    if glob.escape(str(folder)) == str(folder):
        yield folder
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def own_metadata(folder: AnyPath) -> dict[TreePath, jax.ShapeDtypeStruct]:
    """The shapes and dtypes of the arrays in a checkpoint of this library, by path.

    Reads the files that describe the arrays; `metadata` would leak memory.

    Raises:
        CheckpointError: If the descriptions can't be read.
    """
    try:
        about = parsed_json((folder / _ARRAYS / _TREE).read_bytes())
        rows = about["tree_metadata"].values()
        paths = [tuple(key["key"] for key in row["key_metadata"]) for row in rows]
        file, dtype = ("zarr.json", "data_type") if about["use_zarr3"] else (".zarray", "dtype")
        store = ts.KvStore.open(_kvstore(folder / _ARRAYS), context=stores()).result()
        coming = {path: store.read(f"{'.'.join(path)}/{file}") for path in paths}
        texts = {path: read.result().value for path, read in coming.items()}
        # An array without its description is missing, whatever the tree says.
        found = {path: parsed_json(text) for path, text in texts.items() if text}
        return {
            path: jax.ShapeDtypeStruct(tuple(array["shape"]), jnp.dtype(array[dtype]))
            for path, array in found.items()
        }
    except Exception as error:
        why = f"the descriptions of its arrays can't be read ({type(error).__name__}: {error})"
        raise read_error(f"{folder}: {why}", error) from error


def metadata(folder: Path) -> dict[TreePath, Any]:
    """The shapes and dtypes that Orbax reports for any checkpoint's arrays, by path.

    Raises:
        CheckpointError: If there is no checkpoint that Orbax can read.
    """
    try:
        with plain_path(folder) as path:
            found = v1.metadata(str(path)).metadata
        if found is None:  # Orbax logs the reason
            raise ValueError("the description of its arrays is unreadable")
        return flat(found)
    except Exception as error:
        reason: BaseException = error
        # Orbax wraps its advice, such as to use the parent folder, in an error without it.
        while type(reason).__name__ == "InvalidLayoutError" and reason.__cause__ is not None:
            reason = reason.__cause__
        why = f"({type(reason).__name__}: {reason})"
        unread = read_error(f"{folder} could not be read {why}", error)
        if isinstance(unread, UnreadError):
            raise unread from error
        raise CheckpointError(f"{folder} is no checkpoint that Orbax can read {why}") from error


def load_arrays(folder: Path, arrays: Mapping[TreePath, Any]) -> dict[TreePath, np.ndarray]:
    """Loads arrays of any Orbax checkpoint as NumPy arrays.

    Args:
        folder: The checkpoint's folder.
        arrays: Objects with the arrays' shapes and dtypes, by path.
    """
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        # Describes the array to Orbax without taking memory.
        put(tree, path, np.broadcast_to(np.zeros((), jnp.dtype(array.dtype)), array.shape))
    if not tree:
        return {}
    with context(), plain_path(folder) as path:
        return flat(v1.load(str(path), tree))


def check_arrays(
    folder: AnyPath,
    found: Mapping[TreePath, jax.ShapeDtypeStruct],
    entries: Sequence[ArrayEntry],
    what: str,
    cause: Callable[[Collection[TreePath], bool], str] | None = None,
) -> None:
    """Compares a checkpoint's arrays with the expected ones.

    Args:
        folder: The checkpoint's folder.
        found: Shapes and dtypes of its arrays, by path.
        entries: Entries of the expected arrays.
        what: Description of a checkpoint with different arrays, for the message.
        cause: Function that returns sentences on the cause, for the message. Its arguments are the
            paths of arrays that differ, and whether only dtypes differ.

    Raises:
        CheckpointError: If they differ; the first differences are listed.
    """
    shown = {path: (array.shape, array.dtype.name) for path, array in found.items()}
    wanted = {entry.path: (entry.shape, entry.dtype) for entry in entries}
    differences = {
        **{p: f"{'/'.join(p)} is missing" for p in wanted if p not in shown},
        **{p: f"{'/'.join(p)} is not part of this run" for p in shown if p not in wanted},
        **{
            p: f"{'/'.join(p)} is {described(*there)} there, but {described(*wanted[p])} here"
            for p, there in shown.items()
            if p in wanted and there != wanted[p]
        },
    }
    if differences:
        both = [p for p in differences if p in shown and p in wanted]
        only_dtypes = len(both) == len(differences) and all(
            shown[p][0] == wanted[p][0] for p in both
        )
        said = f". {cause(differences, only_dtypes)} The arrays that differ" if cause else ""
        raise CheckpointError(f"{folder} is {what}{said}:{listed([*differences.values()])}")


class ChunkReader:
    """Reads the arrays of a checkpoint of this library, in chunks or whole."""

    def __init__(self, folder: AnyPath):
        """Makes a reader of a checkpoint with chunks in its manifest; opens nothing yet.

        Args:
            folder: The checkpoint's folder.
        """
        self._folder = folder
        self._stores = stores()
        self._arrays: dict[TreePath, Any] = {}

    def read(self, wanted: Sequence[tuple[ArrayEntry, Cell]]) -> list[np.ndarray]:
        """Reads chunks in parallel, as flat arrays.

        Args:
            wanted: Entries of the arrays, with a chunk of each.
        """
        self._open({entry.path for entry, _ in wanted})
        coming = [self._arrays[entry.path][cell.box].read() for entry, cell in wanted]
        return [np.ascontiguousarray(chunk.result()).reshape(-1) for chunk in coming]

    def read_whole(self, paths: Collection[TreePath]) -> dict[TreePath, np.ndarray]:
        """Reads whole arrays in parallel, by path."""
        self._open(paths)
        coming = {path: self._arrays[path].read() for path in paths}
        return {path: np.asarray(array.result()) for path, array in coming.items()}

    def _open(self, paths: Collection[TreePath]) -> None:
        # All are opened, then all read: TensorStore works in parallel within each phase.
        new = [path for path in paths if path not in self._arrays]
        specs = {path: ts.Spec(read_spec(self._folder, path)) for path in new}
        opening = {path: ts.open(spec, context=self._stores) for path, spec in specs.items()}
        self._arrays |= {path: opened.result() for path, opened in opening.items()}
