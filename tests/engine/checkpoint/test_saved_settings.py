"""A run that goes on with other settings than its checkpoint's says which, and which of both count.

Without that, `adamw(1.0)` in the folder of a finished `adamw(1e-3)` looked like a finished run.
"""

import functools
import itertools
import os
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh

import megatrain_jax as mt
import small
from megatrain_jax._src.common.settings import changes
from megatrain_jax._src.engine.checkpoint import manifest
from megatrain_jax._src.engine.checkpoint.folder import MANIFEST
from megatrain_jax._src.engine.checkpoint.saved_settings import with_saved_parts
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.fingerprint import code_hash, fingerprint
from megatrain_jax._src.engine.program.optimizer.hyperparameters import (
    changed_numbers,
    named_numbers,
)
from messages import tells, warns

pytestmark = pytest.mark.usefixtures("started_once")
SLOW, FAST = optax.adamw(1e-3), optax.adamw(1.0)
FLOAT32 = mt.Precision(compute=jnp.float32)


def doubled(params, batch):
    return 2 * small.loss_fn(params, batch)


def fit(
    folder: Path,
    steps: int,
    optimizer: Any = SLOW,
    loss_fn: Any = small.loss_fn,
    first: int = 0,
    data: Any = None,
    **options: Any,
) -> mt.FitResult:
    data = data or (small.batch(seed) for seed in itertools.count(first))
    options = {"precision": FLOAT32, "progress": False} | options
    return mt.fit(
        small.params(), loss_fn, data, optimizer, steps=steps, checkpoint_dir=folder, **options
    )


def line(warned) -> str:
    """The text of the one warning besides the plan's, and of a seed that this model doesn't use."""
    others = (one for one in warned if not issubclass(one.category, mt.PlanWarning))
    (text,) = (str(one.message) for one in others if not tells(str(one.message), "`seed`", 7))
    return text


def settings_in(text: str) -> set[str]:
    """The settings that a text names."""
    names = r"loss_fn|optimizer|precision\.\w+|data|seed|microbatches|waves"
    return set(re.findall(rf"(?<![\w.`])(?:{names})\b", text))


@pytest.mark.filterwarnings("ignore:`seed`=7 changes nothing")
def test_other_settings_of_a_finished_and_of_a_longer_run_are_named_in_one_line(tmp_path):
    before = fit(tmp_path, 2)
    others: dict[str, Any] = {"optimizer": FAST, "loss_fn": doubled, "first": 50, "seed": 7}
    with pytest.warns(UserWarning) as warned:
        again = fit(tmp_path, 2, **others, precision=mt.Precision(rounding="nearest"))
    assert small.losses(again) == small.losses(before)
    assert settings_in(line(warned)) == {
        *("loss_fn", "optimizer", "precision.compute", "precision.rounding", "data", "seed")
    }
    assert tells(line(warned), tmp_path / "2", "effect", "`checkpoint_dir`", "`steps`")
    assert re.search(r"learning_rate\D+0\.001\D+1\b", line(warned))
    assert re.search(r"compute\b.*'float32'.*'bfloat16'.*rounding", line(warned))
    assert re.search(r"rounding\b.*'stochastic'.*'nearest'", line(warned))
    assert re.search(r"seed\b\D*0\D+7\b", line(warned))
    with pytest.warns(UserWarning) as warned:
        fit(tmp_path, 3, **others)
    new, _, kept = line(warned).partition("Kept")
    assert settings_in(new) == {"loss_fn", "optimizer", "data"} and settings_in(kept) == {"seed"}
    assert tells(new, tmp_path / "2") and not tells(new, "effect")
    assert re.search(r"learning_rate\D+0\.001\D+1\b", new) and re.search(r"seed\D+0\D+7\b", kept)
    # What counts from now on is what the last checkpoint says; warnings are errors in tests.
    fit(tmp_path, 4, **others | {"seed": 0})


