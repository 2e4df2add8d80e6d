"""The operations of attention: counted pair by pair here, by formula in a plan.

cuDNN's kernels are traced without a GPU; nothing of them is computed.
"""

import contextlib
import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo as cudnn_attention
from jax.experimental import pallas as pl

import megatrain_jax as mt
from megatrain_jax import models
from megatrain_jax._src.engine import planning
from megatrain_jax._src.engine.adapt.adapters import adapt
from megatrain_jax._src.engine.kernels.gpu_traffic import count_traffic
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.program.flops import (
    attended_pairs,
    attention_flops,
    count_flops,
    is_attention,
    is_product,
)
from megatrain_jax._src.engine.program.trace_target import traced_for
from megatrain_jax._src.engine.report.make_plan import make_plan, microbatch_work
from megatrain_jax._src.engine.spec import bound_step, selective
from megatrain_jax._src.engine.spec.make_spec import make_run_spec
from megatrain_jax._src.engine.spec.run_spec import RunSpec
from megatrain_jax._src.engine.spec.work import Work, backward_work, forward_work, saved_work
from megatrain_jax._src.lm.models import causal_attention
from megatrain_jax._src.lm.models.causal_attention import full_attention

GIB = 2**30
ROWS, HEADS, KV_HEADS, WIDTH = 2, 4, 2, 16


@pytest.fixture
def cudnn(monkeypatch):
    """Traces cuDNN's kernels where there is none, in the library's models as on a GPU."""
    monkeypatch.setattr(cudnn_attention, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn_attention, "check_is_flash_attention", lambda *a, **k: None)
    monkeypatch.setattr(causal_attention, "_widest_heads", lambda: 256)


def planned_for(widest: int) -> contextlib.AbstractContextManager[None]:
    return traced_for(card="a card", widest_heads=widest)


def shapes(queries: int = 96, keys: int = 96) -> tuple[jax.ShapeDtypeStruct, ...]:
    q = jax.ShapeDtypeStruct((ROWS, queries, HEADS, WIDTH), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((ROWS, keys, KV_HEADS, WIDTH), jnp.bfloat16)
    return q, k, k


def mask_of(queries: int, keys: int, causal: bool, window: int | None) -> np.ndarray:
    here, there = np.mgrid[:queries, :keys]
    mask = np.ones((queries, keys), bool)
    if causal or window is not None:
        mask &= there <= here
    if window is not None:
        mask &= there > here - window
    return mask


def forward_of(mask: np.ndarray, width: int = WIDTH) -> int:
    """The operations of a forward: a product of `width` for the score and one for the value."""
    return ROWS * HEADS * int(mask.sum()) * 4 * width


def counted(function: Any, *args: Any) -> tuple[int, int]:
    """All operations of a function, and those of attention's kernels."""
    jaxpr = jax.make_jaxpr(function)(*args)
    return count_flops(jaxpr), count_flops(jaxpr, is_attention)


def attends(implementation: str | None = "cudnn", **options: Any) -> Any:
    return functools.partial(jax.nn.dot_product_attention, implementation=implementation, **options)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 7, 64, 300])
@pytest.mark.parametrize(("queries", "keys"), [(96, 96), (96, 40), (40, 96), (1, 1)])
def test_pairs_are_those_that_no_mask_hides(queries, keys, causal, window):
    pairs = attended_pairs(queries, keys, causal=causal, window=window)
    assert pairs == mask_of(queries, keys, causal, window).sum()


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("keys", [96, 40])
def test_a_kernel_computes_what_its_mask_leaves(cudnn, keys, causal, window):
    size = None if window is None else (window - 1, 0)
    function = attends(is_causal=causal, local_window_size=size)
    expected = forward_of(mask_of(96, keys, causal, window))
    assert counted(function, *shapes(96, keys)) == (expected, expected)


def test_lengths_that_are_not_known_yet_count_as_full(cudnn):
    lengths = jax.ShapeDtypeStruct((ROWS,), jnp.int32)

    def function(q, k, v, lengths):
        return attends(query_seq_lengths=lengths, is_causal=True)(q, k, v)

    expected = forward_of(mask_of(96, 96, True, None))
    assert counted(function, *shapes(), lengths)[1] == expected


