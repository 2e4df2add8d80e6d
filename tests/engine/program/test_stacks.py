"""Stacked layers are cut into layers however the loss takes them, and only layers are."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from orbax.checkpoint import v1

import megatrain_jax as mt
from cuts import run_stages
from inside import spec_of
from megatrain_jax._src.engine.adapt.adapters import adapt
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.layers import known
from megatrain_jax._src.engine.program.layers.blocks import Leaf
from megatrain_jax._src.engine.program.layers.sliced_values import selector
from megatrain_jax._src.engine.program.loss.stage_warnings import uncut_stack_warnings
from megatrain_jax._src.engine.program.loss.trace import cut_loss, leaves_of, trace_loss
from messages import refuses, tells

LAYERS, DIM, VOCAB = 4, 8, 12
Params = dict[str, Any]
BATCH = {"tokens": np.arange(10, dtype=np.int32).reshape(2, 5)}


def layer(x: jax.Array, w: Params) -> jax.Array:
    return x + jnp.tanh(x * w["gain"] @ w["up"] + w["bias"]) @ w["down"]


def init(n: int = LAYERS) -> Params:
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape) / 2, jnp.float32)

    return {
        "embed": draw(VOCAB, DIM),
        "layers": {"gain": draw(n, DIM), "up": draw(n, DIM, 16), "bias": draw(n, 16),
                   "down": draw(n, 16, DIM)},
        "head": draw(DIM, VOCAB),
    }  # fmt: skip


def loss_of(body: Callable[[jax.Array, Any], jax.Array], change=lambda layers: layers):
    def loss(params, batch):
        x = body(params["embed"][batch["tokens"]], change(params["layers"]))
        return jnp.mean((x @ params["head"]) ** 2)

    return loss


def tree(fn, *trees):
    return jax.tree.map(fn, *trees)


def scanned(x, w):
    return lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]


def by_index(x, w, take=lambda a, i: a[i]):
    step = lambda x, i: (layer(x, tree(lambda a: take(a, i), w)), None)  # noqa: E731
    return lax.scan(step, x, jnp.arange(LAYERS))[0]


def by_hand(x, w, take=lambda a, i: a[i]):
    for i in range(LAYERS):
        x = layer(x, tree(lambda a, i=i: take(a, i), w))
    return x


def by_short_scans(x, w):
    for i in range(LAYERS):
        x = scanned(x, tree(lambda a, i=i: a[i : i + 1], w))
    return x


def grouped(x, w):
    w = tree(lambda a: a.reshape(2, LAYERS // 2, *a.shape[1:]), w)
    return lax.scan(lambda x, w: (scanned(x, w), None), x, w)[0]


def rematted_groups(x, w):
    w = tree(lambda a: a.reshape(2, LAYERS // 2, *a.shape[1:]), w)
    return lax.scan(jax.checkpoint(lambda x, w: (scanned(x, w), None)), x, w)[0]


def groups_by_hand(x, w):
    def group(x, w):
        for i in range(LAYERS // 2):
            x = layer(x, tree(lambda a, i=i: a[i], w))
        return x, None

    w = tree(lambda a: a.reshape(2, LAYERS // 2, *a.shape[1:]), w)
    return lax.scan(group, x, w)[0]


def last(a):
    """A stack whose layers are along its last axis."""
    return jnp.moveaxis(a, 0, -1)


def from_last(x, w):
    return scanned(x, tree(lambda a: jnp.moveaxis(a, -1, 0), w))


def two_ends(x, w):
    """The first layer by hand, the others scanned."""
    x = layer(x, tree(lambda a: a[0], w))
    return scanned(x, tree(lambda a: a[1:], w))


# How the layers are stored, made of layers along axis 0, and how the loss takes them.
FORMS: dict[str, tuple[Callable, Callable]] = {
    "last_axis": (last, from_last),
    "last_axis_by_index": (last, functools.partial(by_index, take=lambda a, i: a[..., i])),
    "last_axis_by_hand": (last, functools.partial(by_hand, take=lambda a, i: a[..., i])),
    "reversed": (lambda a: a[::-1], lambda x, w: scanned(x, tree(lambda a: a[::-1], w))),
    "permuted": (
        lambda a: a[jnp.array([2, 0, 3, 1])],
        lambda x, w: scanned(x, tree(lambda a: a[np.array([1, 3, 0, 2])], w)),
    ),
    "groups": (lambda a: a, grouped),
    "rematted_groups": (lambda a: a, rematted_groups),
    "groups_by_hand": (lambda a: a, groups_by_hand),
    "stored_in_groups": (
        lambda a: a.reshape(2, 2, *a.shape[1:]),
        lambda x, w: lax.scan(lambda x, w: (scanned(x, w), None), x, w)[0],
    ),
    "by_index": (lambda a: a, by_index),
    "dynamic_index": (
        lambda a: a,
        functools.partial(by_index, take=lambda a, i: lax.dynamic_index_in_dim(a, i, 0, False)),
    ),
    "take": (lambda a: a, functools.partial(by_index, take=lambda a, i: jnp.take(a, i, axis=0))),
    "fori_loop": (
        lambda a: a,
        lambda x, w: lax.fori_loop(
            0, LAYERS, lambda i, x: layer(x, tree(lambda a: a[i], w)), x
        ),
    ),
    "counted_down": (
        lambda a: a[::-1],
        functools.partial(by_index, take=lambda a, i: a[LAYERS - 1 - i]),
    ),
    "by_hand": (lambda a: a, by_hand),
    "by_hand_in_jit": (
        lambda a: a,
        lambda x, w: functools.reduce(
            lambda x, i: jax.jit(lambda x, w: layer(x, tree(lambda a: a[i], w)))(x, w),
            range(LAYERS),
            x,
        ),
    ),
    "split": (
        lambda a: a,
        lambda x, w: functools.reduce(
            layer,
            [
                dict(zip(w, [jnp.squeeze(r, 0) for r in row], strict=True))
                for row in zip(*(jnp.split(a, LAYERS) for a in w.values()), strict=True)
            ],
            x,
        ),
    ),
    "unstacked": (
        lambda a: a,
        lambda x, w: functools.reduce(
            lambda x, row: layer(x, dict(zip(w, row, strict=True))),
            zip(*map(jnp.unstack, w.values()), strict=True),
            x,
        ),
    ),
    "first_by_hand": (lambda a: a, two_ends),
    "by_short_scans": (lambda a: a, by_short_scans),
    "cast": (lambda a: a, lambda x, w: by_hand(x, tree(lambda a: a * 2.0 / 2.0, w))),
}  # fmt: skip


def cut(params, loss_fn, batch=BATCH):
    """A loss cut into stages, and what computes it as a whole and stage by stage."""
    adapted, initial = adapt(params, loss_fn, batch, 0)

    def loss(parameters, variables, batch, rng):
        return adapted.loss(loss_fn, parameters, variables, batch, rng, True)

    traced = trace_loss(loss, adapted.shapes, adapted.variable_shapes, batch)
    leaves = leaves_of(traced, adapted.paths, adapted.shapes, [True] * len(adapted.paths))
    program = cut_loss(traced, leaves)
    arrays = initial.leaves(range(len(adapted.shapes)))
    data = [*jax.tree.leaves(batch), jax.random.key(3)]

    def staged():
        slices = [arrays[leaf.parameter][selector(leaf.index)] for leaf in leaves]
        return run_stages(program, slices, data)[0]

    return program, leaves, staged, lambda: loss_fn(params, batch)


def shape_of_cut(program) -> list[tuple[bool, int]]:
    """For each stage whether it is a block, and which template it has."""
    keys: dict[Any, int] = {}
    return [(s.is_block, keys.setdefault(s.key, len(keys))) for s in program.stages]


@pytest.mark.parametrize("name", FORMS)
def test_layers_are_stages_as_those_of_a_plain_scan(name):
    stored, body = FORMS[name]
    params = init()
    twin, _, _, whole = cut(params, loss_of(scanned))
    program, leaves, staged, _ = cut(
        params | {"layers": tree(stored, params["layers"])}, loss_of(body)
    )
    assert shape_of_cut(program) == shape_of_cut(twin), [s.name for s in program.stages]
    assert not program.warnings
    np.testing.assert_allclose(staged(), whole(), rtol=1e-5)
    sizes = {sum(jx.num_elements(leaves[i]) for i in s.leaves) for s in program.stages[1:-1]}
    assert len(sizes) == 1


@pytest.mark.parametrize("axis", [0, 1])
def test_a_single_layer_in_a_scan_is_a_block(axis):
    # Such as the first layers of a mixture of experts, which have none and a scan of their own.
    names = {"gain": "gain", "up": "dense_0", "bias": "bias", "down": "dense_1"}

    def loss(params, batch):
        first = {name: jnp.moveaxis(params["first"][names[name]], axis, 0) for name in names}
        x = scanned(params["embed"][batch["tokens"]] + params["class"], first)
        return jnp.mean((scanned(x, params["layers"]) @ params["head"]) ** 2)

    first = {names[name]: jnp.moveaxis(x, 0, axis) for name, x in init(1)["layers"].items()}
    params = {**init(), "first": first, "class": jnp.ones((1, DIM))}
    program, leaves, staged, whole = cut(params, loss)
    found = [stage.name for stage in program.stages if stage.is_block]
    assert found == ["first.0", *(f"layers.{k}" for k in range(LAYERS))]
    assert not program.warnings
    assert {leaf.name: leaf.index for leaf in leaves}["class"] == ()
    np.testing.assert_allclose(staged(), whole(), rtol=1e-5)


def while_loop(x, w):
    """No gradient flows into the loop's layers, but into what comes after."""
    fixed = lax.stop_gradient(w)
    step = lambda s: (s[0] + 1, layer(s[1], tree(lambda a: a[s[0]], fixed)))  # noqa: E731
    start = (0, lax.stop_gradient(x))
    return x + lax.while_loop(lambda s: s[0] < LAYERS, step, start)[1]


