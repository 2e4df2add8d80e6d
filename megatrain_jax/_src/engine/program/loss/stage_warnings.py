"""Warnings about stages that hold too much of a model, because of the way the model is written.

There are two kinds. One operation reads several blocks, so they form one stage. Or a stage of one
block, or of none, holds over a quarter of the parameters (not counting its largest leaf) and has
repeated parts: `tower.first`, `tower.second`, `tower.third` of equal shapes would be blocks if they
were named `tower.0`, ...

Stacked parameters that stay whole, though the loss reads them layer by layer, get a warning too.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.common.trees import ModelPath
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.layers.blocks import Leaf, Lists, Parameter, find_upstream
from megatrain_jax._src.engine.program.layers.stacks import Stacks
from megatrain_jax._src.engine.program.loss.partition import Dataflow, Stretch
from megatrain_jax._src.engine.program.primitives import REMAT

_MASTER_BYTES = 4  # per fp32 element
_OWN_LOOPS = (
    "Run each layer over the whole sequence, in a loop of its own, and each layer becomes a stage. "
    "The parts of one layer, such as the gates of a recurrence, stay together"
)
WORTH_CUTTING = 2**24
"""Number of parameters below which a model fits any device as a whole."""


def find_warnings(
    flow: Dataflow, stretches: Sequence[Stretch], rows: Sequence[Sequence[int]]
) -> tuple[str, ...]:
    """Writes a warning for each stage that holds several blocks, or too much of the model.

    Args:
        flow: The dataflow of the equations.
        stretches: Stretches of reads, one for each stage.
        rows: Equations of each stage.
    """
    read = [set().union(*map(flow.read_by, row)) for row in rows]
    found = [
        _together(flow, stretch, rows[s], read[s])
        for s, stretch in enumerate(stretches) if len(stretch.keys) > 1
    ]  # fmt: skip
    sizes = [math.prod(leaf.shape) for leaf in flow.leaves]
    if sum(sizes) >= WORTH_CUTTING:
        for stretch, row, of_stage in zip(stretches, rows, read, strict=True):
            found += _stacks_in_loops(flow, stretch, row, of_stage)
    # The largest leaf is left out, because no list would divide it: an embedding may be half a
    # model.
    large = [
        s for s, stretch in enumerate(stretches)
        if len(stretch.keys) < 2 and 4 * sum(sorted(sizes[j] for j in read[s])[:-1]) > sum(sizes)
    ]  # fmt: skip
    blocks = [leaf.block for leaf in flow.leaves if leaf.block is not None]
    is_cut = blocks or any(stretch.keys for stretch in stretches)
    if large and (is_cut or sum(sizes) >= WORTH_CUTTING):
        upstream = find_upstream(flow.jaxpr, len(flow.consts), len(flow.leaves))
        lists = Lists([
            Parameter(path=leaf.modules, shape=leaf.shape, upstream=up)
            for leaf, up in zip(flow.leaves, upstream, strict=True)
        ])  # fmt: skip
        ends = [(leaf.modules[-1], leaf.shape) for leaf in flow.leaves]
        likes = [[ends[j] for j in sorted(r)] for r in read]
        for s in large:
            if likes.index(likes[s]) == s:  # one warning serves all like stages
                number = likes.count(likes[s])
                found += _too_large(flow, lists, stretches[s], number, read[s], rows[s])
    return tuple(found)


def _together(flow, stretch: Stretch, row: Sequence[int], read: AbstractSet[int]) -> str:
    """The warning about a stage with blocks that one operation reads together."""
    blocks = {j: flow.leaves[j].block for j in read if flow.leaves[j].block is not None}
    guilty = _reading_together(flow, row, blocks)
    remedy = ". Call the layers one after another, not stacked" if "scan" in guilty else ""
    if _in_one_loop(flow, row, blocks):
        remedy = f". {_OWN_LOOPS}"
    return (
        f"the parameters of {stretch.name} can't be separated, because one operation "
        f"({', '.join(sorted(guilty))}) reads them together: they form one stage of "
        f"{_memory(flow, read)} of fp32 parameters that must fit on the device at once{remedy}"
    )


def _too_large(flow, lists: Lists, stretch, likes: int, read, row: Sequence[int]) -> list[str]:
    """The reasons why repeated parts of a large stage have no stages of their own.

    Nothing is reported if this is intended: there are no such parts, or they run side by side.
    """
    parts = _repeated_parts(lists, read, likes)
    if not parts:
        return []
    owner = {j: k for k, members in enumerate(parts.values()) for j in members}
    guilty = _reading_together(flow, row, owner) - REMAT  # remats are opened anyway
    if not guilty and not lists.in_series(list(parts.values())):
        return []  # experts or heads, side by side
    names = [".".join(map(str, part)) for part in parts]
    becomes = ", and each becomes a stage"
    if guilty:
        why = f"are read together by one operation ({', '.join(sorted(guilty))})"
        remedy = "call them one after another outside of it"
        if _in_one_loop(flow, row, owner):
            if stretch.keys and not any(part in lists.list_of for part in parts):
                return []  # the gates of one layer of a list, which has a loop of its own
            remedy, becomes = f"every pass of this loop needs all of them. {_OWN_LOOPS}", ""
    elif all(part in lists.list_of for part in parts):
        why = "hold less than three quarters of what is around them"
        remedy = "move them into a list that holds little else"
    else:
        why = "have no numbers as the elements of a list have"
        remedy = f"put them into a list (`layers/3`), or call them by number (`{_numbered(parts)}`)"
    share = _memory(flow, read), _memory(flow, range(len(flow.leaves)))
    return [
        f"the stage {stretch.name} holds {share[0]} of the model's {share[1]} of fp32 parameters, "
        f"because its like parts {', '.join(names[:3])}{', …' if len(names) > 3 else ''} {why}: "
        f"{remedy}{becomes}"
    ]


def _reading_together(flow, row: Sequence[int], owners: Mapping[int, object]) -> set[str]:
    """Names of the operations of a stage that read parameters of several owners."""
    several = [i for i in row if len({owners[j] for j in flow.read_by(i) if j in owners}) > 1]
    return {flow.jaxpr.eqns[i].primitive.name for i in several}


def _in_one_loop(flow, row: Sequence[int], owners: Mapping[int, object]) -> bool:
    """Whether each pass of a loop among a stage's equations reads parameters of several owners.

    Args:
        flow: The dataflow of the equations.
        row: Equations of the stage.
        owners: Owner of each parameter that counts.
    """
    for i in row:
        eqn = flow.jaxpr.eqns[i]
        if (name := eqn.primitive.name) not in ("scan", "while"):
            continue
        # A scan takes the remaining operands slice by slice: these may be stacked layers.
        whole = eqn.invars[: sum(jx.scan_parts(eqn))] if name == "scan" else eqn.invars
        read = jx.union(flow.reads, whole)
        if len({owners[j] for j in read if j in owners}) > 1:
            return True
    return False


def _stacks_in_loops(flow, stretch: Stretch, row: Sequence[int], read) -> list[str]:
    """The warning about layers stacked in arrays that each pass of a loop reads one by one."""
    leaves: set[int] = set()
    for i in row:
        eqn = flow.jaxpr.eqns[i]
        if eqn.primitive.name == "scan":
            body = jx.loop_body(eqn).jaxpr
            whole = range(sum(jx.scan_parts(eqn)))
            for k in _sliced(body, {body.invars[k]: k for k in whole}):
                leaves |= flow.reads.get(eqn.invars[k], frozenset())
    # A matrix has rows to look up, not layers.
    stacks = [j for j in sorted(leaves) if len(flow.leaves[j].shape) > 2]
    if 2 * _size(flow, stacks) <= _size(flow, read):
        return []
    names = ", ".join("/".join(map(str, flow.leaves[j].path)) for j in stacks[:3])
    return [
        f"the stage {stretch.name} holds {_memory(flow, read)} of fp32 parameters, because the "
        f"layers stacked in {names} are read together by one operation (scan): every pass of this "
        f"loop needs all of them. {_OWN_LOOPS}"
    ]


def _sliced(jaxpr, of: Mapping[object, int]) -> set[int]:
    """The numbers of variables of a jaxpr that it reads slice by slice, in inner loops, too."""
    of, found = dict(of), set()
    for eqn in jaxpr.eqns:
        name, mine = eqn.primitive.name, [of.get(v) for v in eqn.invars if not jx.is_literal(v)]
        if all(k is None for k in mine):
            continue
        body = jx.loop_body(eqn) if name == "scan" else jx.called(eqn)
        if name in ("slice", "dynamic_slice", "gather"):
            found |= {k for k in mine[:1] if k is not None}
        elif name == "convert_element_type" and mine[0] is not None:
            of[eqn.outvars[0]] = mine[0]
        elif body is not None:
            whole = sum(jx.scan_parts(eqn)) if name == "scan" else len(eqn.invars)
            ins = [None if jx.is_literal(v) else of.get(v) for v in eqn.invars]
            found |= {k for k in ins[whole:] if k is not None}
            pairs = zip(body.jaxpr.invars, ins[:whole], strict=False)
            found |= _sliced(body.jaxpr, {v: k for v, k in pairs if k is not None})
    return found


def _repeated_parts(lists: Lists, read: AbstractSet[int], likes: int) -> dict[ModelPath, list[int]]:
    """Finds the like modules that hold the most of a stage, more than half of it.

    Args:
        lists: Parameters of the model.
        read: Parameters that the stage reads.
        likes: Number of stages like this one, itself included.

    Returns:
        The parameters of each of these modules; {} if no modules hold that much.
    """
    paths = {j: lists.parameters[j].path for j in sorted(read)}
    rows: dict[ModelPath, dict[ModelPath, list[int]]] = {}
    for j, path in paths.items():
        for depth in range(len(path)):
            row = rows.setdefault(path[:depth], {})
            row.setdefault(path[: depth + 1], []).append(j)
    found: list[list[dict[ModelPath, list[int]]]] = []
    for row in rows.values():
        kinds = [kind for kind, count in lists.kinds(row)
                 if count > likes and lists.repeats(kind, row, count, likes)]  # fmt: skip
        found.append([{part: row[part] for part in kind} for kind in kinds])
    # Alternating layers of several kinds, such as `attn0`, `mlp0`, `attn1`, hold most together.
    together = [
        {part: members for kind in kinds if lists.in_series([*kind.values()])
         for part, members in kind.items()}
        for kinds in found
    ]  # fmt: skip
    half = sum(lists.parameters[j].size for j in read) / 2
    for choice in ([kind for kinds in found for kind in kinds], together):
        held = [sum(lists.parameters[j].size for row in p.values() for j in row) for p in choice]
        if choice and max(held) > half:
            return choice[held.index(max(held))]
    return {}


def _numbered(parts: Mapping[ModelPath, Sequence[int]]) -> str:
    stems = {str(part[-1]).rstrip("0123456789_") for part in parts}
    return f"{stems.pop() if len(stems) == 1 else 'layer'}_1"


def _memory(flow, leaves) -> str:
    """Size of some leaves as fp32 masters, with its unit."""
    return sized(_MASTER_BYTES * _size(flow, leaves))


def _size(flow, leaves) -> int:
    return sum(math.prod(flow.leaves[j].shape) for j in leaves)


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
