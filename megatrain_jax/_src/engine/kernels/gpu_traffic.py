"""Counts the bytes that a function's kernels move in a GPU's memory, besides its products.

A matrix product is bound by arithmetic, and attention kernels have a rate of their own. The
remaining kernels are bound by the memory: each reads its operands and writes its results once. The
equations that share a kernel are found by the rules of `gpu_memory.py`. Attention reads a mask
again for each head.

Example: attention written out, with scores of 1 GiB in bfloat16::

    s = dot q k      # a product: 1 GiB written, with few operations per byte
    m = max s        # reads 1 GiB
    e = exp (s - m)  # computed by the kernels that read it
    t = sum e        # reads 1 GiB
    p = div e t      # a product reads p: 1 GiB read, 1 GiB written
    o = dot p v

Softmax moves 4 GiB. A product counts the bytes that take longer than its arithmetic.
A product of many matrices needs them one after another in memory, so operands with the heads' axis
behind the tokens' axis are copied first.

A convolution is fast only if its channels are whole vectors of 16 bytes. XLA does not pad them, so
images with 3 channels are convolved by slower kernels; their operations are counted separately.
So are those of depthwise convolutions, which filter each channel by itself, without matrix units.

A GPU multiplies in tiles of 128 x 128 results and 64 summands. Attention written out has many small
matrices: of 257 x 257 scores with 104 summands each, tiles compute 2.75 times as many operations.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatrain_jax._src.engine.kernels.gpu_memory import GpuFunction, computed_as
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.flops import (
    KERNELS,
    equation_flops,
    is_attention_forward,
    is_depthwise,
    masked_pairs,
)
from megatrain_jax._src.engine.program.primitives import PRODUCTS

# Operations per byte at which a product's arithmetic and its memory traffic take equally long: 150
# to 230 on A100, H100, H200 and RTX 4090.
_BALANCED = 200
# Bytes that fast convolutions read at a time, of channels that lie one after another.
_VECTOR = 16
# Rows and columns of a tile of a matrix product, and its summands at a time.
_TILE, _SUMMANDS = 128, 64
# Time of the gradient of a depthwise convolution's weights, as a share of its forward's time,
# measured on an H100 in fp32: 0.43 of 1.36 ms.
_OF_WEIGHTS = 0.32
# Bytes that take as long as a mask in attention, for each pair of a query and a key: on an H200,
# 3.1 to 3.4 in forward and 10 to 12 in backward, with heads of 128 elements.
_MASKED_FORWARD, _MASKED_BACKWARD = 3, 10
# Kernels with bytes of their own. Sums of products are written by the products.
_KERNELS = (*KERNELS, "pallas_call")


class Traffic(NamedTuple):
    """Bytes that kernels read and write in the device's memory, besides products' hidden bytes.

    Attributes:
        outside: Bytes outside loops.
        in_loops: Bytes in loops, of all their iterations.
        unaligned: Operations of convolutions with channels that are no whole vectors.
        padding: Operations on the padding of tiles, in products of many matrices.
        depthwise: Operations of depthwise convolutions; fewer for gradients of weights, which take
            less time.
    """

    outside: float = 0.0
    in_loops: float = 0.0
    unaligned: float = 0.0
    padding: float = 0.0
    depthwise: float = 0.0

    def plus(self, other: "Traffic") -> "Traffic":
        """The traffic of both."""
        return Traffic(*map(operator.add, self, other))

    @property
    def total(self) -> float:
        """Bytes outside and in loops."""
        return self.outside + self.in_loops


def count_traffic(jaxpr: Any, stored: Sequence[Any] = ()) -> Traffic:
    """Counts the bytes of one evaluation of a jaxpr, of all devices together.

    The trip count of a `while` is unknown; its body counts once. A `cond` counts its costliest
    branch. Attention kernels count their masks only, and Pallas kernels nothing.

    Args:
        jaxpr: A jaxpr, open or closed.
        stored: For each input, the dtype that it is cast from first; None if it isn't cast.
    """
    function = GpuFunction(jx.opened(jaxpr), {}, 1, in_loop=False, stored=stored)
    found = Traffic()
    for node in function.nodes:
        eqn = node.eqn
        if eqn.name in _KERNELS:
            is_forward = is_attention_forward(eqn.primitive, eqn.params)
            each = _MASKED_FORWARD if is_forward else _MASKED_BACKWARD
            found = found.plus(Traffic(each * masked_pairs(eqn)))
            continue
        if eqn.name in ("scan", "while"):
            times = eqn.params["length"] if eqn.name == "scan" else 1
            body = count_traffic(jx.loop_body(eqn).jaxpr)
            rest = (times * number for number in body[2:])
            found = found.plus(Traffic(0.0, times * body.total, *rest))
        elif eqn.name == "cond":
            branches = (count_traffic(body.jaxpr) for body in jx.branches(eqn))
            found = found.plus(max(branches, key=lambda row: row.total))
        elif computed_as(eqn) in PRODUCTS:
            flops = equation_flops(eqn)
            moved = max(0.0, sum(function.moved(node)) - flops / _BALANCED)
            moved += sum(2 * jx.num_bytes(v.aval) for v in _rearranged(eqn, function.made_by))
            more = Traffic(
                moved,
                unaligned=flops if _is_unaligned(eqn) else 0.0,
                padding=_padding(eqn, flops),
                depthwise=_depthwise(eqn, flops),
            )
            found = found.plus(more)
        elif not node.multiplies:
            found = found.plus(Traffic(sum(function.moved(node))))
    return found


def _is_unaligned(eqn: Any) -> bool:
    """Whether an equation is a convolution with channels that are no whole vectors.

    Convolutions of groups of channels have kernels of their own.
    """
    if eqn.name != "conv_general_dilated" or eqn.params["feature_group_count"] > 1:
        return False
    left, right = (v.aval for v in eqn.invars[:2])
    numbers = eqn.params["dimension_numbers"]
    examples, channels = numbers.lhs_spec[:2]
    # A gradient of weights sums over the examples, the first axis, and has channels of the image
    # in their place.
    of_image = examples if channels == 0 else channels
    sizes = left.shape[of_image], right.shape[numbers.rhs_spec[0]]
    return any(size * left.dtype.itemsize % _VECTOR for size in sizes)


def _depthwise(eqn: Any, flops: int) -> float:
    """The operations of a depthwise convolution, or as many as take the same time."""
    if is_depthwise(eqn):
        return flops
    if eqn.name != "conv_general_dilated":
        return 0.0
    # The gradient of weights has the channels in the place of examples.
    groups, examples = eqn.params["batch_group_count"], eqn.params["dimension_numbers"].lhs_spec[0]
    return _OF_WEIGHTS * flops if 1 < groups == eqn.invars[0].aval.shape[examples] else 0.0


def _padding(eqn: Any, flops: int) -> float:
    """The operations on the padding of tiles, if an equation multiplies many matrices."""
    if eqn.name != "dot_general":
        return 0.0
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    left, right = (v.aval.shape for v in eqn.invars[:2])
    summands, number = (math.prod(left[axis] for axis in axes) for axes in (contracted, batch))
    own = summands * number
    sizes = math.prod(left) // max(1, own), math.prod(right) // max(1, own), summands
    # Tiles have other shapes for narrow matrices, and hardly pad large ones.
    if number == 1 or min(sizes) < _SUMMANDS:
        return 0.0
    tiles = _TILE, _TILE, _SUMMANDS
    padded = (
        -(-size // tile) * tile if size > _SUMMANDS else _SUMMANDS
        for size, tile in zip(sizes, tiles, strict=True)
    )
    return flops * (math.prod(padded) / math.prod(sizes) - 1)


def _rearranged(eqn: Any, made_by: Mapping[Any, Any]) -> list[Any]:
    """The operands that are copied because their matrices don't lie one after another.

    An elementwise operation writes its result in the order that the product needs.
    """
    if eqn.name != "dot_general":
        return []
    found = []
    for v, batch in zip(eqn.invars[:2], eqn.params["dimension_numbers"][1], strict=True):
        order, maker = list(range(len(v.aval.shape))), made_by.get(v)
        if maker is not None and maker.name == "transpose":
            order, maker = list(maker.params["permutation"]), made_by.get(maker.invars[0])
        is_moved = [order[axis] for axis in batch] != list(range(len(batch)))
        if is_moved and (maker is None or computed_as(maker) in (*PRODUCTS, "reshape")):
            found.append(v)
    return found