def with_mean(x, w):
    """Each layer also meets the product of all."""
    whole = jnp.einsum("nij,njk->ik", w["up"], w["down"])
    return by_hand(x @ whole, w)


def experts(x, w):
    return sum(layer(x, tree(lambda a, i=i: a[i], w)) for i in range(LAYERS))


def experts_by_index(x, w):
    step = lambda y, i: (y + layer(x, tree(lambda a: a[i], w)), None)  # noqa: E731
    return lax.scan(step, x, jnp.arange(LAYERS))[0]


def with_shared(x, w):
    """One block applied several times, with a bias and a gain for each."""
    for i in range(LAYERS):
        x = layer(x, {"gain": w["gain"][i], "bias": w["bias"][i], "up": w["up"].sum(0) / 2,
                      "down": w["down"].sum(0)})  # fmt: skip
    return x


def halves(x, w):
    up, down = w["up"].reshape(-1, 16), w["down"].reshape(16, -1)
    return (
        x + jnp.tanh(x @ up[:DIM]) @ down[:, :DIM] + x @ up[DIM : 2 * DIM] @ down[:, DIM : 2 * DIM]
    )


def positions(x, w):
    table = w["up"].reshape(-1, DIM)
    return x + table[: x.shape[1]]


def looked_up(x, w):
    """Which slice is read is in the data."""
    i = jnp.argmax(x[0, 0]) % LAYERS
    return layer(x, tree(lambda a: a[i], w))