def test_products_in_float8_are_a_setting_of_a_run(tmp_path):
    fit(tmp_path, 1)
    float8 = mt.Precision(compute=jnp.float32, products={"*": "float8"})
    with pytest.warns(UserWarning) as warned:
        fit(tmp_path, 2, precision=float8)
    assert tells(line(warned), "precision.products", None, "'*: float8'")
    fit(tmp_path, 3, precision=float8)


@pytest.mark.filterwarnings("ignore:`seed`=7 changes nothing")
def test_the_seed_that_a_run_began_with_stays_its_seed(tmp_path):
    fit(tmp_path, 1)
    for steps in (2, 3):
        with warns(UserWarning, "seed=0", 7):
            fit(tmp_path, steps, seed=7)


@pytest.mark.by_default("a number")
@pytest.mark.parametrize("kept", [True, False], ids=["a number", "a schedule"])
def test_an_injected_rate_is_kept_where_it_is_state_and_new_where_a_schedule_sets_it(
    tmp_path, kept
):
    def optimizer(rate):
        made = rate if kept else optax.linear_schedule(rate, 0.0, 100)
        return optax.inject_hyperparams(optax.adamw)(learning_rate=made)

    fit(tmp_path, 2, optimizer(1e-3))
    with pytest.warns(UserWarning) as warned:
        result = fit(tmp_path, 3, optimizer(0.5))
    new, _, held = line(warned).partition("Kept")
    name, part = ("learning_rate", held) if kept else ("init_value", new)
    assert re.search(rf"{name}\D+0\.001\D+0\.5\b", part)
    expected = 1e-3 if kept else 0.5 * 0.98
    np.testing.assert_allclose(result.history[-1]["learning_rate"], expected, rtol=1e-6)


@pytest.mark.by_default("2")
@pytest.mark.parametrize("steps", [2, 3])
def test_another_precision_is_one_line_with_the_number_of_converted_arrays(tmp_path, steps):
    fit(tmp_path, 2)
    with pytest.warns(UserWarning) as warned:
        result = fit(tmp_path, steps, precision=mt.Precision.compact(compute=jnp.float32))
    # Masters and both moments of each of the two layers.
    assert tells(line(warned), "precision.master", "`precision`", 6)
    with warns(UserWarning, 6, "dtypes") as warned:
        result.trainer.restore(tmp_path / "2")
    assert len(warned) == 1


def test_data_is_the_same_in_the_dtype_that_jax_makes_of_it(tmp_path):
    fit(tmp_path, 2)
    wide = ({"x": small.batch(seed)["x"].astype(np.float64)} for seed in itertools.count())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = fit(tmp_path, 3, data=wide)
    assert not said and result.trainer.num_steps == 3


def rewritten(path, change) -> None:
    """Changes the facts of a checkpoint as if another version of the library had written them."""
    facts = {k: v for k, v in manifest.read(path).items() if k not in ("format", "files")}
    change(facts)
    manifest.write(path, facts)


def test_data_is_not_compared_if_the_checkpoint_does_not_know_its_first_batch(tmp_path):
    fit(tmp_path, 2)
    rewritten(tmp_path / "2", lambda facts: facts["data"].pop("first"))
    other = ({"x": small.batch(seed)["x"] + 1} for seed in itertools.count())
    assert fit(tmp_path, 3, data=other).trainer.num_steps == 3


def test_another_version_of_jax_is_remarked_and_nothing_else(tmp_path, capsys):
    fit(tmp_path, 2)

    def age(facts):
        facts["made_of"]["traced"]["versions"]["jax"] = "0.0.1"
        facts["made_of"]["call"]["optimizer"]["form"] = "as it was traced then"

    rewritten(tmp_path / "2", age)
    assert fit(tmp_path, 3, progress=True).trainer.num_steps == 3
    said = capsys.readouterr().out
    assert tells(said, tmp_path / "2", "jax", "'0.0.1'", f"'{jax.__version__}'", "optimizer")
    assert settings_in(said) == {"optimizer"}


def rows_of_two() -> Iterator[Any]:
    return ({"x": small.batch(seed)["x"][:2]} for seed in itertools.count())


