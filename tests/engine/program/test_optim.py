"""The cut optimizer against Optax on the whole tree: values, structure, and what it refuses."""

import dataclasses
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from megatrain_jax._src.common.keys import LASTING, Kind
from megatrain_jax._src.engine.program.optimizer.cut import assemble_state
from megatrain_jax._src.engine.program.optimizer.hyperparameters import (
    find_hyperparameters,
    kept_hyperparameters,
)
from messages import refuses
from optim_trees import (
    TREES,
    Runner,
    Tree,
    blocks_along_axis_1,
    groups_of_blocks,
    make_tree,
    rows_of_blocks,
    run_both,
    stacked_blocks,
    worst_difference,
)
from optimizers import DEFERRED, EPS, LEARNING_RATE, OPTIMIZERS

# Norms of a whole parameter need all its layers, where these are stacked.
DEFERRED_IF_STACKED = DEFERRED | {"adafactor", "lamb"}
# They treat a stack of vectors as one matrix, and so mix layers through more than scalars.
REFUSED_IF_STACKED = {"muon", "adaptive_grad_clip"}
TOLERANCE = 2e-6


# What is refused or deferred for stacks alone, and every third of the others, is cut stacked, too.
STACKED = {
    name
    for number, name in enumerate(OPTIMIZERS)
    if number % 3 == 0 or name in REFUSED_IF_STACKED | DEFERRED_IF_STACKED
}


@pytest.mark.by_default(
    "adamw_schedule-rows", "muon-stacked", "adaptive_grad_clip-stacked", "sgd_momentum-stacked"
)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=pytest.mark.long)
        if kind == "stacked" and name not in STACKED
        else (name, kind)
        for name, kind in itertools.product(OPTIMIZERS, TREES)
    ],
)
def test_cut_agrees_with_optax(name, kind):
    tree = TREES[kind]()
    if kind == "stacked" and name in REFUSED_IF_STACKED:
        with refuses(ValueError, "groups", "layers/b[0]"):
            tree.cut(OPTIMIZERS[name](tree.build(tree.shapes)))
        return
    cut, mine, theirs = run_both(tree, OPTIMIZERS[name])
    assert worst_difference(mine, theirs) <= TOLERANCE
    assert cut.deferred == (name in (DEFERRED_IF_STACKED if kind == "stacked" else DEFERRED))
    assert cut.guarded == (name != "apply_if_finite")
    assert cut.deferred == any(part.jaxpr.outvars for part in cut.reduce)
    if kind == "rows" or not name.startswith("add_noise"):
        assert len({cut.apply[g].key for g in tree.blocks}) == 1
    assert len({cut.initial_state[g].key for g in tree.blocks}) == 1


MORE = {
    "clipped_adam_update": lambda _: optax.chain(
        optax.scale_by_adam(eps=EPS), optax.clip_by_global_norm(0.1), optax.scale(-0.1)
    ),
    "reduce_on_plateau": lambda _: optax.chain(
        optax.sgd(0.1), contrib.reduce_on_plateau(patience=1, cooldown=0)
    ),
    "prodigy": lambda _: contrib.prodigy(0.1, eps=1e-2),
    "momo": lambda _: contrib.momo(0.1),
    "skip_not_finite": lambda _: optax.MultiSteps(
        optax.adam(LEARNING_RATE, eps=EPS), 2, should_skip_update_fn=optax.skip_not_finite
    ),
    "sam": lambda _: contrib.sam(
        optax.adam(LEARNING_RATE, eps=EPS), optax.chain(contrib.normalize(), optax.sgd(0.1))
    ),
    "dog": lambda _: contrib.dog(),
    "snapshot": lambda _: optax.chain(
        optax.adam(LEARNING_RATE, eps=EPS),
        # Not the state of the parameters of this name.
        optax.snapshot("gain", optax.tree.norm),
        optax.snapshot("each", lambda u: jax.tree.map(jnp.linalg.norm, u)),
    ),
    "typed_key": lambda _: optax.chain(
        optax.add_noise(0.01, 0.5, jax.random.key(3)), optax.sgd(0.1)
    ),
}


@pytest.mark.by_default("reduce_on_plateau")
@pytest.mark.parametrize("name", MORE)
def test_cut_agrees_with_optax_beyond_the_zoo(name):
    cut, mine, theirs = run_both(rows_of_blocks(n=2), MORE[name])
    assert worst_difference(mine, theirs) <= TOLERANCE
    late = {"clipped_adam_update", "prodigy", "momo", "skip_not_finite", "sam", "dog", "snapshot"}
    assert cut.deferred == (name in late)