@pytest.mark.by_default("last to first")
@pytest.mark.parametrize("reverse", [False, True], ids=["first to last", "last to first"])
def test_results_of_a_scan_are_in_the_order_of_layers(reverse):
    def loss_fn(params, batch):
        def step(x, w):
            x = layer(x, w)
            return x, jnp.mean(x**2)

        x = params["embed"][batch["tokens"]]
        x, sizes = lax.scan(step, x, params["layers"], reverse=reverse)
        return jnp.mean((x @ params["head"]) ** 2) + sizes @ jnp.array([1.0, -2.0, 3.0, -4.0])

    program, _, staged, whole = cut(init(), loss_fn)
    assert sum(s.is_block for s in program.stages) == LAYERS
    np.testing.assert_allclose(staged(), whole(), rtol=1e-5)


@pytest.mark.by_default("experts", "experts_by_index", "with_shared", "halves", "positions")
@pytest.mark.parametrize(
    "body", [experts, experts_by_index, with_shared, halves, positions, looked_up]
)
def test_what_are_no_layers_stays_whole(body):
    program, leaves, staged, whole = cut(init(), loss_of(body))
    assert not any(leaf.index for leaf in leaves)
    assert not program.warnings
    np.testing.assert_allclose(staged(), whole(), rtol=1e-5)