@pytest.mark.by_default("rows", "compute")
@pytest.mark.parametrize("change", ["microbatches", "rows", "compute"])
def test_a_loss_that_is_traced_for_other_shapes_or_dtypes_is_compared_by_its_code(tmp_path, change):
    options: dict[str, Any] = {
        "microbatches": {"microbatches": 2},
        "rows": {"data": rows_of_two()},
        "compute": {"precision": mt.Precision(compute=jnp.bfloat16)},
    }[change]
    also = {"microbatches": "microbatches", "rows": "data", "compute": "precision.compute"}[change]
    fit(tmp_path, 2)
    for steps, loss_fn, named in ((2, small.loss_fn, {also}), (2, doubled, {"loss_fn", also})):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            fit(tmp_path, steps, loss_fn=loss_fn, **options)
        assert settings_in(line(warned)) == named and tells(line(warned), "effect")


def tied(params, batch):
    """A loss in which two stages read one layer."""
    return small.loss_fn([*params, params[0]], batch)


def test_no_waves_are_named_where_they_change_nothing(tmp_path):
    fit(tmp_path, 1, microbatches=4, waves=2)
    fit(tmp_path, 2, microbatches=4, waves=4)  # warnings are errors in tests


@pytest.mark.by_default("loss_fn-bfloat16-True")
@pytest.mark.parametrize(
    ("loss_fn", "sums", "is_named"),
    [(small.loss_fn, "float32", False), (tied, "float32", True), (small.loss_fn, "bfloat16", True)],
)
def test_other_numbers_of_microbatches_and_waves_are_named(loss_fn, sums, is_named, tmp_path):
    """Waves only where they change the order of additions, or how often sums are rounded."""
    precision = mt.Precision(compute=jnp.float32, sums=sums)
    given: dict[str, Any] = {"loss_fn": loss_fn, "precision": precision}
    fit(tmp_path, 1, microbatches=4, waves=2, **given)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        fit(tmp_path, 2, microbatches=4, waves=4, **given)
    assert bool(warned) == is_named
    if is_named:
        assert re.search(r"waves\D+2\D+4\b", line(warned))
        assert settings_in(line(warned)) == {"waves"}
    # What the plan chooses is what the checkpoint was trained with.
    fit(tmp_path, 3, microbatches="auto", **given)
    with pytest.warns(UserWarning) as warned:
        fit(tmp_path, 4, microbatches=2, waves=2, **given)
    assert settings_in(line(warned)) == {"microbatches"} | ({"waves"} if is_named else set())
    assert re.search(r"microbatches\D+4\D+2\b", line(warned))


@pytest.mark.parametrize(
    ("rows", "processes", "copies", "taken"),
    [
        (4, 1, 1, None),
        (4, 2, 1, (4, 2)),
        (8, 1, 1, (4, 2)),
        (4, 1, 2, (2, 2)),
        (2, 1, 2, None),
        (8, 1, 4, None),
        (8, 1, 3, None),
    ],
)
def test_parts_of_a_checkpoint_are_taken_where_each_divides_over_the_devices(
    rows, processes, copies, taken, tmp_path, monkeypatch
):
    """Each copy of the state has an equal part of them."""
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / MANIFEST).touch()
    parts = {"microbatches": 4, "waves": 2}
    monkeypatch.setattr(manifest, "read", lambda path: {"parts": parts})
    run = Options(microbatches="auto", mesh=AbstractMesh((2,), ("data",)))
    several: Any = SimpleNamespace(
        count=processes, is_first=True, gather=lambda where, value: [value] * processes
    )
    placement: Any = SimpleNamespace(processes=several, num_processes=processes, num_copies=copies)
    found = with_saved_parts(run, tmp_path, rows, placement)
    assert (found.microbatches, found.waves) == (taken or ("auto", None))


def watched(params, batch):
    """The same loss with a metric and prints, one of them in a function of its own."""
    x = batch["x"]
    for layer in params:
        x = jnp.tanh(x @ layer["w"])
        jax.debug.callback(lambda largest: None, 3 * jnp.abs(x).max())
    jax.jit(lambda x: jax.debug.callback(lambda mean: None, x.mean()))(x)
    return jnp.mean(x**2), {"largest": 2 * jnp.abs(x).max()}


