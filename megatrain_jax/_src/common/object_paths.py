"""Paths in object stores, with the methods of `pathlib.Path` that checkpoints use.

TensorStore reads and writes the objects, as it does the arrays: it finds the credentials, and
repeats requests that fail. An object is written as a whole or not at all. There are no folders,
renames or locks; but a write may have the condition that the object is still as it was read, or is
new.

Example: a checkpoint that is being written, or deleted, has a mark elsewhere, and no manifest::

    run/megatrain-unfinished/of-8     the mark: without a manifest, 8 may be deleted
    run/8/state/...                   its arrays
    run/8/megatrain.json              written last, deleted first
"""

import dataclasses
import errno
import functools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tensorstore as ts

# Schemes of URLs and TensorStore's drivers. Objects in memory last as long as the process.
_DRIVERS = {"gs": "gcs", "s3": "s3", "memory": "memory"}
_URL = re.compile(rf"({'|'.join(_DRIVERS)})://([^/]*)/*(.*)", re.DOTALL)
# A request is repeated for about a minute.
_RETRIES = {"max_retries": 6, "initial_delay": "1s", "max_delay": "32s"}
_LOGIN = {
    "gs": "Credentials of Google Cloud come from `gcloud auth application-default login`, from the "
    "file that GOOGLE_APPLICATION_CREDENTIALS names, or from the machine",
    "s3": "Credentials of S3 come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, from ~/.aws, "
    "or from the machine; AWS_ENDPOINT_URL is the address of a store that is not Amazon's",
}
_DENIED = "PERMISSION_DENIED", "UNAUTHENTICATED"


