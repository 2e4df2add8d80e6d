"""Parameter groups: which leaves travel together, and how they lie in slabs."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from megatrain_jax._src.program.blocks import Leaf, common_prefix
from megatrain_jax._src.state.layout import Layout, MixedLayout, layout_of, mixed_layout_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grouping:
    """Which leaves form a group.

    Attributes:
        names: Name of each group.
        leaves: For each group its leaves, ascending.
        frozen: The groups that are only read.
    """

    names: tuple[str, ...]
    leaves: tuple[tuple[int, ...], ...]
    frozen: frozenset[int] = frozenset()

    @property
    def group_of(self) -> tuple[int, ...]:
        """The group of each leaf."""
        owner = {leaf: g for g, leaves in enumerate(self.leaves) for leaf in leaves}
        return tuple(owner[leaf] for leaf in range(len(owner)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupLayout:
    """How a group's state lies in slabs: masters, with gradients alike, and optimizer state."""

    master: Layout
    state: MixedLayout

    @property
    def slabs(self) -> tuple[Layout, ...]:
        """The layouts of all slabs that last."""
        return (self.master, *self.state.layouts)

    def sizes(self, gradient: jax.typing.DTypeLike | None) -> dict[str, int]:
        """Bytes of the parts that travel: masters, optimizer state, gradients of this dtype.

        Without a dtype there are no gradients.
        """
        return {
            "P": self.master.num_bytes,
            "O": self.state.num_bytes,
            "G": self.master.size * jnp.dtype(gradient).itemsize if gradient is not None else 0,
        }


def group_leaves(leaves: Sequence[Leaf], stages: Sequence[Sequence[int]]) -> Grouping:
    """Groups leaves by block; those outside blocks by the stages that read them.

    A tied embedding, which two stages read, so doesn't drag along what only one of them needs.
    Frozen leaves have groups of their own, since they travel one way only.

    Args:
        leaves: All leaves.
        stages: For each stage the leaves it reads.
    """
    uses: dict[int, list[int]] = {i: [] for i in range(len(leaves))}
    for s, read in enumerate(stages):
        for i in read:
            uses[i].append(s)
    members: dict[tuple, list[int]] = {}
    for i, leaf in enumerate(leaves):
        place = (leaf.block,) if leaf.block else (None, *uses[i])
        members.setdefault((leaf.is_trainable, *place), []).append(i)

    def first_use(item):
        return min((uses[i][0] for i in item[1] if uses[i]), default=len(stages)), item[1][0]

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
    paths = [leaves[i].path for i in rows]
    modules = dict.fromkeys(".".join(map(str, common_prefix([p, p])[:-1] or p)) for p in paths)
    return ", ".join(list(modules)[:3]) + (", …" if len(modules) > 3 else "")


def layout_group(
    leaves: Sequence[Leaf], rows: Sequence[int], state: Sequence[jax.ShapeDtypeStruct], master
) -> GroupLayout:
    """Lays out one group's leaves and its optimizer state."""
    shapes = [leaves[i].shape for i in rows]
    return GroupLayout(
        master=layout_of(shapes, master),
        state=mixed_layout_of(state, shapes),
    )