def test_heads_before_tokens_count_alike(cudnn):
    function = functools.partial(cudnn_attention.dot_product_attention, qkv_layout="BNTH")
    q, k, v = (
        jax.ShapeDtypeStruct((x.shape[0], x.shape[2], x.shape[1], x.shape[3]), x.dtype)
        for x in shapes(96, 40)
    )
    assert counted(function, q, k, v)[1] == forward_of(mask_of(96, 40, False, None))


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: f])
def test_a_kernel_counts_within_calls(cudnn, wrap):
    expected = forward_of(mask_of(96, 96, True, None))
    function = wrap(attends(is_causal=True))
    assert counted(function, *shapes())[1] == expected

    def layers(q, k, v):
        return jax.lax.scan(lambda x, _: (function(x, k, v), None), q, None, length=3)[0]

    assert counted(layers, *shapes())[1] == 3 * expected
    more = [jax.ShapeDtypeStruct((5, *x.shape), x.dtype) for x in shapes()]
    assert counted(jax.vmap(function), *more)[1] == 5 * expected


def test_a_tower_counts_as_much_in_a_plan_as_on_a_gpu(cudnn):
    q, _, _ = shapes()

    def pulled(*arrays):
        out, pull = jax.vjp(full_attention, *arrays)
        return pull(out)

    on_gpu = counted(pulled, q, q, q)[1]
    with planned_for(128):
        planned = counted(pulled, q, q, q)[1]
    assert planned == on_gpu == 7 * forward_of(mask_of(96, 96, False, None)) // 2


@pytest.mark.parametrize("window", [None, 7])
def test_a_gradient_is_two_and_a_half_forwards(cudnn, window):
    size = None if window is None else (window - 1, 0)
    function = attends(is_causal=True, local_window_size=size)
    forward = forward_of(mask_of(96, 96, True, window))

    def gradients(function):
        def pulled(q, k, v):
            out, pull = jax.vjp(function, q, k, v)
            return pull(out)

        return counted(pulled, *shapes())[1]

    assert gradients(function) == 3.5 * forward
    assert gradients(jax.checkpoint(function)) == 4.5 * forward  # its forward once more


@pytest.mark.parametrize("width", [8, WIDTH, 40])
def test_a_kernel_counts_the_products_of_values_of_another_width(width):
    q, k, _ = shapes(96, 40)
    v = jax.ShapeDtypeStruct((*k.shape[:3], width), k.dtype)

    def plain(q, k, v):
        k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
        return jnp.einsum("bhqk,bkhd->bqhd", jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v)

    def pulled(*arrays):
        out, pull = jax.vjp(plain, *arrays)
        return pull(out)

    forward, both = (count_flops(jax.make_jaxpr(f)(q, k, v), is_product) for f in (plain, pulled))
    # Backward computes the scores again, in place of having them saved.
    scores = forward * WIDTH // (WIDTH + width)
    params = {"mask_type": SimpleNamespace(name="NO_MASK"), "sliding_window_length": None}
    for name, expected in (("fwd", forward), ("bwd", both - forward + scores)):
        eqn = SimpleNamespace(
            primitive=SimpleNamespace(name=f"dot_product_attention_{name}"),
            params=params,
            invars=[SimpleNamespace(aval=x) for x in (q, k, v)],
        )
        assert attention_flops(eqn) == expected


@pytest.mark.parametrize("implementation", ["xla", None])
def test_without_a_kernel_all_pairs_are_products(implementation):
    jaxpr = jax.make_jaxpr(attends(implementation, is_causal=True))(*shapes())
    assert count_flops(jaxpr, is_product) == forward_of(mask_of(96, 96, False, None))
    assert count_flops(jaxpr, is_attention) == 0


def forward_in_model(longest: int, widest: int, packed: bool, window: int | None) -> int:
    """The operations of the models' attention; packed documents count as one."""
    long = longest < 96 or (window is not None and window < 48)
    if packed and long and WIDTH + 64 <= widest:  # heads have the documents' numbers as well
        return forward_of(mask_of(96, 96, True, window), WIDTH + 64)
    return forward_of(mask_of(96, 96, True, None if packed else window))  # a mask hides it


