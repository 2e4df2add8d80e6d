"""The manifest: the file that marks a folder as a checkpoint of this library, and lists its files.

It is written last and has a checksum of itself. Its contents are checked before they are used.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import xxhash

from megatrain_jax._src.common.object_paths import AnyPath
from megatrain_jax._src.common.outside import parsed_json
from megatrain_jax._src.engine.checkpoint import places
from megatrain_jax._src.engine.checkpoint.folder import (
    MANIFEST,
    CheckpointError,
    OtherFormatError,
    read_error,
    steps,
)

# The one format that is written and read.
_FORMAT = 3
_MOST_LEVELS = 500


def write(path: AnyPath, facts: Mapping[str, Any]) -> None:
    """Writes the manifest of a checkpoint that Orbax has finished.

    Args:
        path: The checkpoint's folder.
        facts: The facts to save beside the arrays, as JSON.
    """
    # The sizes of all files but its own reveal a truncated file before it is read.
    whole = {"format": _FORMAT, **facts, "files": _sizes(path)}
    text = json.dumps({**whole, "checksum": _checksum(whole)}, indent=1)
    (path / MANIFEST).write_text(text, encoding="utf-8")


def read(path: AnyPath) -> dict[str, Any]:
    """Reads a checkpoint's manifest.

    Raises:
        CheckpointError: If there is none, or it is not well-formed; an `OtherFormatError` if it has
            the number of another format.
    """
    try:
        # The position of a pipeline may be nested as deeply as the pipeline is long.
        facts = parsed_json(places.read_file(path / MANIFEST), levels=_MOST_LEVELS)
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            raise CheckpointError(_missing(path)) from error
        why = _unreadable(path, f"{MANIFEST} can't be read ({error})")
        raise read_error(str(why), error) from error
    if not isinstance(facts, dict):
        raise _unreadable(path, f"{MANIFEST} holds no facts but {str(facts)[:40]!r}")
    # In Python, 3.0 equals 3, but a format must be an integer.
    if not _is_count(number := facts.get("format")):
        raise _unreadable(path, f"`format` in {MANIFEST} is {number!r:.40}, not a whole number")
    if number != _FORMAT:
        raise OtherFormatError(
            f"{path} is a checkpoint of format {number}, but this version of megatrain_jax reads "
            f"format {_FORMAT} only. Use the version of megatrain_jax that wrote it, or another "
            "checkpoint"
        )
    wrong = [name for name, is_right in _CHECKS.items() if not is_right(facts.get(name))]
    wrong += [n for n, is_right in _OPTIONAL.items() if n in facts and not is_right(facts[n])]
    if wrong:
        listed = ", ".join(f"`{name}`" for name in wrong)
        raise _unreadable(path, f"{listed} in {MANIFEST} are missing or malformed")
    if facts.pop("checksum") != _checksum(facts):
        raise _unreadable(path, f"{MANIFEST} was changed since it was written")
    return facts


def facts_of(path: AnyPath) -> dict[str, Any]:
    """Reads the facts saved beside a checkpoint's arrays, after checking its files.

    Raises:
        CheckpointError: If it is not this library's, or files are missing or have changed their
            size.
    """
    facts = read(path)
    files = facts["files"]
    try:
        sizes = _sizes(path)
    except OSError as error:
        raise read_error(f"{path} can't be read ({error})", error) from error
    # An object store has objects whole or not at all, and TensorStore doesn't tell their sizes.
    wrong = [
        name
        for name, size in files.items()
        if name not in sizes or None not in (size, sizes[name]) and size != sizes[name]
    ]
    if wrong:
        raise CheckpointError(
            f"{path} is damaged: {len(wrong)} of its {len(files)} files are missing or have "
            f"another size than when they were written, the first {wrong[0]}. Use another "
            "checkpoint."
        )
    return facts


def unknown_names(path: AnyPath) -> list[str]:
    """The files in a checkpoint's folder that its manifest doesn't list, and symbolic links.

    Raises:
        CheckpointError: If it is not a checkpoint of this library.
    """
    known = {MANIFEST, *read(path)["files"]}
    return [name for name, is_link in places.names(path) if is_link or name not in known]


def _sizes(path: AnyPath) -> dict[str, int | None]:
    return {name: size for name, size in places.sizes(path).items() if name != MANIFEST}


def _checksum(facts: Mapping[str, Any]) -> str:
    # JSON keeps the order of keys, so rereading gives the same text.
    return xxhash.xxh3_64_hexdigest(json.dumps(facts).encode())


def _missing(path: AnyPath) -> str:
    """The error of a path without a manifest."""
    if path.is_dir() and (saved := steps(path)):
        one = path / str(saved[-1])
        return f"{path} is a folder of checkpoints: name one of them, such as {one}"
    if path.is_dir():
        return (
            f"{path} is no whole checkpoint of megatrain_jax: it has no {MANIFEST}, which is "
            "written last. Another program made it, or its writing was cut off"
        )
    there = "is a file, not the folder of a checkpoint" if path.exists() else "does not exist"
    return (
        f"{path} {there}. `fit` writes a folder for each saved step into its `checkpoint_dir`: "
        "name one of them"
    )


def _unreadable(path: AnyPath, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is no whole checkpoint of megatrain_jax: {why}")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_loss_scale(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"scale", "good_steps"}:
        return False
    return isinstance(value["scale"], float) and _is_count(value["good_steps"])


def _is_coding(value: Any) -> bool:
    names = {"code", "bits", "signed", "block", "shape", "axes"}
    return isinstance(value, dict) and names <= value.keys()


def _is_chunked(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"chunk", "checksums"}:
        return False
    is_chunk = _each(list, lambda n: _is_count(n) and n > 0)
    return is_chunk(value["chunk"]) and _each(list, _is_text)(value["checksums"])


def _is_settings(value: Any) -> bool:
    names = {"traced", "call", "state", "code", "numbers"}
    return _each(dict, lambda settings: isinstance(settings, dict))(value) and names <= value.keys()


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _each(kind: type, is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        rows = value.values() if isinstance(value, dict) else value
        return isinstance(value, kind) and all(map(is_right, rows))

    return check


_is_numbers = _each(dict, _is_count)
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "step": _is_count,
    "skipped": _is_count,
    "skipped_in_row": _is_count,
    "partial": lambda value: value is None or _is_text(value),
    "parts": lambda value: _is_numbers(value) and value.keys() == {"microbatches", "waves"},
    "params_only": lambda value: isinstance(value, bool),
    "history": _each(list, lambda row: isinstance(row, dict)),
    "files": _each(dict, lambda size: size is None or _is_count(size)),
    "arrays": _each(dict, _is_chunked),
    "coded": _each(dict, _is_coding),
    "made_of": _is_settings,
    "checksum": _is_text,
}
# Only some runs have these.
_OPTIONAL: dict[str, Callable[[Any], bool]] = {
    "data": lambda value: isinstance(value, dict) and _is_count(value.get("batches")),
    "loss_scale": _is_loss_scale,
    "calls": _each(list, lambda call: isinstance(call, list) and len(call) == 3),
}
