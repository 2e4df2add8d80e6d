"""Training and inference: what a model does only in training stays out of evaluations."""

import re
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.experimental import io_callback

import megatrain_jax as mt
from megatrain_jax import callbacks
from megatrain_jax._src.engine import trainer as trainers
from megatrain_jax._src.engine.adapt.adapters import adapt
from messages import refuses, tells, warns

FP32 = mt.Precision(compute=jnp.float32)
RNG = np.random.default_rng(0)
DATA = [
    (RNG.normal(size=(8, 4)).astype(np.float32), RNG.normal(size=(8, 3)).astype(np.float32))
    for _ in range(3)
]


class Net(linen.Module):
    dropout: float = 0.0
    norm: bool = False

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        for _ in range(2):
            x = linen.Dense(4)(x)
            x = linen.BatchNorm(use_running_average=not train)(x) if self.norm else x
            x = linen.Dropout(self.dropout, deterministic=not train)(jnp.tanh(x))
        return linen.Dense(3)(x)


def loss_fn(model: Any, batch: Any) -> jax.Array:
    x, y = batch
    return jnp.mean((model(x) - y) ** 2)


def eval_loss_fn(model: Any, batch: Any) -> jax.Array:
    x, y = batch
    return jnp.mean((model(x, train=False) - y) ** 2)


def fitted(model: Any, **options: Any) -> mt.FitResult:
    given: dict[str, Any] = {"eval_data": DATA[:1], "precision": FP32, "progress": False}
    data, loss = options.pop("data", DATA), options.pop("loss_fn", loss_fn)
    return mt.fit(model, loss, data, optax.sgd(0.1), **given | options)


@pytest.mark.by_default("True-0.5", "False-0.0")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("norm", [False, True])
def test_linen_is_evaluated_as_the_user_applies_it(dropout: float, norm: bool):
    result = fitted(Net(dropout, norm), eval_loss_fn=eval_loss_fn)
    trainer = result.trainer
    variables: dict[str, Any] = {"params": trainer.params}
    for path, value in trainer.variables.items():
        collection, layer, name = path.split("/")
        variables.setdefault(collection, {}).setdefault(layer, {})[name] = value

    def applied(variables: Any, batch: Any) -> jax.Array:
        x, y = batch
        return jnp.mean((Net(dropout, norm).apply(variables, x, train=False) - y) ** 2)

    assert result.history[-1]["eval_loss"] == float(jax.jit(applied)(variables, DATA[0]))
    assert trainer.evaluate(DATA[:1]) == trainer.evaluate(DATA[:1], eval_loss_fn)
    assert "eval_loss" not in result.history[0]


@pytest.mark.by_default("False-True-0.0", "False-False-0.5", "True-False-0.0", "True-True-0.5")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
def test_an_evaluation_that_trains_is_told_once(dropout: float, norm: bool, by_hand: bool):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fitted(Net(dropout, norm), **({"eval_data": None} if by_hand else {})).trainer
        trainer.evaluate(DATA)
        trainer.evaluate(DATA[:1])
    told = [str(w.message) for w in caught if "eval_loss_fn" in str(w.message)]
    assert len(told) == (dropout > 0 or norm)
    for text in told:
        assert ("dropout" in text, "BatchNorm" in text) == (dropout > 0, norm)


def test_nothing_is_told_where_the_loss_of_evaluations_was_chosen():
    fitted(Net(0.5, True), eval_loss_fn=loss_fn)  # warnings are errors in tests
    fitted(Net(0.5, True), eval_data=None).trainer.evaluate(DATA, eval_loss_fn)


class Layers(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.dropout(self.norm(self.first(x))))