@pytest.mark.parametrize("window", [None, 7, 48])
@pytest.mark.parametrize("longest", [95, 96])
@pytest.mark.parametrize("packed", [False, True])
def test_the_models_attention_counts_as_its_kernel(cudnn, monkeypatch, packed, longest, window):
    monkeypatch.setattr(causal_attention, "_MASKED", longest)
    segments = jax.ShapeDtypeStruct((ROWS, 96), jnp.int32) if packed else None

    def function(q, k, v, segments):
        return models.attention(q, k, v, segments=segments, window=window)

    expected = forward_in_model(longest, 256, packed, window)
    assert counted(function, *shapes(), segments)[1] == expected


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("widest", [WIDTH, WIDTH + 56, WIDTH + 64])
@pytest.mark.parametrize("packed", [False, True])
def test_a_kernel_that_is_planned_for_counts_as_the_kernel(packed, widest, window):
    segments = jax.ShapeDtypeStruct((ROWS, 96), jnp.int32) if packed else None

    def function(q, k, v, segments):
        return models.attention(q, k, v, segments=segments, window=window)

    def pulled(*args):
        out, pull = jax.vjp(jax.checkpoint(function), *args)
        return pull(out)[:3]

    forward = forward_in_model(96, widest, packed, window)
    with planned_for(widest):
        assert counted(function, *shapes(), segments)[1] == forward
        assert counted(pulled, *shapes(), segments)[1] == 4.5 * forward
        rows = jax.vmap(lambda q, k, v: function(q, k, v, segments))
        more = [jax.ShapeDtypeStruct((5, *x.shape), x.dtype) for x in shapes()]
        assert packed or counted(rows, *more)[1] == 5 * forward
        out, *gradients = jax.eval_shape(
            lambda *a: (function(*a), *pulled(*a)), *shapes(), segments
        )
        assert [(x.shape, x.dtype) for x in (out, *gradients)] == [
            (x.shape, x.dtype) for x in (shapes()[0], *shapes())
        ]
    for none in (0, WIDTH - 8):  # no kernel is there
        with planned_for(none):
            assert counted(function, *shapes(), segments)[1] == 0
    assert counted(function, *shapes(), segments)[1] == 0
    exact = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in shapes()]
    with planned_for(widest):
        assert counted(function, *exact, segments)[1] == 0


@pytest.mark.parametrize("widest", [WIDTH, WIDTH + 64])
def test_rows_too_long_for_a_mask_have_marks_or_no_kernel(monkeypatch, widest):
    segments = jax.ShapeDtypeStruct((ROWS, 96), jnp.int32)
    for longest in (94, 96):
        monkeypatch.setattr(causal_attention, "_LONGEST_MASKED", longest)
        monkeypatch.setattr(causal_attention, "_MASKED", 90)
        with planned_for(widest):
            found = counted(
                lambda q, k, v, segments: models.attention(q, k, v, segments=segments, window=7),
                *shapes(),
                segments,
            )[1]
        expected = forward_in_model(90, widest, True, 7)
        assert found == (0 if widest == WIDTH and longest == 94 else expected)


def test_chosen_keys_are_a_mask_of_the_kernel_of_all_queries_or_of_some_at_a_time(monkeypatch):
    bits = jax.ShapeDtypeStruct((ROWS, 96, 12), jnp.uint8)
    whole = forward_of(mask_of(96, 96, True, None))
    parts = sum(forward_of(mask_of(16, stop, False, None)) for stop in range(16, 97, 16))
    for longest, expected in ((40, parts), (96, whole)):
        monkeypatch.setattr(causal_attention, "_LONGEST_MASKED", longest)
        with planned_for(WIDTH + 64):
            attend = functools.partial(causal_attention.attend_to_chosen, scale=None)
            found = counted(attend, *shapes(), bits)[1]
        assert found == expected


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("keys", [96, 40, HEADS])
def test_a_mask_is_read_for_each_pair_of_each_head(cudnn, keys, causal):
    """Bytes that a mask costs, by cuDNN's own calls; those without a mask cost none."""
    mask = jax.ShapeDtypeStruct((ROWS, 1, 96, keys), bool)

    def traffic(*masks):
        def forward(q, k, v):
            return attends(is_causal=causal)(q, k, v, mask=masks[0] if masks else None)

        def both(q, k, v):
            out, pull = jax.vjp(forward, q, k, v)
            return pull(out)

        jaxprs = (jax.make_jaxpr(f)(*shapes(96, keys)) for f in (forward, both))
        return [count_traffic(jaxpr).total for jaxpr in jaxprs]

    def in_plan(q, k, v):  # whose statistics have the shape of a mask for as many heads as keys
        out, pull = jax.vjp(models.attention, q, k, v)
        return pull(out)

    with planned_for(128):
        assert count_traffic(jax.make_jaxpr(in_plan)(*shapes(HEADS, HEADS))).total == 0
    pairs = ROWS * HEADS * int(mask_of(96, keys, causal, None).sum())
    bare = traffic()
    masked = traffic(jnp.ones(mask.shape, bool))
    made = [
        each - own - read * pairs for own, each, read in zip(bare, masked, (3, 13), strict=True)
    ]
    assert (bare, made) == ([0, 0], [3 * mask.size] * 2)  # read as booleans, written in 16 bits


