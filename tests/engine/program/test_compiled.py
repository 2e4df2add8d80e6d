"""Functions are compiled before the first step, by their shapes alone, and steps use those."""

import dataclasses
import functools
import logging
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, Mesh

import megatrain_jax as mt
import small
from inside import engine_of, spec_of
from megatrain_jax._src.engine.kernels import cache
from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.kernels.kernel import Kernel
from megatrain_jax._src.engine.kernels.rewrites import NO_TRITON
from megatrain_jax._src.engine.program import float8
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.report.make_plan import make_plan
from megatrain_jax._src.engine.spec.budget import with_temporaries
from megatrain_jax._src.engine.spec.step_kernels import step_kernels
from megatrain_jax._src.engine.state.placement import LARGEST_PART, PART, placed_on
from messages import refuses
from optimizers import OPTIMIZERS
from runs import SLOW, make_spec, make_trainer
from workloads import all_resident_bytes
from zoo import CASES
from zoo_case import Case

FUNCTIONS = {"forward_stage", "backward_stage", "reduce_group", "update_group"}


def compile_all(trainer):
    engine, spec = engine_of(trainer), spec_of(trainer)
    what = spec.first, spec.layouts, spec.optimizer, engine.store.placement
    return engine.kernels.compile(step_kernels(*what))


def compiled_names(caplog):
    texts = [record.getMessage() for record in caplog.records]
    return [name for text in texts if "Compiling" in text for name in FUNCTIONS if name in text]


# All pairs of values of two of the first four.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "optimizer", "compute", "microbatches", "num_devices"),
    [
        ("nnx_tied", "clip_adamw", "float32", 2, 1),
        ("dropout_nnx", "clip_adamw", "bfloat16", 1, 1),
        ("nnx_tied", "adafactor", "bfloat16", 1, 1),
        ("dropout_nnx", "adafactor", "float32", 2, 1),
        ("nnx_tied", "muon", "bfloat16", 2, 1),
        ("dropout_nnx", "muon", "float32", 1, 1),
        ("nnx_tied", "clip_adamw", "float32", 2, 4),
        ("dropout_nnx", "muon", "bfloat16", 1, 4),
    ],
)
def test_steps_find_everything_compiled(
    name, optimizer, compute, microbatches, num_devices, caplog
):
    case = CASES[name]
    mesh = Mesh(jax.devices()[:num_devices], "data")
    options = {"microbatches": microbatches, "compute": compute, "mesh": mesh}
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        trainer = make_trainer(case, OPTIMIZERS[optimizer], **options)
        caplog.clear()
        assert compile_all(trainer) > 0
        at_once = set() if spec_of(trainer).optimizer.deferred else {"reduce_group"}
        assert set(compiled_names(caplog)) == FUNCTIONS - at_once
        caplog.clear()
        for seed in range(2):
            trainer.step(case.batch(seed))
        trainer.flush()
        assert not compiled_names(caplog)


def signature(args):
    return jax.tree.structure(args), [(x.shape, x.dtype) for x in jax.tree.leaves(args)]


@pytest.mark.by_default("adamw_schedule-1000000000")
@pytest.mark.parametrize(
    ("optimizer", "budget"), [("adamw_schedule", 10**9), ("clip_adamw", "least"), ("muon", "least")]
)
def test_calls_pass_what_their_kernels_take(optimizer, budget, monkeypatch):
    case, get, seen = CASES["nnx_tied"], KernelCache.get, set()

    def watched_get(self, kernel):
        function = get(self, kernel)

        def run(*args):
            seen.add(kernel.name)
            assert signature(args) == signature(kernel.takes), kernel.name
            return function(*args)

        run.trace = function.trace  # by which the memory that it needs is estimated
        return function if kernel.takes is None else run

    monkeypatch.setattr(KernelCache, "get", watched_get)
    # Where arithmetic is slow, keeping residuals is worth it.
    options = {"budget": budget, "microbatches": 2, "hardware": SLOW}
    trainer = make_trainer(case, OPTIMIZERS[optimizer], **options)
    for seed in range(2):
        trainer.step(case.batch(seed))
    trainer.flush()
    ways = {"forward", "backward"}
    if budget != "least":
        ways |= {"forward keeping", "backward of kept"}
    deferred = {"reduce"} if optimizer == "clip_adamw" else set()
    assert seen >= ways | deferred | {"update"}


