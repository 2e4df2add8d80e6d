"""Losses that change the mesh they are traced in give what plain JAX gives, on one device."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import megatrain_jax as mt
from inside import on_one_device
from megatrain_jax._src.engine.state.placement import placed_on
from megatrain_jax._src.engine.state.processes import Processes
from messages import refuses
from runs import check_close

DIM = 4
BATCH = {"x": np.random.default_rng(0).normal(size=(4, DIM)).astype(np.float32)}
EXPLICIT, AUTO = (
    jax.make_mesh((1,), ("d",), axis_types=(kind,), devices=jax.devices()[:1])
    for kind in (AxisType.Explicit, AxisType.Auto)
)


def layer(x, w):
    return x + jnp.tanh(x @ w)


def auto(function):
    """The function with automatic sharding, for use within an explicit mesh."""
    return jax.sharding.auto_axes(function, axes="d", out_sharding=P())


def sharded(x, w):
    return jax.sharding.reshard(layer(jax.sharding.reshard(x, P("d")), w), P())


def in_mesh(function, mesh=EXPLICIT):
    @functools.wraps(function)
    def run(*args):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args)

    return run


LAYERS = {
    "plain": layer,
    "auto": auto(layer),
    "auto jit": jax.jit(auto(layer)),
    "auto remat": jax.checkpoint(auto(layer)),
    "remat auto": auto(jax.checkpoint(layer)),
    "jit in auto": auto(jax.jit(layer)),
    "reshard": sharded,
}


def loss_of(names, stacked):
    def loss_fn(params, batch):
        x = batch["x"]
        for name, w in zip(names, params["blocks"], strict=True):
            x = LAYERS[name](x, w)
        run = LAYERS[stacked]
        x, _ = jax.lax.scan(lambda x, w: (run(x, w), None), x, params["stack"])
        return ((x @ params["head"]) ** 2).mean()

    return loss_fn


def init_params():
    rng = np.random.default_rng(0)
    blocks = [rng.normal(size=(DIM, DIM)).astype(np.float32) for _ in range(4)]
    return {"blocks": blocks, "stack": np.stack(blocks[:2]), "head": blocks[0][0]}


@pytest.mark.by_default("4")
@pytest.mark.parametrize("seed", range(5))
def test_contexts_within_an_explicit_mesh_are_kept(seed):
    rng = np.random.default_rng(seed)
    *names, stacked = rng.choice(list(LAYERS), 5)
    loss_fn = loss_of(["auto", *names[1:]], stacked)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    with jax.set_mesh(EXPLICIT):
        params = jax.tree.map(jnp.asarray, init_params())

        @jax.jit
        def plain_step(params, state):
            loss, grads = jax.value_and_grad(loss_fn)(params, BATCH)
            updates, state = optimizer.update(grads, state, params)
            return loss, optax.apply_updates(params, updates), state

        trainer = mt.Trainer(
            init_params(), loss_fn, optimizer, BATCH,
            precision=mt.Precision(compute=jnp.float32), progress=False,
        )  # fmt: skip
        state = optimizer.init(params)
        for _ in range(2):
            loss, params, state = plain_step(params, state)
            found = trainer.read(trainer.step(BATCH))
            np.testing.assert_allclose(found["loss"], loss, rtol=2e-6)
        check_close(trainer.params, params, 1e-5, "parameter")


@pytest.mark.by_default("mesh1")
@pytest.mark.parametrize("mesh", [EXPLICIT, AUTO])
def test_a_loss_may_enter_a_mesh_by_itself(mesh):
    names = ["auto" if mesh is EXPLICIT else "plain"] * 4
    loss_fn = in_mesh(loss_of(names, names[0]), mesh)
    trainer = mt.Trainer(
        init_params(), loss_fn, optax.sgd(0.1), BATCH,
        precision=mt.Precision(compute=jnp.float32), progress=False,
    )  # fmt: skip
    expected = loss_of(["plain"] * 4, "plain")(jax.tree.map(jnp.asarray, init_params()), BATCH)
    np.testing.assert_allclose(trainer.read(trainer.step(BATCH))["loss"], expected, rtol=2e-6)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("nested", [False, True])
def test_a_mesh_of_several_devices_is_refused_by_its_axes(kind, nested):
    mesh = AbstractMesh((2, 2), ("rows", "cols"), axis_types=(kind, kind))

    def loss_fn(params, batch):
        run = loss_of(["plain"] * 4, "plain")
        with jax.sharding.use_abstract_mesh(mesh):
            return jax.checkpoint(run)(params, batch) if nested else run(params, batch)

    with refuses(ValueError, "mesh", 4, "rows, cols"):
        mt.plan(init_params(), loss_fn, optax.sgd(0.1), BATCH)


def mesh_of(start, stop):
    kinds = (AxisType.Auto,)
    return jax.make_mesh(
        (stop - start,), ("d",), axis_types=kinds, devices=jax.devices()[start:stop]
    )


def constrained(mesh):
    return lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("d")))


def within_a_scan(place):
    return lambda x: jax.lax.scan(lambda x, _: (place(x), None), x, None, length=2)[0]


TWO, FIRST, SECOND = mesh_of(0, 2), mesh_of(0, 1), mesh_of(1, 2)
PLACED = {
    "constraint": (constrained(TWO), None),
    "undivided": (lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(TWO, P())), None),
    "in a scan": (within_a_scan(constrained(TWO)), None),
    "copied": (lambda x: jax.device_put(x, NamedSharding(TWO, P("d"))), None),
    "results": (within_a_scan(jax.jit(jnp.tanh, out_shardings=NamedSharding(TWO, P()))), None),
    "another device": (constrained(SECOND), FIRST),
    "a single device": (
        lambda x: jax.lax.with_sharding_constraint(x, SingleDeviceSharding(jax.devices()[1])),
        FIRST,
    ),
    "fewer devices": (constrained(FIRST), TWO),
}


def placing(place):
    def loss_fn(params, batch):
        return loss_of(["plain"] * 4, "plain")(params, {"x": place(batch["x"])})

    return loss_fn


@pytest.mark.parametrize("name", PLACED)
def test_values_on_other_devices_than_the_run_s_are_refused_early(name):
    place, mesh = PLACED[name]
    made = init_params(), placing(place), optax.sgd(0.1)
    with pytest.raises(ValueError, match="cpu:1" if "fewer" not in name else "cpu:0"):
        mt.plan(*made, BATCH, mesh=mesh)
    with refuses(ValueError, "places", "devices"):
        mt.Trainer(*made, BATCH, mesh=mesh, progress=False)


@pytest.mark.by_default("first")
@pytest.mark.parametrize("mesh", [FIRST, SECOND, TWO], ids=["first", "second", "both"])
def test_values_on_the_run_s_own_devices_are_left_there(mesh):
    trainer = mt.Trainer(
        init_params(), placing(constrained(mesh)), optax.sgd(0.1), BATCH, mesh=mesh,
        precision=mt.Precision(compute=jnp.float32), progress=False,
    )  # fmt: skip
    expected = loss_of(["plain"] * 4, "plain")(jax.tree.map(jnp.asarray, init_params()), BATCH)
    np.testing.assert_allclose(trainer.read(trainer.step(BATCH))["loss"], expected, rtol=2e-6)


def test_a_mesh_set_around_a_run_of_several_devices_is_named():
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])
    batches = [BATCH]
    with jax.set_mesh(mesh), refuses(ValueError, "`jax.set_mesh`"):
        mt.fit(
            init_params(), loss_of(["plain"] * 4, "plain"), batches, optax.sgd(0.1),
            mesh=mesh, progress=False,
        )  # fmt: skip


@pytest.mark.parametrize(("own", "around"), [*itertools.product((1, 2, 4), repeat=2)])
def test_a_run_is_outside_any_mesh_around_it_unless_both_have_one_device(own, around):
    meshes = [jax.make_mesh((n,), ("d",), devices=jax.devices()[:n]) for n in (own, around)]
    placement = placed_on(meshes[0])
    with jax.set_mesh(meshes[1]):
        with placement.outside_meshes():
            assert jax.sharding.get_abstract_mesh().empty == ((own, around) != (1, 1))
        assert jax.sharding.get_abstract_mesh().size == around


@pytest.mark.by_default("kinds1-1")
@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("kinds", [(AxisType.Explicit, AxisType.Explicit), (AxisType.Auto,) * 2])
def test_a_trainer_steps_within_any_mesh_as_outside(num_devices, kinds, tmp_path):
    around = jax.make_mesh((2, 2), ("rows", "cols"), axis_types=kinds, devices=jax.devices()[:4])
    first, second = (
        mt.Trainer(
            init_params(), loss_of(["plain"] * 4, "plain"),
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)), BATCH,
            precision=mt.Precision(compute=jnp.float32), progress=False,
            mesh=jax.make_mesh((num_devices,), ("d",), devices=jax.devices()[:num_devices]),
        )
        for _ in range(2)
    )  # fmt: skip
    other = {"x": np.concatenate([BATCH["x"], 2 * BATCH["x"]])}
    bad = {"x": np.full_like(BATCH["x"], np.nan)}

    def run(trainer, folder):
        found = [trainer.read(trainer.step(batch))["loss"] for batch in (BATCH, other)]
        found.append(trainer.evaluate([other, BATCH])["loss"])
        trainer.save(folder)
        trainer.step(BATCH)
        trainer.restore(folder)
        with refuses(FloatingPointError, "nothing"):
            trainer.read(trainer.step(bad))
        found.append(trainer.read(trainer.step(BATCH))["loss"])
        return found, jax.tree.leaves((trainer.params, trainer.opt_state))

    expected = run(first, tmp_path / "outside")
    with jax.set_mesh(around):
        jax.tree.map(np.testing.assert_array_equal, run(second, tmp_path / "within"), expected)


def test_a_process_with_all_state_has_all_of_its_own_rows():
    across = Mesh(np.array(jax.devices()[:1])[None], ("across", "data"))
    own = dataclasses.replace(on_one_device(), processes=Processes(2, 1), across=across)
    np.testing.assert_array_equal(own.part_here(jnp.arange(4)), range(4))
