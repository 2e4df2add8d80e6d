"""A process of several that share a run, as `test_processes` starts it with two simulated devices.

Usage: processes.py INDEX COUNT PORT SCENARIOS; the last is a list as JSON, of each scenario its
name and its arguments. The environment's RESULT names the file that gets what was found, by the
scenarios' names. What a scenario prints comes after a line with its name.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax

import megatrain_jax as mt
from contexts import shared_contexts
from megatrain_jax._src.engine.checkpoint.save import Writer
from optimizers import OPTIMIZERS
from oracle import train_plain
from processes_state import Counted, digest, states
from runs import check_close, make_trainer, recording, train, variables_of
from started import Started
from zoo import CASES

SEEDS = (1, 2, 3)
TOLERANCE = 2e-6
BEGINS = "the scenario "
# One of each, as runs are known again by their optimizers.
ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def part(batch: Any) -> Any:
    """This process's examples of a batch."""
    count, index = jax.process_count(), jax.process_index()

    def rows(x: np.ndarray) -> np.ndarray:
        share = x.shape[0] // count
        return x[index * share : (index + 1) * share]

    return jax.tree.map(rows, batch)


def equivalence(
    pairs: str, copies: int = 1, microbatches: int = 1, num_steps: int = 3
) -> dict[str, str]:
    """The differences from plain JAX with the whole batch, by model and optimizer; all is well.

    With two copies of the state, each process has one, and its part of the batch is as many of the
    whole batch's microbatches.
    """
    found = {}
    options = {"microbatches": microbatches, "state_per_process": copies > 1}
    for pair in pairs.split(","):
        name, optimizer = pair.split(":")
        case = CASES[name]
        batches = [case.batch(seed) for seed in SEEDS[:num_steps]]
        plain = train_plain(
            case, OPTIMIZERS[optimizer], batches, microbatches=copies * microbatches
        )
        sample = part(batches[0])
        recorded = recording(OPTIMIZERS[optimizer])
        trainer = make_trainer(case, recorded, sample=sample, progress=False, **options)
        run = train(trainer, [part(batch) for batch in batches])
        try:
            check_close(run.first_grads, plain.first_grads, TOLERANCE, "gradient")
            np.testing.assert_allclose(run.losses, plain.losses, rtol=1e-6)
            check_close(run.params, plain.params, TOLERANCE, "parameter")
            check_close(run.opt_state[1], plain.opt_state, 2 * TOLERANCE, "optimizer state")
            check_close(variables_of(trainer.model), plain.variables, TOLERANCE, "variable")
            assert len(trainer.devices) == 4 // copies
        except AssertionError as error:
            found[pair] = str(error)
    return found


def first_step(pairs: str) -> dict[str, str]:
    """As `equivalence`, for one step."""
    return equivalence(pairs, num_steps=1)


def per_process(pairs: str) -> dict[str, str]:
    """As `equivalence`, with two microbatches and all state in each process."""
    return equivalence(pairs, copies=2, microbatches=2)


def training(
    folder: str | None, num_batches: int = 8, optimizer: Any = None, **options: Any
) -> dict[str, Any]:
    """A run with checkpoints and evaluations: how it ended, and what its trainer holds."""
    case = CASES["two_towers"]
    data = [part(case.batch(seed)) for seed in range(num_batches)]
    try:
        result = mt.fit(
            case.build(),
            case.loss_fn,
            data,
            optimizer or ADAMW,
            checkpoint_dir=folder,
            eval_data=data[:2],
            eval_every=3,
            precision=mt.Precision(compute="float32"),
            **options,
        )
    except Exception as error:
        result, raised = getattr(error, "result", None), f"{type(error).__name__}: {error}"
    else:
        raised = None
    found: dict[str, Any] = {"raised": raised}
    if result is not None:
        found["digest"] = None if raised else digest(result.trainer)
        found["losses"] = [record["loss"] for record in result.history]
        found["slowest"] = [record["slowest_process"] for record in result.history]
        found["evaluated"] = [r["step"] for r in result.history if "eval_loss" in r]
        found["interrupted"] = result.interrupted
    return found


def copies(folder: str) -> dict[str, Any]:
    """Runs with all state in each process, that go on from shared state and the reverse.

    Where the plan chooses, processes of one host share the state.
    """
    own: dict[str, Any] = {"state_per_process": True}
    with ExitStack() as patch:
        counted = Counted(patch)
        few = training(f"{folder}/own", 4, **own)
        written = counted.take()["written"]
    return {
        "few": few,
        "written": written,
        "shared": training(f"{folder}/own", state_per_process="auto"),
        "few shared": training(f"{folder}/shared", 4),
        "own": training(f"{folder}/shared", **own),
        "error": training(f"{folder}/error", callbacks=[at_step_three(fail)], **own),
    }