def test_a_loss_that_only_shows_more_is_the_same_loss(tmp_path):
    fit(tmp_path, 1)
    fit(tmp_path, 2, loss_fn=watched)
    with warns(UserWarning, "loss_fn"):
        fit(tmp_path, 3, loss_fn=lambda params, batch: watched(params, batch)[0] ** 2)


def scaled(scale: Any, microbatches: int = 1) -> Any:
    return lambda params, batch: scale * small.loss_fn(params, batch) * microbatches


def steps_of(size: float) -> Any:
    def update(updates, state, params=None, *, size=0.0):
        return jax.tree.map(lambda g: -size * g, updates), state

    return optax.GradientTransformation(optax.sgd(1.0).init, functools.partial(update, size=size))


def cosine(peak: float) -> Any:
    return optax.warmup_cosine_decay_schedule(0.0, peak, 10, 100)


@pytest.mark.parametrize(
    ("before", "now", "clause"),
    [
        (optax.sgd(0.1, momentum=0.9), optax.sgd(0.2, momentum=0.9), "learning_rate 0.1 -> 0.2"),
        (optax.adamw(cosine(1.0)), optax.adamw(cosine(2.0)), "end_value 1 -> 2, init_value 1 -> 2"),
        (optax.adamw(0.1, b1=0.9), optax.adamw(0.1, b1=0.8), "b1 0.9 -> 0.8"),
        (
            optax.chain(optax.clip_by_global_norm(1.0), optax.partition({"a": SLOW}, "a")),
            optax.chain(optax.clip_by_global_norm(0.5), optax.partition({"a": FAST}, "a")),
            "max_norm 1 -> 0.5, learning_rate 0.001 -> 1",
        ),
        (SLOW, optax.adam(1e-3), ""),
        (optax.adam(0.5), optax.adam(0.5), ""),
        (optax.clip(np.inf), optax.clip(np.nan), ""),
        (steps_of(0.1), steps_of(0.2), "size 0.1 -> 0.2"),
    ],
)
def test_numbers_of_an_optimizer_are_named_as_optax_names_them(before, now, clause):
    assert changed_numbers(*(named_numbers(tx.update) for tx in (before, now))) == clause


class Scale:
    """A loss as an object; what begins with an underscore is no part of the code."""

    def __init__(self, factor: int, note: str = ""):
        self.factor, self._note = factor, note

    def __call__(self, x):
        return self.factor * x

    def twice(self, x):
        return 2 * self.factor * x


def test_code_is_compared_by_what_it_computes_with():
    def documented(x):
        """One text."""
        return x + 1

    def described(y):
        """Another text."""
        return y + 1

    assert code_hash(documented) == code_hash(described)
    assert code_hash(scaled(2)) == code_hash(scaled(2, microbatches=4))
    assert code_hash(jax.jit(doubled)) == code_hash(doubled)
    assert code_hash(Scale(2, "a")) == code_hash(Scale(2, "b"))
    assert code_hash(Scale(2, "a").twice) == code_hash(Scale(2, "b").twice)
    functions = [
        doubled,
        scaled(2),
        scaled(100),
        scaled(doubled),
        functools.partial(scaled(2), batch=1),
        lambda x: x + 1,
        lambda x: x + 2,
        lambda x: x in {"a", "b"},
        lambda x: doubled(x, x),
        lambda x: line(x),
        *(function for factor in (2, 3) for function in (Scale(factor), Scale(factor).twice)),
    ]
    hashes = [str(code_hash(function)) for function in functions]
    assert len(set(hashes)) == len(functions)


@jax.custom_jvp
def softened(x):
    return jnp.tanh(x)


