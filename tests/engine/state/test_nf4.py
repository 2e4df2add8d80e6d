"""NF4 against bitsandbytes: its codes and numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import megatrain_jax as mt
from megatrain_jax._src.engine.state.codec import Nf4
from megatrain_jax._src.engine.state.host_leaves import encoded, part_shape, read_leaf
from megatrain_jax._src.engine.state.layout import layout_of
from slabs import read_part, unpacked

torch = pytest.importorskip("torch", reason='compared with PyTorch: pip install -e ".[torch]"')
bnb: Any = pytest.importorskip("bitsandbytes")

CODEC = Nf4()
PARTS = [part.name for part in CODEC.parts("float32")]


def matrix(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 0.02


def quantised(x: Any) -> tuple[dict[str, np.ndarray], Any, Any]:
    """A matrix as bitsandbytes encodes it: as parts of this codec, its codes, and its state."""
    codes, state = bnb.functional.quantize_4bit(x, quant_type="nf4", compress_statistics=True)
    nested = state.state2.absmax.numpy()
    means = np.full(nested.shape, state.offset.item(), np.float32)
    parts = codes.numpy().reshape(-1), state.absmax.numpy(), nested, means
    return dict(zip(PARTS, parts, strict=True)), codes, state


@pytest.mark.parametrize("shape", [(128, 256), (512, 576), (64, 64), (3000, 64)])
def test_codes_and_numbers_are_those_of_bitsandbytes(shape):
    x = matrix(0, *shape)
    theirs, codes, state = quantised(torch.tensor(x))
    numbers = bnb.functional.dequantize_4bit(codes, state).numpy().reshape(-1)
    own = jax.jit(CODEC.encode_leaf)(x.reshape(-1))
    for name, part, by_numpy in zip(PARTS, own, CODEC.encode_leaf(x.reshape(-1)), strict=True):
        np.testing.assert_array_equal(part, by_numpy, err_msg=name)
    ours = {name: np.asarray(x)[: theirs[name].size] for name, x in zip(PARTS, own, strict=True)}
    np.testing.assert_array_equal(ours["codes"], theirs["codes"])
    # The mean of the scales is summed up in another order.
    np.testing.assert_allclose(ours["scale_means"], theirs["scale_means"], rtol=2e-7)
    np.testing.assert_allclose(ours["scale_scales"], theirs["scale_scales"], rtol=1e-6)
    # Codes of scales are the nearest ones; bitsandbytes' kernel for CPUs misses some near a border.
    blocks = np.abs(x.reshape(-1, 64)).max(axis=1)
    rows = np.repeat(theirs["scale_scales"], 256)[: blocks.size]
    places = (blocks - theirs["scale_means"][0]) / rows
    levels = state.state2.code.numpy()
    nearest = np.abs(places[:, None] - levels).min(axis=1)
    np.testing.assert_allclose(np.abs(places - levels[ours["scales"]]), nearest, atol=1e-6)
    differs = ours["scales"].astype(int) - theirs["scales"]
    assert (differs != 0).mean() < 0.01 and np.abs(differs).max() <= 1
    # Decoded from their arrays, by NumPy and by XLA, numbers have the same bits.
    padded = [np.pad(x, (0, y.size - x.size)) for x, y in zip(theirs.values(), own, strict=True)]
    for decode, arrays in (
        (CODEC.decode, padded),
        (jax.jit(CODEC.decode, static_argnums=1), list(map(jnp.asarray, padded))),
    ):
        found = np.asarray(decode(arrays, jnp.float32))[: x.size]
        np.testing.assert_array_equal(found, numbers)


def test_what_bitsandbytes_has_quantised_gets_the_same_codes_again():
    """From bfloat16, the dtype of most checkpoints in NF4; scales are rounded once more."""
    x = torch.tensor(matrix(1, 256, 512)).to(torch.bfloat16)
    theirs, codes, state = quantised(x)
    decoded = bnb.functional.dequantize_4bit(codes, state).float().numpy()
    parts = CODEC.encode_leaf(decoded.reshape(-1))
    np.testing.assert_array_equal(parts[0], theirs["codes"])
    again = CODEC.decode(parts, np.float32).reshape(decoded.shape)
    scales = np.abs(decoded.reshape(-1, 64)).max(axis=1)
    assert np.abs(again - decoded).max() < 0.01 * scales.max()
    np.testing.assert_array_equal(CODEC.encode_leaf(again.reshape(-1))[0], theirs["codes"])


@pytest.mark.parametrize("lib", [np, jnp])
def test_zeros_stay_and_what_is_not_finite_is_not_hidden(lib):
    x = np.zeros(2 * CODEC.block + 5, np.float32)
    assert not np.asarray(CODEC.decode(CODEC.encode_leaf(lib.asarray(x)), np.float32)).any()
    x[70] = 3.0
    found = np.asarray(CODEC.decode(CODEC.encode_leaf(lib.asarray(x)), np.float32))
    assert found[70] > 2.9 and not np.delete(found, 70).any()
    for bad in (np.nan, np.inf):
        x[CODEC.block + 7] = bad
        with np.errstate(invalid="ignore"):
            parts = CODEC.encode_leaf(lib.asarray(x))
            assert not np.isfinite(CODEC.decode(parts, np.float32)[: x.size]).any()


def test_devices_and_neighbours_change_no_code():
    leaves = [matrix(seed, *shape) for seed, shape in enumerate([(7, 50), (300, 130), (64, 1024)])]
    parts = []
    for num_shards in (1, 3):
        shapes = [x.shape for x in leaves]
        layout = layout_of(shapes, "float32", num_shards, [CODEC] * 3, unit=CODEC.block)

        def encode(leaves, layout=layout):
            return layout.encode(layout.pack(leaves))

        arrays = [np.asarray(x) for x in jax.jit(encode)(leaves)]
        assert [(x.shape, x.dtype) for x in arrays] == [(x.shape, x.dtype) for x in layout.at_rest]
        slab = jax.jit(layout.decode)(arrays)
        rows = [[read_part(layout, arrays, i, p) for p in range(4)] for i in range(3)]
        for i, (leaf, row) in enumerate(zip(leaves, rows, strict=True)):
            assert [x.shape for x in row] == [part_shape(layout, i, p) for p in range(4)]
            for own, part in zip(encoded(layout, leaf, i), row, strict=True):
                np.testing.assert_array_equal(own, part)
            np.testing.assert_array_equal(unpacked(layout, slab, i), read_leaf(layout, arrays, i))
        parts.append(rows)
    jax.tree.map(np.testing.assert_array_equal, *parts)


def test_a_run_without_matrices_in_blocks_is_told_so():
    params = {"w": matrix(0, 8, 8), "b": np.zeros(8, np.float32)}

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean((batch @ params["w"] + params["b"]) ** 2)

    plan = mt.plan(
        params,
        loss,
        optax.sgd(0.1),
        np.ones((4, 8), np.float32),
        trainable="b",
        precision=mt.Precision(frozen="nf4"),
    )
    assert any('frozen="nf4"' in text for text in plan.warnings)
