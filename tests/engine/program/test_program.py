"""Every model of the zoo is cut where its blocks are, and into as few templates as it has kinds."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from cut_cases import cut_case, trace_case
from cuts import TOKENS, cut, run_stages
from megatrain_jax._src.common.remembering import remembering
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.layers.blocks import power
from megatrain_jax._src.engine.program.layers.sliced_values import selector
from megatrain_jax._src.engine.program.loss.trace import cut_loss, leaves_of
from megatrain_jax._src.engine.program.primitives import REMAT
from megatrain_jax._src.engine.program.structural_key import structural_key
from messages import refuses
from zoo import CASES, Case


@pytest.mark.parametrize("name", CASES)
def test_blocks_become_stages_that_share_templates(name):
    case = CASES[name]
    _, program = cut_case(case)
    names = [stage.name for stage in program.stages]
    blocks = [stage for stage in program.stages if stage.is_block]
    assert len(blocks) == case.blocks * case.passes, names
    if case.templates is not None:
        assert len({stage.key for stage in blocks}) == case.templates, names
    assert bool(program.warnings) == case.warns
    assert names[0] == "embedding" and names[-1] == "head"
    assert not program.stages[0].is_block and not program.stages[-1].is_block


def test_a_remat_is_opened_only_for_borders_within_it():
    adapted, _, traced, _ = trace_case(CASES["linen_scan_remat"])
    whole = leaves_of(traced, adapted.paths, adapted.shapes, [True] * len(adapted.paths))
    parts = [replace(leaf, block=leaf.block and (*leaf.block, *leaf.modules)) for leaf in whole]
    with remembering():
        programs = [cut_loss(traced, leaves) for leaves in (whole, parts, whole, parts)]
    names = [{e.primitive.name for s in p.stages for e in s.jaxpr.eqns} for p in programs]
    assert [not REMAT.isdisjoint(found) for found in names] == [True, False, True, False]


@pytest.mark.parametrize("names", [("one/w", "two/w"), ("one/v", "one/w")])
def test_a_remat_over_modules_outside_blocks_is_opened(names):
    """All are in the module of a wrapper, which says nothing."""
    params = {"model": {m: {name: jnp.ones((4, 4)) for name in "vw"} for m in ("one", "two")}}

    def loss_fn(params, batch):
        def twice(x, *weights):
            return jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1])

        read = [params["model"][name[:3]][name[4:]] for name in names]
        return jax.checkpoint(twice)(batch["x"], *read).sum()

    batch = {"x": jnp.ones((2, 4))}
    case = Case(name="remat", build=lambda: params, loss_fn=loss_fn, blocks=0, templates=None)
    _, program = cut_case(replace(case, batch=lambda seed: batch))
    found = {e.primitive.name for stage in program.stages for e in stage.jaxpr.eqns}
    assert REMAT.isdisjoint(found) == (names[0][:3] != names[1][:3])


# Every third by default, since test_equivalence trains all of them.
@pytest.mark.by_default("batchnorm_nnx", "mid_rest")
@pytest.mark.parametrize(
    "name",
    [
        name if number % 3 == 0 else pytest.param(name, marks=pytest.mark.long)
        for number, name in enumerate(CASES)
    ],
)
def test_stages_together_compute_the_loss(name):
    case = CASES[name]
    adapted, initial, traced, batch = trace_case(case)
    leaves = leaves_of(traced, adapted.paths, adapted.shapes, [True] * len(adapted.paths))
    program = cut_loss(traced, leaves)
    parameters = initial.leaves(range(len(adapted.shapes)))
    arrays = [parameters[leaf.parameter][selector(leaf.index)] for leaf in leaves]
    rng = jax.random.key(3)
    data = [*initial.variables(), *jax.tree.leaves(batch), rng]

    @jax.jit
    def staged(arrays, data):
        return run_stages(program, arrays, data)

    @jax.jit
    def whole(parameters, data):
        return jx.evaluate(traced.traced.jaxpr, [*traced.traced.consts, *parameters, *data])

    for ours, theirs in zip(staged(arrays, data), whole(parameters, data), strict=True):
        if jnp.issubdtype(theirs.dtype, jax.dtypes.prng_key):
            ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_skips_pass_by_reference():
    _, program = cut_case(CASES["unet"])
    made = [i for stage in program.stages for i in stage.outputs]
    assert len(made) == len(set(made))
    readers = {i: sum(i in stage.inputs for stage in program.stages) for i in made}
    assert max(readers.values()) >= 2


def test_large_data_is_made_where_it_is_read_also_beside_a_small_sum():
    """A loop over rows gives a table of each, and how many tokens there are."""

    def loss(params, batch):
        x = params["embed"][batch["tokens"]]
        for w in params["layers"]:
            x = jnp.tanh(x @ w)
        count, table = lax.scan(
            lambda count, row: (count + row.size, jax.nn.one_hot(row, 64)),
            jnp.float32(0),
            batch["tokens"],
        )
        return ((x @ params["head"] - table) ** 2).sum() / count

    params = {"embed": jnp.ones((64, 8)), "layers": [jnp.ones((8, 8))] * 3}
    program, _ = cut(params | {"head": jnp.ones((8, 64))}, loss, TOKENS)
    assert max(jx.num_elements(program.values[i]) for i in program.prologue_values) <= 32


def test_a_tied_embedding_is_read_by_two_stages_and_casts_are_repeated():
    _, program = cut_case(CASES["nnx_tied"])
    uses = [i for stage in program.stages for i in stage.leaves]
    tied = {i for i in uses if uses.count(i) > 1}
    assert len(tied) == 1
    assert tied <= set(program.stages[0].leaves) and tied <= set(program.stages[-1].leaves)


def test_the_control_flow_warning_names_the_operation_and_its_memory():
    _, program = cut_case(CASES["while_two"])
    (warning,) = program.warnings
    assert "while" in warning and "KiB" in warning and "blocks.1 + blocks.2" in warning


def test_a_loss_without_parameters_is_refused():
    params = {"w": jnp.ones(3)}
    case = Case(
        name="constant", build=lambda: params, loss_fn=lambda m, b: b["x"].sum(), blocks=0,
        templates=None, batch=lambda seed: {"x": np.ones((2, 3), np.float32)},
    )  # fmt: skip
    with refuses(ValueError, "parameter"):
        cut_case(case)


def test_passes_that_share_an_operation_are_one_stage():
    rng = np.random.default_rng(0)
    blocks = [{"a": rng.normal(size=(4, 4)), "b": rng.normal(size=(4, 4))} for _ in range(3)]

    def loss(params, batch):
        x = batch["x"]
        for block in params["blocks"]:
            # Reads b, then both, then a: twice the same but for a product with a part in both.
            x = jnp.tanh(jnp.tanh(x @ block["b"]) @ (block["a"] @ block["b"])) @ block["a"]
        return jnp.mean(x**2)

    case = Case(
        name="overlapping", build=lambda: {"blocks": jax.tree.map(jnp.float32, blocks)},
        loss_fn=loss, blocks=3, templates=1,
        batch=lambda seed: {"x": np.ones((2, 4), np.float32)},
    )  # fmt: skip
    _, program = cut_case(case)
    assert [stage.name for stage in program.stages] == ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize("seed", range(20))
def test_power_finds_the_number_of_repetitions(seed):
    rng = np.random.default_rng(seed)
    word = [*rng.integers(0, 3, rng.integers(1, 6)).tolist(), 9]
    times = int(rng.integers(1, 5))
    assert power(word * times) == times


def key_of(fn, *args):
    traced = jx.trace(fn, *args)
    return structural_key(traced.jaxpr, traced.consts)


def test_structural_keys_tell_computations_apart():
    x = jnp.ones((3, 4))
    table, other = np.arange(12.0).reshape(3, 4), np.arange(12.0).reshape(3, 4) + 1

    @jax.custom_jvp
    def plain(x):
        return jnp.sin(x)

    @jax.custom_jvp
    def doubled(x):
        return jnp.sin(x)

    plain.defjvp(lambda p, t: (plain(p[0]), jnp.cos(p[0]) * t[0]))
    doubled.defjvp(lambda p, t: (doubled(p[0]), 2 * jnp.cos(p[0]) * t[0]))
    different = [
        lambda x: x * 2.0,
        lambda x: x * 3.0,
        lambda x: x + 2.0,
        lambda x: x * table,
        lambda x: x * other,
        plain,
        doubled,
        jnp.sin,
        lambda x: x.sum(0),
        lambda x: x.sum(1),
        jax.checkpoint(jnp.sin),
        lambda x: jax.lax.scan(lambda c, y: (c + y, None), x[0], x)[0],
        lambda x: jax.lax.scan(lambda c, y: (c - y, None), x[0], x)[0],
    ]
    keys = [key_of(fn, x) for fn in different]
    assert len(set(keys)) == len(keys)
    assert key_of(lambda a: a * table.copy(), x) == key_of(lambda b: b * table, x)
    assert key_of(jax.jit(lambda a: jnp.tanh(a)), x) == key_of(jax.jit(jnp.tanh), x)
