"""What a CPU can't show: that steps on a GPU are right, stay within their budget, and leave
nothing behind on the device.

The CPU has no memory statistics, and there operations on arrays in host memory succeed silently.
"""

import dataclasses
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import megatrain_jax as mt
from coded_groups import in_segments
from inside import on_one_device, store_of
from megatrain_jax._src.common.keys import LASTING, Key
from megatrain_jax._src.engine import start
from megatrain_jax._src.engine.adapt.adapters import adapt
from megatrain_jax._src.engine.kernels import update_pieces as pieces
from megatrain_jax._src.engine.kernels import updates
from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.spec import bound_step
from megatrain_jax._src.engine.spec.make_spec import make_run_spec
from megatrain_jax._src.engine.startup import allocator
from oracle import train_plain
from places import HELPERS, ROOT
from zoo import CASES, token_batch

pytestmark = pytest.mark.gpu

MIB = 2**20
NUM_STEPS = 5
FP32 = mt.Precision(compute=jnp.float32)

# With a small epsilon Adam would magnify the rounding of small gradients, and XLA fuses the plain
# step otherwise than ours.
OPTIMIZERS = {
    "immediate": lambda: optax.adamw(1e-2, eps=0.1, weight_decay=0.1),
    "deferred": lambda: optax.chain(optax.clip_by_global_norm(0.1), OPTIMIZERS["immediate"]()),
}


@pytest.fixture(autouse=True)
def on_a_gpu() -> Iterator[None]:
    assert jax.default_backend() == "gpu", "these tests need a GPU; plain `pytest` leaves them out"
    with jax.default_matmul_precision("highest"):
        yield
    gc.collect()  # the next test measures memory


