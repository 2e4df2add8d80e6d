"""What only a GPU shows of the decoder: cuDNN's attention, and memory for packed documents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_by_definition import defined
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.rewriting import in_pieces, is_oversized
from megatrain_jax.models import attention

pytestmark = pytest.mark.gpu


def arrays(length: int, heads: int, kv_heads: int, head_dim: int, dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(2, length, n, head_dim) for n in (heads, kv_heads, kv_heads)]
    return [jax.random.normal(k, shape, dtype) for k, shape in zip(keys, shapes, strict=True)]


CASES = {
    "all": {},
    "own": {"window": 1},
    "window": {"window": 100},
    "packed": {"segments": np.arange(258)[None].repeat(2, 0) // np.array([[50], [3]])},
    "packed window": {"segments": np.arange(258)[None].repeat(2, 0) // 60, "window": 20},
}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("length", "case"), [*((258, case) for case in CASES), (257, "window")])
def test_the_gpu_gives_what_the_definition_gives(head_dim, length, case):
    q, k, v = arrays(length, 4, 2, head_dim, jnp.bfloat16)

    def total(function):
        def call(q, k, v):
            out = function(q, k, v, **CASES[case], scale=0.1)
            return jnp.sum(out.astype(jnp.float32) ** 2), out

        return jax.jit(jax.grad(call, (0, 1, 2), has_aux=True))

    assert ("fmha" in total(attention).lower(q, k, v).as_text()) == (length % 2 == 0)
    ours = total(attention)(q, k, v)
    exact = total(defined)(*(x.astype(jnp.float32) for x in (q, k, v)))
    # A token that sees only itself gives its query and its key no gradient at all.
    largest = [np.abs(b).max() for b in jax.tree.leaves(exact)]
    for a, b, most in zip(jax.tree.leaves(ours), jax.tree.leaves(exact), largest, strict=True):
        assert np.abs(a.astype(np.float32) - b).max() < 0.03 * (most or max(largest))


@pytest.mark.parametrize("options", [{}, {"softcap": 50.0}, {"window": 1024}])
def test_packed_documents_take_little_memory(options):
    length, heads = 16_384, 16
    q, k, v = (jnp.zeros((1, length, n, 128), jnp.bfloat16) for n in (heads, 4, 4))
    segments = jnp.arange(length)[None] // 1000 + 1

    def total(q, k, v):
        out = attention(q, k, v, segments=segments, **options)
        return jnp.sum(out.astype(jnp.float32))

    compiled = jax.jit(jax.grad(total, (0, 1, 2))).lower(q, k, v).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    # The scores of all pairs would be 16 GiB in fp32.
    assert analysis.temp_size_in_bytes < 2 * 2**30


LONG_CASES = {
    "all": (602_112, {}),
    "window": (1_048_576, {"window": 1024}),
    "packed": (524_288, {"segments": 100_000}),
}


@pytest.mark.parametrize("case", LONG_CASES)
def test_more_elements_than_32_bits_count(case):
    length, options = LONG_CASES[case]
    heads, kv_heads, head_dim, few = 28, 4, 128, 32
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (
        jax.random.normal(key, (1, length, n, head_dim), jnp.bfloat16)
        for key, n in zip(keys[:3], (heads, kv_heads, kv_heads), strict=True)
    )
    if size := options.get("segments"):
        options = {"segments": jnp.arange(length)[None] // size}
    # The first and the last queries tell all about keys and values, and are few to compute plainly.
    rows = np.r_[:few, length - few : length]
    weights = jax.random.normal(keys[3], (1, 2 * few, heads, head_dim), jnp.float32)

    def ours(q, k, v):
        out = attention(q, k, v, **options)[:, rows]
        return jnp.sum(out.astype(jnp.float32) * weights), out

    def plainly(q, k, v):
        there = jnp.arange(length)
        seen = there <= rows[:, None]
        if window := options.get("window"):
            seen &= there > rows[:, None] - window
        if "segments" in options:
            owner = options["segments"][0]
            seen &= owner == owner[rows][:, None]
        grouped = q.reshape(1, len(rows), kv_heads, -1, head_dim)
        scores = jnp.einsum("bmkgh,bnkh->bkgmn", grouped, k) / head_dim**0.5
        scores = jnp.where(seen, scores, -jnp.inf)
        out = jnp.einsum("bkgmn,bnkh->bmkgh", jax.nn.softmax(scores), v).reshape(q.shape)
        return jnp.sum(out * weights), out

    traced = jx.trace(jax.grad(ours, (0, 1, 2), has_aux=True), q, k, v)
    assert is_oversized(traced.jaxpr)
    narrow = jax.jit(lambda *args: in_pieces(traced.jaxpr, (), [*traced.consts, *args], 1))
    gradients, out = jax.tree.unflatten(traced.out_tree, narrow(q, k, v))
    found = jax.device_get((gradients[0][:, rows], *gradients[1:], out))
    assert not jnp.any(gradients[0][:, few:-few])
    del gradients, out
    wide = [x.astype(jnp.float32) for x in (q[:, rows], k, v)]
    exact, exact_out = jax.jit(jax.grad(plainly, (0, 1, 2), has_aux=True))(*wide)
    for a, b in zip(found, (*exact, exact_out), strict=True):
        assert np.abs(a.astype(np.float32) - b).max() < 0.03 * np.abs(b).max()