def test_the_memory_that_a_function_needs_is_seen():
    rows, dim, wide = 64, 8, 1 << 14
    params = {"up": np.zeros((dim, wide), np.float32), "down": np.zeros((wide, dim), np.float32)}

    def loss_fn(params, batch):
        hidden = jnp.sort(batch["x"] @ params["up"], axis=-1)  # between two functions of libraries
        return ((hidden @ params["down"]) ** 2).mean()

    batch = {"x": np.ones((rows, dim), np.float32)}
    precision = mt.Precision(compute=jnp.float32)
    trainer = mt.Trainer(params, loss_fn, optax.sgd(0.1), batch, precision=precision)
    assert rows * wide * 4 <= compile_all(trainer) <= 12 * rows * wide * 4


def test_an_automatic_budget_is_what_the_device_has_left():
    case = Case(
        name="layers", build=lambda: 2 * small.params(), loss_fn=small.loss_fn, blocks=4,
        templates=1, batch=small.batch,
    )  # fmt: skip
    spec = make_spec(case, OPTIMIZERS["clip_adamw"])
    # As on a GPU, where temporaries are known later.
    spec = dataclasses.replace(spec, base_bytes=None, temporary_bytes=None)
    least, most = spec.first.schedule.smallest_bytes, all_resident_bytes(spec.first.workload)
    plan = make_plan(spec)
    taken = plan.device_other_bytes + 1000
    assert spec.options.device_budget is None and plan.device_temporary_bytes is None

    def with_room_for(num_bytes):
        gaps = spec.largest_slab_bytes
        device_bytes = int((taken + gaps + num_bytes) / 0.95) + 1
        return with_temporaries(spec, 1000, device_bytes)

    for room in (0, least, (least + most) // 2, most, 10 * most):
        planned = make_plan(with_room_for(room))
        assert planned.device_state_bytes <= max(room, least)
        assert planned.device_temporary_bytes == 1000 and planned.device_temporary_estimated
        assert planned.device_bytes == planned.device_state_bytes + taken
    assert make_plan(with_room_for(most)).bytes_in == 0 < make_plan(with_room_for(least)).bytes_in
    compiled = dataclasses.replace(with_room_for(most), temporary_estimated=False)
    assert not make_plan(compiled).device_temporary_estimated
    assert with_temporaries(spec, 1000, None).first is spec.first
    options = dataclasses.replace(spec.options, device_budget="least")
    fixed = dataclasses.replace(spec, options=options)
    assert with_temporaries(fixed, 1000, 10 * most).first is spec.first


@pytest.mark.parametrize("budget", ["most", "LEAST", ""])
def test_a_budget_in_words_has_to_be_known(budget):
    with refuses(ValueError, "`device_budget`", "bytes", '"minimum"'):
        make_trainer(CASES["nnx_tied"], OPTIMIZERS["adam"], budget=budget)


@pytest.mark.by_default("least")
@pytest.mark.parametrize("name", ["minimum", "least"])
def test_the_minimum_budget_by_its_name(name):
    trainer = make_trainer(CASES["nnx_tied"], OPTIMIZERS["adam"], budget=name)
    schedule = spec_of(trainer).first.schedule
    assert trainer.plan.device_state_bytes == schedule.peak_bytes <= schedule.smallest_bytes


@pytest.mark.parametrize("devices", [1, 2])
def test_xla_knows_the_options_for_a_gpu(devices):
    placement = placed_on(AbstractMesh((devices,), ("data",)))
    options = dataclasses.replace(placement, platform="gpu").compiler_options
    assert PART in options
    jax.jit(jnp.sin, compiler_options=options).lower(1.0).compile()
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jax.jit(jnp.sin, compiler_options={**options, "xla_multiheap": "1"}).lower(1.0).compile()


def test_temporaries_have_parts_of_the_largest_array_and_functions_are_traced_once(monkeypatch):
    """XLA warns of arrays that are larger than a part."""
    traced, parts = [], []

    def function(x):
        traced.append(x)
        return jax.lax.map(lambda row: jnp.outer(row, row).sum(0), x)

    shapes = (jax.ShapeDtypeStruct((8, 256), jnp.float32),)
    kernel = Kernel(name="test", build=lambda: function, takes=shapes)
    jit = jax.jit

    def noted(*args, compiler_options=None, **kwargs):
        parts.append(compiler_options and int(compiler_options[PART]))
        return jit(*args, compiler_options=compiler_options, **kwargs)

    monkeypatch.setattr(jax, "jit", noted)
    for smallest in (1, 10**6, LARGEST_PART + 1):
        KernelCache({PART: str(smallest)}).compile([kernel])
    assert parts == [None, 256 * 256 * 4, None, 10**6, None, LARGEST_PART] and len(traced) == 1


def test_temporaries_with_a_very_large_array_are_undivided(monkeypatch):
    """Divided, those of an MLP's gradient take more, because each array has its own part."""
    rows, dim, wide = 512, 56, 296

    def gradient(y, x, gate, up, down):
        def block(x, gate, up, down):
            normal = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)
            return x + (jax.nn.silu(normal @ gate) * (normal @ up)) @ down

        return jax.vjp(block, x, gate, up, down)[1](y)

    shapes = (rows, dim), (rows, dim), (dim, wide), (dim, wide), (wide, dim)
    takes = tuple(jnp.zeros(shape, jnp.bfloat16) for shape in shapes)
    kernel = Kernel(name="test", build=lambda: gradient, takes=takes)
    options = {PART: str(rows * wide)}
    whole = KernelCache().compile([kernel])
    with warnings.catch_warnings():  # JAX can't store a program for the CPU with pieces
        warnings.simplefilter("ignore")
        divided = jax.jit(kernel.build(), compiler_options=options).lower(*takes).compile()
    stats = divided.memory_analysis()
    assert stats is not None and stats.temp_size_in_bytes > whole
    monkeypatch.setattr(cache, "_LARGE_TEMPORARIES", rows * wide)
    assert KernelCache(options).compile([kernel]) == whole