def all_but_one(x, w):
    return scanned(x, tree(lambda a: a[:-1], w))


def twice_in_one_scan(x, w):
    return scanned(x, tree(lambda a: jnp.concatenate([a, a]), w))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (while_loop, "while_loop"),
        (with_mean, "dot_general"),
        (all_but_one, "only some of them are read"),
        (twice_in_one_scan, "a scan takes them from another array"),
    ],
)
def test_a_stack_that_stays_whole_is_named_with_what_to_write_instead(body, reason):
    program, leaves, staged, whole = cut(init(), loss_of(body))
    assert not any(leaf.index for leaf in leaves)
    (warning,) = program.warnings
    assert reason in warning and "layers/" in warning and "jax.lax.scan" in warning
    np.testing.assert_allclose(staged(), whole(), rtol=1e-5)


def test_slices_that_are_parts_of_blocks_in_a_list_stay_whole_and_are_named():
    params = init()
    blocks = [tree(lambda a, i=i: a[i], params["layers"]) for i in range(LAYERS)]
    stacks = {"up": jnp.stack([b.pop("up") for b in blocks])}

    def body(x, layers):
        for i, block in enumerate(layers["blocks"]):
            x = layer(x, block | {"up": layers["stacks"]["up"][i]})
        return x

    program, leaves, _, _ = cut(
        params | {"layers": {"blocks": blocks, "stacks": stacks}}, loss_of(body)
    )
    assert not any(leaf.index for leaf in leaves)
    assert any(tells(w, "layers/stacks/up", "blocks") for w in program.warnings)


def fused(x, qkv, out):
    q, k, v = qkv
    return x + jnp.tanh(x @ q) * jnp.tanh(x @ k) @ v @ out


def fused_by_scan(x, w):
    body = lambda x, w: (fused(x, (w[0][0], w[0][1], w[0][2]), w[1]), None)  # noqa: E731
    return lax.scan(body, x, (jnp.moveaxis(w["qkv"], 1, 0), w["out"]))[0]


def fused_by_hand(x, w):
    for i in range(LAYERS):
        x = fused(x, [w["qkv"][j, i] for j in range(3)], w["out"][i])
    return x


def fused_by_row(x, w):
    for i in range(LAYERS):
        x = fused(x, w["qkv"][i], w["out"][i])
    return x


@pytest.mark.parametrize(
    ("body", "axis"), [(fused_by_scan, 1), (fused_by_hand, 1), (fused_by_row, 0)]
)
def test_what_lies_beside_each_other_in_a_layer_is_not_cut(body, axis):
    params, rng = init(), np.random.default_rng(1)
    qkv = jnp.asarray(rng.normal(size=(LAYERS, 3, DIM, DIM)) / 2, jnp.float32)
    out = jnp.asarray(rng.normal(size=(LAYERS, DIM, DIM)) / 2, jnp.float32)
    params["layers"] = {"qkv": jnp.moveaxis(qkv, 0, axis), "out": out}
    program, leaves, staged, whole = cut(params, loss_of(body))
    blocks = [stage for stage in program.stages if stage.is_block]
    assert len(blocks) == LAYERS and len({stage.key for stage in blocks}) == 1
    assert {leaf.shape for leaf in leaves if leaf.index} == {(3, DIM, DIM), (DIM, DIM)}
    assert not program.warnings
    np.testing.assert_allclose(staged(), whole(), rtol=1e-5)