class _Called(Exception):
    pass


@pytest.mark.parametrize(
    ("capability", "widest"),
    [("7.5", 0), ("gfx942", 0), ("8.0", 128), ("8.9", 128), ("9.0", 256)],
)
def test_cudnn_is_called_only_on_gpus_where_jax_has_its_attention(monkeypatch, capability, widest):
    def call(*args, **options):
        raise _Called

    device = SimpleNamespace(platform="gpu", compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(jax.nn, "dot_product_attention", call)
    for width in (128, 256):
        q = jax.ShapeDtypeStruct((1, 4, 1, width), jnp.float16)
        refused = pytest.raises(_Called) if width <= widest else contextlib.nullcontext()
        with refused:
            assert jax.eval_shape(lambda q: models.attention(q, q, q), q) == q


def test_other_calls_are_no_attention():
    def function(x):
        call = jax.ffi.ffi_call("other", jax.ShapeDtypeStruct(x.shape, x.dtype))
        return call(x, window=np.int64(3))

    assert counted(function, jnp.ones((ROWS, 96, HEADS, WIDTH))) == (0, 0)


@pytest.mark.by_default("None")
@pytest.mark.parametrize("window", [None, 512])
def test_a_plan_made_elsewhere_is_that_of_a_gpu(window, monkeypatch, request):
    config = dataclasses.replace(QWEN_7B, num_layers=1, windows=(window,) if window else ())
    rows = jax.ShapeDtypeStruct((2, 4096), jnp.int32)
    batch = {"tokens": rows, "labels": rows, "segments": rows}

    def plan() -> mt.Plan:
        return mt.plan(
            lambda: models.Decoder(config, rngs=nnx.Rngs(0)),
            models.next_token_loss,
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4)),
            batch,
            hardware="H200",
            device_budget=20 * GIB,
        )

    elsewhere = plan()
    assert elsewhere.attention_flops_per_step > 0
    # As if there were cuDNN here: the kernels themselves are traced.
    request.getfixturevalue("cudnn")
    monkeypatch.setattr(planning, "traced_for", lambda **_: contextlib.nullcontext())
    assert plan() == elsewhere


def test_what_was_traced_for_a_plan_is_not_run():
    @jax.jit
    def attend(q):
        return models.attention(q, q, q)

    q = jnp.ones((ROWS, 8, HEADS, WIDTH), jnp.bfloat16)
    with planned_for(128):
        assert counted(attend, q)[1] > 0
    np.testing.assert_array_equal(attend(q), q)  # the mean of equal values


@pytest.mark.parametrize("window", [None, 7])
def test_spans_count_what_they_compute(window):
    piece = 4
    computed = np.zeros((96, 96), bool)
    for start in range(0, 96, 12):  # eight spans, each with the keys up to its end
        first = 0 if window is None else max(0, start - window + 1)
        computed[start : start + 12, first : start + 12] = True
    needed = mask_of(96, 96, True, window)
    assert (computed | needed == computed).all()
    function = functools.partial(models.attention, window=window, piece=piece)
    jaxpr = jax.make_jaxpr(function)(*shapes())
    assert count_flops(jaxpr, is_product) == forward_of(computed)
    assert count_flops(jaxpr, is_attention) == 0