@pytest.mark.by_default("sam")
@pytest.mark.parametrize("name", ["sam", "dog", "snapshot"])
def test_numbers_of_all_parameters_are_those_of_all_layers(name):
    _, mine, theirs = run_both(stacked_blocks(), MORE[name], steps=3)
    assert worst_difference(mine, theirs) <= TOLERANCE


def test_only_reductions_of_state_and_parameters_read_them():
    tree = rows_of_blocks(n=2)
    assert tree.cut(OPTIMIZERS["clip_adamw"](None)).reduce_reads == frozenset()
    assert tree.cut(MORE["clipped_adam_update"](None)).reduce_reads == {Kind.OPTIMIZER_STATE}
    assert stacked_blocks(n=2).cut(OPTIMIZERS["lamb"](None)).reduce_reads == LASTING


@pytest.mark.parametrize("is_scaled", [False, True])
def test_hyperparameters_without_a_schedule_are_known_before_training(is_scaled):
    made = optax.inject_hyperparams(optax.sgd)(lambda count: 0.1 / (1 + count), momentum=0.9)
    cut = rows_of_blocks(n=2).cut(made, is_scaled=is_scaled)
    assert find_hyperparameters(cut).keys() == {"learning_rate", "momentum"}
    assert kept_hyperparameters(cut) == {"momentum": 0.9}


@pytest.mark.parametrize("name", ["apply_if_finite", "clip_adamw"])
def test_a_step_with_nan_does_what_optax_does(name):
    cut, mine, theirs = run_both(rows_of_blocks(n=2), OPTIMIZERS[name], steps=3, bad_step=1)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    finite = all(np.isfinite(x).all() for x in jax.tree.leaves(mine[0]))
    assert finite == (not cut.guarded)


def test_parts_take_all_their_arguments():
    tree = rows_of_blocks(n=2)
    cut = tree.cut(OPTIMIZERS["clip_adamw"](None))
    assert [s.name for s in cut.globals] == ["[1][0].count"]
    assert [s.shape for s in cut.globals] == [()]
    for g, (reduce, apply) in enumerate(zip(cut.reduce, cut.apply, strict=True)):
        count = tree.group_of.count(g)
        assert len(cut.state[g]) == 2 * count
        own = len(apply.consts) + 4 * count
        assert len(apply.jaxpr.invars) == own + len(cut.messages[g])
        assert len(apply.jaxpr.outvars) == 3 * count
        assert len(reduce.jaxpr.invars) == len(reduce.consts) + 4 * count + 1 + len(cut.globals)
        assert len(cut.initial_state[g].jaxpr.outvars) == 2 * count
    scalars = sum(len(part.jaxpr.outvars) for part in cut.reduce)
    inputs = len(cut.combine.consts) + 1 + len(cut.globals) + scalars
    assert len(cut.combine.jaxpr.invars) == inputs
    assert len(cut.combine.jaxpr.outvars) == cut.num_messages + len(cut.globals)


def test_state_of_stacked_parameters_is_owned_layer_by_layer():
    tree = stacked_blocks()
    cut = tree.cut(OPTIMIZERS["adam"](None))
    for layer, g in enumerate(tree.blocks):
        assert {leaf.index for leaf in cut.state[g]} == {(layer,)}
        assert f"[0].mu['layers']['w1'][{layer}]" in {leaf.name for leaf in cut.state[g]}


@pytest.mark.by_default("clip_adamw-groups_of_blocks")
@pytest.mark.parametrize("make", [blocks_along_axis_1, groups_of_blocks])
@pytest.mark.parametrize("name", ["adafactor", "lamb", "clip_adamw", "schedule_free"])
def test_layers_along_other_axes_are_updated_as_optax_does(name, make):
    tree = make()
    cut, mine, theirs = run_both(tree, OPTIMIZERS[name], steps=3)
    assert worst_difference(mine, theirs) <= TOLERANCE
    assert len({cut.apply[g].key for g in tree.blocks}) == 1
    owned = [sum(math.prod(leaf.shape) for leaf in cut.state[g]) for g in tree.blocks]
    assert len(set(owned)) == 1 and owned[0] > 0


def test_one_group_is_never_deferred_by_a_global_norm():
    tree = make_tree({"a": {"w": (4, 4), "b": (4,)}})
    cut, mine, theirs = run_both(tree, OPTIMIZERS["clip_adamw"])
    assert worst_difference(mine, theirs) <= TOLERANCE
    assert not cut.deferred