@pytest.mark.by_default("1", "3", "4", "5", "6", "7")
@pytest.mark.parametrize("seed", range(8))
def test_any_mixture_of_forms_is_cut_into_layers(seed):
    """Each array lies along its own axis in its own order; some layers are taken by hand."""
    rng = np.random.default_rng(seed)
    params, n = init(), LAYERS
    first = int(rng.integers(0, n))  # so many by hand
    stored, views = {}, {}
    for name, a in params["layers"].items():
        order, axis = rng.permutation(n), int(rng.integers(a.ndim))
        back, whole = np.argsort(order), int(rng.integers(3))
        stored[name] = jnp.moveaxis(a[order], 0, axis)
        views[name] = (back, axis, whole)

    def take(w, name, i):
        back, axis, whole = views[name]
        if whole == 0:
            return jnp.take(jnp.moveaxis(w, axis, 0), jnp.asarray(back)[i], axis=0)
        if whole == 1:
            return lax.dynamic_index_in_dim(w, jnp.asarray(back)[i], axis, keepdims=False)
        return jnp.moveaxis(w, axis, 0)[back][i]

    def body(x, w):
        at = lambda i: {name: take(a, name, i) for name, a in w.items()}  # noqa: E731
        for i in range(first):
            x = layer(x, at(i))
        return lax.fori_loop(first, n, lambda i, x: layer(x, at(i)), x)

    twin, _, _, whole = cut(params, loss_of(scanned))
    program, _, staged, _ = cut(params | {"layers": stored}, loss_of(body))
    assert shape_of_cut(program) == shape_of_cut(twin), [s.name for s in program.stages]
    np.testing.assert_allclose(staged(), whole(), rtol=1e-5)


@pytest.mark.by_default("int32", "uint32")
@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int8])
def test_known_integers_are_those_that_jax_computes(dtype):
    def index(i, table):
        wrapped = jnp.where(i < 3, i + table[1], i - table[0])
        return wrapped, table[wrapped % 4], (wrapped * 2).astype(jnp.int16), i >= table

    rng = np.random.default_rng(0)
    info = np.iinfo(dtype)
    table = rng.integers(info.min, info.max, 4, dtype, endpoint=True)
    for i in (dtype(0), dtype(3), dtype(info.max), dtype(info.min)):
        traced = jx.trace(index, i, table)
        env = dict(zip(traced.jaxpr.invars, map(known.constant, (i, table)), strict=True))
        for eqn in _opened_eqns(traced.jaxpr, env):
            ins = [known.constant(a.val) if jx.is_literal(a) else env[a] for a in eqn.invars]
            env.update(zip(eqn.outvars, known.results(eqn, ins), strict=True))
        computed = index(jnp.asarray(i), jnp.asarray(table))
        for var, expected in zip(traced.jaxpr.outvars, computed, strict=True):
            found = env[var]
            assert found is not None and found.value.dtype == expected.dtype
            np.testing.assert_array_equal(found.value, expected)


def _opened_eqns(jaxpr, env):
    """The equations of a jaxpr with those of its calls in place of these."""
    for eqn in jaxpr.eqns:
        inner = jx.called(eqn)
        if inner is None:
            yield eqn
        else:
            pairs = zip(inner.jaxpr.invars, eqn.invars, strict=True)
            env.update((v, known.constant(a.val) if jx.is_literal(a) else env[a]) for v, a in pairs)
            yield from _opened_eqns(inner.jaxpr, env)
            results = zip(eqn.outvars, inner.jaxpr.outvars, strict=True)
            env.update((v, env[a]) for v, a in results)


