"""What two processes do with state that is divided oddly: scenarios of `processes.py`."""

import shutil
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import megatrain_jax as mt
import small
from disks import state_on_disk
from inside import spec_of
from megatrain_jax import callbacks
from megatrain_jax._src.engine.checkpoint import chunks
from megatrain_jax._src.engine.checkpoint.orbax import ChunkReader
from megatrain_jax._src.engine.checkpoint.save import Writer

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"precision": mt.Precision(compute=jnp.float32)},
    # Masters as codes or in bfloat16, state and frozen parameters as codes.
    "codes": {
        "precision": mt.Precision(
            compute=jnp.float32,
            master={"head/*": "bfloat16", "*": "int8"},
            state="int8",
            frozen="int8",
        ),
        "trainable": "^(layer|head)",
    },
}


def params() -> dict[str, Any]:
    """Leaves whose shares are rows, parts of rows, a few numbers, and layers of a stack."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)

    return {
        "layer": {"w": normal(128, 128), "b": normal(128)},
        "stack": {"w": normal(2, 128, 128), "b": normal(2, 128)},
        "odd": normal(3, 129, 131),
        "head": {"w": normal(128, 5), "b": normal(5)},
    }


def loss_fn(params: Any, batch: Any) -> Any:
    x = jnp.tanh(batch["x"] @ params["layer"]["w"] + params["layer"]["b"])
    x, _ = jax.lax.scan(lambda x, p: (jnp.tanh(x @ p["w"] + p["b"]), None), x, params["stack"])
    x = jnp.tanh(x @ params["odd"].sum(0)[:128, :128])
    y = x @ params["head"]["w"] + params["head"]["b"]
    return jnp.mean((y - batch["y"]) ** 2)


def batch(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {n: rng.normal(size=(8, k)).astype(np.float32) for n, k in {"x": 128, "y": 5}.items()}


def part(whole: Any) -> Any:
    """This process's examples of a batch."""
    share = 8 // jax.process_count()
    start = jax.process_index() * share
    return jax.tree.map(lambda x: x[start : start + share], whole)


def trainer(setting: str) -> mt.Trainer:
    sample = part(batch(0))
    return mt.Trainer(params(), loss_fn, OPTIMIZER, sample, progress=False, **SETTINGS[setting])


def losses(trainer: mt.Trainer, seeds: Any) -> list[float]:
    return [trainer.read(trainer.step(part(batch(seed))))["loss"] for seed in seeds]


def digest(trainer: mt.Trainer) -> list[Any]:
    """Every bit of the state, in short."""
    return bits([trainer.params, trainer.opt_state])


def bits(tree: Any) -> list[int]:
    """Every bit of each array of a tree, in short; converts one after the other."""
    return [
        int(np.frombuffer(np.asarray(x).tobytes(), np.uint8).sum()) for x in jax.tree.leaves(tree)
    ]


class Counted:
    """Bytes of chunks that this process has written and read since `take` was called."""

    def __init__(self, patch: Any):
        self.bytes = {"written": 0, "read": 0}
        write, read = Writer._write, ChunkReader.read

        def writing(writer: Writer, chunks: Any) -> None:
            self.bytes["written"] += sum(chunk.nbytes for _, _, chunk in chunks)
            write(writer, chunks)

        def reading(reader: ChunkReader, wanted: Any) -> Any:
            rows = read(reader, wanted)
            self.bytes["read"] += sum(row.nbytes for row in rows)
            return rows

        patch.enter_context(mock.patch.object(Writer, "_write", writing))
        patch.enter_context(mock.patch.object(ChunkReader, "read", reading))

    def take(self) -> dict[str, int]:
        found, self.bytes = self.bytes, {"written": 0, "read": 0}
        return found


