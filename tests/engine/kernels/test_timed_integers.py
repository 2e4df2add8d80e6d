"""Functions are timed with the integers of a batch and the residuals of their forwards."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import megatrain_jax as mt
from inside import engine_of, spec_of
from megatrain_jax._src.engine.kernels import timing
from megatrain_jax._src.engine.kernels.timing import RepeatedCall, Timed
from megatrain_jax._src.engine.runtime.evaluation import put_batch
from megatrain_jax._src.engine.spec import measured

SGD = optax.sgd(0.1)
DOCUMENTS = np.repeat(np.array([[3, 3, 3, 7], [1, 2, 2, 2], [5, 5, 9, 9], [4, 4, 4, 6]]), 4, 1)


def routed(params: Any, batch: Any) -> jax.Array:
    """Blocks choose rows by the previous block's scores, within documents."""
    documents = batch["documents"]
    counted = jnp.cumsum(jnp.ones_like(documents), axis=1)  # known before any parameter is
    x, chosen = batch["x"], documents % 2
    for layer in params["layers"]:
        same = documents[:, :, None] == documents[:, None, :]
        x = jnp.tanh(x @ layer["w"] + layer["table"][chosen])
        x += (same / same.sum(-1, keepdims=True)) @ x + layer["table"][counted % 5]
        chosen = jnp.argmax((x - x.mean()) @ layer["router"], axis=-1)
    return (x**2).mean() + params["last"]["w"][chosen].mean()


def made() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    layers = [{"w": weight(8, 8), "table": weight(5, 8), "router": weight(8, 5)} for _ in range(3)]
    params = {"layers": layers, "last": {"w": weight(5, 8)}}
    batch = {"x": weight(4, 16, 8), "documents": DOCUMENTS}
    return params, routed, SGD, batch


class Watch:
    """Records the timed functions' arguments, and what forwards return."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.timed: list[Timed] = []
        self.taken: dict[Any, list[np.ndarray]] = {}
        self.returned: dict[Any, list[np.ndarray]] = {}
        self.now: Any = None
        real = measured.time_kernels

        def time_kernels(cache: Any, functions: Any, *rest: Any, **options: Any) -> Any:
            self.timed = list(functions)
            return real(cache, self.timed, *rest, **options)

        def call(function: Any, kernel: Any, arguments: Any) -> RepeatedCall:
            self.now = kernel.name, kernel.key
            if kernel.name != "update":
                self.taken[self.now] = [np.asarray(x) for x in arguments[1]]
            return RepeatedCall(function, kernel, arguments)

        def timer(call: RepeatedCall, agree: Any, pause: float = 0.0) -> float:
            call.run(2)
            if "forward" in self.now[0]:
                self.returned[self.now] = [np.asarray(x) for x in call.outputs()]
            return agree(1e-3)

        monkeypatch.setattr(measured, "time_kernels", time_kernels)
        monkeypatch.setattr(timing, "RepeatedCall", call)
        monkeypatch.setattr(timing, "measured_seconds", timer)

    def integers(self) -> dict[int, list[np.ndarray]]:
        """The integers that functions took, by the value's id.

        Stages that share a function are timed once, as the first of them.
        """
        found: dict[int, list[np.ndarray]] = {}
        left = dict(self.taken)
        for row in self.timed:
            if taken := left.pop(row.name, None):
                for i, x in zip(row.reads, taken, strict=True):
                    if np.issubdtype(x.dtype, np.integer):
                        found.setdefault(i, []).append(x)
        return found


def of_first_microbatch(trainer: mt.Trainer) -> dict[int, np.ndarray]:
    """The integers that a step's prologue computes of the batch, by the value's id."""
    engine, step = engine_of(trainer), spec_of(trainer).first
    batch = put_batch(made()[-1], step, engine.store.placement)
    live, _, _ = engine._begin(step, batch)
    found = {i: np.asarray(x) for i, x in live.rows[0].items()}
    return {i: x for i, x in found.items() if np.issubdtype(x.dtype, np.integer)}


@pytest.mark.by_default("1-4")
@pytest.mark.usefixtures("pretending_gpu")
@pytest.mark.parametrize(("num_devices", "microbatches"), [(1, 1), (1, 4), (2, 1), (2, 2)])
def test_functions_take_the_integers_that_a_step_computes(num_devices, microbatches, monkeypatch):
    """Of the first microbatch, and of the rows that earlier functions have chosen."""
    watch, mesh = Watch(monkeypatch), Mesh(jax.devices()[:num_devices], "data")
    division = {"microbatches": microbatches, "waves": 1}
    trainer = mt.Trainer(*made(), **division, mesh=mesh, progress=False)
    of_batch = of_first_microbatch(trainer)
    chosen: dict[int, np.ndarray] = {}
    for row in watch.timed:
        if row.writes:
            returned = watch.returned[row.name]
            pairs = zip(row.writes, returned, strict=True)
            chosen |= {i: x for i, x in pairs if np.issubdtype(x.dtype, np.integer)}
    assert of_batch and len(chosen) >= 2, "documents, and what the blocks have chosen"
    assert all(len(np.unique(x)) > 1 for x in chosen.values())
    integers = watch.integers()
    assert of_batch.keys() < integers.keys() <= of_batch.keys() | chosen.keys()
    for i, taken in integers.items():
        for x in taken:
            np.testing.assert_array_equal(x, (of_batch | chosen)[i])


def test_a_plan_takes_the_integers_of_its_batch_too(monkeypatch, request):
    of_batch = of_first_microbatch(mt.Trainer(*made(), progress=False))
    assert of_batch
    request.getfixturevalue("pretending_gpu")  # a trainer is timed there, too
    watch = Watch(monkeypatch)
    mt.plan(*made(), microbatches=1, waves=1, measure=True)
    for i, expected in of_batch.items():
        for x in watch.integers()[i]:
            np.testing.assert_array_equal(x, expected)


@pytest.mark.usefixtures("pretending_gpu")
def test_integers_along_another_first_axis_are_taken_whole(monkeypatch):
    watch = Watch(monkeypatch)
    params, loss_fn, optimizer, batch = made()
    rows = np.array([1, 2, 8, 3, 9, 4])

    def with_rows(params: Any, batch: Any) -> jax.Array:
        last = params["last"]["w"][batch["rows"] % 5]
        return loss_fn(params, batch) + (last**2).mean()

    mt.Trainer(params, with_rows, optimizer, batch | {"rows": rows}, progress=False)
    taken = [x for found in watch.integers().values() for x in found if x.size == len(rows)]
    assert taken and all((x.reshape(-1) == rows % 5).all() for x in taken)


@pytest.mark.usefixtures("pretending_gpu")
def test_of_a_batch_of_shapes_integers_are_made_up(monkeypatch):
    watch = Watch(monkeypatch)
    params, loss_fn, optimizer, batch = made()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    trainer = mt.Trainer(params, loss_fn, optimizer, shapes, progress=False)
    assert trainer.plan.is_measured
    for i, expected in of_first_microbatch(trainer).items():
        assert all((x >= 0).all() and (x != expected).any() for x in watch.integers()[i])


def announced(params: Any, batch: Any) -> jax.Array:
    jax.debug.print("documents of {}", batch["documents"][:, 0])
    return routed(params, batch)


@pytest.mark.usefixtures("pretending_gpu")
def test_a_prologue_that_prints_does_not_print_before_training(monkeypatch, capsys):
    watch = Watch(monkeypatch)
    params, _, optimizer, batch = made()
    trainer = mt.Trainer(params, announced, optimizer, batch, waves=1, progress=False)
    assert trainer.plan.is_measured and watch.timed
    assert "documents of" not in capsys.readouterr().out
    trainer.read(trainer.step(batch))
    jax.effects_barrier()
    assert "documents of" in capsys.readouterr().out


class Masked(nnx.Module):
    """Blocks of documents with masks from a random key that a variable holds."""

    def __init__(self, impl: str | None, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(3)])
        self.key = nnx.Variable(jax.random.key(1, impl=impl))

    def __call__(self, x: jax.Array, documents: jax.Array) -> jax.Array:
        dropped = jax.random.bernoulli(self.key[...], 0.5, documents.shape)
        kept = jnp.where(dropped, documents, jax.random.key_data(self.key[...])[-1]) % 8
        for layer in self.layers:
            x = jnp.tanh(layer(x)) + layer.kernel[kept]
        return x


@pytest.mark.by_default("rbg")
@pytest.mark.usefixtures("pretending_gpu")
@pytest.mark.parametrize("impl", [None, "rbg"])
def test_a_model_with_keys_of_another_generator_trains(impl, monkeypatch):
    """Keys of another generator than the default can't be made."""
    watch, batch = Watch(monkeypatch), made()[-1]
    trainer = mt.Trainer(
        lambda: Masked(impl, nnx.Rngs(0)),
        lambda model, batch: (model(batch["x"], batch["documents"]) ** 2).mean(),
        SGD,
        batch,
        waves=1,
        progress=False,
    )
    assert trainer.plan.is_measured and watch.timed
    assert np.isfinite(trainer.read(trainer.step(batch))["loss"])