@pytest.mark.parametrize("estimate", [None, 1234])
def test_kernels_of_pallas_say_what_they_cost_or_are_looked_into(estimate):
    def multiply(x, y, out):
        out[...] = x[...] @ y[...]

    def function(x, y):
        return pl.pallas_call(
            multiply,
            grid=(4, 2),
            in_specs=[
                pl.BlockSpec((8, 16), lambda i, j: (i, 0)),
                pl.BlockSpec((16, 8), lambda i, j: (0, j)),
            ],
            out_specs=pl.BlockSpec((8, 8), lambda i, j: (i, j)),
            out_shape=jax.ShapeDtypeStruct((32, 16), jnp.float32),
            cost_estimate=estimate
            and pl.CostEstimate(flops=estimate, transcendentals=0, bytes_accessed=0),
        )(x, y)

    x, y = jnp.ones((32, 16)), jnp.ones((16, 16))
    assert counted(function, x, y) == (estimate or 2 * 32 * 16 * 16, 0)
    # What a policy of residuals asks for within a kernel is not there.
    assert count_flops(jax.make_jaxpr(function)(x, y), is_product) == 0


def spec_of(**options: Any) -> RunSpec:
    """The spec of a run whose layers have a product, attention and another product."""
    width = HEADS * WIDTH
    layers = [{"in": jnp.ones((width, width)), "out": jnp.ones((width, width))} for _ in range(3)]
    batch = {"x": jnp.ones((ROWS, 96, width), jnp.bfloat16)}

    def loss_fn(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for layer in params:
            q = (x @ layer["in"]).reshape(-1, 96, HEADS, WIDTH)
            mixed = attends(is_causal=True)(q, q, q)
            x = x + mixed.reshape(x.shape) @ layer["out"]
        return (x.astype(jnp.float32) ** 2).mean()

    asked = Options(precision=mt.Precision(compute=jnp.bfloat16), **options)
    adapted, _ = adapt(layers, loss_fn, batch, 0)
    return make_run_spec(adapted, loss_fn, optax.sgd(0.1), batch, asked)


FORWARD = forward_of(mask_of(96, 96, True, None))
SLOW = dataclasses.replace(mt.card("H200"), flops_per_s=1e6)


@pytest.mark.parametrize(("trainable", "share"), [(None, 1.0), ("out", 0.5)])
def test_a_backward_of_attention_takes_as_long_whatever_is_trained(cudnn, trainable, share):
    step = spec_of(trainable=trainable, hardware=SLOW).first
    stages = [bound.stage for bound in step.stages]
    forwards = forward_work(stages)
    assert [work.attention for work in forwards] == [FORWARD] * 3
    costs = step.workload.costs
    for s, (stage, work) in enumerate(zip(stages, forwards, strict=True)):
        products = work.flops - work.attention
        assert stage.trainable_share == share
        # Computed once more, and five products for two.
        assert backward_work(stage, work) == Work(
            flops=(2 + share) * products + 3.5 * FORWARD, attention=3.5 * FORWARD
        )
        seconds = products / 1e6 / SLOW.sustained, FORWARD / 1e6 / SLOW.sustained_attention
        assert costs.forward[s] == pytest.approx(sum(seconds))
        assert costs.backward[s] == pytest.approx((2 + share) * seconds[0] + 3.5 * seconds[1])


def test_attention_that_is_kept_saves_its_forward(cudnn):
    step = spec_of(hardware=SLOW).first
    residuals = step.stages[0].residuals
    assert residuals is not None
    saved = saved_work(residuals)
    products = 2 * 2 * ROWS * 96 * (HEADS * WIDTH) ** 2
    assert saved == Work(flops=products + FORWARD, attention=FORWARD)
    seconds = (products + FORWARD / SLOW.sustained_attention) / 1e6
    moved = 2 * residuals.num_bytes / SLOW.memory_bytes_per_s
    assert step.workload.costs.recompute[0] == pytest.approx(seconds - moved)
    none, all_kept = (
        dataclasses.replace(step, schedule=dataclasses.replace(step.schedule, kept=frozenset(kept)))
        for kept in ((), (0, 1))
    )
    # Of the last stage the forward is a part of the backward.
    assert microbatch_work(none).attention == (4.5 + 4.5 + 3.5) * FORWARD
    assert microbatch_work(all_kept).attention == (3.5 + 3.5 + 3.5) * FORWARD


def test_a_plan_counts_attention_of_all_microbatches(cudnn):
    once = make_plan(spec_of(device_budget="least"))
    assert once.attention_flops_per_step == 12.5 * FORWARD < once.flops_per_step
    assert once.seconds_attention is None
    halves = make_plan(spec_of(device_budget="least", microbatches=2))
    assert halves.attention_flops_per_step == once.attention_flops_per_step


QWEN_7B = models.DecoderConfig(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    rope=models.Rope(dim=128, base=1e6),
    qkv_bias=True,
)
MEASURED = [(131_072, 28, 39.8), (262_144, 14, 71.1), (262_144, 4, 20.4)]


def plan_of_qwen(length: int, num_layers: int, **options: Any) -> mt.Plan:
    """The plan of training such a decoder on one sequence."""
    config = dataclasses.replace(QWEN_7B, num_layers=num_layers)
    row = jax.ShapeDtypeStruct((1, length), jnp.int32)
    return mt.plan(
        lambda: models.Decoder(config, rngs=nnx.Rngs(0)),
        models.next_token_loss,
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4)),
        {"tokens": row, "labels": row},
        hardware=dataclasses.replace(mt.card("H200"), host_bytes=251 * GIB),
        **options,
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(("length", "num_layers", "seconds"), MEASURED)
def test_steps_on_long_sequences_take_as_long_as_they_took(
    cudnn, length, num_layers, seconds, monkeypatch
):
    """Steps of one sequence on an H200, clipped, with all of its memory; recomputed in backward."""
    # They were measured when stages kept no attention for their backward.
    monkeypatch.setattr(bound_step, "find_residuals", lambda *args: None)
    plan = plan_of_qwen(length, num_layers)
    assert plan.seconds_per_step == pytest.approx(seconds, rel=0.1)
    assert plan.bound == "arithmetic"
    assert plan.attention_flops_per_step > 0.6 * plan.flops_per_step


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("num_layers", "budget"),
    [(3, 20 * GIB), pytest.param(28, None, marks=pytest.mark.long)],
)
def test_attention_alone_is_kept_where_that_saves_most(cudnn, num_layers, budget, monkeypatch):
    kept = plan_of_qwen(131_072, num_layers, device_budget=budget)
    assert kept.keeps_costliest and kept.num_kept == num_layers
    # Attention is computed once forward, and two and a half times as long backward.
    forward = 4 * 28 * 128 * 131_072 * 131_073 // 2
    assert kept.attention_flops_per_step == pytest.approx(num_layers * 3.5 * forward)
    assert str(kept) != str(dataclasses.replace(kept, keeps_costliest=False))
    monkeypatch.setattr(bound_step, "selective_residuals", lambda *args: None)
    without = plan_of_qwen(131_072, num_layers, device_budget=budget)
    assert not without.keeps_costliest and without.num_kept < num_layers
    assert kept.seconds_per_step and without.seconds_per_step
    assert kept.seconds_per_step < 0.9 * without.seconds_per_step
    assert kept.device_budget and kept.device_state_bytes <= kept.device_budget


