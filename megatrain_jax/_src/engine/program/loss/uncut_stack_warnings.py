"""Warnings about stacked parameters that stay whole, though the loss reads them layer by layer."""

from collections import defaultdict
from collections.abc import Sequence

from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.layers.blocks import Leaf
from megatrain_jax._src.engine.program.layers.stacks import Stacks

_WORTH = 1 / 4  # fraction of a model's parameters from which on a reason is reported


def uncut_stack_warnings(stacks: Stacks, leaves: Sequence[Leaf]) -> list[str]:
    """Writes a warning for each reason why stacks stay whole, with advice how to change the model.

    Only reasons that affect more than a quarter of the model's parameters are reported.

    Args:
        stacks: Stacked parameters that the loss reads, and the reasons why some stay whole.
        leaves: Leaves of the model.
    """
    # Slices of cut stacks have an index; all remaining parameters are stored whole.
    whole = {leaf.parameter: leaf for leaf in leaves if not leaf.index}
    reasons: dict[str, dict[int, Leaf]] = defaultdict(dict)
    for p, name in stacks.mixed.items():
        reasons[f"one operation ({name}) takes several of them together"][p] = whole[p]
    # Parameters in a block are already cut along another list, so nothing is lost.
    blocks = {leaf.parameter for leaf in leaves if leaf.block is not None}
    looped = "a loop that can't be unrolled (while_loop) takes them by its counter"
    alone = [
        ("only some of them are read", stacks.partial - blocks),
        ("a scan takes them from another array, made of this one", stacks.remade - blocks),
        (looped, stacks.looped),
    ]
    for reason, parameters in alone:
        for p in parameters & whole.keys():
            reasons[reason][p] = whole[p]
    for stack in stacks.stacks:
        if not blocks.isdisjoint(stack.between):
            for p in stack.slices.keys() & whole.keys() - blocks:
                reasons["other blocks are read between them"][p] = whole[p]
    size = sum(jx.num_elements(leaf) for leaf in leaves)
    found = []
    for reason, rows in reasons.items():
        held = sum(jx.num_elements(leaf) for leaf in rows.values())
        if held > _WORTH * size:
            names = [leaf.name for _, leaf in sorted(rows.items(), key=lambda row: row[0])]
            listed = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            found.append(
                f"the layers stacked in {listed} can't be separated, because {reason}: they are "
                f"{sized(4 * held)} of fp32 parameters that must fit on the device at once. "
                "Scan over them along axis 0 (`jax.lax.scan(layer, x, layers)`) and use them "
                "nowhere else, or keep the layers in a list"
            )
    return found