class Scanned(nnx.Module):
    """Layers in a loop, which passes on keys and statistics also where it uses none."""

    def __init__(self):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def make(rngs: nnx.Rngs) -> Any:
            layer = nnx.Linear(4, 4, rngs=rngs)
            return layer, nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        self.layers = nnx.List(make(nnx.Rngs(0)))
        self.last = nnx.Linear(4, 3, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def through(x: jax.Array, layers: Any) -> jax.Array:
            for layer in layers:
                x = layer(x)
            return x

        return self.last(through(x, self.layers))


@pytest.mark.parametrize("make", [Layers, Scanned])
def test_an_nnx_model_that_the_loss_itself_sets_to_training_is_told(make: Any):
    def told(*kinds: type) -> tuple[bool, bool]:
        def loss(model: Any, batch: Any, rng: Any) -> jax.Array:
            for _, module in nnx.iter_graph(model):
                if isinstance(module, kinds):
                    module.train()
            # What the loss itself draws may be meant.
            return loss_fn(model, batch) + jax.random.uniform(rng)

        text = adapt(make(), loss, DATA[0], 0)[0].only_in_training(loss, DATA[0])
        return "dropout" in text, "BatchNorm" in text

    assert told() == (False, False) and told(nnx.Dropout) == (True, False)
    assert told(nnx.BatchNorm) == (False, True) and told(nnx.Module) == (True, True)


def state_after_training(change: Any) -> Any:
    model = Layers()
    change(model)
    trainer = fitted(model, eval_data=None).trainer
    # Keys are no numbers.
    return trainer.params, {n: x for n, x in trainer.variables.items() if not n.endswith("key")}


def test_a_model_left_in_evaluation_mode_trains():
    expected = state_after_training(lambda model: None)
    jax.tree.map(np.testing.assert_array_equal, state_after_training(nnx.Module.eval), expected)


def test_a_module_in_evaluation_mode_stays_so_among_others():
    expected, found = (
        state_after_training(change)[1] for change in (lambda m: None, lambda m: m.norm.eval())
    )
    assert not found["norm/mean"].any() and expected["norm/mean"].any()
    assert found["dropout/rngs/count"] == expected["dropout/rngs/count"] > 0
    model = Layers()
    model.norm.eval()
    trainer = fitted(model, eval_data=None).trainer
    expected = trainer.predict(DATA[:1], lambda model, batch: model(batch[0]))
    np.testing.assert_allclose(trainer.model(DATA[0][0]), expected, rtol=1e-5)


class Backbone(nnx.Module):
    """A model whose only modes are those of its frozen part, and of a dropout after it."""

    def __init__(self):
        self.layers = Layers()
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        self.head = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.dropout(self.layers(x)))


def of_frozen(model: Any, **options: Any) -> tuple[Any, bool]:
    """The state after training a head, and whether statistics were told to change."""
    given = {"eval_data": None, "trainable": "head"} | options
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fitted(model, **given).trainer
    told = [tells(str(w.message), "`trainable`", "layers/norm/mean") for w in caught]
    assert all(told)  # no warning of anything else
    return trainer.variables, told == [True]


def test_frozen_modules_in_evaluation_mode_stay_in_it():
    weights = jnp.ones(3)

    def weighted_loss(model: Any, batch: Any) -> jax.Array:
        x, y = batch
        return jnp.mean(weights * (model(x) - y) ** 2)

    model = Backbone()
    model.eval()
    found, told = of_frozen(model, loss_fn=weighted_loss)
    assert not told and not found["layers/norm/mean"].any()
    assert found["layers/dropout/rngs/count"] == 0 < found["dropout/rngs/count"]
    several: list[Any] = [{}, *({"trainable": x} for x in ("layers", "norm/scale", None))]
    for options in several:
        model = Backbone()
        if options:
            model.eval()
        found, told = of_frozen(model, **options)
        assert told == (not options) and found["layers/norm/mean"].any(), options
        assert found["layers/dropout/rngs/count"] > 0


@pytest.mark.parametrize("trainable", ["Dense_2", "Dense_0", None, "BatchNorm_0"])
def test_statistics_of_frozen_linen_modules_are_told(trainable: str | None):
    told = trainable in ("Dense_2", "Dense_0")
    named = warns(UserWarning, "`trainable`", "BatchNorm_0/mean")
    with named if told else nullcontext():
        fitted(Net(0.0, True), eval_data=None, trainable=trainable)