def predictions() -> list[list[float]]:
    """Rows of batches that all devices divide and that none does, in two microbatches and in one.

    Each process passes other numbers.
    """

    def fn(model: Any, batch: Any) -> Any:
        return batch["x"] @ model["w"]

    numbers = [np.arange(n, dtype=np.float32) + 10 * jax.process_index() for n in (4, 3, 1)]
    batches = [{"x": x[:, None]} for x in numbers]
    trainer = mt.Trainer(
        {"w": np.full((1, 1), 2, np.float32)},
        lambda model, batch: fn(model, batch).mean(),
        optax.sgd(0.1),
        batches[0],
        microbatches=2,
        progress=False,
    )
    return trainer.predict(batches, fn).tolist()


def at_step_three(action: Callable[[], Any], index: int = 1) -> Callable[..., None]:
    """A callback that does something in one process, once step 3 is known."""

    def callback(trainer: mt.Trainer, record: dict[str, Any]) -> None:
        if record["step"] == 3 and jax.process_index() == index:
            action()

    return callback


def fail() -> None:
    raise OSError("a disk of this process alone")


def endings(folder: str) -> dict[str, Any]:
    """Runs that end in one process alone, by an error, its data or another argument."""
    first = jax.process_index() == 0
    rate = optax.adam(1e-2 if first else 2e-2)
    many, few = 8, 5
    return {
        "whole": training(f"{folder}/whole", checkpoint_every=2),
        "again": training(f"{folder}/whole"),
        "error": training(f"{folder}/error", callbacks=[at_step_three(fail)]),
        "data": training(f"{folder}/data", many if first else few, progress=False),
        "resumed": training(f"{folder}/data", many),
        "steps": training(f"{folder}/steps", steps=2 if first else 3),
        "optimizer": training(f"{folder}/optimizer", optimizer=rate),
        "folder": training(f"{folder}/one" if first else None),
        "resume": training(f"{folder}/resume", resume=first),
    }


class OnDisk:
    """An array in a file that one process alone can't read."""

    def __init__(self, array: np.ndarray):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        if jax.process_index() == 1:
            fail()
        return self.array


def completed(folder: str) -> dict[str, Any]:
    """Runs that fail in one process alone: as one starts, and as one without steps is completed."""
    case, unstarted = CASES["two_towers"], None
    options = {"sample": part(case.batch(0)), "progress": False}
    trainer = make_trainer(case, OPTIMIZERS["adam"], **options)
    files = jax.tree.map(OnDisk, trainer.params)
    try:
        make_trainer(case, OPTIMIZERS["adam"], params=files, **options)
    except Exception as error:
        unstarted = f"{type(error).__name__}: {error}"
    if jax.process_index() == 1:
        vars(trainer)["flush"] = fail
    try:
        mt.train(trainer, iter(()), checkpoint_dir=folder)
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    else:
        raised = None
    plan = trainer.plan
    found = {"unstarted": unstarted, "raised": raised}
    return {**found, "plan": [plan.num_processes, plan.processes_per_host, str(plan)]}


def alone() -> str | None:
    """What the first process gets that reads the parameters while the other one ends."""
    case = CASES["two_towers"]
    trainer = make_trainer(case, OPTIMIZERS["adam"], sample=part(case.batch(0)), progress=False)
    if jax.process_index() == 0:
        try:
            return f"read {len(jax.tree.leaves(trainer.params))} arrays"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return None


def signalled(folder: str, name: str, index: int = 1) -> dict[str, Any]:
    """A run of which a process gets a signal: at a step, or while it writes step 4."""

    def send() -> None:
        os.kill(os.getpid(), signal.Signals[name])

    if name != "SIGKILL":
        return training(folder, checkpoint_every=2, callbacks=[at_step_three(send, index)])
    write = Writer.finish

    def finish(writer: Writer) -> None:
        # What the first process has written, and a part of what this one has, is there by now.
        if jax.process_index() == index and (Path(folder) / "2").exists():
            send()
        write(writer)

    with mock.patch.object(Writer, "finish", finish):
        return training(folder, checkpoint_every=2)


def main() -> None:
    index, count, port, wanted = sys.argv[1:]
    jax.distributed.initialize(f"localhost:{port}", int(count), int(index))
    scenarios = (
        equivalence,
        first_step,
        per_process,
        copies,
        endings,
        completed,
        predictions,
        signalled,
        states,
        alone,
    )
    by_name = {function.__name__: function for function in scenarios}
    found = {}
    with shared_contexts(), Started().replacing():
        for name, *arguments in json.loads(wanted):
            print(f"\n{BEGINS}{name}", flush=True)
            found[name] = by_name[name](*arguments)
    Path(os.environ["RESULT"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