softened.defjvps(lambda t, ans, x: t * (1 - ans**2))
# Traced in another process, with other addresses, hashes of strings and caches.
FUNCTIONS = """
    def traced():
        import jax, jax.numpy as jnp, optax
        from megatrain_jax._src.engine.program import jaxpr as jx
        def loss(w, x):
            def layer(h, w):
                return jax.nn.relu(jax.nn.gelu(h @ w)), {"b": h.sum(), "a": h.max()}
            h, each = jax.lax.scan(jax.checkpoint(layer), x, w)
            jax.debug.print("{}", each["a"].sum())
            return jnp.where(h > 0, h, -jnp.inf).max()
        w, x = jax.ShapeDtypeStruct((2, 4, 4), "float32"), jax.ShapeDtypeStruct((3, 4), "float32")
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
        state = jax.eval_shape(tx.init, w)
        return [jx.trace(jax.grad(loss), w, x), jx.trace(tx.update, w, state, w)]
    def code():
        from megatrain_jax._src.engine.program.fingerprint import code_hash
        names = ("a", "b")
        return code_hash(lambda x: x in {"p", "q", "r"} and names and traced())
"""


def saving_a_name(x):
    policy = jax.checkpoint_policies.save_only_these_names("a")
    return jax.checkpoint(jnp.tanh, policy=policy)(x)


def test_functions_within_a_trace_have_no_addresses_in_its_fingerprint():
    """Each trace makes its own policy, at another address while the first one is alive."""
    traces = [jx.trace(lambda x: saving_a_name(x), jax.ShapeDtypeStruct((2,), "float32"))
              for _ in range(2)]  # fmt: skip
    policies = [trace.jaxpr.eqns[0].params["policy"] for trace in traces]
    assert policies[0] is not policies[1]
    assert fingerprint(traces[0]) == fingerprint(traces[1])


@pytest.mark.exhaustive
def test_fingerprints_are_the_same_in_another_process():
    scope: dict = {}
    exec(textwrap.dedent(FUNCTIONS), scope)
    here = [scope["code"](), *(fingerprint(traced) for traced in scope["traced"]())]
    script = textwrap.dedent(FUNCTIONS) + (
        "from megatrain_jax._src.engine.program.fingerprint import fingerprint\n"
        "print([code(), *(fingerprint(x) for x in traced())])"
    )
    there = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONHASHSEED": "7", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.strip() == str(here)
    assert "0x" not in str(here)


def fingerprints() -> Iterator[dict]:
    """Fingerprints of functions that differ in one thing each."""
    table = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    for function in (
        lambda x: x + 1,
        lambda x: x + 2,
        lambda x: 1 + x * 1,
        lambda x: x - 1,
        lambda x: x + table,
        lambda x: x + 2 * table,
        lambda x: jax.jit(lambda y: y + 3)(x),
        lambda x: jax.jit(lambda y: y + 4)(x),
        lambda x: x.sum(axis=0),
        lambda x: x.sum(axis=1),
        softened,
    ):
        yield fingerprint(jx.trace(function, jax.ShapeDtypeStruct((2, 3), "float32")))


def test_functions_that_differ_in_one_thing_have_different_fingerprints():
    found = list(fingerprints())
    pairs = itertools.combinations(found, 2)
    assert all(changes({"f": a}, {"f": b}) for a, b in pairs)
    assert not any(changes({"f": a}, {"f": b}) for a, b in zip(found, fingerprints(), strict=True))
    assert tells(changes({"f": found[0]}, {"f": found[1]})["f"], "f", 2, 1)
    assert not re.search(r"\d", changes({"f": found[4]}, {"f": found[5]})["f"])


def test_settings_are_compared_by_name_and_free_ones_are_not():
    before, now = {"a": 1, "b": [1], "c": 3}, {"a": 2, "b": [2], "new": 4}
    ((name, said),) = changes(before, now, {"b"}).items()
    assert name == "a" and tells(said, "a", 1, 2)
    assert changes({}, now) == {}
    # A mapping is no fingerprint, of which only parts are told.
    found = changes({"a": {"form": 1}}, {"a": {"form": 1, "numbers": [7]}})
    assert tells(found["a"], "a", "form", 1, 7)
