"""The text: Python files of this machine, as bytes, with whole files held out."""

import hashlib
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np

# Larger files are mostly tables that a program has written.
_LARGEST = 256 * 1024
_HELD_OUT_OF = 20


def read(packages: bool) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Reads the standard library and, if asked for, installed packages.

    Files of equal bytes count once. One in twenty is held out, by a hash of its path below the
    folder it was found in, so that machines agree on files that they share.

    Returns:
        The bytes to train on, those of the files held out, and how many files and bytes that is.
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
    train, held_out = (np.frombuffer(b"".join(part), np.uint8) for part in parts)
    figures = {
        "train_files": len(parts[0]),
        "train_bytes": train.size,
        "held_out_files": len(parts[1]),
        "held_out_bytes": held_out.size,
        "digest": hashlib.sha256(train.tobytes() + held_out.tobytes()).hexdigest()[:16],
    }
    return train, held_out, figures