def test_modules_whose_mode_was_never_set_train_and_are_evaluated():
    """As `nnx.MultiHeadAttention`, which asks for a mode where none is set."""

    class Attention(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.attention = nnx.MultiHeadAttention(2, 4, dropout_rate=0.5, decode=False, rngs=rngs)
            self.last = nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.last(self.attention(x[:, None])[:, 0])

    model = Attention()
    trainer = fitted(model, eval_data=None).trainer
    found = nnx.merge(*nnx.split(trainer.model))
    found.eval()
    np.testing.assert_allclose(trainer.evaluate(DATA[:1])["loss"], loss_fn(found, DATA[0]), 1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_prediction_that_trains_is_told_once_for_a_function(dropout: float):
    trainer = fitted(Net(dropout), eval_data=None).trainer

    def trains(model: Any, batch: Any) -> jax.Array:
        return model(batch[0])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            trainer.predict(DATA, trains)
        trainer.predict(DATA, lambda model, batch: model(batch[0], train=False))
    assert [("trains" in str(w.message)) for w in caught] == [True] * (dropout > 0)


@pytest.mark.by_default("given0", "given1")
@pytest.mark.parametrize("given", [{"epochs": 1}, {"steps": 2}, {"steps": 3}])
def test_a_run_beyond_the_steps_asked_for_is_done(given: Any, tmp_path: Path):
    for _ in range(2):  # the second call has just the steps of the first
        fitted(Net(), epochs=2, checkpoint_dir=tmp_path, eval_data=None)
    asked = f"`steps`={given.get('steps', 3)}"
    with warns(UserWarning, tmp_path / "6", "step 6", asked, "`epochs`", "`checkpoint_dir`"):
        result = fitted(Net(), checkpoint_dir=tmp_path, eval_data=None, **given)
    assert (result.ended, result.trainer.num_steps) == ("done", 6)


def test_a_run_that_was_stopped_stops_at_once_when_it_continues(tmp_path: Path):
    def run(patience: int) -> mt.FitResult:
        stop = callbacks.EarlyStopping("loss", patience=patience, min_delta=100.0)
        return fitted(Net(), epochs=4, checkpoint_dir=tmp_path, eval_data=None, callbacks=[stop])

    first = run(2)
    steps = first.trainer.num_steps
    again = run(2)
    assert (again.ended, again.trainer.num_steps) == ("stopped", steps)
    assert run(5).trainer.num_steps > steps


@pytest.mark.parametrize(
    ("metric", "mode", "is_more"),
    [
        ("eval_accuracy", "auto", True),
        ("eval_top5_acc", "auto", True),
        ("rewards/margins", "auto", True),
        ("eval_map50", "auto", True),
        ("eval_hits@10", "auto", True),
        ("eval_log_likelihood", "auto", True),
        ("eval_loss", "auto", False),
        ("eval_dice_loss", "auto", False),
        ("eval_top1_error", "auto", False),
        ("eval_accuracy", "min", False),
        ("eval_loss", "max", True),
    ],
)
def test_more_is_better_for_what_is_named_so(metric: str, mode: Any, is_more: bool):
    stop = callbacks.EarlyStopping(metric, patience=1, mode=mode)
    trainer: Any = SimpleNamespace(history=[{"step": 1, metric: 1.0}])
    stop.begin(trainer)
    stop(trainer, {"step": 2, metric: 2.0 if is_more else 0.5})
    with pytest.raises(mt.StopTraining):
        stop(trainer, {"step": 3, metric: 1.5})


@pytest.mark.parametrize("metric", ["eval_space", "eval_", "eval_perplexity_score", "los"])
@pytest.mark.parametrize("make", [callbacks.EarlyStopping, lambda m: callbacks.KeepBest("b", m)])
def test_a_metric_whose_name_does_not_tell_needs_a_mode(metric: str, make: Any):
    with refuses(ValueError, "`metric`", metric, "mode", "min", "max"):
        make(metric)


@pytest.mark.parametrize(("every", "steps"), [(None, [3, 6]), (2, [2, 4, 6])])
def test_epochs_are_evaluated_at_their_ends(every: int | None, steps: list[int]):
    net = Net()
    seen = callbacks.EarlyStopping(patience=9)
    result = fitted(net, epochs=2, eval_every=every, callbacks=[seen])
    assert [record["step"] for record in result.history if "eval_loss" in record] == steps


@pytest.mark.parametrize("make", [lambda path: callbacks.KeepBest(path), callbacks.EarlyStopping])
@pytest.mark.parametrize("data", [None, DATA[:1]])
def test_a_callback_that_would_see_no_evaluation_is_refused(make: Any, data: Any, tmp_path: Path):
    callback = make(tmp_path / "best") if make is not callbacks.EarlyStopping else make()
    lacking = "`eval_data`" if data is None else "`eval_every`"
    with refuses(ValueError, "callbacks[1]", type(callback).__name__, "eval_loss", lacking):
        fitted(Net(), eval_data=data, callbacks=[print, callback])
    if data is None:  # with data, `train` evaluates at the end of every call
        trainer = fitted(Net()).trainer
        with refuses(ValueError, "callbacks[0]", lacking):
            mt.train(trainer, DATA, callbacks=[callback], progress=False)


@pytest.mark.by_default(
    *("given0-True", "given4-True", "given6-True"), *(f"given{i}-False" for i in (1, 3, 7))
)
@pytest.mark.parametrize(
    ("given", "fires"),
    [
        ({"steps": 3}, True),
        ({"steps": 2}, False),
        ({"data": DATA[:3]}, True),
        ({"data": DATA[:2]}, False),
        ({"data": iter(DATA[:2])}, True),
        ({"data": (x for x in DATA[:2])}, True),
        ({"data": DATA[:2], "epochs": 2}, True),
        ({"data": DATA[:1], "epochs": 2}, False),
    ],
)
def test_an_evaluation_after_the_last_step_is_none(given: Any, fires: bool):
    given = {"eval_every": 3, "callbacks": [callbacks.EarlyStopping()]} | given
    if fires:
        assert "eval_loss" in fitted(Net(), **given).history[-1]
        return
    with refuses(ValueError, "callbacks[0]", "`eval_every`", "3"):
        fitted(Net(), **given)


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_training_metric_where_evaluations_have_it_is_told(by_hand: bool):
    stop = callbacks.EarlyStopping("loss", patience=9)
    given: Any = {"callbacks": [print, stop], "eval_data": DATA[:1]}
    trainer = fitted(Net()).trainer if by_hand else None
    with warns(UserWarning, "callbacks[1]", "EarlyStopping", "'loss'", "'eval_loss'"):
        if trainer is not None:
            mt.train(trainer, DATA[:1], progress=False, **given)
        else:
            fitted(Net(), steps=1, **given)
    fitted(Net(), steps=1, **(given | {"eval_data": None}))
    norm = callbacks.EarlyStopping("grad_norm", mode="min")
    fitted(Net(), steps=1, **(given | {"callbacks": [norm]}))


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_the_name_that_keras_gives_a_metric_is_told(precision: str):
    stop = callbacks.EarlyStopping("val_loss")
    with refuses(ValueError, "callbacks[0]", "val_loss", "`eval_loss`") as caught:
        fitted(Net(), callbacks=[stop], eval_every=1, precision=precision)
    listed = set(re.split(r"\W+", str(caught.value)))
    record = {*fitted(Net(), precision=precision).history[0]} - {"step"}
    assert record <= listed and not ({"loss_scale", "skipped", "step"} & listed) - record


def test_a_training_metric_needs_no_evaluation():
    stop = callbacks.EarlyStopping("loss", patience=1, min_delta=100.0)
    assert fitted(Net(), eval_data=None, callbacks=[stop]).ended == "stopped"


def test_train_by_hand_evaluates_at_the_end_of_each_call():
    stop = callbacks.EarlyStopping(patience=1, min_delta=100.0)
    result = fitted(Net())
    ended = [
        mt.train(result.trainer, DATA, eval_data=DATA[:1], callbacks=[stop], progress=False).ended
        for _ in range(2)
    ]
    assert ended[-1] == "stopped"


def with_accuracy(model: Any, batch: Any) -> Any:
    return eval_loss_fn(model, batch), {"accuracy": 1.0}


def adding(trainer: mt.Trainer, record: dict[str, Any]) -> None:
    record["eval_f1"] = 1.0


class Adding(callbacks.Callback):
    adds_metrics = ("eval_f1",)

    def __call__(self, trainer: mt.Trainer, record: dict[str, Any]) -> None:
        adding(trainer, record)


@pytest.mark.parametrize(
    ("metric", "loss", "named"),
    [
        ("eval_acuracy", None, ("eval_loss",)),
        ("eval_acuracy", with_accuracy, ("eval_loss", "`eval_accuracy`")),
        ("grad_nrom", None, ("loss", "`grad_norm`")),
    ],
)
def test_a_metric_that_there_is_not_is_refused_before_anything_is_compiled(
    metric: str, loss: Any, named: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    stop: Any = callbacks.EarlyStopping(metric, mode="max")
    given: Any = {"eval_every": 1, "eval_data": DATA[:1]}
    trainer = fitted(Net(), eval_loss_fn=loss).trainer
    with refuses(ValueError, "callbacks[0]", "`metric`", metric, *named):
        mt.train(trainer, DATA, callbacks=[stop], progress=False, **given)
    monkeypatch.setattr(trainers, "start", None)
    for some in ([stop], [Adding(), callbacks.Profile("p"), stop]):
        with refuses(ValueError, f"callbacks[{len(some) - 1}]", "`metric`", metric, *named):
            fitted(Net(), eval_loss_fn=loss, callbacks=some, **given)


@pytest.mark.parametrize("adds", [adding, Adding()])
def test_a_metric_that_a_callback_may_add_is_not_refused(adds: Any):
    stop = callbacks.EarlyStopping("eval_f1", patience=1)
    assert fitted(Net(), eval_every=1, callbacks=[adds, stop]).ended == "stopped"
    with refuses(ValueError, "callbacks[0]", "eval_f1"):
        fitted(Net(), eval_every=1, callbacks=[stop, adds])


def test_an_evaluation_drawn_for_its_metrics_is_the_first_one():
    calls = []

    def evaluation() -> Any:
        calls.append(1)
        return iter(DATA[:2])

    stop = callbacks.EarlyStopping()
    result = fitted(Net(), eval_data=evaluation, eval_every=3, callbacks=[stop])
    assert len(calls) == 1
    assert result.history[-1]["eval_loss"] == result.trainer.evaluate(DATA[:2])["loss"]


def floated(model: Any, batch: Any) -> Any:
    return jnp.float32(float(eval_loss_fn(model, batch)))


def ordered(model: Any, batch: Any) -> Any:
    loss = eval_loss_fn(model, batch)
    return loss + io_callback(np.float32, jax.ShapeDtypeStruct((), jnp.float32), loss)


@pytest.mark.parametrize(
    ("loss", "named"),
    [
        (lambda model, batch: model(batch[0], train=False), "shape"),
        (lambda model, batch: (eval_loss_fn(model, batch), 1, 2), "3"),
        (lambda model, batch: (eval_loss_fn(model, batch), {"seconds": 1}), "'seconds'"),
        (lambda model, batch: (eval_loss_fn(model, batch), {"x": batch[0]}), "'x'"),
        (lambda model, batch: jnp.mean(batch[0]), "parameter"),
        (floated, "floated"),
        (ordered, "io_callback"),
    ],
)
def test_an_error_about_the_loss_of_evaluations_names_it(loss: Any, named: str):
    with refuses(ValueError if loss is not floated else TypeError, "eval_loss_fn", named) as caught:
        fitted(Net(), eval_loss_fn=loss, eval_data=[tuple(np.tile(x, (2, 1)) for x in DATA[0])])
    assert "loss_fn" not in str(caught.value).replace("eval_loss_fn", "")


@pytest.mark.parametrize("name", ["kept", "added"])
def test_the_loss_of_evaluations_is_named_if_it_changes_the_model(name: str):
    model: Any = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    model.kept = nnx.BatchStat(jnp.zeros(2))

    def changing(model: Any, batch: Any) -> Any:
        setattr(model, name, nnx.BatchStat(jnp.zeros(3)))
        return loss_fn(model, batch)

    with refuses(ValueError, "eval_loss_fn", name):
        fitted(model, eval_loss_fn=changing)


def drawing(model: Any, batch: Any, rng: Any) -> jax.Array:
    return loss_fn(model, batch) + jax.random.uniform(rng)


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize(
    ("model", "loss", "options", "unused"),
    [
        (Backbone(), loss_fn, {}, True),
        (lambda: Backbone(), loss_fn, {"precision": "bfloat16"}, True),
        (lambda: Backbone(), drawing, {}, False),
        (lambda: Backbone(), loss_fn, {"eval_loss_fn": drawing}, False),
        (lambda: Backbone(), loss_fn, {"precision": "compact"}, False),
        (
            lambda: Backbone(),
            loss_fn,
            {"precision": mt.Precision(compute="float32", sums="bfloat16")},
            False,
        ),
        (
            lambda: Backbone(),
            loss_fn,
            {"precision": mt.Precision(compute="float32", state="bfloat16")},
            False,
        ),
        (
            lambda: Backbone(),
            loss_fn,
            {
                "precision": mt.Precision(
                    compute=jnp.float32, state=jnp.bfloat16, rounding="nearest"
                )
            },
            True,
        ),
        (Net(), loss_fn, {}, False),
    ],
)
def test_a_seed_that_nothing_draws_from_is_told(model: Any, loss: Any, options: Any, unused: bool):
    data = jax.tree.map(jnp.asarray, DATA[0])
    given: Any = {"precision": FP32, "progress": False} | options
    told = []
    for seed in (3, 0):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mt.Trainer(model, loss, optax.sgd(0.1), data, seed=seed, **given)
        told += [str(w.message) for w in caught if tells(str(w.message), "`seed`")]
    assert len(told) == unused and all(tells(text, "`seed`=3", "nnx.Rngs") for text in told)
