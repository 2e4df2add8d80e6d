"""A stage bound to slabs: the places of its leaves, and its backward's operands and results."""

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence

from megatrain_jax._src.kernels.residuals import Residuals
from megatrain_jax._src.kernels.tiles import Tiling
from megatrain_jax._src.program.loss.stages import Stage
from megatrain_jax._src.state.layout import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """The place of one leaf of a stage among the slabs that the stage takes.

    Attributes:
        slab: Position of the slab among those the stage takes.
        leaf: Position of the leaf in that slab's layout.
    """

    slab: int
    leaf: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Binding:
    """The places of a stage's leaves in the slabs of the groups it reads.

    A worked example: an embedding of 10 x 4 is tied to the head, whose stage reads it after a norm
    of its own. The norm's scale and bias are leaves 5 and 6 of the model and form group 3; the
    embedding is leaf 0 and alone in group 0. The head's jaxpr reads leaves 5, 6 and 0, in this
    order. It takes the masters of groups 3 and 0, hence::

        layouts = (<shapes (4,), (4,)>, <shape (10, 4)>)
        slots = (Slot(slab=0, leaf=0), Slot(slab=0, leaf=1), Slot(slab=1, leaf=0))

    Nothing here names a group, so that equal blocks have equal bindings.

    Attributes:
        layouts: Layout of each slab of masters that the stage takes.
        slots: Place of each leaf of the stage, in the jaxpr's order.
    """

    layouts: tuple[Layout, ...]
    slots: tuple[Slot, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backward:
    """The mode of a stage's backward: what it takes besides slabs and inputs, and what it gives.

    Attributes:
        gradients: For each slab, the dtype of its gradient; None if the group is frozen.
        accumulate: For each slab, whether a gradient exists to be added to.
        arriving: For each output, whether a cotangent arrives.
        existing: For each input, whether another stage has already sent a cotangent to it.
        give_outputs: Whether to return the outputs, too: the stage has no separate forward.
    """

    gradients: tuple[str | None, ...]
    accumulate: tuple[bool, ...]
    arriving: tuple[bool, ...]
    existing: tuple[bool, ...]
    give_outputs: bool


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class BoundStage:
    """A stage bound to the groups it reads.

    Attributes:
        stage: The stage.
        groups: Numbers of the groups whose masters the stage takes.
        binding: Places of the stage's leaves in their slabs.
        mode: Mode of the stage's backward; None without a backward.
        sent: Ids of inputs whose cotangent another stage has already sent, in input order.
        residuals: Residuals that the forward can keep; None if there are none worth keeping.
        tiles: By name of a kernel, the tiles that it is computed in; the others are left whole.
        lean: The costliest of them alone; None if none stand out.
    """

    stage: Stage
    groups: tuple[int, ...]
    binding: Binding
    mode: Backward | None
    sent: tuple[int, ...]
    residuals: Residuals | None
    tiles: Mapping[str, Tiling] = dataclasses.field(default_factory=dict)
    lean: Residuals | None = None

    def __repr__(self) -> str:
        """Returns the stage's name, groups and size: its jaxpr may be long."""
        stage = self.stage
        return (
            f"BoundStage({stage.name!r}, groups={self.groups}, {len(stage.jaxpr.eqns)} equations)"
        )

    @property
    def key(self) -> Hashable:
        """Key of the stage's forward: equal for bound stages that share a compiled one."""
        return self.stage.key, self.binding

    @functools.cached_property
    def alike(self) -> tuple[tuple[int, ...], ...]:
        """The stage's leaves by slab and dtype, as their positions: those that travel together."""
        # Equations may take leaves of one slab in several dtypes, as norms in fp32 beside products
        # in bf16.
        rows: dict[Hashable, list[int]] = {}
        pairs = zip(self.binding.slots, self.stage.leaf_dtypes, strict=True)
        for i, (slot, dtype) in enumerate(pairs):
            rows.setdefault((slot.slab, dtype), []).append(i)
        return tuple(map(tuple, rows.values()))

    def share_bytes(self, positions: Sequence[int]) -> int:
        """Bytes of some of its leaves that one device has, in the dtypes of the equations."""
        slots, dtypes = self.binding.slots, self.stage.leaf_dtypes
        return sum(
            self.binding.layouts[slots[i].slab].shares[slots[i].leaf] * dtypes[i].itemsize
            for i in positions
        )

    @property
    def trained(self) -> tuple[int, ...]:
        """Numbers of the groups that get gradients from this stage; none without a backward."""
        if self.mode is None:
            return ()
        pairs = zip(self.groups, self.mode.gradients, strict=True)
        return tuple(group for group, dtype in pairs if dtype is not None)

    @property
    def arriving(self) -> tuple[int, ...]:
        """Ids of the outputs whose cotangents its backward takes."""
        if self.mode is None:
            return ()
        pairs = zip(self.stage.outputs, self.mode.arriving, strict=True)
        return tuple(i for i, arrives in pairs if arrives)

    @property
    def accumulated(self) -> tuple[int, ...]:
        """Numbers of the groups whose gradients its backward takes and adds to."""
        if self.mode is None:
            return ()
        pairs = zip(self.groups, self.mode.accumulate, strict=True)
        return tuple(group for group, adds in pairs if adds)

    @property
    def leaving(self) -> tuple[int, ...]:
        """Ids of the inputs whose cotangents its backward gives."""
        pairs = zip(self.stage.inputs, self.stage.active, strict=True)
        return tuple(i for i, active in pairs if active)
