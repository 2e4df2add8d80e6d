"""What users get wrong about a model or a loss function, and what they are told.

Each case is one mistake; the message has to name the user's own argument, path or function.
"""

import dataclasses
import functools
import itertools
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import megatrain_jax as mt
from megatrain_jax._src.engine.adapt.adapters import adapt
from megatrain_jax._src.engine.options.precision import Precision
from megatrain_jax._src.engine.state.hardware import card
from messages import refuses

BATCH = {"x": np.ones((4, 3), np.float32)}
RNG = jax.random.key(7)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(3)(x)


def mean_square(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(model(batch["x"]) ** 2)


class Changing(nnx.Module):
    """Makes new variables, or changes the shape of one, when it is called."""

    def __init__(self, change: str):
        self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.state = nnx.Variable(jnp.zeros(2))
        self.change = change

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.change == "adds a variable":
            self.extra = nnx.Variable(x)
        elif self.change == "adds a parameter":
            self.extra = nnx.Param(x)
        elif self.change == "removes a variable":
            del self.state
        elif self.change == "changes a shape":
            self.state.set_value(jnp.zeros(3))
        else:
            self.state.set_value(jnp.zeros(2, jnp.int32))
        return self.linear(x)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("adds a variable", "variables added extra"),
        ("adds a parameter", "parameters added extra"),
        ("removes a variable", "variables removed state"),
        ("changes a shape", "state float32(2,) float32(3,)"),
        ("changes a dtype", "state float32(2,) int32(2,)"),
    ],
)
def test_variables_must_keep_their_structure(change: str, named: str):
    adapted, initial = adapt(Changing(change), mean_square, BATCH, 0)
    leaves, variables = initial.leaves(range(len(adapted.paths))), initial.variables()
    with refuses(ValueError, "loss_fn", *named.split()):
        adapted.loss(mean_square, leaves, variables, BATCH, RNG, True)


def with_params(value: Any) -> nnx.Module:
    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    model.bias = nnx.Param(value)
    return model


