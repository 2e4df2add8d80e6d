"""Frozen parameters: exact results for the others, and neither gradients nor state nor way back."""

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import megatrain_jax as mt
import small
from inside import spec_of, store_of
from megatrain_jax._src.common.keys import PASSING, Kind
from megatrain_jax._src.common.trees import path_name
from megatrain_jax._src.engine.adapt.adapters import adapt, flatten, is_frozen, trainable_mask
from megatrain_jax._src.engine.schedule.instructions import Op
from messages import refuses, tells, warns
from optimizers import OPTIMIZERS
from oracle import train_plain
from runs import NUM_STEPS, SLOW, check_close, check_same_bits, make_trainer, train
from workloads import all_resident_bytes
from zoo import CASES
from zoo_case import Case

pytestmark = pytest.mark.usefixtures("started_once")
TOLERANCE = 1e-6


def tied_loss(params, batch):
    """The small model's loss between two products with one matrix."""
    embed = params["embed"]
    return small.loss_fn([{"w": embed}, *params["layers"], {"w": embed.T}], batch)


TIED = Case(
    name="tied",
    build=lambda: {"embed": small.params()[0]["w"], "layers": small.params()},
    loss_fn=tied_loss,
    blocks=2,
    templates=1,
    batch=small.batch,
)
RUNS = [
    ("tied", r"embed", "clip_adamw", 2),
    ("nnx_tied", r"attention|attn|mlp/up", "clip_adamw", 1),
    ("nnx_tied", r"blocks/[12]/", "adamw_schedule", 2),
    ("nnx_tied", r"embed", "clip_adamw", 2),
    ("nnx_scan", r"bias", "adamw_schedule", 1),
    pytest.param("linen_scan_remat", r"kernel", "clip_adamw", 1, marks=pytest.mark.long),
    ("linen_numbered", r"head", "adamw_schedule", 1),
    ("shared_block", r"bias|norm", "clip_adamw", 1),
    ("moe", r"expert|router", "adafactor", 1),
    ("dropout_nnx", r"kernel", "adamw_schedule", 1),
    ("unused", r"blocks/0/|spare", "clip_adamw", 1),
]


def names_of(case):
    adapted, _ = adapt(case.build(), case.loss_fn, case.batch(0), 0)
    return [path_name(path) for path in adapted.paths]


def masked(optimizer, pattern, names):
    """The same optimizer for the parameters that are trained; the others get no update."""

    def make(params):
        trained = [re.search(pattern, name) is not None for name in names]
        mask = jax.tree.unflatten(jax.tree.structure(params), trained)
        return optax.chain(
            optax.masked(optimizer(params), mask),
            optax.masked(optax.set_to_zero(), jax.tree.map(lambda x: not x, mask)),
        )

    return make