class MLPBlock(nnx.Module):
    """Two layers around a nonlinearity. No embedding: its gradient's sums have no fixed order."""

    def __init__(self, dim: int, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(dim, rngs=rngs)
        self.up = nnx.Linear(dim, 2 * dim, rngs=rngs)
        self.down = nnx.Linear(2 * dim, dim, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class MLP(nnx.Module):
    def __init__(self, dim: int, num_blocks: int):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([MLPBlock(dim, rngs) for _ in range(num_blocks)])
        self.head = nnx.Linear(dim, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.head(x)[:, 0]


def squared_error(model: MLP, batch: dict[str, Any]) -> jax.Array:
    return jnp.mean(jnp.square(model(batch["x"]) - batch["y"]))


def float_batch(dim: int, seed: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(32, dim)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, 0])}


def mlp_trainer(
    dim: int, num_blocks: int, optimizer: str, device_budget: Any, precision: mt.Precision = FP32
) -> mt.Trainer:
    return mt.Trainer(
        lambda: MLP(dim, num_blocks),
        squared_error,
        OPTIMIZERS[optimizer](),
        float_batch(dim, 0),
        precision=precision,
        device_budget=device_budget,
    )


def run_steps(trainer: mt.Trainer, batches: list[Any]) -> list[dict[str, float]]:
    """Trains one step a batch, with no implicit transfer, and waits for what it dispatched."""
    with jax.transfer_guard("disallow"):
        metrics = [trainer.step(batch) for batch in batches]
        rows = [trainer.read(m) for m in metrics]
        trainer.flush()
    return rows


def assert_equal_trees(ours: Any, theirs: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def close_to_largest(ours: Any, theirs: Any) -> None:
    scale = max(float(np.max(np.abs(theirs))), np.finfo(np.float32).tiny)
    np.testing.assert_allclose(np.asarray(ours) / scale, theirs / scale, rtol=0, atol=2e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["nnx_tied", "nnx_scan", "linen_scan_remat"])
def test_steps_are_those_of_plain_jax(name, optimizer):
    case = CASES[name]
    batches = [token_batch(seed) for seed in range(NUM_STEPS)]
    plain = train_plain(case, OPTIMIZERS[optimizer](), batches)
    trainer = mt.Trainer(
        case.build(),
        case.loss_fn,
        OPTIMIZERS[optimizer](),
        batches[0],
        precision=FP32,
        device_budget="least",
    )
    assert trainer.plan.update_mode == optimizer
    rows = run_steps(trainer, batches)
    np.testing.assert_allclose([row["loss"] for row in rows], plain.losses, rtol=1e-6)
    norms = [row["grad_norm"] for row in plain.metrics]
    np.testing.assert_allclose([row["grad_norm"] for row in rows], norms, rtol=1e-5)
    ours, theirs = jax.tree.leaves(trainer.params), jax.tree.leaves(plain.params)
    for our_leaf, their_leaf in zip(ours, theirs, strict=True):
        close_to_largest(our_leaf, their_leaf)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_rests_in_pinned_host_memory(optimizer):
    in_use = device_bytes("bytes_in_use")
    trainer = mlp_trainer(512, 4, optimizer, "least")
    store = store_of(trainer)
    slabs = {Key(kind, group) for kind in LASTING for group in range(len(store.layouts))}
    for after in ("initialising", "steps", "an evaluation"):
        if after == "steps":
            run_steps(trainer, [float_batch(512, seed) for seed in range(3)])
        elif after == "an evaluation":
            with jax.transfer_guard("disallow"):
                trainer.evaluate([float_batch(512, 9)])
        assert store.host.keys() == slabs, after
        assert not store.on_device, after
        state = jax.tree.leaves((store.host, store.variables, store.globals))
        assert {x.sharding.memory_kind for x in state} == {"pinned_host"}, after
    # The last steps' metrics are all that is left.
    gc.collect()
    assert device_bytes("bytes_in_use") - in_use < 0.1 * trainer.plan.host_bytes


@pytest.fixture
def no_residuals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that saves results is another program; XLA may fuse it, and so round, otherwise."""
    monkeypatch.setattr(bound_step, "_residuals", lambda stage, hardware: (None, None))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_budgets_do_not_change_a_bit(optimizer, no_residuals):
    batches = [float_batch(256, seed) for seed in range(NUM_STEPS)]
    runs, traffic = [], []
    smallest = mlp_trainer(256, 6, optimizer, "least").plan
    middling = smallest.device_state_bytes + smallest.host_bytes // 3
    for budget in ("least", middling, 10**15):
        trainer = mlp_trainer(256, 6, optimizer, budget)
        traffic.append(trainer.plan.bytes_in)
        rows = run_steps(trainer, batches)
        runs.append((rows, trainer.params, trainer.opt_state))
    assert traffic[0] > traffic[1] > traffic[2] == 0
    for run in runs[1:]:
        assert_equal_trees(run, runs[0])


@pytest.mark.parametrize("in_one_pass", [True, False])
def test_budgets_do_not_change_a_bit_of_codes_in_pieces(in_one_pass, no_residuals, monkeypatch):
    if not in_one_pass:
        monkeypatch.setattr(start, "has_triton", lambda devices: False)
    batches = [float_batch(256, seed) for seed in range(NUM_STEPS)]
    compact = dataclasses.replace(mt.Precision.compact(), compute=jnp.float32)
    runs = []
    for piece, budget in ((pieces.PIECE, "least"), (2**16, "least"), (2**16, 10**15)):
        monkeypatch.setattr(pieces, "PIECE", piece)
        trainer = mlp_trainer(256, 6, "deferred", budget, compact)
        assert trainer.plan.host_bytes < 5 * trainer.plan.num_parameters
        rows = run_steps(trainer, batches)
        runs.append((rows, trainer.params, trainer.opt_state))
    whole, streamed, resident = runs
    assert_equal_trees(streamed, resident)
    if in_one_pass:
        assert_equal_trees(whole, resident)  # it has no pieces
    losses = [[row["loss"] for row in run[0]] for run in (whole, streamed)]
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.parametrize("state", ["int8", "int4"])
def test_an_update_in_one_pass_is_that_of_plain_operations(state):
    """Rounded to nearest, numbers differ where the last bits of arithmetic decide."""
    precision = mt.Precision(master=jnp.bfloat16, state=state, rounding="nearest")
    batch = float_batch(256, 0)
    adapted, _ = adapt(lambda: MLP(256, 6), squared_error, batch, 0)
    options = Options(precision=precision)
    spec = make_run_spec(adapted, squared_error, OPTIMIZERS["immediate"](), batch, options)
    group = max(range(len(spec.layouts)), key=lambda g: spec.layouts[g].num_coded)
    layout, placement = spec.layouts[group], on_one_device()
    kernel = updates.update(spec.optimizer, layout, group, jnp.bfloat16, placement)
    rng = np.random.default_rng(0)
    masters, moments = rng.normal(size=layout.master.size), rng.gamma(0.5, size=layout.master.size)
    slabs = [jnp.asarray(moments * 1e-3, slab.dtype)[: slab.size] for slab in layout.state.layouts]
    given = (
        layout.master.encode(jnp.asarray(masters, jnp.float32)),
        layout.state.encode(slabs),
        in_segments(layout.master, jnp.asarray(masters[::-1] * 1e-3, jnp.bfloat16)),
        [jnp.asarray(3, v.dtype) for v in (kernel.takes or [()] * 4)[3]],
        jnp.array(True),
        None,
    )
    found = []
    for with_triton in (True, False):
        function = KernelCache(with_triton=with_triton).get(kernel)
        assert ("update_codes" in function.lower(*given).as_text()) == with_triton
        copies = jax.tree.map(jnp.copy, given)
        new = function(*copies)[:2]
        found.append((layout.master.decode(new[0]), *layout.state.decode(new[1])))
        kept = function(*jax.tree.map(jnp.copy, (*given[:4], jnp.array(False), None)))[:2]
        assert_equal_trees(kept, given[:2])
    for a, b in zip(*found, strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        same = np.abs(a - b) <= 1e-6 * np.abs(b)
        assert same.mean() > 0.999
        assert np.abs(a - b).max() < 0.2 * np.abs(b).max()


def device_bytes(name: str) -> int:
    stats = jax.devices()[0].memory_stats()
    assert stats is not None
    return stats[name]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_streaming_stays_within_its_budget(optimizer):
    # Slabs a little smaller than a power of two: for those a little larger, the allocator takes
    # the next one, and counts it.
    dim, num_blocks = 2000, 24
    batches = [float_batch(dim, seed) for seed in range(3)]
    in_use = device_bytes("bytes_in_use")
    trainer = mlp_trainer(dim, num_blocks, optimizer, "least")
    plan = trainer.plan
    assert plan.host_bytes > 2 * 2**30
    assert plan.host_bytes > 3 * plan.device_state_bytes
    run_steps(trainer, batches)
    # A process's peak can't be reset, but all that ran before here was smaller.
    peak = device_bytes("peak_bytes_in_use") - in_use
    assert 0.8 * plan.device_bytes < peak < 1.1 * plan.device_bytes + 16 * MIB, (peak, str(plan))
    assert plan.device_bytes < plan.host_bytes // 2


def test_the_norm_of_a_layer_of_experts_takes_no_copy_of_it():
    """The function is compiled for a group of 604M parameters; nothing so large is allocated."""
    names = ("gate", "up", "down")

    def build():
        experts = jnp.zeros((128, 2048, 768))
        return {"layers": [{name: experts for name in names} for _ in range(2)]}

    def loss_fn(params, batch):
        x = batch["x"]
        for layer in params["layers"]:
            x = jnp.tanh(x @ layer["gate"].mean(0)) * (x @ layer["up"].mean(0))
            x = x @ layer["down"].mean(0).T
        return jnp.mean(x**2)

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    batch = {"x": np.ones((4, 2048), np.float32)}
    adapted, _ = adapt(build, loss_fn, batch, 0)
    spec = make_run_spec(adapted, loss_fn, optimizer, batch, Options())
    placement = on_one_device()
    kernel = updates.reduce(spec.optimizer, spec.layouts[0], 0, "bfloat16", placement)
    needed = KernelCache(placement.compiler_options).compile([kernel])
    assert needed < spec.layouts[0].master.size, "less than a byte for each parameter"


def test_without_a_budget_state_stays_where_there_is_room():
    trainer = mlp_trainer(256, 6, "immediate", None)
    assert trainer.plan.bytes_in == 0 and trainer.plan.fits_device
    run_steps(trainer, [float_batch(256, seed) for seed in range(2)])


def test_arrays_lie_in_the_pool_where_a_plan_places_them():
    script = HELPERS / "pool_places.py"
    assert subprocess.run([sys.executable, str(script)]).returncode == 0


def test_a_3b_decoder_streams_as_it_trains_resident(tmp_path):
    """The experiments' own decoder at its full size, each row in a process of its own."""
    script = ROOT / "experiments/throughput/updates.py"
    # As users run it: optimised programs, and CUDA's memory pool.
    others = "XLA_FLAGS", allocator.VARIABLE, allocator.PREALLOCATE
    env = {name: value for name, value in os.environ.items() if name not in others}
    command = [sys.executable, script, "--unclean", "yes", "--out", tmp_path, "--rows"]
    subprocess.run([*command, "resident", "least"], check=True, env=env)
    rows = {path.stem: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    resident = rows.pop("all-state-resident")
    assert set(rows) == {"immediate-least", "clip-1-least"}
    assert resident["num_parameters"] > 3.3e9 and resident["planned_gib_in_and_out"] == [0, 0]
    for row in rows.values():
        assert row["losses"][0] == resident["losses"][0]
        # Attention's backward and scattered sums have no fixed order.
        np.testing.assert_allclose(row["losses"][:6], resident["losses"][:6], rtol=1e-4)
        assert row["peak_device_gib"] < resident["peak_device_gib"] / 4
