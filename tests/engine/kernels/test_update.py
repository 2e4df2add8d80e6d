"""A group's update on whole slabs against the same update leaf by leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import megatrain_jax as mt
from coded_groups import in_segments
from inside import on_one_device
from megatrain_jax._src.engine.kernels import stage_kernels as stages
from megatrain_jax._src.engine.kernels import updates
from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.spec.step_kernels import step_kernels
from megatrain_jax._src.engine.state.host_leaves import read_leaves
from megatrain_jax._src.engine.state.layout import layout_of
from optimizers import OPTIMIZERS
from runs import SLOW, make_spec
from slabs import all_unpacked, unpacked
from zoo import CASES
from zoo_case import Case

# For these no element of an update depends on another one, or on where it is.
ELEMENTWISE = {
    *("adam", "adamw_schedule", "clip_adamw", "lion", "masked_path", "masked_tree"),
    *("inject_hyperparams", "multi_steps", "apply_if_finite", "normalize", "schedule_free"),
    *("sgd_momentum", "polyak_sgd"),
}
NOT_ELEMENTWISE = {"adafactor", "lamb", "adaptive_grad_clip", "add_noise", "add_noise_alone"}


def skipping(params, batch):
    """A loss of layers that all read the first one's output, and so add to its cotangent."""
    first = x = batch["x"] @ params["first"]
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"]) + first
    return (x**2).mean()


SKIPPING = Case(
    name="skipping",
    build=lambda: {"first": np.eye(64), "layers": [{"w": np.eye(64)} for _ in range(3)]},
    loss_fn=skipping,
    blocks=3,
    templates=1,
    batch=lambda seed: {"x": np.ones((4, 64), np.float32)},
)


def parts_of(optimizer):
    """The updates that differ, each with a layout and a number of messages."""
    spec = make_spec(CASES["nnx_tied"], optimizer)
    groups = zip(spec.optimizer.apply, spec.optimizer.messages, spec.layouts, strict=True)
    different = {part.key: (part, layout, len(messages)) for part, messages, layout in groups}
    assert 2 < len(different) < len(spec.layouts)
    return list(different.values())


def random_arguments(layout, part, num_messages, seed=0):
    rng = np.random.default_rng(seed)

    def slab(layout):
        leaves = [
            jnp.asarray(np.abs(rng.normal(size=shape)), layout.dtype) for shape in layout.shapes
        ]
        return layout.pack(leaves)

    avals = [v.aval for v in part.jaxpr.invars[len(part.jaxpr.invars) - num_messages :]]
    messages = [jnp.asarray(rng.integers(1, 3, a.shape), a.dtype) for a in avals]
    state = tuple(slab(s) for s in layout.state.layouts)
    return slab(layout.master), state, slab(layout.master), messages


def leaf_by_leaf(part, layout):
    """The update of whole slabs, `(masters, state, gradient, messages) -> (masters, state)`.

    All of its leaves are unpacked, and its equations evaluated as they are.
    """
    count = len(layout.master.shapes)

    def compute(masters, state, gradient, messages):
        rows = (gradient, masters)
        leaves = [unpacked(layout.master, slab, i) for slab in rows for i in range(count)]
        args = [*part.consts, *leaves, *all_unpacked(layout.state, state), *messages]
        out = jx.evaluate(part.jaxpr, args)
        return layout.master.pack(out[:count]), layout.state.pack(out[count:])

    return compute