@pytest.mark.by_default("tied-embed-clip_adamw-2")
@pytest.mark.parametrize(("name", "pattern", "optimizer", "microbatches"), RUNS)
def test_training_a_part_agrees_with_masked_optax(name, pattern, optimizer, microbatches):
    case = {**CASES, TIED.name: TIED}[name]
    names = names_of(case)
    trained = [re.search(pattern, n) is not None for n in names]
    assert any(trained) and not all(trained), names
    batches = [case.batch(seed) for seed in range(NUM_STEPS)]
    plain = train_plain(
        case, masked(OPTIMIZERS[optimizer], pattern, names), batches, microbatches=microbatches
    )
    trainer = make_trainer(
        case, OPTIMIZERS[optimizer], microbatches=microbatches, trainable=pattern
    )
    before = [np.array(x) for x in jax.tree.leaves(trainer.params)]
    run = train(trainer, batches, gradients=False)
    np.testing.assert_allclose(run.losses, plain.losses, rtol=5e-7)
    check_close(run.params, plain.params, TOLERANCE, "parameter")
    check_close(run.opt_state, plain.opt_state[0].inner_state, 4 * TOLERANCE, "optimizer state")
    for old, new, trains in zip(before, jax.tree.leaves(run.params), trained, strict=True):
        assert trains or np.array_equal(old, new)


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", ["adamw_schedule", "clip_adamw"])
def test_every_budget_and_residuals_give_the_same_results(optimizer):
    case = CASES["nnx_tied"]
    batches = [case.batch(seed) for seed in range(NUM_STEPS)]

    def make(budget, hardware=None):
        return make_trainer(
            case,
            OPTIMIZERS[optimizer],
            budget=budget,
            trainable=r"blocks/\d/mlp/down",
            hardware=hardware,
        )

    smallest = make("least")
    reference = train(smallest, batches, gradients=False)
    most = all_resident_bytes(spec_of(smallest).first.workload)
    for budget in ((smallest.schedule.smallest_bytes + most) // 2, 10**9):
        run = train(make(budget), batches, gradients=False)
        check_same_bits(run.params, reference.params)
    keeping = make(10**9, hardware=SLOW)
    assert keeping.schedule.kept
    check_close(train(keeping, batches, gradients=False).params, reference.params, 1e-6, "kept")


@pytest.mark.by_default("clip_adamw")
@pytest.mark.parametrize("optimizer", ["adamw_schedule", "clip_adamw"])
def test_frozen_groups_travel_one_way_and_nothing_runs_before_the_first_trained(optimizer):
    case = CASES["nnx_tied"]
    last = max(int(m.group(1)) for n in names_of(case) if (m := re.match(r"blocks/(\d)", n)))
    trainer = make_trainer(
        case, OPTIMIZERS[optimizer], budget="least", trainable=rf"blocks/{last}/mlp"
    )
    spec = spec_of(trainer)
    frozen = spec.grouping.frozen
    assert len(frozen) == len(spec.grouping.names) - 1
    schedule = spec.first.schedule
    for instructions in (schedule.cold, schedule.steady, schedule.flush):
        keyed = [(r.op, r.key) for r in instructions if r.key and r.key.kind not in PASSING]
        ops = {(op, key.kind) for op, key in keyed if key.owner in frozen}
        assert ops <= {(Op.FETCH, Kind.MASTERS), (Op.RELEASE, Kind.MASTERS)}
        assert frozen.isdisjoint(r.group for r in instructions)
    backwards = {r.stage for r in schedule.steady if r.op is Op.BACKWARD}
    first = next(s for s, b in enumerate(spec.first.stages) if b.trained)
    assert backwards == set(range(first, len(spec.first.stages))) and first > 1
    assert not any(spec.first.stages[first].stage.active)  # nothing goes back further
    sizes = [layout.sizes(None) for layout in spec.layouts]
    assert not any(sizes[g][Kind.OPTIMIZER_STATE] for g in frozen)
    train(trainer, [case.batch(0)], gradients=False)
    assert {g for kind, g in store_of(trainer).host if kind is Kind.OPTIMIZER_STATE}.isdisjoint(
        frozen
    )


@pytest.mark.exhaustive
def test_frozen_parameters_can_be_kept_in_bf16(tmp_path):
    case = CASES["nnx_tied"]
    pattern = ".*norm"
    whole = make_trainer(case, OPTIMIZERS["clip_adamw"], trainable=pattern)
    small = make_trainer(case, OPTIMIZERS["clip_adamw"], trainable=pattern, frozen=jnp.bfloat16)
    trained = [re.search(pattern, name) is not None for name in names_of(case)]
    for trains, exact, kept in zip(
        trained, jax.tree.leaves(whole.params), jax.tree.leaves(small.params), strict=True
    ):
        assert kept.dtype == (np.float32 if trains else jnp.bfloat16)
        np.testing.assert_array_equal(kept, exact.astype(kept.dtype))
    assert small.plan.frozen_bytes * 2 == whole.plan.frozen_bytes
    assert small.plan.num_frozen == whole.plan.num_frozen > 0
    assert tells(str(small.plan), "trained")
    everything = make_trainer(case, OPTIMIZERS["clip_adamw"])
    assert whole.plan.host_bytes < 0.5 * everything.plan.host_bytes
    assert whole.plan.flops_per_step < everything.plan.flops_per_step
    # A checkpoint has them as they are kept, and the run goes on from it to the bit.
    losses = [small.read(small.step(case.batch(s)))["loss"] for s in range(2)]
    small.save(tmp_path / "2")
    saved = small.params
    other = make_trainer(case, OPTIMIZERS["clip_adamw"], trainable=pattern, frozen=jnp.bfloat16)
    other.restore(tmp_path / "2")
    for seed in (2, 3):
        losses.append(small.read(small.step(case.batch(seed)))["loss"])
        assert other.read(other.step(case.batch(seed)))["loss"] == losses[-1]
    check_same_bits(other.params, small.params)
    # Given parameters may be rounded where that was asked for, and only there.
    exact = make_trainer(case, OPTIMIZERS["clip_adamw"], trainable=pattern, params=whole.params)
    rounded = make_trainer(
        case, OPTIMIZERS["clip_adamw"], trainable=pattern, frozen=jnp.bfloat16, params=exact.params
    )
    assert {x.dtype.name for x in jax.tree.leaves(rounded.params)} == {"float32", "bfloat16"}
    with warns(UserWarning, "converted"):
        whole.restore(tmp_path / "2")
    for wide, kept in zip(*map(jax.tree.leaves, (whole.params, saved)), strict=True):
        np.testing.assert_array_equal(wide, kept.astype(wide.dtype))


@pytest.mark.usefixtures("traced_once")
def test_a_function_chooses_and_mistakes_are_named():
    seen = []

    def choose(path):
        seen.append(path)
        return path.endswith("bias")

    chosen = plan_of(choose)
    adapted, _ = adapt(build_adapted, adapted_loss, ADAPTED_BATCH, 0)
    assert seen == [path_name(path) for path in adapted.paths]
    assert chosen.num_frozen
    # A list chooses what its patterns choose, joined as alternatives.
    tree = adapted.params_tree(adapted.shapes)
    assert trainable_mask(("bias", "pair"), tree) == trainable_mask("bias|pair", tree)
    # Names are whole ones, at any place of a path; expressions are searched for in it.
    tree = {n: {"0": SHAPE, "10": SHAPE} for n in ("head", "multihead", "head_norm")}
    for given, expected in {
        "head": "head/0 head/10",
        "10": "head/10 multihead/10 head_norm/10",
        "head/1": "",
        "/head/10/": "head/10",
        "d/1": "",
        "head/1.*": "head/10 multihead/10",
        "^head": "head/0 head/10 head_norm/0 head_norm/10",
        ".*_norm": "head_norm/0 head_norm/10",
    }.items():
        if not expected:
            with refuses(ValueError, f"'{given}'", f"'.*{given}'"):
                trainable_mask(given, tree)
            continue
        paths = [path_name(path) for path in flatten(tree)[0]]
        chosen = itertools.compress(paths, trainable_mask(given, tree))
        assert {*chosen} == {*expected.split()}
    for bad, error, *named in [
        ("layers/q_proj", ValueError, "layers/q_proj", "model"),
        ("(", ValueError, "(", "regular"),
        (["bias", "q_proj"], ValueError, "'q_proj'", "model"),
        (3, TypeError, "`trainable`", "regular"),
    ]:
        with refuses(error, *named):
            plan_of(bad)
    params = {"w": jnp.ones((4, 1)), "spare": jnp.ones(1)}
    with refuses(ValueError, "parameter", "`trainable`"):
        mt.plan(
            params, lambda p, b: (b["x"] @ p["w"]).mean(), SGD, ADAPTED_BATCH, trainable="spare"
        )


class Adapted(nnx.Module):
    """Layers with Flax's own adapters, and a parameter with two arrays."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.LoRALinear(4, 4, lora_rank=2, rngs=rngs) for _ in range(2)])
        self.pair = nnx.Param({"a": jnp.ones(4), "b": jnp.ones(4)})
        self.head = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x * self.pair["a"] + self.pair["b"])


def build_adapted():
    return Adapted()


def adapted_loss(model, batch):
    return (model(batch["x"]) ** 2).mean()


SGD, SHAPE = optax.sgd(0.1), jax.ShapeDtypeStruct((), jnp.float32)
ADAPTED_BATCH = {"x": np.ones((2, 4), np.float32)}
FILTERS = [
    nnx.LoRAParam,
    nnx.OfType(nnx.LoRAParam),
    nnx.Not(nnx.LoRAParam),
    nnx.Any(nnx.LoRAParam, nnx.PathContains("head")),
    nnx.All(nnx.Param, nnx.PathContains(1)),
    nnx.PathContains("lora", exact=False),
    nnx.filterlib.PathIn(("pair",), ("head", "bias")),
    lambda path, value: path[0] == "layers" and value.ndim == 2,
    lambda path, value: isinstance(value, nnx.LoRAParam) or path == ("pair",),
    (nnx.LoRAParam, nnx.PathContains("bias")),
]


@pytest.mark.parametrize("given", FILTERS, ids=[str(number) for number in range(len(FILTERS))])
def test_filters_of_flax_choose_what_flax_chooses(given):
    model = Adapted()
    expected = {
        "/".join(map(str, path))
        for path, value in nnx.to_flat_state(nnx.state(model, nnx.Param))
        if nnx.filterlib.to_predicate(given)(path, value)
    }
    adapted, _ = adapt(lambda: Adapted(), adapted_loss, ADAPTED_BATCH, 0)
    names = [path_name(path) for path in adapted.paths]
    mask = trainable_mask(given, adapted.params_tree(adapted.shapes))
    chosen = {name for name, is_chosen in zip(names, mask, strict=True) if is_chosen}
    assert chosen == {
        n for n in names if n in expected or n.startswith("pair/") & ("pair" in expected)
    }
    assert chosen and len(chosen) < len(names)


def plan_of(trainable):
    return mt.plan(build_adapted, adapted_loss, SGD, ADAPTED_BATCH, trainable=trainable)


def test_a_plan_counts_the_parameters_that_a_filter_freezes():
    model = Adapted()
    size = {
        kind: sum(x.size for x in jax.tree.leaves(nnx.state(model, kind)))
        for kind in (nnx.Param, nnx.LoRAParam)
    }
    assert plan_of(nnx.LoRAParam).num_frozen == size[nnx.Param] - size[nnx.LoRAParam]
    # A pattern beside a filter is a regular expression, no tag.
    both = plan_of([nnx.LoRAParam, "^head/b"])
    assert both.num_frozen == size[nnx.Param] - size[nnx.LoRAParam] - 1
    assert (
        plan_of(True).num_frozen == plan_of(...).num_frozen == plan_of([nnx.Param]).num_frozen == 0
    )


@pytest.mark.usefixtures("traced_once")
def test_a_choice_of_all_parameters_is_said():
    for given, number in ((lambda path: True, 1), (None, 0), (True, 0), (..., 0), (nnx.Param, 0)):
        assert len(plan_of(given).warnings) == number


@pytest.mark.parametrize(
    ("bad", "kind", "named"),
    [
        (re.compile("lora").search, TypeError, "head/bias"),
        (lambda path: path, TypeError, "head/bias"),
        (lambda path, value: value, TypeError, "head/bias"),
        (lambda path, value: value[...].sum() > 0, TypeError, "`trainable`=.* head/bias.*shape"),
        ([nnx.LoRAParam, lambda path: 1], TypeError, "head/bias"),
        (nnx.LoRAParam[jax.Array], TypeError, "head/bias"),
        (re.compile("lora"), TypeError, "lora"),
        ({"lora": True}, TypeError, "trainable"),
        ([nnx.LoRAParam, None], TypeError, "trainable"),
        (nnx.BatchStat, ValueError, "BatchStat"),
        ([nnx.LoRAParam, nnx.BatchStat], ValueError, "BatchStat"),
        (False, ValueError, "False"),
        (nnx.Not(...), ValueError, "Not"),
    ],
)
def test_choices_without_a_clear_answer_are_refused(bad, kind, named):
    with pytest.raises(kind, match=named):
        plan_of(bad)


class Marked(nnx.Module):
    """A product of two vectors, of which one is never trained."""

    def __init__(self):
        self.free = nnx.Param(jnp.arange(1.0, 5.0))
        self.fixed = nnx.Param(jnp.arange(2.0, 6.0), trainable=False)


def test_what_a_model_marks_is_not_trained():
    def loss(model, batch):
        return ((batch["x"] * model.free[...] * model.fixed[...]) ** 2).mean()

    made = (lambda: Marked()), loss, optax.adamw(0.1, weight_decay=0.1), ADAPTED_BATCH
    free, fixed = Marked().free[...], Marked().fixed[...]

    def plain(free):
        return ((ADAPTED_BATCH["x"] * free * fixed) ** 2).mean()

    updates: Any = made[2].update(jax.grad(plain)(free), made[2].init(free), free)[0]
    trainer = mt.Trainer(*made)
    trainer.step(ADAPTED_BATCH)
    np.testing.assert_allclose(trainer.params["free"][...], free + updates, rtol=1e-6)
    np.testing.assert_array_equal(trainer.params["fixed"][...], fixed)
    for trainable in (None, "fixed|free", nnx.Param):
        assert mt.plan(*made, trainable=trainable).num_frozen == 4
    for trainable in "fixed", ("free", "fixed"):
        with refuses(ValueError, "`trainable`='fixed'", "trainable=False"):
            mt.plan(*made, trainable=trainable)
    no_word: Any = "no"
    with refuses(TypeError, "`trainable`", repr(no_word)):
        mt.plan(lambda: nnx.Dict(w=nnx.Param(jnp.ones(2), trainable=no_word)), *made[1:])


def test_filters_of_types_choose_nothing_in_a_tree_of_arrays():
    params = {"w": jnp.ones((4, 1)), "b": jnp.ones(1)}

    def loss(params, batch):
        return ((batch["x"] @ params["w"] + params["b"]) ** 2).mean()

    made = params, loss, optax.sgd(0.1), ADAPTED_BATCH
    with refuses(ValueError, "LoRAParam", "types"):
        mt.plan(*made, trainable=nnx.LoRAParam)
    assert mt.plan(*made, trainable=nnx.PathContains("w")).num_frozen == 1
    assert mt.plan(*made, trainable=lambda path, value: value.shape == (1,)).num_frozen == 4


def test_a_module_is_frozen_as_the_smallest_one_around_it_with_parameters():
    trained = {("block", "norm", "scale"): False, ("block", "w"): True, ("head", "w"): False}
    found = {
        path: is_frozen(tuple(path.split("/")), [*trained], [*trained.values()])
        for path in ("block", "block/drop", "block/norm", "block/norm/seen", "head/drop", "other")
    }
    assert [path for path, frozen in found.items() if frozen] == [
        *("block/norm", "block/norm/seen", "head/drop")
    ]