@pytest.mark.exhaustive
def test_parameters_lie_as_the_user_stacked_them(tmp_path):
    params = init()
    params["layers"] = tree(lambda a: last(a[::-1]), params["layers"])
    params["layers"]["up"] = jnp.asarray(np.moveaxis(params["layers"]["up"], -1, 1))

    def body(x, w):
        w = w | {"up": jnp.moveaxis(w["up"], 1, -1)}
        return from_last(x, tree(lambda a: a[..., ::-1], w))

    trainer = mt.Trainer(
        params, loss_of(body), optax.adafactor(1e-2, min_dim_size_to_factor=8), BATCH,
        precision=mt.Precision(compute=jnp.float32), progress=False,
    )  # fmt: skip
    assert sum(bool(leaf.index) for leaf in spec_of(trainer).leaves) == 4 * LAYERS
    jax.tree.map(np.testing.assert_array_equal, trainer.params, tree(np.asarray, params))
    loss = float(loss_of(body)(params, BATCH))
    np.testing.assert_allclose(trainer.read(trainer.step(BATCH))["loss"], loss, rtol=1e-5)
    trainer.save(tmp_path / "saved")
    context = v1.Context()
    context.pytree.loading.partial_load = True
    with context:
        saved = v1.load(tmp_path / "saved", {"params": tree(np.zeros_like, params)})["params"]
    jax.tree.map(np.testing.assert_array_equal, saved, trainer.params)
    loss = trainer.evaluate([BATCH])["loss"]
    trainer.step(BATCH)
    trainer.restore(tmp_path / "saved")
    jax.tree.map(np.testing.assert_array_equal, trainer.params, saved)
    assert trainer.evaluate([BATCH])["loss"] == loss


@pytest.mark.by_default("reversed")
@pytest.mark.parametrize("name", ["last_axis", "by_hand", "reversed"])
def test_layers_that_an_optimizer_takes_together_stay_in_one_array(name):
    stored, body = FORMS[name]
    params = init()
    params["layers"] = tree(stored, params["layers"])
    loss_fn, optimizer = loss_of(body), optax.contrib.muon(1e-2)
    with pytest.warns(mt.PlanWarning, match="together.*layers/"):
        trainer = mt.Trainer(
            params, loss_fn, optimizer, BATCH,
            precision=mt.Precision(compute=jnp.float32), progress=False,
        )  # fmt: skip
    state = optimizer.init(params)
    differentiate, update = jax.jit(jax.value_and_grad(loss_fn)), jax.jit(optimizer.update)
    for _ in range(3):
        loss, grads = differentiate(params, BATCH)
        np.testing.assert_allclose(trainer.read(trainer.step(BATCH))["loss"], loss, rtol=1e-5)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    # A scan says that they are layers.
    with refuses(ValueError, "optimizer", "group"):
        mt.plan(init, loss_of(scanned), optimizer, BATCH)


@pytest.mark.parametrize(
    ("step", "counts"),
    [
        (lambda i, x: i + 1, True),
        (lambda i, x: i + (x.sum() > 0).astype(jnp.int32), False),
    ],
)
def test_a_number_that_depends_on_data_is_no_counter(step: Any, counts: bool):
    def loss(w, x):
        def body(carry, _):
            i, x = carry
            return (step(i, x), x @ lax.dynamic_index_in_dim(w, i, keepdims=False)), None

        return lax.scan(body, (0, x), None, length=3)[0][1]

    (eqn,) = jax.make_jaxpr(loss)(jnp.ones((3, 4, 4)), jnp.ones((2, 4))).eqns
    stacked = [v.aval.ndim == 3 for v in eqn.invars]
    integers = [v.aval.ndim == 0 for v in eqn.invars]
    assert sum(stacked) == sum(integers) == 1
    assert known.reads_by_counter(eqn, stacked, integers) is counts


@pytest.mark.parametrize("reason", ["partial", "remade"])
def test_stacks_in_blocks_are_cut_along_another_list(reason):
    def leaf(parameter, block):
        path = (f"layers_{parameter}", "w")
        return Leaf(
            path=path, parameter=parameter, index=(), shape=(4, 8), dtype="float32", block=block
        )

    none = {"mixed": {}, "partial": set(), "remade": set(), "looped": set(), "stacks": []}
    stacks: Any = SimpleNamespace(**none | {reason: {0, 1}})
    leaves = [leaf(0, ("layers_0",)), leaf(1, None)]
    (said,) = uncut_stack_warnings(stacks, leaves)
    assert "layers_1/w" in said and "layers_0" not in said
    assert uncut_stack_warnings(stacks, leaves[:1]) == []
