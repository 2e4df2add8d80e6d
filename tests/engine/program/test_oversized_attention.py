"""Attention of more elements than cuDNN counts, in pieces: as much as fits in each call.

There is no cuDNN here: its calls are lowered to plain attention, which notes how large they are.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn_attention
from jax.interpreters import mlir

import megatrain_jax as mt
from megatrain_jax._src.common import attention_kernel
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program import rewriting
from megatrain_jax._src.engine.program.flops import is_attention
from megatrain_jax._src.engine.program.rewriting import in_pieces, is_oversized
from runs import check_close

WIDTH = 8
calls: list[tuple[int, ...]] = []


def plainly(q, k, v):
    """Causal attention, (rows, length, heads, width), and the logarithms of its sums."""
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.einsum("bmkgh,bnkh->bkgmn", grouped, k) / math.sqrt(q.shape[3])
    scores = jnp.where(jnp.tri(q.shape[1], dtype=bool), scores, -jnp.inf)
    out = jnp.einsum("bkgmn,bnkh->bmkgh", jax.nn.softmax(scores), v).reshape(q.shape)
    sums = jax.nn.logsumexp(scores, -1)
    return out, sums.reshape(q.shape[0], q.shape[2], q.shape[1])


def forward(q, k, v, *_, is_training, **__):
    calls.append(q.shape)
    return plainly(q, k, v)[: 1 + is_training]


def backward(q, k, v, *operands, **_):
    calls.append(q.shape)
    sums, out, cotangent = operands[-3:]
    expected, expected_sums = plainly(q, k, v)
    # What the forward has kept is divided as queries are: else this is not 0.
    wrong = jnp.abs(sums - expected_sums).max() + jnp.abs(out - expected).max()
    wrong = jnp.where(wrong < 1e-5, 0.0, jnp.nan)
    found = jax.vjp(lambda *x: plainly(*x)[0], q, k, v)[1](cotangent)
    return [x + wrong for x in found]


@pytest.fixture
def cudnn(monkeypatch):
    monkeypatch.setattr(cudnn_attention, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn_attention, "check_is_flash_attention", lambda *a, **k: None)
    monkeypatch.setattr(cudnn_attention, "check_layout", lambda *a: None)  # takes fp32, too
    for name, function in (("fwd", forward), ("bwd", backward)):
        primitive = getattr(cudnn_attention, f"_dot_product_attention_{name}_p_wrapper")
        lowering = mlir.lower_fun(function, multiple_results=True)
        mlir.register_lowering(primitive, lowering, platform="cpu")
    calls.clear()
    yield
    jax.clear_caches()


def blocks_of(heads, kv_heads):
    rng = np.random.default_rng(1)
    sizes = (16, (heads + 2 * kv_heads) * WIDTH), (heads * WIDTH, 16)
    return [[rng.normal(size=n).astype(np.float32) / 4 for n in sizes] for _ in range(2)]


def attend(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def apply(blocks, x, kv_heads, remat):
    for mix, out in blocks:
        heads = (x @ mix).reshape(*x.shape[:2], -1, WIDTH)
        splits = [heads.shape[2] - 2 * kv_heads, heads.shape[2] - kv_heads]
        q, k, v = jnp.split(heads, splits, axis=2)
        own = jax.checkpoint(attend) if remat else attend
        x = x + own(q, k, v).reshape(*x.shape[:2], -1) @ out
    return x


@pytest.mark.by_default("2-3-3-2-parts1-None")
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "most", "parts", "budget"),
    [
        (2, 4, 2, 1, [(2, 12, 2, WIDTH)], "least"),  # heads of keys with their queries
        (2, 3, 3, 2, [(2, 12, 2, WIDTH), (2, 12, 1, WIDTH)], None),
        (3, 4, 1, 0.7, [(2, 12, 4, WIDTH), (1, 12, 4, WIDTH)], None),  # rows
    ],
)
def test_a_step_is_that_of_whole_attention(
    cudnn, monkeypatch, rows, heads, kv_heads, most, parts, budget
):
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(rows, 12, 16)).astype(np.float32)}

    def loss_fn(model, batch):
        return (apply(model, batch["x"], kv_heads, remat=budget is None) ** 2).mean()

    def run(limit):
        monkeypatch.setattr(rewriting, "_MOST_ELEMENTS", limit)
        calls.clear()
        trainer = mt.Trainer(
            blocks_of(heads, kv_heads),
            loss_fn,
            optax.sgd(1.0),
            batch,
            device_budget=10**9 if budget is None else budget,
        )
        loss = trainer.read(trainer.step(batch))["loss"]
        return loss, jax.device_get(trainer.params), set(calls)

    whole = run(10**9)
    each = rows * 12 * (heads // kv_heads) * WIDTH  # elements of a head of keys' queries
    divided = run(int(each * most))
    assert whole[2] == {(rows, 12, heads, WIDTH)}
    assert divided[2] == set(parts)
    np.testing.assert_allclose(divided[0], whole[0], rtol=2e-6)
    check_close(divided[1], whole[1], 2e-6, "parameters")


def sizes(jaxpr):
    found = [
        v.aval.size
        for e in jaxpr.eqns
        if is_attention(e)
        for v in (*e.invars, *e.outvars)
        if v.aval.shape[-2:] != (256, 256)
    ]
    return found + [n for e in jaxpr.eqns for inner in jx.inner_jaxprs(e) for n in sizes(inner)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_plan_without_a_gpu_has_the_same_pieces_also_within_loops(monkeypatch, wrap, masked):
    monkeypatch.setattr(rewriting, "_MOST_ELEMENTS", 256 * 4 * 8)
    q, k = (jax.ShapeDtypeStruct((1, 256, n, 8), jnp.bfloat16) for n in (8, 4))
    mask = jnp.ones((1, 1, 256, 256), bool) if masked else None

    def loss(q, k, v):
        attend = wrap(lambda q, k, v: attention_kernel.attend(q, k, v, mask, None))
        out = jax.lax.scan(lambda q, _: (attend(q, k, v), None), q, None, length=2)[0]
        return out.astype(jnp.float32).sum()

    traced = jx.trace(jax.grad(loss, (0, 1, 2)), q, k, k)
    arguments = [v.aval for v in traced.jaxpr.invars]
    found = jax.make_jaxpr(lambda *args: in_pieces(traced.jaxpr, (), args, 1))(*arguments)
    assert is_oversized(traced.jaxpr) and not is_oversized(jx.opened(found))
    before, after = sizes(traced.jaxpr), sizes(jx.opened(found))
    assert max(before) == 256 * 8 * 8 and max(after) == 256 * 4 * 8
    assert sum(before) == sum(after) and jx.opened(found).outvars[0].aval.shape == q.shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_rate": 0.1}, "dropout"),
        ({"bias": True}, "bias"),
        ({"kv_heads": 1}, "one head .*keys"),
    ],
)
def test_what_cannot_be_divided_is_refused(cudnn, monkeypatch, options, message):
    monkeypatch.setattr(rewriting, "_MOST_ELEMENTS", 300)
    kv_heads = options.pop("kv_heads", 4)
    q, k = (jax.ShapeDtypeStruct((1, 16, n, 8), jnp.bfloat16) for n in (4, kv_heads))
    bias = jax.ShapeDtypeStruct((1, 4, 16, 16), jnp.bfloat16) if options.pop("bias", 0) else None

    def attend(q, k, v, bias):
        return cudnn_attention.dot_product_attention(q, k, v, bias, **options)

    jaxpr = jx.opened(jax.make_jaxpr(attend)(q, k, k, bias))
    with pytest.raises(ValueError, match=f"16, 4, 8.*cuDNN .*{message}"):
        jax.make_jaxpr(lambda *args: in_pieces(jaxpr, (), args, 1))(*(v.aval for v in jaxpr.invars))
