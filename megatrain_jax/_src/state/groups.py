"""Parameter groups: leaves that are copied together, and their layout in slabs.

A worked example: leaves 0 to 3 are an embedding, one matrix in each of two blocks, and a norm; the
stages read leaves [0], [1], [2] and, in a head tied to the embedding, [3, 0]. Groups stand in the
order of their first use::

    names  = ("embed", "layers.0", "layers.1", "norm")
    leaves = ((0,), (1,), (2,), (3,))

The embedding is read by stages 0 and 3, the norm by stage 3 alone: they are two groups, so that
stage 0 doesn't fetch the norm.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from megatrain_jax._src.common.keys import Kind
from megatrain_jax._src.program.blocks import Leaf
from megatrain_jax._src.state.codec import Plain
from megatrain_jax._src.state.draws import Draw, draw_of, part_of
from megatrain_jax._src.state.layout import PLAIN, Layout
from megatrain_jax._src.state.mixed_layout import MixedLayout, mixed_layout_of, rows_like
from megatrain_jax._src.state.offsets import in_order, layout_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grouping:
    """The partition of a model's leaves into groups.

    Attributes:
        names: Name of each group, as tables and messages show it.
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
        master: Layout of the masters; gradients lie alike, in a dtype of their own.
        state: Layout of the optimizer state, a slab or more.
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
        """Numbers of a shard that are held in codes, with scales that several of them share."""
        segments = (segment for slab in self.slabs for segment in slab.segments)
        return sum(s.stop - s.start for s in segments if s.codec.block > 1)

    def slab_draws(self, draw: tuple | None) -> list[Draw | None]:
        """The draw of each slab, masters before state, whose elements have the same numbers.

        Args:
            draw: What an update's random bits are drawn from, see `draw_of`; None for no bits.
        """
        if draw is None:
            return [None] * len(self.slabs)
        masters, state = (part_of(draw_of(*draw), number) for number in range(2))
        return [masters, *(part_of(state, number) for number in range(len(self.state.layouts)))]

    def leaf(self, kind: Kind, position: int) -> tuple[Layout, int]:
        """The layout of the slab that a leaf of masters or of state is in, and its number there."""
        if kind is Kind.MASTERS:
            return self.master, position
        slab, i = self.state.places[position]
        return self.state.layouts[slab], i

    def sizes(self, gradient: jax.typing.DTypeLike | None) -> dict[Kind, int]:
        """Bytes of each kind of part that travels to and from each device.

        Args:
            gradient: Dtype of the gradient; None if the group has none.

        Returns:
            Bytes by kind: masters and optimizer state as they are at rest, and the gradient.
        """
        itemsize = jnp.dtype(gradient).itemsize if gradient is not None else 0
        return {
            Kind.MASTERS: self.master.num_bytes // self.master.num_shards,
            Kind.OPTIMIZER_STATE: self.state.num_bytes // self.master.num_shards,
            Kind.GRADIENT: self.master.size // self.master.num_shards * itemsize,
        }


def group_leaves(leaves: Sequence[Leaf], stages: Sequence[Sequence[int]]) -> Grouping:
    """Groups leaves by block; those outside blocks by the stages that read them.

    A tied embedding, which two stages read, so doesn't drag along what only one of them needs.
    Frozen leaves have groups of their own, since they travel one way only.

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
        # A block travels whole, whichever stages read it; outside of blocks, what the same stages
        # read.
        place = (leaf.block,) if leaf.block else (None, *uses[i])
        members.setdefault((leaf.is_trainable, *place), []).append(i)

    def first_use(item):
        return min((uses[i][0] for i in item[1] if uses[i]), default=len(stages)), item[1][0]

    # Groups are numbered as forward meets them: the smaller number is fetched first where nothing
    # else decides, and tables read like the model.
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
    paths = [leaves[i].path for i in rows]
    # A parameter that lies in a block and belongs to none has its own name, not the block's.
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
) -> GroupLayout:
    """Lays out one group's leaves and its optimizer state.

    Leaves that are coded alike, in all that lies as the masters do, are put together.

    Args:
        leaves: All leaves of the model.
        rows: Numbers of the group's leaves.
        state: Shapes and dtypes of its optimizer state's leaves.
        master: Dtype that masters are computed on in.
        num_shards: Number of equal parts that slabs are divided into, one a device.
        master_codecs: Codec of each leaf's master; None for plain ones.
        state_codecs: Codec of each leaf of the state; None for plain ones.
    """
    shapes = [leaves[i].shape for i in rows]
    masters = list(master_codecs or [PLAIN] * len(rows))
    states = list(state_codecs or [PLAIN] * len(state))
    mirrors = [states[at : at + n] for at, n in rows_like(state, shapes) if n]
    # One order and one unit for masters and state: leaf by leaf both lie at the same offsets, which
    # lets an elementwise update compute on whole slabs.
    order = in_order(list(zip(masters, *mirrors, strict=True)))
    unit = max((codec.block for codec in (*masters, *states)), default=1)
    return GroupLayout(
        master=layout_of(shapes, master, num_shards, masters, order, unit),
        state=mixed_layout_of(state, shapes, num_shards, states, order, unit),
    )