@pytest.mark.by_default("1-products0")
@pytest.mark.usefixtures("pretending_gpu")
@pytest.mark.parametrize(("num_devices", "products"), [(1, {"*": "float8"}), (2, None)])
def test_backwards_take_the_residuals_of_their_forwards(num_devices, products, monkeypatch):
    """With made-up scales, the codes of float8 are zeros, which a GPU multiplies faster."""
    cache, taken = [], {}
    real = measured.time_kernels
    timed: list[Timed] = []

    def time_kernels(kernels: Any, functions: Any, *rest: Any, **options: Any) -> Any:
        timed.extend(functions)
        cache.append(kernels)
        return real(kernels, timed, *rest, **options)

    def call(function: Any, kernel: Any, arguments: Any) -> RepeatedCall:
        taken[kernel.name, kernel.key] = jax.tree.map(np.asarray, arguments[:3])
        return RepeatedCall(function, kernel, arguments)

    def timer(call: RepeatedCall, agree: Any, pause: float = 0.0) -> float:
        call.run(1)
        return agree(1e-3)

    monkeypatch.setattr(measured, "time_kernels", time_kernels)
    monkeypatch.setattr(timing, "RepeatedCall", call)
    monkeypatch.setattr(timing, "measured_seconds", timer)
    params, _, optimizer, batch = made()
    mesh = Mesh(jax.devices()[:num_devices], "data")
    precision = mt.Precision(compute="bfloat16", products=products)
    given = {"mesh": mesh, "precision": precision, "waves": 1, "progress": False}
    mt.Trainer(params, routed, optimizer, batch, **given)
    kept = [row for row in timed if row.kernel.name == "backward of kept"]
    assert kept
    for row in kept:
        masters, inputs, residuals = taken[row.name]
        assert row.forward is not None
        _, expected = cache[0].get(row.forward)(masters, inputs)
        jax.tree.map(np.testing.assert_array_equal, residuals, expected)
