"""What the training loop is made of: interrupts held back, batches checked, history kept."""

import itertools
import json
import os
import random
import re
import signal
import threading
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from boards import FakeBoard, processes_of
from megatrain_jax._src.engine.history import History, as_json
from megatrain_jax._src.engine.options.batch_checks import batch_size, check_batch, check_like
from megatrain_jax._src.engine.runtime.evaluation import put_batch
from megatrain_jax._src.engine.runtime.interrupt import deferred_interrupt
from megatrain_jax._src.engine.state.placement import placed_on
from megatrain_jax._src.engine.state.processes import Processes
from megatrain_jax._src.engine.train import source
from megatrain_jax._src.engine.train.loop import slowest_of
from megatrain_jax._src.engine.train.source import (
    Prefetch,
    is_state,
    joined_positions,
    own_position,
)
from messages import refuses, tells


def batch_of(value: float) -> dict[str, np.ndarray]:
    return {"x": np.full((4, 3), value, np.float32)}


# Interrupts


def test_an_interrupt_waits_for_the_end_of_the_block():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with deferred_interrupt():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("inner")
            with deferred_interrupt():
                signal.raise_signal(signal.SIGINT)
            done.append("outer")
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_goes_to_the_handler_that_was_there():
    received = []
    before = signal.signal(signal.SIGINT, lambda signum, frame: received.append(signum))
    try:
        with deferred_interrupt():
            signal.raise_signal(signal.SIGINT)
            assert received == []
        assert received == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_each_kind_of_signal_is_handed_on_once():
    received = []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: received.append(signum))
    try:
        with pytest.raises(KeyboardInterrupt):
            with deferred_interrupt():
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
                    signal.raise_signal(number)
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_error_of_the_block_wins_over_the_interrupt():
    with pytest.raises(OSError, match="first"):
        with deferred_interrupt():
            signal.raise_signal(signal.SIGINT)
            raise OSError("first")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_goes_through_where_allowed():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with deferred_interrupt(second_interrupts=True):
            signal.raise_signal(signal.SIGINT)
            done.append("first")
            signal.raise_signal(signal.SIGINT)
            done.append("second")
    assert done == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_off_the_main_thread_signals_are_left_alone():
    handlers = []

    def work() -> None:
        with deferred_interrupt():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


# Batches


@pytest.mark.parametrize("seed", range(20))
def test_each_process_goes_on_from_its_own_position(seed):
    rng = random.Random(seed)
    count, index = rng.randint(1, 4), rng.randrange(4)
    index %= count
    each = [{"batches": 5, "state": rng.choice([None, 1, 1, {"at": 2}])} for _ in range(count)]
    board = FakeBoard()
    processes = processes_of(board, count, index) if count > 1 else Processes()
    rows = ({"where": "the position of `data`", "value": value} for value in each)
    board.answers = {i: row for i, row in enumerate(rows) if i != index}
    saved = json.loads(json.dumps(joined_positions(each[index], processes)))
    for i, own in enumerate(each):
        peer = processes_of(FakeBoard(), count, i) if count > 1 else processes
        assert own_position(saved, peer) == own
    # As many rows for fewer or more processes, of which each counts batches.
    other = processes_of(FakeBoard(), count + 1, count)
    shared = all(own == each[0] for own in each)
    assert own_position(saved, other) == (each[0] if shared else {"batches": 5})
    assert is_state(saved) == any(own["state"] is not None for own in each)


class Tensor:
    """An array as in PyTorch."""

    def numpy(self) -> np.ndarray:
        return np.ones(4)


