"""Groups of state in codes, their arguments, and updates compared piece by piece."""

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax._src.engine.state.codec import Blockwise, Plain, Rounded
from megatrain_jax._src.engine.state.layout import layout_group
from runs import make_spec
from zoo import CASES

MASTER = Rounded(dtype="bfloat16", stochastic=True)


MU = Blockwise(code="dynamic", stochastic=True)


NU = Blockwise(code="dynamic", signed=False, bits=4, stochastic=True)


def coded_group(optimizer, num_shards, *, least_axes=2, master: Plain = MASTER):
    """A block's update, its layout with codes for matrices alone, and its number of messages."""
    spec = make_spec(CASES["nnx_tied"], optimizer)
    group = max(range(len(spec.layouts)), key=lambda g: len(spec.layouts[g].master.shapes))
    leaves, rows = spec.leaves, spec.grouping.leaves[group]
    state = [jax.ShapeDtypeStruct(s.shape, s.dtype) for s in spec.optimizer.state[group]]

    def codec(coded, shape):
        return coded if len(shape) >= least_axes else Plain()

    masters = [codec(master, leaves[i].shape) for i in rows]
    half = len(state) / 2
    codecs = [codec(MU if at < half else NU, aval.shape) for at, aval in enumerate(state)]
    layout = layout_group(leaves, rows, state, "float32", num_shards, masters, codecs)
    return spec.optimizer.apply[group], layout, len(spec.optimizer.messages[group])


def in_segments(layout, slab):
    """A slab's segments, one array each, as in a gradient."""
    rows = slab.reshape(layout.num_shards, -1)
    return tuple(rows[:, s.start : s.stop].reshape(-1) for s in layout.segments)


def random_arguments(layout, part, num_messages):
    rng = np.random.default_rng(0)
    whole = [jnp.asarray(rng.gamma(0.5, size=slab.size), slab.dtype) for slab in layout.slabs]
    gradient = jnp.asarray(rng.normal(size=layout.master.size), jnp.bfloat16)
    avals = [v.aval for v in part.jaxpr.invars[len(part.jaxpr.invars) - num_messages :]]
    messages = [jnp.asarray(rng.integers(1, 3, a.shape), a.dtype) for a in avals]
    at_rest = layout.master.encode(whole[0]), layout.state.encode(whole[1:])
    return (*at_rest, in_segments(layout.master, gradient), messages)


def check_updates(run, expected, args, draw, small):
    """Two kernels write the same bits; one changes its arrays, unless gradients aren't finite."""
    found = run(*args, draw)
    jax.tree.map(np.testing.assert_array_equal, found, expected(*args, draw))
    assert any(
        (np.asarray(new) != np.asarray(old)).any()
        for new, old in zip(jax.tree.leaves(found), jax.tree.leaves(args[:2]), strict=True)
    )
    dropped = run(*args[:-1], jax.device_put(jnp.array(False), small), draw)
    jax.tree.map(np.testing.assert_array_equal, dropped, tuple(args[:2]))
