"""The trainer as a user meets it: evaluation, bad input, numbers that are not finite, plans."""

import copy
import itertools
import pickle
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import megatrain_jax as mt
import small
from inside import engine_of, pinned_arrays, unread_of
from megatrain_jax._src.engine.history import weighted_means
from megatrain_jax._src.engine.options.batch_checks import check_batch, num_rows
from megatrain_jax._src.engine.program.loss.stages import find_examples
from messages import refuses, tells
from optimizers import OPTIMIZERS
from poison import poisoned
from runs import check_same_bits, make_trainer
from zoo import CASES

pytestmark = pytest.mark.usefixtures("started_once")
FP32 = mt.Precision(compute=jnp.float32)


class Net(nnx.Module):
    """Three residual layers; `scale` in the batch makes the loss or one gradient overflow."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(3)])

    def __call__(self, x: jax.Array, poison: jax.Array) -> jax.Array:
        for i, layer in enumerate(self.layers):
            x = x + jnp.tanh(layer(x))
            if i == 1:
                x = poisoned(x, poison)
        return x


def build() -> Net:
    return Net(nnx.Rngs(0))


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"], batch["poison"]) - batch["y"]) ** 2)


def make_batch(seed=0, poison=1.0, y=None):
    x = np.random.default_rng(seed).normal(size=(4, 8)).astype(np.float32)
    y = x[:, ::-1].copy() if y is None else np.full_like(x, y)
    return {"x": x, "y": y, "poison": np.full(4, poison, np.float32)}


ADAM = optax.adam(1e-2)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAM)


def make(optimizer: optax.GradientTransformation = ADAM, **options):
    return mt.Trainer(build, loss_fn, optimizer, make_batch(), precision=FP32, **options)


@pytest.mark.by_default("immediate")
@pytest.mark.parametrize("optimizer", [ADAM, CLIPPED], ids=["immediate", "deferred"])
def test_a_loss_that_is_not_finite_changes_nothing(optimizer):
    trainer = make(optimizer)
    trainer.step(make_batch(0))
    before, state = trainer.params, trainer.opt_state
    metrics = trainer.step(make_batch(1, y=np.nan))
    with refuses(FloatingPointError, "loss", "step 2", "nan", "nothing"):
        trainer.read(metrics)
    assert trainer.num_steps == 1, "it is not counted"
    check_same_bits(trainer.params, before)
    check_same_bits(trainer.opt_state, state)
    # The run goes on as if the step had not been.
    plain = make(optimizer)
    plain.step(make_batch(0))
    trainer.read(trainer.step(make_batch(2)))
    plain.read(plain.step(make_batch(2)))
    check_same_bits(trainer.params, plain.params)


def test_a_gradient_that_is_not_finite_changes_nothing_when_updates_are_deferred():
    trainer = make(CLIPPED)
    trainer.step(make_batch(0))
    before = trainer.params
    metrics = trainer.step(make_batch(1, poison=np.inf))
    with refuses(FloatingPointError, "gradient", "step 2", "nothing"):
        trainer.read(metrics)
    check_same_bits(trainer.params, before)


def test_a_gradient_that_is_not_finite_stops_immediate_updates_at_its_group():
    trainer = make()
    before = trainer.params
    metrics = trainer.step(make_batch(1, poison=np.inf))
    with refuses(FloatingPointError, "gradient", "layers.1", "step 1") as error:
        trainer.read(metrics)
    assert tells(str(error.value).partition("Updated")[2], "layers.2")
    after = trainer.params
    for i, changed in enumerate((False, False, True)):
        old, new = before["layers"][i], after["layers"][i]
        assert ((old["kernel"].get_value() != new["kernel"].get_value()).any()) == changed


def test_an_unread_failure_is_raised_by_a_later_step():
    trainer = make()
    trainer.step(make_batch(0, y=np.inf))
    with pytest.raises(FloatingPointError, match="step 1"):
        for seed in range(3):
            trainer.step(make_batch(seed))
    after = trainer.step(make_batch(5))
    assert np.isfinite(trainer.read(after)["loss"])


def test_an_optimizer_that_tests_for_finite_numbers_is_left_to_it():
    trainer = make(optax.apply_if_finite(optax.adam(1e-2), 5))
    before = trainer.params
    metrics = trainer.read(trainer.step(make_batch(1, y=np.nan)))
    assert np.isnan(metrics["loss"])
    check_same_bits(trainer.params, before)
    assert int(trainer.opt_state.total_notfinite) == 1


def test_evaluation_uses_eval_mode_and_changes_nothing():
    case = CASES["batchnorm_nnx"]
    trainer = make_trainer(case, OPTIMIZERS["adamw_schedule"])
    trainer.step(case.batch(0))
    before, variables = trainer.params, trainer.variables
    model = trainer.model
    model.eval()
    expected = np.mean([float(case.loss_fn(model, case.batch(s))) for s in (1, 2)])
    values = trainer.evaluate([case.batch(1), case.batch(2)])
    np.testing.assert_allclose(values["loss"], expected, rtol=1e-5)
    check_same_bits(trainer.params, before)
    check_same_bits(trainer.variables, variables)


def test_the_model_writes_its_own_copies_of_variables():
    """A dropout counts its keys, and a batch norm its statistics, whenever the model is called."""

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
            self.norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.dropout(self.norm(self.linear(x)))

    def loss_fn(model: Model, x: Any) -> jax.Array:
        return (model(x) ** 2).mean()

    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    trainer = mt.Trainer(Model(), loss_fn, optax.sgd(0.1), x, precision="float32", progress=False)
    trainer.step(x)
    variables, model = trainer.variables, trainer.model
    model.train()
    losses = [float(loss_fn(model, x)) for _ in range(2)]
    assert losses[0] != losses[1]
    check_same_bits(trainer.variables, variables)
    # The training step draws the same dropout next.
    assert float(trainer.step(x)["loss"]) == pytest.approx(losses[0], rel=1e-6)


def test_the_model_of_a_trainer_computes_with_the_trained_parameters():
    trainer = make()
    for seed in range(2):
        trainer.step(make_batch(seed))
    loss = float(loss_fn(trainer.model, make_batch(9)))
    assert loss != pytest.approx(float(loss_fn(build(), make_batch(9))), rel=1e-3)
    np.testing.assert_allclose(trainer.evaluate([make_batch(9)])["loss"], loss, rtol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["nnx_tied", "linen_numbered", "equinox", "nnx_scan", "last_axis"])
def test_models_of_the_zoo_compute_with_the_trained_parameters(name):
    case = CASES[name]
    trainer = make_trainer(case, OPTIMIZERS["clip_adamw"])
    for seed in range(2):
        trainer.step(case.batch(seed))
    model = trainer.model
    if not isinstance(model, nnx.Module | nn.Module):
        model = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, model)
    loss = float(case.loss_fn(model, case.batch(9)))
    np.testing.assert_allclose(trainer.evaluate([case.batch(9)])["loss"], loss, rtol=1e-5)


def test_another_loss_can_be_evaluated():
    trainer = make()
    values = trainer.evaluate(
        [make_batch()],
        loss_fn=lambda m, b: (loss_fn(m, b), {"max": jnp.abs(m(b["x"], b["poison"])).max()}),
    )
    assert values["max"] > 0


def test_evaluating_between_deferred_steps_applies_what_is_pending():
    one, two = make(CLIPPED), make(CLIPPED)
    for seed in range(3):
        one.step(make_batch(seed))
        two.step(make_batch(seed))
        two.evaluate([make_batch(9)])
    check_same_bits(one.params, two.params)


def test_a_builder_starts_from_the_eager_values():
    trainer = make()
    eager = nnx.state(build(), nnx.Param)
    check_same_bits(trainer.params, eager)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("microbatches.*3", {"microbatches": 3}),
        ("microbatches.*1.*0", {"microbatches": 0}),
        ("device_budget=1024 .*smallest", {"device_budget": 1024}),
    ],
)
def test_options_that_cannot_work_are_named(message, options):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_batch_statistics_refuse_microbatches():
    with refuses(ValueError, "microbatches", "norm", "batch"):
        make_trainer(CASES["batchnorm_nnx"], OPTIMIZERS["adam"], microbatches=2)


def test_too_little_memory_is_said_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr("megatrain_jax._src.engine.state.pool.available_bytes", lambda: 1000)
    # A run may reuse its process's own memory, which earlier tests have filled.
    monkeypatch.setattr("megatrain_jax._src.engine.state.pool.resident_bytes", lambda: 0)
    earlier = pinned_arrays()
    with refuses(MemoryError, "4.50 KiB", "`host_budget`", "Nothing"):
        make()
    assert not pinned_arrays().keys() - earlier.keys()


@pytest.mark.parametrize(
    ("message", "allocator", "advice"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory", None, "XLA_PYTHON_CLIENT_ALLOCATOR unset"),
        ("RESOURCE_EXHAUSTED: Out of memory", "default", "XLA_PYTHON_CLIENT_ALLOCATOR unset"),
        ("RESOURCE_EXHAUSTED: Out of memory", "cuda_async", "ALLOCATOR=default before Python"),
        ("INTERNAL: else", None, ""),
    ],
)
def test_memory_that_runs_out_in_a_step_comes_with_advice(message, allocator, advice, monkeypatch):
    trainer = make()
    if allocator is not None:
        monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", allocator)

    def fails(*_):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(engine_of(trainer), "train", fails)
    monkeypatch.setattr(engine_of(trainer), "evaluate", fails)
    for call in (lambda: trainer.evaluate([make_batch()]), lambda: trainer.step(make_batch())):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message) as caught:
            call()
        notes = getattr(caught.value, "__notes__", [])
        assert len(notes) == message.startswith("RESOURCE")
        assert all(advice in note for note in notes)


def test_long_work_before_the_first_step_is_shown_unless_it_is_not_wanted(capfd, tmp_path):
    make(progress=False)
    assert capfd.readouterr() == ("", "")
    trainer = make()
    shown = capfd.readouterr().err
    assert "compiling" in shown and "initialising" in shown
    trainer.save(tmp_path / "saved")
    trainer.restore(tmp_path / "saved")
    assert "restoring" in capfd.readouterr().err


def test_a_batch_unlike_the_first_is_refused_before_the_step():
    trainer = make()
    with pytest.raises(ValueError, match="x"):
        trainer.step({"y": make_batch()["y"], "poison": make_batch()["poison"]})
    assert trainer.num_steps == 0


def decoder_plan(layers, width, optimizer, **options):
    """The plan of a plain decoder of this size, from shapes alone."""

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.RMSNorm(width, rngs=rngs)
            self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
            self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
            self.up = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
            self.down = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)

        def __call__(self, x):
            q, k, v = jnp.split(self.qkv(self.norm(x)).reshape(*x.shape[:2], -1, 128), 3, axis=2)
            attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.reshape(x.shape))
            return x + self.down(nnx.gelu(self.up(self.norm(x))))

    class Decoder(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(32000, width, rngs=rngs)
            self.layers = nnx.List([Block(rngs) for _ in range(layers)])
            self.head = nnx.Linear(width, 32000, use_bias=False, rngs=rngs)

        def __call__(self, tokens):
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    def token_loss(model, batch):
        logits = model(batch["tokens"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"]).mean()

    batch = {"tokens": jax.ShapeDtypeStruct((4, 2048), jnp.int32)}
    return mt.plan(lambda: Decoder(nnx.Rngs(0)), token_loss, optimizer, batch, **options)


@pytest.mark.exhaustive
def test_a_120b_decoder_is_planned_from_shapes():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))
    plan = decoder_plan(24, 20480, optimizer, hardware="H200")
    assert 120e9 < plan.num_parameters < 130e9
    # A block of 5 billion parameters doesn't fit as a whole: embedding, parts and head.
    assert plan.fits_device and plan.num_parts == 3 and plan.num_templates == 5
    assert plan.update_mode == "deferred"
    assert plan.host_bytes >= 12 * plan.num_parameters
    tokens = 4 * 2048
    # 6 N tokens, and 2 N more for the parts computed again, plus attention and the optimizer.
    again = 1 - plan.num_kept / plan.num_stages
    assert 1.0 < plan.flops_per_step / ((6 + 2 * again) * plan.num_parameters * tokens) < 1.1
    assert tells(str(plan), "layers.0.part 1", "layers.23.part 1")
    shown: Any = plan
    assert "<table>" in shown._repr_html_()


@pytest.mark.parametrize("widths", [(2560, 2568, 2576, 2584), (4224, 4224)])
def test_a_stage_that_is_most_of_a_model_with_blocks_is_named(widths):
    """Several layers that are not alike do; a single array as large, an embedding, does not."""
    dim, shapes = widths[0], list(itertools.pairwise(widths))

    def loss_fn(model, batch):
        for layer in model["layers"]:
            batch = batch + jnp.tanh(batch @ layer["a"]) @ layer["b"]
        for name in "xyz"[: len(shapes)]:
            batch = jnp.tanh(batch @ model[name])
        return jnp.mean(batch**2)

    def build():
        layers = [{"a": jnp.zeros((dim, 8)), "b": jnp.zeros((8, dim))} for _ in range(3)]
        return {**dict(zip("xyz", map(jnp.zeros, shapes), strict=False)), "layers": layers}

    batch = jax.ShapeDtypeStruct((4, dim), jnp.bfloat16)
    plan = mt.plan(build, loss_fn, optax.sgd(0.1), batch)
    assert sum(row.count for row in plan.groups if row.name.startswith("layers")) == 3
    assert len(plan.warnings) == (len(shapes) > 1)


def test_a_trainer_can_not_be_copied_but_its_results_can():
    result = small.fit(None, 1)
    for part in (result, result.trainer):
        for copied in (pickle.dumps, copy.deepcopy):
            with refuses(TypeError, "Trainer", "pickled", "copied"):
                copied(part)
    params, history = pickle.loads(pickle.dumps((result.params, result.history)))
    check_same_bits(params, result.params)
    assert list(history) == list(result.history)


def test_a_model_without_blocks_is_named():
    def loss_fn(model, batch):
        return jnp.mean((batch @ model["up"] @ model["down"]) ** 2)

    def warnings_of(dim):
        batch = jax.ShapeDtypeStruct((4, dim), jnp.bfloat16)
        return mt.plan(
            lambda: dict.fromkeys(("up", "down"), jnp.zeros((dim, dim))),
            loss_fn,
            optax.sgd(0.1),
            batch,
        ).warnings

    (warning,) = warnings_of(4096)
    assert tells(warning, "128.00 MiB", "no blocks")
    assert not warnings_of(8)  # it fits anywhere as a whole
    case = CASES["nnx_tied"]
    plan = mt.plan(case.build(), case.loss_fn, optax.sgd(0.1), case.batch(0))
    assert not any("no blocks" in warning for warning in plan.warnings)


# Batches without rows of examples


class Graphs(NamedTuple):
    """Padded graphs in one, as jraph has them: the leading axes are nodes, edges and graphs."""

    edges: np.ndarray
    nodes: np.ndarray
    senders: np.ndarray
    receivers: np.ndarray
    n_node: np.ndarray


def graphs(seed, num_nodes=12, num_edges=20):
    rng = np.random.default_rng(seed)
    nodes = rng.normal(size=(num_nodes, 4)).astype(np.float32)
    edges = rng.normal(size=(num_edges, 2)).astype(np.float32)
    ends = rng.integers(0, num_nodes, (2, num_edges), np.int32)
    return Graphs(edges, nodes, ends[0], ends[1], np.full(3, num_nodes // 3, np.int32))


def graph_loss(params, batch):
    x = batch.nodes
    for layer in params["layers"]:
        sent = jnp.concatenate([x[batch.senders], batch.edges], 1) @ layer["in"]
        x = x + jnp.tanh(jax.ops.segment_sum(sent, batch.receivers, len(x)) @ layer["out"])
    of_graph = jnp.repeat(jnp.arange(3), batch.n_node, total_repeat_length=len(x))
    return ((jax.ops.segment_sum(x, of_graph, 3) @ params["head"]) ** 2).mean()


def graph_params():
    rng = np.random.default_rng(0)
    shapes = {"layers": [{"in": (6, 4), "out": (4, 4)}] * 2, "head": (4, 1)}
    return jax.tree.map(
        lambda shape: rng.normal(size=shape).astype(np.float32) / 4,
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def graph_trainer(**settings):
    settings = {"precision": mt.Precision(compute=jnp.float32), "progress": False} | settings
    return mt.Trainer(graph_params(), graph_loss, optax.sgd(0.1), graphs(0), **settings)


def test_a_batch_of_graphs_has_no_number_of_examples():
    without_edges = graphs(0, num_edges=0)
    check_batch(without_edges)
    assert num_rows(graphs(0)) is None and num_rows(make_batch()) == 4
    # Any number divides the rows of an axis without rows.
    jaxpr = jax.make_jaxpr(lambda edges, nodes: (edges + 1, nodes * 2))(*without_edges[:2]).jaxpr
    found = find_examples(jaxpr, jaxpr.invars, zip(jaxpr.outvars, (5, 6), strict=True))
    assert found.values == {5, 6}
    # Which of two graphs counts more is not known, unless the loss says it.
    rows = [{"loss": 1.0, "weight": 12.0}, {"loss": 4.0, "weight": 15.0}]
    means = weighted_means(rows, [None, None])
    assert means["loss"] == pytest.approx((12 * 1 + 15 * 4) / 27)
    bare = [{"loss": row["loss"]} for row in rows]
    for sizes in ([None, None], [1, None], [None, 3]):
        with pytest.raises(ValueError, match="weight"):
            weighted_means(bare, sizes)
    assert weighted_means(bare, [1, 3])["loss"] == pytest.approx((1 + 3 * 4) / 4)


@pytest.mark.exhaustive
def test_graphs_are_trained_and_evaluated_as_in_plain_jax():
    """The second batch has no edges."""
    trainer, params = graph_trainer(microbatches="auto"), graph_params()
    for batch in (graphs(0), graphs(1, num_edges=0)):
        loss, grads = jax.value_and_grad(graph_loss)(params, batch)
        params = jax.tree.map(lambda x, g: x - 0.1 * g, params, grads)
        np.testing.assert_allclose(trainer.read(trainer.step(batch))["loss"], loss, rtol=2e-6)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), trainer.params, params
    )
    expected = graph_loss(params, graphs(2))
    np.testing.assert_allclose(trainer.evaluate([graphs(2)])["loss"], expected, rtol=1e-5)
    # Which of two graphs counts more is not known, unless the loss says it.
    with pytest.raises(ValueError, match="weight"):
        trainer.evaluate([graphs(2), graphs(3, num_nodes=15)])

    def weighted(params, batch):
        return graph_loss(params, batch), {"weight": batch.n_node.sum()}

    found = trainer.evaluate([graphs(2), graphs(3, num_nodes=15)], loss_fn=weighted)
    parts = [graph_loss(params, graphs(2)), graph_loss(params, graphs(3, num_nodes=15))]
    np.testing.assert_allclose(found["loss"], (12 * parts[0] + 15 * parts[1]) / 27, rtol=1e-5)


def test_graphs_can_t_be_divided():
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])
    choices: list[dict[str, Any]] = [{"microbatches": 2}, {"mesh": mesh}]
    for settings in choices:
        with refuses(ValueError, "edges", "shape"):
            graph_trainer(**settings)
        with refuses(ValueError, "'x'", (0, 4)):
            mt.Trainer(
                graph_params(), graph_loss, optax.sgd(0.1), {"x": np.ones((0, 4))}, **settings
            )
    # A run with rows of examples evaluates none without.
    rows = {"x": np.ones((4, 4), np.float32)}

    def loss_fn(params, batch):
        return ((batch["x"] @ params["head"]) ** 2).mean()

    trainer = mt.Trainer(
        graph_params(), loss_fn, optax.sgd(0.1), rows, microbatches=2, progress=False
    )
    with pytest.raises(ValueError, match="'y'"):
        trainer.evaluate([rows | {"y": np.ones(6)}])


def test_a_parameter_stacked_over_layers_is_whole_on_the_device():
    def loss_fn(params, x):
        return (jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0] ** 2).mean()

    weights = np.random.default_rng(0).normal(size=(3, 8, 8)).astype(np.float32)
    batch = np.ones((2, 8), np.float32)
    trainer = mt.Trainer(
        {"w": weights}, loss_fn, optax.sgd(0.1), batch, precision="bfloat16", progress=False
    )
    assert trainer.plan.num_stages >= 3
    copy = trainer.compute_copy()
    (found,) = copy.read(jax.tree.leaves(copy.model))
    np.testing.assert_array_equal(found, weights.astype(jnp.bfloat16))


def injected(rate: Any) -> optax.GradientTransformationExtraArgs:
    return optax.inject_hyperparams(optax.adamw)(rate, weight_decay=0.1)


@pytest.mark.parametrize("clips", [False, True], ids=["immediate", "deferred"])
def test_hyperparameters_that_are_set_count_from_the_next_step(clips: bool, tmp_path):
    optimizer: Any = injected(1e-2)
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optimizer) if clips else optimizer

    def made() -> mt.Trainer:
        given = small.params(), small.loss_fn, optimizer, small.batch(0)
        return mt.Trainer(*given, precision=FP32, progress=False)

    params: Any = small.params()
    trainer, state = made(), optimizer.init(params)
    for step, rate in enumerate([1e-2, 3e-3, 3e-3, 0.0]):
        if step in (1, 3):
            trainer.set_hyperparams(learning_rate=rate)
            (state[1] if clips else state).hyperparams["learning_rate"] = jnp.float32(rate)
        updates, state = optimizer.update(
            jax.grad(small.loss_fn)(params, small.batch(step)), state, params
        )
        params = optax.apply_updates(params, updates)
        assert trainer.step(small.batch(step))["learning_rate"] == np.float32(rate)
    for ours, plain in zip(trainer.params, params, strict=True):
        np.testing.assert_allclose(ours["w"], plain["w"], rtol=0, atol=2e-6)
    trainer.set_hyperparams(weight_decay=0.2)
    trainer.save(tmp_path / "saved")
    again = made()
    again.restore(tmp_path / "saved")
    check_same_bits(again.opt_state, trainer.opt_state)
    found = again.step(small.batch(0))
    assert (found["weight_decay"], found["learning_rate"]) == (np.float32(0.2), 0)


def test_hyperparameters_are_not_set_in_a_copy_nor_against_a_schedule():
    given, batch = (small.params(), small.loss_fn), small.batch(0)
    trainer = mt.Trainer(*given, injected(1e-2), batch, progress=False)
    trainer.opt_state.hyperparams["learning_rate"] = 0.5
    with refuses(ValueError, "`opt_state`", "`trainer.set_hyperparams(learning_rate=...)`"):
        trainer.step(batch)
    trainer.opt_state.hyperparams["learning_rate"] = 0.5
    trainer.set_hyperparams(learning_rate=0.25)
    assert trainer.step(batch)["learning_rate"] == 0.25 and trainer.num_steps == 1
    with refuses(ValueError, "`rate`", "learning_rate", "weight_decay"):
        trainer.set_hyperparams(rate=0.5)
    with refuses(TypeError, "`learning_rate`", "'high'"):
        trainer.set_hyperparams(learning_rate="high")  # type: ignore[arg-type]
    assert trainer.step(batch)["learning_rate"] == 0.25
    scheduled = injected(optax.linear_schedule(0.1, 0.0, 10))
    trainer = mt.Trainer(*given, scheduled, batch, progress=False)
    with refuses(ValueError, "`learning_rate`", "schedule"):
        trainer.set_hyperparams(learning_rate=0.5)
    trainer = mt.Trainer(*given, optax.adam(0.1), batch, progress=False)
    with refuses(ValueError, "`learning_rate`", "optax.inject_hyperparams("):
        trainer.set_hyperparams(learning_rate=0.5)


def test_two_steps_are_in_flight_at_most():
    trainer, found = small.trainer(), []
    for seed in range(4):
        trainer.step(small.batch(seed))
        found.append(unread_of(trainer)[0])
    assert max(found) == 2


@pytest.mark.parametrize(
    ("after", "named"),
    [
        ({"b": jnp.zeros(2)}, ["structure", "a", "b"]),
        ({"a": jnp.zeros(3)}, ["state['a']", "float32[2]", "float32[3]"]),
        ({"a": jnp.zeros(2, jnp.int32)}, ["state['a']", "float32[2]", "int32[2]"]),
    ],
    ids=["structure", "shape", "dtype"],
)
def test_an_optimizer_whose_state_changes_its_form_is_refused(after, named):
    optimizer = optax.GradientTransformation(
        lambda params: {"a": jnp.zeros(2)}, lambda updates, state, params=None: (updates, after)
    )
    with refuses(ValueError, "optimizer", *named):
        mt.Trainer(small.params(), small.loss_fn, optimizer, small.batch(0), progress=False)
