"""The text: Python files of this machine, with whole files held out."""

import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

# Larger files are mostly tables that a program has written.
_LARGEST = 256 * 1024
_HELD_OUT_OF = 20


def find(packages: bool) -> tuple[list[bytes], list[bytes]]:
    """Reads the files of the standard library and, if asked for, installed packages.

    Files of equal bytes count once. One in twenty is held out, by a hash of its path below the
    folder it was found in, so that machines agree on files that they share.

    Returns:
        The files to train on, and those held out.
    """
    names = ("stdlib", "purelib", "platlib") if packages else ("stdlib",)
    roots = dict.fromkeys(Path(sysconfig.get_path(name)).resolve() for name in names)
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    seen: set[bytes] = set()
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            below = path.relative_to(root)
            if {"site-packages", "dist-packages"} & set(below.parts):
                continue  # roots of their own
            text = path.read_bytes() if path.stat().st_size <= _LARGEST else b""
            digest = hashlib.sha256(text).digest()
            if text and digest not in seen:
                seen.add(digest)
                place = hashlib.sha256(below.as_posix().encode()).digest()
                parts[place[0] * 256 + place[1] < 65536 // _HELD_OUT_OF].append(text)
    return parts


def read(packages: bool) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Returns the bytes to train on, those held out, and how many files and bytes that is."""
    parts = find(packages)
    train, held_out = (np.frombuffer(b"".join(part), np.uint8) for part in parts)
    return train, held_out, {**count(*parts), "digest": digest(train, held_out)}


def count(train: Sequence[bytes], held_out: Sequence[bytes]) -> dict[str, int]:
    """Returns how many files and bytes there are to train on and held out."""
    return {
        "train_files": len(train),
        "train_bytes": sum(map(len, train)),
        "held_out_files": len(held_out),
        "held_out_bytes": sum(map(len, held_out)),
    }


def digest(*arrays: np.ndarray) -> str:
    """Returns 16 digits that tell a text, as bytes or as tokens, from others."""
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]