@pytest.mark.by_default("polyak_sgd")
@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_whole_slabs_get_what_their_leaves_get(name):
    for part, layout, num_messages in parts_of(OPTIMIZERS[name]):
        elements = updates._update_of_elements(part, layout)
        assert elements is not None

        def whole(masters, state, gradient, messages, elements=elements):
            rows = [gradient, masters, *state]
            own, *others = elements(rows, jnp.arange(masters.size), messages)
            return own, tuple(others)

        args = random_arguments(layout, part, num_messages)
        mine = jax.jit(whole)(*args)
        theirs = jax.jit(leaf_by_leaf(part, layout))(*args)
        for ours, plain in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
            assert ours.dtype == plain.dtype and ours.shape == plain.shape
        rows = [(layout.master, mine[0], theirs[0])]
        rows += zip(layout.state.layouts, mine[1], theirs[1], strict=True)
        for slab_layout, ours, plain in rows:  # what lies between leaves is nobody's
            ours, plain = (
                read_leaves(slab_layout, slab_layout.encode(slab)) for slab in (ours, plain)
            )
            for one, other in zip(ours, plain, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.by_default("add_noise_alone")
@pytest.mark.parametrize("name", sorted(NOT_ELEMENTWISE))
def test_what_mixes_elements_stays_leaf_by_leaf(name):
    assert all(
        updates._update_of_elements(part, layout) is None
        for part, layout, _ in parts_of(OPTIMIZERS[name])
    )


def test_each_element_comes_from_the_array_of_its_leaf_s_kind():
    layout, columns = layout_of([(64,), (64,), (5,), (64,)], "float32"), jnp.arange(256)
    kinds = [jnp.full(256, kind) for kind in range(3)]
    found = updates._by_leaf(layout, [1, 0, 2, 0], columns, kinds)
    np.testing.assert_array_equal(found, np.repeat([1, 0, 2, 0], [64, 64, 5, 123]))


def test_an_array_for_each_leaf_is_not_one_number():
    def shifted(params):
        shifts = jax.tree.map(
            lambda x: np.arange(x.size, dtype=np.float32).reshape(x.shape), params
        )

        def update(updates, state, params=None):
            return jax.tree.map(lambda g, s: -0.1 * g + s, updates, shifts), state

        return optax.GradientTransformation(lambda params: optax.EmptyState(), update)

    for part, layout, _ in parts_of(shifted):
        assert updates._update_of_elements(part, layout) is None


@pytest.mark.by_default("lion")
@pytest.mark.parametrize("name", ["adamw_schedule", "masked_tree", "lion"])
def test_an_update_is_done_in_place(name):
    """A CPU's compiler still copies moments, which several loops read; a GPU's makes one loop."""
    for part, layout, num_messages in parts_of(OPTIMIZERS[name]):
        run = jax.jit(updates._update(part, layout, True), donate_argnums=(0, 1))
        masters, state, gradient, messages = random_arguments(layout, part, num_messages)
        at_rest = layout.master.encode(masters), layout.state.encode(state)
        args = (*at_rest, in_segments(layout.master, gradient), messages, jnp.array(True))
        memory = run.lower(*args).compile().memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes == layout.master.num_bytes + layout.state.num_bytes
        assert memory.temp_size_in_bytes < layout.state.num_bytes + 128


@pytest.mark.parametrize(
    ("optimizer", "options", "names"),
    [
        ("adamw_schedule", {}, {"update", "backward"}),
        ("clip_adamw", {"precision": mt.Precision.compact()}, {"update", "backward"}),
        (
            "adam",
            {"device_budget": 10**9, "hardware": SLOW},
            {"update", "backward", "backward of kept"},
        ),
    ],
    ids=["added to", "as codes", "with residuals"],
)
def test_kernels_write_state_and_sums_where_they_were(optimizer, options, names):
    """Beside a group's masters and state there is no room for new ones, nor for a second sum."""
    spec = make_spec(SKIPPING, OPTIMIZERS[optimizer], microbatches=2, **options)
    here, cache = on_one_device(), KernelCache()
    # The places of what is written: masters and state, or gradients and cotangents of inputs.
    written = {"update": (0, 1), "backward": (3, 4), "backward of kept": (4, 5)}
    seen = set()
    for kernel in dict.fromkeys(step_kernels(spec.first, spec.layouts, spec.optimizer, here)):
        if kernel.name not in written:
            assert not kernel.donated
            continue
        assert kernel.takes is not None
        arrays = jax.tree.leaves([kernel.takes[at] for at in written[kernel.name]])
        memory = cache.get(kernel).lower(*kernel.takes).compile().memory_analysis()
        expected = sum(array.size * array.dtype.itemsize for array in arrays)
        assert memory.alias_size_in_bytes == expected, kernel.name
        seen |= {kernel.name} if expected else set()
    assert seen == names


def test_a_backward_writes_each_gradient_as_soon_as_it_is_computed():
    """A gradient that waits for another one's place lies beside the slab until then."""
    spec = make_spec(CASES["nnx_tied"], OPTIMIZERS["adam"])
    step = spec.first
    bound = next(b for b in step.stages if b.stage.is_block)
    kernel = stages.backward(bound, step.program, on_one_device(), 1)
    assert kernel.takes is not None
    jaxpr = jax.make_jaxpr(kernel.build())(*kernel.takes).jaxpr
    made = {v: at for at, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}

    def computed(v):
        """The equation that computes a value, seen through what only renames it."""
        eqn = jaxpr.eqns[made[v]]
        renames = eqn.primitive.name in ("reshape", "convert_element_type")
        return computed(eqn.invars[0]) if renames else made[v]

    (group,) = bound.groups
    (slab,) = {v for v in jaxpr.outvars if v.aval.size == spec.layouts[group].master.size}
    written = []
    while (eqn := jaxpr.eqns[made[slab]]).primitive.name == "dynamic_update_slice":
        slab, part = eqn.invars[:2]
        written.append(computed(part))
    assert len(written) > 6 and written == sorted(written, reverse=True)