@pytest.mark.by_default("2048-False")
@pytest.mark.parametrize(("length", "is_lean"), [(131_072, True), (32_768, True), (2048, False)])
def test_attention_costs_the_most_for_its_bytes_on_long_sequences(cudnn, length, is_lean):
    config = dataclasses.replace(QWEN_7B, num_layers=2)
    row = jax.ShapeDtypeStruct((1, length), jnp.int32)
    batch = {"tokens": row, "labels": row}
    asked = Options(precision=mt.Precision(compute=jnp.bfloat16), hardware="H200")
    adapted, _ = adapt(
        lambda: models.Decoder(config, rngs=nnx.Rngs(0)), models.next_token_loss, batch, 0
    )
    spec = make_run_spec(adapted, models.next_token_loss, optax.sgd(0.1), batch, asked)
    layer = spec.first.stages[1]
    assert layer.residuals is not None
    costs = selective.seconds_per_byte(layer.stage, layer.residuals, mt.card("H200"))
    assert len(costs) == 4  # queries and the output; keys and values; gate and up; attention
    best: Any = max(costs, key=costs.__getitem__)
    assert best[0].startswith("dot_product_attention") == is_lean
    if not is_lean:
        assert layer.selective is None
        return
    assert layer.selective is not None
    output, statistics = sorted(layer.selective.avals, key=lambda aval: -aval.size)
    assert (output.shape, output.dtype) == ((1, length, 28, 128), jnp.bfloat16)
    assert (statistics.shape, statistics.dtype) == ((1, 28, length), jnp.float32)
    assert (
        layer.selective.saved.total
        == layer.selective.saved.attention
        == 2 * 28 * 256 * (length * (length + 1) // 2)
    )
