"""Drives that fill up, fail and return other bytes, at random moments of runs with checkpoints."""

import errno
import math
import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

import megatrain_jax as mt
from disks import CASE, state_on_disk
from megatrain_jax._src.engine.checkpoint import folder, manifest
from optimizers import OPTIMIZERS

STEPS = 8
MODEL, OPTIMIZER = CASE.build(), OPTIMIZERS["clip_adamw"](None)
CALLS = {"full": "pwrite", "unreadable": "preadv", "flipped": "preadv"}


def run(path: Path, *, on_disk: bool = True) -> Any:
    """Trains in the folders `run` and `disk`; returns the history and all checksums at the end."""
    with state_on_disk() if on_disk else nullcontext():
        mt.fit(
            MODEL,
            CASE.loss_fn,
            map(CASE.batch, range(STEPS)),
            OPTIMIZER,
            checkpoint_dir=path / "run",
            checkpoint_every=2,
            keep=2,
            disk_dir=path / "disk",
            device_budget="minimum",
            precision="float32",
            progress=False,
        )
    facts = manifest.facts_of(path / "run" / str(STEPS))
    return [record["loss"] for record in facts["history"]], facts["arrays"]


@contextmanager
def fault(kind: str, at: float, rng: random.Random) -> Iterator[list[int]]:
    """Has a call of the system fail, the one of this number; yields the offsets of the calls."""
    name, offsets = CALLS[kind], []
    own = getattr(os, name)

    def call(file: int, data: Any, offset: int) -> int:
        offsets.append(offset)
        if kind == "full" and len(offsets) >= at:  # and stays full
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if kind == "unreadable" and len(offsets) == at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if kind == "flipped" and len(offsets) == at:
            # Most of what was read before is written again before it is read.
            where = rng.choice((offset, rng.choice(offsets)))
            with open(f"/proc/self/fd/{file}", "r+b", buffering=0) as plain:
                (byte,) = os.pread(plain.fileno(), 1, where)
                os.lseek(plain.fileno(), where, os.SEEK_SET)
                plain.write(bytes([byte ^ 1 << rng.randrange(8)]))
        return own(file, data, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, call)
        yield offsets


@pytest.mark.usefixtures("started_once_in_test")
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        *(pytest.param(kind, 2, marks=pytest.mark.exhaustive) for kind in CALLS),
        *(pytest.param(kind, 20, marks=pytest.mark.long) for kind in CALLS),
    ],
)
def test_a_faulty_drive_ends_a_run_with_its_name_and_a_whole_checkpoint(
    kind: str, count: int, tmp_path: Path
):
    expected, rng, ends = run(tmp_path / "memory", on_disk=False), random.Random(kind), Counter()
    with fault(kind, math.inf, rng) as offsets:
        assert run(tmp_path / "whole") == expected
    for number in range(count):
        path = tmp_path / str(number)
        with fault(kind, rng.randint(1, len(offsets)), rng):
            try:
                found = run(path)
            except (OSError, mt.CheckpointError) as error:
                assert "`disk_dir`" in str(error) and str(path / "disk") in str(error)
                found = None
        ends[found is None] += 1
        for step in folder.steps(path / "run") if (path / "run").exists() else ():
            manifest.facts_of(path / "run" / str(step))
        # What was flipped may have been replaced before it was read.
        assert found == expected if kind == "flipped" and found else found is None
        assert not list((path / "disk").iterdir())
        assert run(path, on_disk=number % 2 == 0) == expected
    print(f"{kind}: {ends[True]} of {count} runs were ended")
    assert ends[True] > count // 4