def test_numbers_of_the_learning_rate_are_sent_once():
    cut = rows_of_blocks(n=3).cut(OPTIMIZERS["adamw_schedule"](None))
    assert cut.num_messages == 3  # two bias corrections and the learning rate
    assert set(cut.messages) == {(0, 1, 2)}


def test_state_without_a_path_is_found_by_what_it_meets():
    def init(params):
        return [jnp.zeros_like(p) for p in jax.tree.leaves(params)]

    def update(updates, state, params=None):
        del params
        leaves, treedef = jax.tree.flatten(updates)
        new = [0.9 * s + g for s, g in zip(state, leaves, strict=True)]
        return jax.tree.unflatten(treedef, [-0.1 * s for s in new]), new

    tree = rows_of_blocks(n=2)
    cut, mine, theirs = run_both(tree, lambda _: optax.GradientTransformation(init, update))
    assert worst_difference(mine, theirs) <= TOLERANCE
    assert all(sum(x.shape != () for x in cut.state[g]) == 3 for g in tree.blocks)


def stateless(update) -> optax.GradientTransformation:
    return optax.GradientTransformation(
        optax.init_empty_state, lambda updates, state, params=None: (update(updates), state)
    )


def averaged(updates):
    """Gives the two first matrices of the blocks their mean."""
    first, second, *rest = updates["blocks"]
    mean = (first["w1"] + second["w1"]) / 2
    return {**updates, "blocks": [{**first, "w1": mean}, {**second, "w1": mean}, *rest]}


def swapped(updates):
    first, second, *rest = updates["blocks"]
    return {**updates, "blocks": [second, first, *rest]}


def wrong(updates):
    raise TypeError("not today")


def each(function):
    return lambda updates: jax.tree.map(function, updates)


def scaled(gradient):
    """A gradient times an array of length 1 along the axis of the layers."""
    if not gradient.ndim:
        return gradient
    row = gradient[:1]
    return gradient * jnp.arange(1.0, row.size + 1).reshape(row.shape)


@pytest.mark.by_default("acos", "log2", "length 1")
@pytest.mark.parametrize(
    "function",
    [
        each(lambda g: jnp.arccos(jnp.clip(g, -1, 1))),
        each(lambda g: jax.scipy.special.gammainc(jnp.abs(g) + 1, jnp.abs(g))),
        each(lambda g: jnp.log2(1 + jnp.abs(g))),
        each(scaled),
    ],
    ids=["acos", "igamma", "log2", "length 1"],
)
def test_any_elementwise_update_is_cut_along_stacked_layers(function):
    make = optax.chain(stateless(function), optax.sgd(0.1))
    cut, mine, theirs = run_both(stacked_blocks(), lambda _: make, steps=2)
    assert not cut.deferred and worst_difference(mine, theirs) <= TOLERANCE


TWICE = optax.chain(optax.clip_by_global_norm(1.0), optax.normalize_by_update_norm())


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (optax.lbfgs(), ["traced", "value_fn", "optax.adamw"]),
        (stateless(wrong), ["traced", "TypeError: not today", "eval_shape"]),
        (stateless(averaged), ["several groups", "blocks/0/w1", "blocks/1/w1"]),
        (stateless(swapped), ["several groups", "blocks/0/", "blocks/1/", "scalars"]),
        (
            optax.flatten(optax.sgd(0.1)),
            ["several groups", "(concatenate)", "blocks/0/w1", "optax.flatten"],
        ),
        (TWICE, ["again", "blocks/0/w1"]),
        (contrib.mechanize(optax.sgd(1.0)), ["again", "contrib.mechanize"]),
        (
            contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True),
            ["grad_fn must be provided", "opaque_mode=False"],
        ),
    ],
    ids=["lbfgs", "wrong", "averaged", "swapped", "flattened", "twice", "mechanize", "opaque sam"],
)
def test_what_cannot_be_cut_is_named(optimizer, words):
    with pytest.raises(ValueError, match="^optimizer") as error:
        rows_of_blocks().cut(optimizer)
    assert [w for w in words if w not in str(error.value)] == []
    listed = re.search(r"among ([^;]*);", str(error.value))
    assert listed is None or len(listed[1].split(", ")) <= 6


def test_large_state_of_no_group_is_refused():
    def init(params):
        del params
        return {"table": jnp.zeros((300, 300))}

    def update(updates, state, params=None):
        del params
        total = state["table"].sum()
        return jax.tree.map(lambda g: g * total, updates), state

    with refuses(ValueError, "state['table']", "float32[300, 300]"):
        rows_of_blocks().cut(optax.GradientTransformation(init, update))