@dataclasses.dataclass(frozen=True)
class ObjectPath:
    """A path in an object store: of an object, or the beginning of the names of several.

    Its methods are those of `pathlib.Path`. They raise `OSError`s. A checkpoint's path may be given
    as such a path, too.

    Attributes:
        scheme: "gs" or "s3", or "memory" in tests.
        bucket: The bucket.
        key: The name in the bucket, without slashes at its ends.
    """

    scheme: str
    bucket: str
    key: str

    def __str__(self) -> str:
        """The URL."""
        return f"{self.scheme}://{self.bucket}" + (f"/{self.key}" if self.key else "")

    def __fspath__(self) -> str:
        """The URL, which no file has."""
        return str(self)

    def __truediv__(self, name: str) -> "ObjectPath":
        """A path below this one."""
        return dataclasses.replace(self, key=f"{self._prefix}{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.key.rpartition("/")[2] or self.bucket

    @property
    def parent(self) -> "ObjectPath":
        """The path above this one; of a bucket, the bucket."""
        return dataclasses.replace(self, key=self.key.rpartition("/")[0])

    def with_name(self, name: str) -> "ObjectPath":
        """The path with another last part."""
        return self.parent / name

    def is_file(self) -> bool:
        """Whether this is an object."""
        return self.key in self._keys(ts.KvStore.KeyRange(self.key, f"{self.key}\0"))

    def is_dir(self) -> bool:
        """Whether objects lie below."""
        return bool(self.files())

    def exists(self) -> bool:
        """Whether this is an object, or objects lie below."""
        return self.is_file() or self.is_dir()

    def is_symlink(self) -> bool:
        """Whether this is a link; no object is."""
        return False

    def mkdir(self, **options: Any) -> None:
        """Does nothing: an object needs no folder."""

    def iterdir(self) -> Iterator["ObjectPath"]:
        """The paths one level below."""
        names = dict.fromkeys(name.split("/")[0] for name in self.files())
        return (self / name for name in names)

    def files(self) -> list[str]:
        """The names of all objects below, in order."""
        return sorted(key[len(self._prefix) :] for key in self._keys(self._below))

    def read_bytes(self) -> bytes:
        """The contents."""
        value, _ = self.read_version()
        if value is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return value

    def read_version(self) -> tuple[bytes | None, bytes]:
        """The contents, None if there are none, and the version, for `write_if`."""
        found = self._result(self._store.read(self.key))
        return (found.value if found.state == "value" else None), found.stamp.generation

    def write_bytes(self, data: bytes) -> None:
        """Replaces the contents."""
        self._write(data)

    def write_text(self, data: str, encoding: str = "utf-8") -> None:
        """Replaces the contents."""
        self._write(data.encode(encoding))

    def touch(self) -> None:
        """Makes an empty object."""
        self._write(b"")

    def write_if(self, value: bytes | None, version: bytes) -> bytes | None:
        """Writes, or deletes with None, if the version is still this one.

        Returns:
            The new version; None if another one is there.
        """
        return self._write(value, if_equal=version) or None

    def unlink(self, missing_ok: bool = True) -> None:
        """Deletes the object."""
        self._write(None)

    def read_text(self, encoding: str = "utf-8") -> str:
        """The contents."""
        return self.read_bytes().decode(encoding)

    def delete_below(self) -> None:
        """Deletes all objects below, in no order."""
        self._result(self._store.delete_range(self._below))

    def _write(self, value: bytes | None, **condition: bytes) -> bytes:
        return self._result(self._store.write(self.key, value, **condition)).generation

    def kvstore(self) -> dict[str, Any]:
        """TensorStore's description of the objects below."""
        spec: dict[str, Any] = {"driver": _DRIVERS[self.scheme], "path": self._prefix}
        if self.scheme == "memory":
            return spec | {"path": f"{self.bucket}/{self._prefix}"}
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if self.scheme == "s3" and endpoint:
            region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
            # With an address, TensorStore doesn't look for the region.
            spec |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
        return spec | {"bucket": self.bucket}

    @property
    def _prefix(self) -> str:
        return f"{self.key}/" if self.key else ""

    @property
    def _store(self) -> ts.KvStore:
        spec = dataclasses.replace(self, key="").kvstore()
        return _opened(tuple(spec.items()))

    @property
    def _below(self) -> ts.KvStore.KeyRange:
        # "0" comes after "/".
        return ts.KvStore.KeyRange(self._prefix, f"{self.key}0" if self.key else "")

    def _keys(self, wanted: ts.KvStore.KeyRange) -> list[str]:
        return [key.decode() for key in self._result(self._store.list(wanted))]

    def _result(self, future: Any) -> Any:
        try:
            return future.result()
        except Exception as error:
            text = re.sub(r" \[[a-z-_]+='.*", "", str(error), flags=re.DOTALL)
            login = _LOGIN.get(self.scheme, "")
            if any(word in text for word in _DENIED):
                raise PermissionError(errno.EACCES, f"{text}. {login}", str(self)) from error
            if "NOT_FOUND" in text:
                text = f"there is no bucket called {self.bucket!r}, or it is not yours ({text})"
                raise FileNotFoundError(errno.ENOENT, text, str(self)) from error
            raise OSError(errno.EIO, f"{text}. {login}", str(self)) from error


AnyPath = Path | ObjectPath


def path_of(text: str) -> AnyPath:
    """The absolute path of a user's text, ``~`` expanded, or the path in an object store.

    Raises:
        ValueError: If it is a URL without a bucket, or with parts that no object store has.
        RuntimeError: If the home folder is not known.
    """
    if (url := _URL.fullmatch(text)) is None:
        return Path(text).expanduser().absolute()
    scheme, bucket, key = url.groups()
    parts = [part for part in key.split("/") if part]
    if not bucket:
        raise ValueError(f"{text!r} names no bucket, as {scheme}://bucket/folder does")
    if {".", ".."} & {*parts}:
        raise ValueError(
            f"{text!r} has a part that is a dot or two, which an object store can't follow"
        )
    return ObjectPath(scheme, bucket, "/".join(parts))


@functools.cache
def shared_context() -> ts.Context:
    """TensorStore's resources for object stores: retries, and what is in memory."""
    retries = dict.fromkeys(("s3_request_retries", "gcs_request_retries"), _RETRIES)
    return ts.Context({"memory_key_value_store": {}, **retries})


@functools.cache
def _opened(spec: Sequence[tuple[str, str]]) -> ts.KvStore:
    return ts.KvStore.open(dict(spec), context=shared_context()).result()


# ---- unfinished checkpoints

UNFINISHED = "megatrain-unfinished"
_MARK = "of-"


def workspace_of(path: AnyPath) -> Any:
    """The path of the mark of a checkpoint that is saved by hand."""
    return path.with_name(f"{path.name}.{UNFINISHED}")


def mark_of(workspace: ObjectPath, name: str) -> ObjectPath:
    """The mark of an unfinished checkpoint.

    Args:
        workspace: The path of marks, beside the checkpoint.
        name: The checkpoint's name.
    """
    return workspace / f"{_MARK}{name}"


def marked(workspace: ObjectPath) -> list[ObjectPath]:
    """The unfinished checkpoints that have a mark."""
    names = [n[len(_MARK) :] for n in workspace.files() if n.startswith(_MARK)]
    return [workspace.parent / name for name in names]


def discard(path: ObjectPath, workspace: ObjectPath, manifest: str) -> None:
    """Deletes a checkpoint, of which an interrupt leaves only what counts as unfinished.

    Args:
        path: The checkpoint.
        workspace: The path of marks, beside the checkpoint.
        manifest: Name of its manifest, which goes first.
    """
    mark = mark_of(workspace, path.name)
    mark.touch()
    (path / manifest).unlink()
    path.delete_below()
    mark.unlink()