def product(rows, summands, columns, dtype=jnp.bfloat16, *, batch=()):
    shapes = (*batch, rows, summands), (*batch, summands, columns)
    takes = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    return Kernel(name=f"product {shapes} {dtype}", build=lambda: jnp.matmul, takes=takes)


def beside(kernel, other):
    """A kernel that computes a second product in a loop."""

    def build():
        def both(x, y, z, w):
            return kernel.build()(x, y), jax.lax.map(lambda _: other.build()(z, w), jnp.arange(2))

        return both

    takes = (*kernel.takes, *other.takes)
    return Kernel(name=f"{kernel.name}, {other.name}", build=build, takes=takes)


def test_only_kernels_with_small_products_try_functions_of_triton(monkeypatch):
    """XLA would compile some dozens of them for every large product, and use none."""
    jit, noted = jax.jit, []

    def noting(*args, compiler_options=None, **kwargs):
        noted.append(compiler_options)
        return jit(*args, compiler_options=compiler_options, **kwargs)

    monkeypatch.setattr(jax, "jit", noting)

    def tries_triton(kernel):
        KernelCache({PART: "1"}, "gpu").get(kernel)
        return NO_TRITON.keys().isdisjoint(noted[-1])

    large, small = product(512, 256, 1024), product(512, 256, 16)
    assert not tries_triton(large) and not tries_triton(beside(large, large))
    others = small, product(512, 16, 512), product(16, 512, 512), product(512, 512, 512, batch=(2,))
    for kernel in (*others, product(512, 512, 512, jnp.float32), beside(large, small)):
        assert tries_triton(kernel), kernel.name
    vector = jax.ShapeDtypeStruct((8,), jnp.bfloat16)
    sums = Kernel(name="sum", build=lambda: jnp.sum, takes=(vector,))
    assert tries_triton(sums)
    KernelCache(None, "gpu").get(large)  # not for a GPU of XLA's
    assert noted[-1] is None
    jit(jnp.sin, compiler_options=dict(NO_TRITON)).lower(1.0).compile()  # XLA knows the option


