"""Leaves of slabs and their parts, read by their places alone."""

import math

import numpy as np

from megatrain_jax._src.engine.state.host_leaves import part_shape, runs_of


def unpacked(layout, slab, i):
    """Leaf `i` of a slab."""
    start, shape = layout.offsets[i], layout.shapes[i]
    flat = slab.reshape(layout.num_shards, -1)[:, start : start + layout.shares[i]].reshape(-1)
    return flat[: math.prod(shape)].reshape(shape)


def all_unpacked(layout, slabs):
    """All leaves of slabs of several dtypes."""
    return [unpacked(layout.layouts[s], slabs[s], i) for s, i in layout.places]


def read_part(layout, arrays, i, p):
    """Part `p` of leaf `i` of arrays at rest."""
    shape = part_shape(layout, i, p)
    return np.concatenate([run for _, run in runs_of(layout, arrays, i, p)]).reshape(shape)