@pytest.mark.parametrize(
    ("batch", "microbatches", "error", "message"),
    [
        ({}, 1, ValueError, "arrays"),
        ({"x": [1.0, 2.0]}, 1, TypeError, r"batch\['x'\]\[0\] .*float"),
        ({"x": Tensor()}, 1, TypeError, r"batch\['x'\] .*Tensor.* `.numpy\(\)`"),
        ({"x": np.float32(1)}, 1, TypeError, r"batch\['x'\] .*float32.*np.full\(n, x"),
        ({"x": np.zeros(())}, 1, ValueError, r"batch\['x'\] .*scalar.*np.full\(n, x"),
        ({"x": np.zeros((0, 2))}, 1, ValueError, r"batch\['x'\] .*\(0, 2\)"),
        ({"x": np.array([[1], None], object)}, 1, TypeError, r"batch\['x'\] .*object"),
        ({"x": np.array(["a"])}, 1, TypeError, r"batch\['x'\] .*<U1"),
        (
            {"x": np.zeros((4, 2)), "y": [np.zeros(4), np.zeros(3)]},
            2,
            ValueError,
            r"batch\['x'\] .*\(4, 2\).*batch\['y'\]\[1\] .*\(3,\).*np.repeat",
        ),
        # It would be broadcast.
        (
            {"x": np.zeros((4, 2)), "y": np.zeros(1)},
            1,
            ValueError,
            r"batch\['y'\] .*\(1,\)",
        ),
        (
            {"x": np.zeros((1, 2)), "y": np.zeros(4)},
            1,
            ValueError,
            r"batch\['x'\] .*\(1, 2\)",
        ),
    ],
)
def test_wrong_batches_are_named_by_path(
    batch: Any, microbatches: int, error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        check_batch(batch, microbatches)


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [("int64", -(2**31), 2**31 - 1), ("uint64", 0, 2**32 - 1)]
)
def test_integers_that_jax_would_change_are_refused(dtype: str, least: int, most: int):
    check_batch({"ids": np.array([[least, most]], dtype)})
    check_batch({"ids": np.zeros((4, 0), dtype)})
    for wrong in (least - 1, most + 1):
        if wrong < 0 and dtype == "uint64":
            continue
        batch = {"ids": np.array([[0, wrong]], dtype)}
        with refuses(ValueError, "batch['ids']", dtype, wrong):
            check_batch(batch)
        with jax.enable_x64(True):
            check_batch(batch)


def test_right_batches_pass():
    pair = np.zeros((4, 2), np.int32), jnp.zeros((4,), jnp.bfloat16)
    keys = {"key": jax.random.split(jax.random.key(0), 4), "none": None}
    check_batch(jax.ShapeDtypeStruct((4,), jnp.uint8), or_shapes=True)
    check_batch(pair, 2)
    check_batch(keys, 4)


def test_a_batch_passes_if_each_device_has_equally_many_rows_of_each_microbatch():
    for rows, parts, devices in itertools.product(range(1, 13), range(1, 5), range(1, 5)):
        batch = {"x": np.zeros((rows, 2)), "y": [np.zeros(rows, np.int32)]}
        if rows % (parts * devices) == 0:
            check_batch(batch, parts, num_devices=devices)
        elif rows % parts:
            with refuses(ValueError, f"`microbatches`={parts}", rows, "batch['x']"):
                check_batch(batch, parts, num_devices=devices)
        else:
            with refuses(ValueError, f"{devices} devices", "batch['x']") as caught:
                check_batch(batch, parts, num_devices=devices, fewer="on {n} of them")
            advised = int(re.findall(r"on (\d) of them", str(caught.value))[0])
            check_batch(batch, parts, num_devices=advised)
            assert all(rows % (parts * more) for more in range(advised + 1, devices))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"y": np.zeros((4, 3), np.float32)}, r"batch\['x'\].* batch\['y'\]"),
        ({"x": np.zeros((4, 3), np.int32)}, r"batch\['x'\] .*int32"),
        ({"x": np.zeros((4, 3), np.float32), "n": None}, "structure"),
    ],
)
def test_a_batch_unlike_the_first_is_named(batch: Any, message: str):
    with pytest.raises(ValueError, match=message):
        check_like(batch, batch_of(1))
    # Other shapes and widths of one dtype pass.
    check_like({"x": np.zeros((2, 5), np.float64)}, batch_of(1))


def test_prefetch_puts_batches_on_the_device_ahead():
    drawn: list[int] = []

    def numbered(count: int):
        for index in range(count):
            drawn.append(index)
            yield batch_of(index)

    with jax.transfer_guard("disallow"):
        batches = Prefetch(numbered(4), check_batch, Processes())
        assert drawn == []
        first = next(batches)
        assert isinstance(first["x"], jax.Array)
        batches.fill()
        batches.fill()
        assert len(drawn) == 2
        assert len(list(batches)) == 3
        assert batches.exhausted