def in_float8(kernel):
    """A kernel with the same product in float8."""

    def build():
        (eqn,) = jax.make_jaxpr(jnp.matmul)(*kernel.takes).eqns
        form = float8.ProductSpec.of(eqn, (False, False))
        return lambda x, y: float8.product(form, x, y)

    return dataclasses.replace(kernel, name=f"{kernel.name} in float8", build=build)


@pytest.mark.parametrize("turn", [False, True])
def test_float8_products_never_try_functions_of_triton(turn, monkeypatch):
    """XLA would try them for 20 s per product; a small product beside it may still be Triton's."""
    monkeypatch.setattr(cache, "compiles_float8_by_cublas", lambda device: True)
    large, small = in_float8(product(512, 256, 1024)), product(512, 256, 16)
    vector = in_float8(product(1, 256, 1024))
    pair = (large, small) if not turn else (small, large)

    def algorithms(*kernels):
        kernel = functools.reduce(beside, kernels)
        jaxpr = KernelCache({PART: "1"}, "gpu").get(kernel).trace(*(kernel.takes or ())).jaxpr
        products = [e for e in equations(jx.opened(jaxpr)) if float8.is_float8_product(e)]
        return [eqn.params["precision"] for eqn in products]

    assert algorithms(large) == [None]  # its kernel does not try Triton at all
    (found,) = algorithms(*pair)
    assert found is jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM
    assert algorithms(vector, small) == [None]  # XLA computes it as a sum


def test_no_product_tries_triton_where_float8_products_cannot_be_left_to_cublas(monkeypatch):
    jit, noted = jax.jit, []
    monkeypatch.setattr(jax, "jit", lambda *a, **k: noted.append(k) or jit(*a, **k))
    kernel = beside(in_float8(product(512, 256, 1024)), product(512, 256, 16))
    # A CPU's compiler refuses the algorithm, as some versions for a GPU do.
    function = KernelCache({PART: "1"}, "gpu", device=jax.devices()[0]).get(kernel)
    assert noted[-1]["compiler_options"].items() >= NO_TRITON.items()
    function.lower(*(kernel.takes or ()))


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jx.inner_jaxprs(eqn):
            yield from equations(inner)


def test_only_a_large_piece_of_temporaries_waits_for_the_stage_before(monkeypatch):
    """The pool of a GPU finds small pieces while the memory of the stage before is in use."""

    def function(x):
        rows, columns = jnp.sort(x, 1), jnp.sort(x, 0)  # XLA doesn't compute these in pieces
        return jnp.cumsum(columns @ rows, 0) @ columns

    shapes = (jax.ShapeDtypeStruct((256, 256), jnp.float32),)
    kernel = Kernel(name="test", build=lambda: function, takes=shapes)
    whole, divided = KernelCache(), KernelCache({PART: "1"})
    every, largest = whole.compile([kernel]), 256 * 256 * 4
    with warnings.catch_warnings():  # JAX can't store a program for the CPU with pieces
        warnings.simplefilter("ignore")
        divided.compile([kernel])
    assert every > largest

    def waits(large):
        monkeypatch.setattr(cache, "_LARGE_TEMPORARIES", large)
        return [kernels.has_large_temporaries(kernel) for kernels in (whole, divided)]

    assert waits(largest) == [True, True]
    assert waits(largest + 1) == [True, False]
    assert waits(every + 1) == [False, False]
