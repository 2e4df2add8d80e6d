"""Parameter groups: leaves that are copied together, and their layout in slabs.

Example: leaves 0 to 3 are an embedding, one matrix in each of two blocks, and a norm. The stages
read leaves [0], [1], [2] and, in a head tied to the embedding, [3, 0]. Groups are numbered in the
order of their first use::

    names  = ("embed", "layers.0", "layers.1", "norm")
    leaves = ((0,), (1,), (2,), (3,))

The embedding is read by stages 0 and 3, the norm by stage 3 alone: they are two groups, so that
stage 0 doesn't fetch the norm.
"""

import dataclasses
from collections.abc import Sequence

import jax

from megatrain_jax._src.common.keys import Kind
from megatrain_jax._src.engine.program.jaxpr import num_bytes
from megatrain_jax._src.engine.program.layers.blocks import Leaf
from megatrain_jax._src.engine.state.codec import Draw, Plain, derived_draw, draw_of
from megatrain_jax._src.engine.state.layout import (
    PLAIN,
    Layout,
    MixedLayout,
    in_order,
    large_leaves,
    layout_of,
    mixed_layout_of,
    rows_like,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grouping:
    """The partition of a model's leaves into groups.

    Attributes:
        names: Name of each group in tables and messages.
        leaves: For each group, the numbers of its leaves, ascending.
        frozen: Numbers of the groups that are only read.
    """

    names: tuple[str, ...]
    leaves: tuple[tuple[int, ...], ...]
    frozen: frozenset[int] = frozenset()

    @property
    def group_of(self) -> tuple[int, ...]:
        """The number of each leaf's group."""
        owner = {leaf: g for g, leaves in enumerate(self.leaves) for leaf in leaves}
        return tuple(owner[leaf] for leaf in range(len(owner)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupLayout:
    """The layout of a group's state in slabs.

    Attributes:
        master: Layout of the masters; gradients have the same offsets and their own dtype.
        state: Layout of the optimizer state, in one or more slabs.
    """

    master: Layout
    state: MixedLayout

    @property
    def slabs(self) -> tuple[Layout, ...]:
        """Layouts of the slabs that outlast a step: masters, then optimizer state."""
        return (self.master, *self.state.layouts)

    @property
    def draws(self) -> bool:
        """Whether encoding an update draws random bits."""
        return self.master.draws or self.state.draws

    @property
    def num_coded(self) -> int:
        """Count of a shard's numbers that are stored as codes with shared scales."""
        segments = (segment for slab in self.slabs for segment in slab.segments)
        return sum(s.stop - s.start for s in segments if s.codec.block > 1)

    def slab_draws(self, draw: tuple | None) -> list[Draw | None]:
        """The draws of all slabs, masters first; each slab has its own, as all count from 0.

        Args:
            draw: Arguments of `draw_of` for an update's random bits; None for no bits.
        """
        if draw is None:
            return [None] * len(self.slabs)
        masters, state = (derived_draw(draw_of(*draw), number) for number in range(2))
        return [
            masters,
            *(derived_draw(state, number) for number in range(len(self.state.layouts))),
        ]

    def leaf(self, kind: Kind, position: int) -> tuple[Layout, int]:
        """The layout of the slab with a leaf of masters or state, and the leaf's number there."""
        if kind is Kind.MASTERS:
            return self.master, position
        slab, i = self.state.places[position]
        return self.state.layouts[slab], i

    def arrays(self, gradient: jax.typing.DTypeLike | None) -> dict[Kind, list[int]]:
        """Bytes per device of the arrays of each kind of part that is transferred.

        Args:
            gradient: Dtype of the gradient; None if the group has none.

        Returns:
            Bytes by kind: masters and optimizer state in their stored form, and the gradient.
        """
        avals = {
            Kind.MASTERS: self.master.at_rest,
            Kind.OPTIMIZER_STATE: self.state.at_rest,
            Kind.GRADIENT: () if gradient is None else self.master.gradient_avals(gradient),
        }
        shards = self.master.num_shards
        return {kind: [num_bytes(x) // shards for x in row] for kind, row in avals.items()}

    def sizes(self, gradient: jax.typing.DTypeLike | None) -> dict[Kind, int]:
        """The sums of `arrays`."""
        return {kind: sum(row) for kind, row in self.arrays(gradient).items()}


def group_leaves(leaves: Sequence[Leaf], stages: Sequence[Sequence[int]]) -> Grouping:
    """Groups leaves by block, and leaves outside blocks by the stages that read them.

    So fetching a tied embedding, read by two stages, does not fetch leaves that only one of them
    needs. Frozen leaves have their own groups, because they travel in one direction only.

    Args:
        leaves: All leaves of the model.
        stages: For each stage, the numbers of the leaves that it reads.
    """
    uses: dict[int, list[int]] = {i: [] for i in range(len(leaves))}
    for s, read in enumerate(stages):
        for i in read:
            uses[i].append(s)
    members: dict[tuple, list[int]] = {}
    for i, leaf in enumerate(leaves):
        # A block travels whole, even if several stages read it. Outside blocks, leaves that the
        # same stages read travel together.
        place = (leaf.block,) if leaf.block else (None, *uses[i])
        members.setdefault((leaf.is_trainable, *place), []).append(i)

    def first_use(item):
        return min((uses[i][0] for i in item[1] if uses[i]), default=len(stages)), item[1][0]

    # Groups are numbered in the order of their first use: ties between fetches are broken by the
    # smaller number, and tables read like the model.
    ordered = sorted(members.items(), key=first_use)
    names = [
        (".".join(map(str, key[1] or ())) or _name(leaves, rows)) + ("" if key[0] else " (frozen)")
        for key, rows in ordered
    ]
    return Grouping(
        names=tuple(names),
        leaves=tuple(tuple(rows) for _, rows in ordered),
        frozen=frozenset(g for g, (key, _) in enumerate(ordered) if not key[0]),
    )


def _name(leaves: Sequence[Leaf], rows: Sequence[int]) -> str:
    """The name of a group outside blocks: its leaves' modules, at most three of them."""
    blocks = {leaf.block for leaf in leaves}
    paths = [leaves[i].modules for i in rows]
    # A parameter directly in a block's container gets its own name, not its parent's.
    modules = dict.fromkeys(
        ".".join(map(str, p if len(p) == 1 or p[:-1] in blocks else p[:-1])) for p in paths
    )
    return ", ".join(list(modules)[:3]) + (", …" if len(modules) > 3 else "")


def layout_group(
    leaves: Sequence[Leaf],
    rows: Sequence[int],
    state: Sequence[jax.ShapeDtypeStruct],
    master: jax.typing.DTypeLike,
    num_shards: int = 1,
    master_codecs: Sequence[Plain] | None = None,
    state_codecs: Sequence[Plain] | None = None,
    *,
    apart: bool = False,
) -> GroupLayout:
    """Lays out one group's leaves and its optimizer state.

    Leaves that have the same codecs, for the master and for each moment, are placed together.

    Args:
        leaves: All leaves of the model.
        rows: Numbers of the group's leaves.
        state: Shapes and dtypes of the leaves of its optimizer state.
        master: Compute dtype of the masters.
        num_shards: Number of equal parts that slabs are divided into, one per device.
        master_codecs: Codec of each leaf's master; None for plain ones.
        state_codecs: Codec of each leaf of the state; None for plain ones.
        apart: Whether the masters of large leaves, and their gradients, have their own arrays.
    """
    shapes = [leaves[i].shape for i in rows]
    masters = list(master_codecs or [PLAIN] * len(rows))
    states = list(state_codecs or [PLAIN] * len(state))
    mirrors = [states[at : at + n] for at, n in rows_like(state, shapes) if n]
    # Masters and state share one order and one unit, so that each leaf has the same offset in both.
    # This lets an elementwise update compute on whole slabs.
    order = in_order(list(zip(masters, *mirrors, strict=True)))
    large = large_leaves(shapes) if apart else frozenset()
    order = sorted(order, key=large.__contains__)  # small leaves share an array
    unit = max((codec.block for codec in (*masters, *states)), default=1)
    # Updates of plain numbers run segment by segment, updates of codes in pieces of any length.
    alike = large if unit == 1 else ()
    return GroupLayout(
        master=layout_of(shapes, master, num_shards, masters, order, unit, large),
        state=mixed_layout_of(state, shapes, num_shards, states, order, unit, alike),
    )
