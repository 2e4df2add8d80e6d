"""What a model of the user's may ask about its trace: the machine, the devices, the experts."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import megatrain_jax as mt
import small
from megatrain_jax._src.engine.adapt.adapters import adapt
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.loss.block_parts import num_groups
from megatrain_jax._src.engine.program.trace_target import traced_for
from megatrain_jax._src.engine.spec.block_splits import BlockSplit
from megatrain_jax._src.engine.spec.make_spec import make_run_spec


@pytest.fixture
def asked():
    """A loss, and what it was traced for each time."""
    found: list[mt.TraceTarget] = []

    def loss_fn(params, batch):
        found.append(mt.trace_target())
        return small.loss_fn(params, batch)

    return loss_fn, found


@pytest.mark.parametrize("hardware", [None, "H100", "T4"])
def test_a_plan_traces_for_its_machine_and_its_devices(asked, hardware):
    loss_fn, found = asked
    mesh = AbstractMesh((2,), ("data",))
    mt.plan(small.params(), loss_fn, small.OPTIMIZER, small.batch(0), hardware=hardware, mesh=mesh)
    machine = hardware and mt.card(hardware)
    card, widest_heads = (machine.name, machine.widest_heads) if machine else (None, 0)
    expected = mt.TraceTarget(card=card, widest_heads=widest_heads, num_devices=2)
    assert found and set(found) == {expected}
    assert mt.trace_target() == mt.TraceTarget()


def test_a_run_traces_for_this_machine_after_a_plan_for_another(asked):
    loss_fn, found = asked
    model, batch = small.params(), small.batch(0)

    @jax.jit
    def inner(model, batch):
        return loss_fn(model, batch)

    mt.plan(model, inner, small.OPTIMIZER, batch, hardware="H100")
    assert {target.card for target in found} == {mt.card("H100").name}
    found.clear()
    mt.Trainer(model, inner, small.OPTIMIZER, batch, mesh=jax.make_mesh((2,), ("data",)))
    assert found and set(found) == {mt.TraceTarget(num_devices=2)}


def test_a_model_that_reads_experts_by_groups_has_them_divided(monkeypatch):
    way = BlockSplit(3, 2)
    monkeypatch.setattr("megatrain_jax._src.engine.spec.make_spec.BLOCK_SPLITS", (way,))
    sizes = jnp.full(3, 4, jnp.int32)

    def loss_fn(model, batch):
        x = batch
        for block in model:
            x = jnp.tanh(x @ block["w"])
            experts, read = block["experts"], 6 // mt.trace_target().groups_of(6)
            # One operation takes all experts of a group together.
            groups = [experts[start : start + read] for start in range(0, 6, read)]
            x = x + sum(jax.lax.ragged_dot(x, group, sizes) for group in groups)
        return jnp.mean(x**2)

    model = [{"w": jnp.ones((16, 16)), "experts": jnp.ones((6, 16, 16))} for _ in range(2)]
    batch = jnp.ones((12, 16))
    adapted, _ = adapt(model, loss_fn, batch, 0)
    optimizer, options = optax.sgd(1.0), Options(precision="float32")
    spec = make_run_spec(adapted, loss_fn, optimizer, batch, options)
    assert num_groups(spec.leaves) == 2


def test_targets_within_each_other_differ_by_what_was_changed():
    with traced_for(card="NVIDIA H200", widest_heads=256), traced_for(num_devices=4):
        assert mt.trace_target() == ("NVIDIA H200", 256, 4, 1)
    assert [mt.TraceTarget(expert_groups=n).groups_of(60) for n in (1, 8, 33, 99)] == [
        1,
        10,
        60,
        60,
    ]


def test_the_largest_mesh_is_that_of_any_equation():
    def over(size):
        mesh = AbstractMesh((size,), ("x",), axis_types=(AxisType.Auto,))
        spec = PartitionSpec("x")
        return jax.shard_map(jnp.tanh, mesh=mesh, in_specs=spec, out_specs=spec)

    for function, expected in (
        (jnp.tanh, None),
        (lambda x: over(4)(over(2)(x)), 4),
        (lambda x: over(2)(over(4)(x)), 4),
        (lambda x: jax.jit(over(2))(x), 2),
    ):
        mesh = jx.largest_mesh(jax.make_jaxpr(function)(jnp.ones(8)).jaxpr)
        assert (mesh and mesh.size) == expected
