"""A clause for messages: the arrays of a block's largest part, if no cut divides them.

Example: one operation reads three arrays, each with the weights of all experts of a layer::

    whole        norm, q, k, v, out, norm, router, gate, up, down
    2 parts      norm, q, k, v, out | norm, router, gate, up, down
    3 parts      norm, q, k, v | out | norm, router, gate, up, down

More parts don't divide the last part, so the text names gate, up and down.
"""

import math
from collections.abc import Sequence

from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.engine.spec.cut_run import Cut
from megatrain_jax._src.engine.spec.run_spec import RunSpec
from megatrain_jax._src.engine.state.layout import GroupLayout

# Arrays with a smaller fraction of a part's elements are not named.
_LARGE = 0.1


def indivisible_arrays(cut: Cut | RunSpec, layouts: Sequence[GroupLayout]) -> str:
    """A clause on the largest part of a block, if it can't be cut; otherwise "".

    Args:
        cut: The loss and the optimizer, with blocks in parts, or a run with them.
        layouts: Layout of each group.
    """
    rows = enumerate(cut.grouping.leaves)
    blocks = [g for g, leaves in rows if leaves and cut.leaves[leaves[0]].block is not None]
    if cut.has_smaller_parts or not blocks:
        return ""
    # Without the gradient, because its dtype depends on the microbatches.
    sizes = {g: sum(layouts[g].sizes(None).values()) for g in blocks}
    largest = max(blocks, key=lambda g: sizes[g])
    elements = {i: math.prod(cut.leaves[i].shape) for i in cut.grouping.leaves[largest]}
    least = _LARGE * sum(elements.values())
    names = [cut.leaves[i].name for i, number in elements.items() if number >= least]
    return (
        f"no cut divides {', '.join(names)}, with {sized(sizes[largest])} of masters and optimizer "
        "state: fewer bytes per parameter, or adapters on frozen parameters, reduce them"
    )