def test_state_that_changes_its_dtype_is_refused():
    def init(params):
        return {"mu": jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)}

    def update(updates, state, params=None):
        del params
        return updates, {"mu": jax.tree.map(lambda g, m: g + m, updates, state["mu"])}

    with pytest.raises(ValueError, match=r"state\['mu'\].* bfloat16\[.* float32"):
        rows_of_blocks().cut(optax.GradientTransformation(init, update))


def test_state_that_starts_from_other_parameters_is_refused():
    def init(params):
        first, second, *rest = params["blocks"]
        return {"start": {**params, "blocks": [second, first, *rest]}}

    def update(updates, state, params=None):
        del params
        return jax.tree.map(jnp.multiply, updates, state["start"]), state

    with refuses(ValueError, "state['start']['blocks'][0]"):
        rows_of_blocks().cut(optax.GradientTransformation(init, update))


def huge() -> Tree:
    """About 120 billion parameters in 24 blocks of 10 arrays."""
    d, hidden = 20480, 65536
    block = {"q": (d, d), "k": (d, 5120), "v": (d, 5120), "o": (d, d), "up": (d, hidden)}
    block |= {"gate": (d, hidden), "down": (hidden, d), "norm1": (d,), "norm2": (d,), "b": (d,)}
    ends = {"embed": (128256, d), "head": (d, 128256)}
    return make_tree({**ends, "blocks": [block] * 24})


def test_an_optimizer_of_120_billion_parameters_is_cut_without_arrays():
    tree = huge()
    assert sum(int(np.prod(s.shape)) for s in tree.shapes) > 120e9
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)
    cut = tree.cut(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)))
    assert cut.deferred
    assert cut.num_messages == 5
    assert len({cut.apply[g].key for g in tree.blocks}) == 1
    assert len({cut.initial_state[g].key for g in tree.blocks}) == 1
    assert len({cut.reduce[g].key for g in tree.blocks}) <= 2  # the first starts the sum
    assert all(len(cut.apply[g].jaxpr.eqns) < 400 for g in tree.blocks)


def test_initial_state_is_what_optax_makes():
    tree = stacked_blocks(n=2)
    params = [np.full(s.shape, 0.5, np.float32) for s in tree.shapes]
    optimizer = contrib.schedule_free_adamw(LEARNING_RATE)
    runner = Runner(tree, tree.cut(optimizer), params)
    expected = optimizer.init(tree.build(list(map(jnp.asarray, params))))
    mine = assemble_state(runner.cut, runner.state, runner.globals)
    assert worst_difference(mine, expected) == 0


def test_stacked_gradients_are_named_by_the_operation_that_reads_them():
    def update(updates):
        both = jnp.stack([block["w1"] for block in updates["blocks"]])
        whitened = jnp.cumsum(both, axis=0)
        blocks = zip(updates["blocks"], whitened, strict=True)
        return {**updates, "blocks": [block | {"w1": w} for block, w in blocks]}

    with refuses(ValueError, "(cumsum)", "blocks/0/w1"):
        rows_of_blocks(n=2).cut(stateless(update))


def spread(side):
    """Adds to all gradients parts of a matrix that one block's gradient fills with its sum."""

    def update(updates):
        sums = jnp.full((side * side,), updates["blocks"][0]["w1"].sum())
        return jax.tree.map(lambda g: g + sums[: g.size].reshape(g.shape), updates)

    return lambda _: stateless(update)


def test_scalars_that_groups_share_may_be_arrays_of_some_size():
    cut, mine, theirs = run_both(rows_of_blocks(n=2), spread(256))
    assert cut.deferred and worst_difference(mine, theirs) <= TOLERANCE
    with refuses(ValueError, "groups", "blocks/0/w1"):
        rows_of_blocks(n=2).cut(spread(257)(None))


def test_averages_are_first_in_their_group_and_in_the_order_of_its_leaves():
    tree = stacked_blocks()
    # All layers in one group: its leaves are layer by layer, the state parameter by parameter.
    tree = dataclasses.replace(tree, group_of=tuple(int(x.block is not None) for x in tree.leaves))
    cut = tree.cut(OPTIMIZERS["adam"](None), ema_decay=0.5)
    for group in range(2):
        leaves = [x for g, x in zip(tree.group_of, tree.leaves, strict=True) if g == group]
        averages = cut.state[group][: len(leaves)]
        assert [(x.leaf, x.index) for x in averages] == [(x.parameter, x.index) for x in leaves]
        rest = cut.state[group][len(leaves) :]
        assert all(cut.state_paths[x.leaf][:2] in {("0", "mu"), ("0", "nu")} for x in rest)