class LinenInteger(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.param("offset", lambda key: jnp.ones(3, jnp.int32))


class PlainTuple(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.tables = (jnp.ones(3),)


class WithDefault(nnx.Module):
    """A module whose random numbers are an argument's default, made with the class."""

    def __init__(self, draws: nnx.Rngs = nnx.Rngs(42)):  # noqa: B008
        self.linear = nnx.Linear(3, 3, rngs=draws)


class HasOneInside(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear, self.inner = nnx.Linear(3, 3, rngs=rngs), WithDefault()


class Foreign:
    """A module as of PyTorch, which can be called."""

    __module__ = "torch.nn"

    def __call__(self, *inputs: Any) -> Any: ...


RNGS = nnx.Rngs(0)


def needs_values() -> nnx.Module:
    return nnx.Linear(3, int(jnp.arange(4)[3]), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("model", "error", "named"),
    [
        (Net, TypeError, "model Net instance"),
        (LinenNet, TypeError, "model LinenNet instance"),
        ("gpt", TypeError, "model str nnx.Module"),
        (Foreign(), TypeError, "model Foreign torch nnx.Module"),
        (3.0, TypeError, "model float"),
        (lambda dim: Net(dim), TypeError, "<lambda> arguments"),
        (lambda: LinenNet(), TypeError, "<lambda> LinenNet Linen"),
        (lambda: "gpt", TypeError, "<lambda> builds str"),
        (lambda: Net, TypeError, "<lambda> Net instance"),
        (needs_values, ValueError, "needs_values traced"),
        (lambda: HasOneInside(nnx.Rngs(0)), ValueError, "<lambda> WithDefault draws nnx.Rngs"),
        (lambda: Net(RNGS), ValueError, "<lambda> outside nnx.Rngs"),
        (lambda: PlainTuple(), ValueError, "tables container"),
        (None, TypeError, "model NoneType"),
        ({"depth": 3}, ValueError, "parameters"),
        ({"w": jax.ShapeDtypeStruct((3,), jnp.float32)}, ValueError, "parameters shapes function"),
        (nnx.Dropout(0.5, rngs=nnx.Rngs(0)), ValueError, "parameters"),
        (linen.Dropout(0.5, deterministic=True), ValueError, "parameters"),
        (with_params(jnp.arange(3)), ValueError, "bias int32"),
        (with_params(jnp.ones(3) * 1j), ValueError, "bias complex64"),
        (with_params("three"), TypeError, "bias str"),
        (LinenInteger(), ValueError, "offset int32"),
        ({"w": np.ones(3, np.complex64)}, ValueError, "w complex64"),
        (
            {"w": np.ones(3), "names": [np.array(["a"]), np.array([None])]},
            ValueError,
            "device names/0 <U1 names/1 object",
        ),
    ],
)
def test_unsupported_models_are_refused(model: Any, error: type[Exception], named: str):
    with refuses(error, *named.split()):
        adapt(model, mean_square, BATCH, 0)


def test_a_loss_that_applies_a_linen_module_to_variables_learns_the_way():
    variables = LinenNet().init(jax.random.key(0), BATCH["x"])

    def applied(model: Any, batch: Any) -> jax.Array:
        return jnp.mean(model.apply(variables, batch["x"]) ** 2)

    with refuses(ValueError, "`model(x)`", "`model.apply`"):
        adapt(LinenNet(), applied, BATCH, 0)


@pytest.mark.parametrize(
    ("loss_fn", "named"),
    [
        ("mse", "str"),
        (lambda model: 0.0, "<lambda> (model)"),
        (lambda batch, model: 0.0, "<lambda> `batch` first"),
        (lambda data, model, rng: 0.0, "<lambda> `data` first"),
        (lambda params, state, batch: 0.0, "<lambda> random"),
        (lambda model, batch, rng, step: 0.0, "<lambda> (model, batch, rng, step)"),
        (lambda model, batch, *, scale: 0.0, "<lambda> (model, batch, *, scale)"),
        (lambda model, batch, state: 0.0, "<lambda> `state`"),
        (lambda model, batch, *, rng=None: 0.0, "<lambda> `rng`"),
    ],
)
def test_loss_functions_of_another_signature_are_refused(loss_fn: Any, named: str):
    with refuses(TypeError, "loss_fn(model, batch)", *named.split(maxsplit=1)):
        adapt({"w": jnp.ones(3)}, loss_fn, BATCH, 0)


@pytest.mark.parametrize(
    ("result", "named"),
    [
        (jnp.ones(4), ["scalar", (4,)]),
        (jnp.ones((), jnp.int32), ["scalar", (), "int32"]),
        (None, ["scalar", "NoneType"]),
        ((1.0, {}, {}), ["metrics", "tuple", 3]),
        ((1.0, [1.0]), ["metrics", "dict", "list"]),
        ((1.0, jnp.ones(4)), ["metrics", "dict", (4,)]),
        ((1.0, {1: 1.0}), ["metrics", "dict", "str"]),
        ((1.0, {"loss": 1.0}), ["metric", "'loss'"]),
        *(
            ((1.0, {name: 1.0}), ["metric", f"'{name}'"])
            for name in ("grad_norm", "loss_scale", "seconds", "skipped", "step", "eval_loss")
        ),
        ((1.0, {"logits": jnp.ones(2)}), ["'logits'", (2,)]),
        ((1.0, {"key": jax.random.key(0)}), ["'key'", "key<fry>"]),
        ((1.0, {"nested": {"a": 1.0}}), ["'nested'", "dict"]),
    ],
)
def test_results_that_are_no_loss_are_refused(result: Any, named: list[Any]):
    def loss_fn(model: Any, batch: Any) -> Any:
        return result

    adapted, initial = adapt({"w": jnp.ones(3)}, loss_fn, BATCH, 0)
    with refuses(ValueError, "loss_fn", *named):
        adapted.loss(loss_fn, initial.leaves([0]), (), BATCH, RNG, True)


@pytest.mark.parametrize("read", [float, bool, np.asarray, lambda x: x.item(), range])
def test_a_loss_that_needs_a_value_learns_the_line_and_the_way(read: Any):
    def loss_fn(model: Any, batch: Any) -> Any:
        loss = (model["w"] ** 2).mean()
        read(loss if read is not range else loss.astype(int))
        return loss

    adapted, initial = adapt({"w": jnp.ones(3)}, loss_fn, BATCH, 0)
    line = r"test_adapter_errors.py:\d+, `(read|@pytest.*lambda x: x.item).*`.* jax.debug.print"
    with pytest.raises(TypeError, match="loss_fn.*" + line):
        jax.eval_shape(lambda leaves: adapted.loss(loss_fn, leaves, (), BATCH, RNG, True),
                       initial.leaves([0]))  # fmt: skip


def test_precision_checks_its_dtypes():
    chosen = Precision(master="float32", compute="bfloat16")
    assert Precision().on(None) == Precision().on(card("H200")) == chosen == chosen.on(card("T4"))
    assert Precision().on(card("T4")) == Precision(compute=jnp.float16)
    with refuses(ValueError, "compute=int32", "floating"):
        Precision(compute=jnp.int32)
    for narrow in (jnp.float8_e5m2, jnp.float8_e4m3fn, jnp.float8_e8m0fnu):
        with refuses(ValueError, f"compute={np.dtype(narrow)}", "bfloat16", "float32"):
            Precision(compute=narrow)
        with refuses(ValueError, f"compute={np.dtype(narrow)}", "bfloat16", "float32"):
            Precision.compact(compute=narrow)
    with refuses(ValueError, "master=float64", "jax_enable_x64"):
        Precision(master=np.float64)
    with refuses(ValueError, "master='fp32'", 'mean "float32"'):
        Precision(master="fp32")
    with refuses(ValueError, "frozen='NF4'", 'mean "nf4"'):
        Precision(frozen="NF4")
    # NumPy takes these for structures without numbers.
    value: Any
    for name, value in itertools.product(("frozen", "compute", "sums"), ({}, [], "V")):
        with refuses(ValueError, f"({name}={value!r})", "jnp.float32"):
            Precision(**{name: value})
    with refuses(ValueError, "state=[]", "jnp.float32"):
        Precision(state=cast(Any, []))
    with refuses(ValueError, "sums='bf16'", '"float32"', 'mean "bfloat16"'):
        Precision(sums="bf16")
    # 64-bit types are no advice where the dtype is refused with them, too.
    wide: Any
    for wide in ({"sums": "float64"}, {"state": "float64"}, {"master": {"*": "float64"}}):
        with pytest.raises(
            ValueError, match=rf"{next(iter(wide))}=.*float64\S* .*float32, bfloat16"
        ):
            Precision(**wide)
    with refuses(ValueError, "compute=int64", "floating"):
        Precision(compute=np.int64)
    with refuses(ValueError, "master=float16", "bfloat16", "float32"):
        Precision(master=jnp.float16)
    with refuses(ValueError, "state=float16", "bfloat16", "float32"):
        Precision(state=jnp.float16)
    with refuses(ValueError, "state={'a': float16}", "bfloat16", "int4"):
        Precision(state={"*": "int8", "a": "float16"})
    with pytest.raises(ValueError, match=r"state=uint8\) .*bfloat16[^:]*$"):
        Precision(state="uint8")
    mapped = Precision(state={"*/mu/*": "int8"}, master={"*w": "bfloat16"})
    assert dataclasses.replace(mapped, rounding="nearest").state == mapped.state
    with refuses(ValueError, "rounding", "'up'", "stochastic", "nearest"):
        Precision(rounding=cast(Any, "up"))


def test_initial_values_that_need_a_batch_of_arrays_name_it():
    class Centred(linen.Module):
        @linen.compact
        def __call__(self, x):
            return x - self.param("mean", lambda key: x.mean(0))

    def loss_fn(model, batch):
        return (model(batch) ** 2).mean()

    x = np.ones((2, 3), np.float32)
    _, values = adapt(Centred(), loss_fn, x, 0)
    np.testing.assert_array_equal(values.leaves([0])[0], [1, 1, 1])
    _, values = adapt(Centred(), loss_fn, jax.ShapeDtypeStruct(x.shape, x.dtype), 0)
    with refuses(ValueError, "values", "`sample_batch`", "arrays"):
        values.leaves([0])


class Static(eqx.Module):
    """A module with a function in a static field."""

    weight: jax.Array
    function: Any = eqx.field(static=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.function(x) @ self.weight


class InAttribute(nnx.Module):
    def __init__(self):
        table = jnp.ones((3, 3))
        self.function = lambda x: x @ table
        self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(self.function(x))


def build_static():
    table = jnp.ones((3, 3))
    return Static(weight=jnp.ones((3, 2)), function=lambda x: x @ table)


def build_partial():
    table = jnp.ones((3, 3))
    return Static(weight=jnp.ones((3, 2)), function=functools.partial(jnp.matmul, table.T))


def build_in_attribute():
    return InAttribute()


@pytest.mark.parametrize("build", [build_static, build_partial, build_in_attribute])
def test_arrays_that_a_builder_puts_into_functions_name_the_way(build: Any):
    def loss_fn(model: Any, batch: Any):
        return jnp.mean(model(batch["x"][:3]) ** 2)

    def plan(model: Any):
        return mt.plan(model, loss_fn, optax.sgd(0.1), BATCH)

    with refuses(ValueError, "pass", build.__name__):
        plan(build)
    assert plan(build()).num_parameters > 0


def test_arrays_that_a_cache_has_kept_are_not_the_builder_s():
    table = functools.cache(lambda: jnp.ones((3, 3)))

    def plan(loss_fn: Any):
        return mt.plan({"w": jnp.ones((3, 2))}, loss_fn, optax.sgd(0.1), BATCH)

    plan(lambda params, batch: jnp.mean(batch["x"] @ table() @ params["w"]))
    with pytest.raises(ValueError, match="cache") as caught:
        plan(lambda params, batch: jnp.mean(batch["x"] @ table() @ params["w"]) * 2)
    assert "builds" not in str(caught.value)