def states(folder: str) -> dict[str, Any]:
    """Checkpoints of odd state, and a run whose callbacks write."""
    found: dict[str, Any] = {}
    with ExitStack() as patch:
        # So that state as small as this is divided as larger one is.
        patch.enter_context(mock.patch.object(chunks, "_LEAST_BYTES", 2048))
        patch.enter_context(mock.patch.object(chunks, "_ODD_BYTES", 8192))
        counted = Counted(patch)
        for name in SETTINGS:
            path, run = Path(folder) / name, trainer(name)
            begun = losses(run, range(2))
            digests = [digest(run)]
            saving = run.start_saving(path)
            early = path.exists()  # not before all have agreed, at the next step
            after = losses(run, range(2, 4))
            saving.wait()
            run.restore(path)
            digests.append(digest(run))
            moved = counted.take()
            again = losses(run, range(2, 4))
            run.restore(Path(folder) / f"{name}-alone")  # one device of one process wrote it
            digests.append(digest(run))
            found[name] = {"losses": begun, "after": after, "again": again, "early": early}
            found[name] |= {"digests": digests, "bytes": moved}
            if name == "full":
                run.restore(path)
                found["refused"] = refused(run, Path(folder) / "damaged", path)
                found["full disk"] = full_disk(run, Path(folder) / "never")
                found["logged"] = logged(run, Path(folder))
    found["own"] = own_runs(Path(folder))
    found["on disks"] = on_disks(Path(folder))
    return found


def refused(run: mt.Trainer, damaged: Path, whole: Path) -> str:
    """The error with which each process refuses a checkpoint of which the second reads damage."""
    rows = run.params["layer"]["w"][96:]
    if jax.process_index() == 0:
        shutil.copytree(whole, damaged)
        small.damage(damaged, rows)
    run.processes.gather("the damage")
    try:
        run.restore(damaged)
    except mt.CheckpointError as error:
        run.restore(whole)
        return str(error)
    return "nothing"


def full_disk(run: mt.Trainer, path: Path) -> list[str]:
    """The error of a save that fails in the second process, and what is left of it."""
    finish = Writer.finish

    def failing(writer: Writer) -> None:
        if jax.process_index() == 1:
            raise OSError(28, "No space left on device")
        finish(writer)

    with mock.patch.object(Writer, "finish", failing):
        try:
            run.save(path)
        except mt.CheckpointError as error:
            run.processes.gather("what is left")
            return [str(error), *(p.name for p in path.parent.iterdir() if "never" in p.name)]
    return []


def on_disks(folder: Path) -> dict[str, Any]:
    """Losses and bits of a run in memory, and of one with all state and inputs on disks.

    The parameters' bits come once more, read one by one.
    """
    found: dict[str, Any] = {}
    for name, folders in {"memory": None, "disks": [folder / "disk 0", folder / "disk 1"]}.items():
        with state_on_disk() if folders else nullcontext():
            run = mt.Trainer(
                *(params(), loss_fn, OPTIMIZER, part(batch(0))),
                **SETTINGS["full"],
                device_budget="minimum",
                disk_dir=folders,
                progress=False,
            )
        found[name] = [losses(run, range(3)), digest(run), bits(run.unread_model())]
        if folders:
            found["kinds"] = sorted({key.kind.name for key in spec_of(run).on_disk})
    return found


def own_runs(folder: Path) -> bool:
    """Runs of each process's own devices, as of a sweep: one asks the other for nothing."""
    if jax.process_index() == 0:
        return True
    mesh = Mesh(jax.local_devices(), "data")
    run = small.trainer(mesh=mesh)
    run.read(run.step(small.batch(0)))
    run.save(folder / "own")
    again = small.trainer(mesh=mesh, params=folder / "own")
    same = digest(again)[:2] == digest(run)[:2]
    again.restore(folder / "own")
    return same and digest(again) == digest(run)


def logged(run: mt.Trainer, folder: Path) -> dict[str, Any]:
    """Trains on with callbacks that write, evaluations and checkpoints."""
    data = [part(batch(seed)) for seed in range(4)]
    own = folder / str(jax.process_index())  # nothing comes here but from the first process
    keep = callbacks.KeepBest(folder / "best")
    writing = [
        callbacks.CSVLog(own / "log.csv"),
        callbacks.JSONLog(own / "log.jsonl"),
        callbacks.Profile(own / "profile", first=5, last=5),
        callbacks.EarlyStopping(patience=9),
        keep,
    ]
    result = mt.train(
        run,
        data,
        eval_data=data[:1],
        eval_every=2,
        checkpoint_dir=folder / "run",
        checkpoint_every=1,
        callbacks=writing,
    )
    records = [[r["step"], r["loss"], r.get("eval_loss")] for r in result.history]
    return {"records": records, "best": keep.path and keep.path.name}