def test_data_may_fill_its_arrays_anew():
    """Of aligned memory, a CPU's arrays would be the same bytes."""
    memory = np.zeros(4096 + 64, np.uint8)
    start = -memory.ctypes.data % 64
    x = memory[start : start + 4096].view(np.float32)

    def refilled() -> Iterator[Any]:
        for number in range(3):
            x[:] = number
            yield {"x": x}

    batches = Prefetch(refilled(), lambda batch: None, Processes())
    found = []
    for _ in range(3):
        found.append(next(batches)["x"])
        batches.fill()
    assert [float(row.max()) for row in found] == [0, 1, 2]
    step: Any = SimpleNamespace(microbatches=1)
    (put,) = put_batch(
        {"x": x}, step, placed_on(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]))
    )
    x[:] = 7
    assert float(put.max()) == 2


def test_work_is_counted_in_tokens_or_examples():
    tokens = np.zeros((4, 8), np.int32)
    assert batch_size({"labels": np.zeros((4,), np.int32), "t": tokens}) == (32, "tokens")
    assert batch_size({"labels": tokens[:, :5], "t": tokens}) == (32, "tokens")
    images = np.zeros((4, 8, 8, 3), np.uint8)
    assert batch_size({"images": images, "labels": np.zeros(4, np.int32)}) == (4, "examples")
    assert batch_size({"nodes": np.zeros((12, 3)), "edges": np.zeros((20, 2))}) == (1, "batches")


# History


def test_history_is_saved_as_json_and_drawn(tmp_path: Any):
    unknown = {"loss": float("nan"), "grad_norm": float("inf")}
    history = History([{"step": 1, "loss": 2.0}, {"step": 2, **unknown, "eval_loss": 1.5}])
    history.save(tmp_path / "history.json")
    assert json.loads((tmp_path / "history.json").read_text()) == [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": None, "grad_norm": None, "eval_loss": 1.5},
    ]
    # A callback may add anything, and a checkpoint is not lost by it.
    added = {"step": 3, ("a", "b"): 1, "by": {("a", "b"): 1, "c": np.arange(2)}, "each": {1}}
    assert as_json([added]) == [{"step": 3, "by": {"c": [0, 1]}, "each": "{1}"}]
    (axes,) = history.plot().axes
    loss, evaluation = axes.lines
    np.testing.assert_array_equal(loss.get_xdata(), [1, 2])
    np.testing.assert_array_equal(evaluation.get_xydata(), [[2, 1.5]])
    assert History()._repr_html_() is None
    assert len(History().plot().axes[0].lines) == 0


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("ended", [*itertools.product([False, True], repeat=2)], ids=str)
def test_data_end_for_all_processes_with_the_first_that_ends(index, ended):
    """The first process says so, unless the data of all have ended."""
    each = [index == 1 and ended[0], ended[1], ended[0]]
    each[index] = own = each[index]
    board = FakeBoard()
    rows = ({"where": "the next batch of `data`", "value": [end, 1.0]} for end in each)
    board.answers = {i: row for i, row in enumerate(rows) if i != index}
    data = [] if own else [{"x": np.ones(2)}]
    batches = Prefetch(data, lambda batch: None, processes_of(board, 3, index))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert len(list(itertools.islice(batches, 1))) == (not any(each))
    first, count = next((i for i in range(3) if each[i]), None), sum(each)
    assert len(told) == (index == 0 and 0 < count < 3)
    assert all(tells(str(row.message), f"{count} of 3", f"process {first}") for row in told)


def test_each_step_names_the_process_that_the_others_wait_for(monkeypatch):
    """Of the own seconds, those that a process waits for others are none."""
    clock = iter([10.0, 13.0, 13.5, 20.0, 20.0])
    monkeypatch.setattr(source, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    answer = {"where": "the next batch of `data`", "value": [False, 2.5]}
    processes = processes_of(FakeBoard({1: answer}))
    batches = Prefetch(iter([{"x": np.ones(2)}] * 3), lambda batch: None, processes)
    next(batches)
    assert batches.seconds == [3.0, 2.5]
    processes.waited += 5
    next(batches)
    assert batches.seconds == [1.5, 2.5]
    assert slowest_of(batches.seconds) == {"slowest_process": 1.0, "slowest_seconds": 2.5}
    assert slowest_of([3.0]) == {}
