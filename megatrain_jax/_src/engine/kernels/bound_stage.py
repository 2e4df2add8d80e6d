"""A stage bound to slabs: the places of its leaves, and its backward's operands and results."""

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence

from megatrain_jax._src.engine.kernels.residuals import Residuals
from megatrain_jax._src.engine.kernels.tiled_stages import Tiling
from megatrain_jax._src.engine.program.loss.stages import Stage
from megatrain_jax._src.engine.state.layout import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """The place of one leaf of a stage in the stage's slabs.

    Attributes:
        slab: Position of the slab in the stage's arguments.
        leaf: Position of the leaf in that slab's layout.
    """

    slab: int
    leaf: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Binding:
    """The places of a stage's leaves in the slabs of its groups.

    Example: an embedding of 10 x 4 is tied to the head. The head's stage has a norm, and reads the
    embedding after it. The norm's scale and bias are leaves 5 and 6 of the model and form group 3;
    the embedding is leaf 0, alone in group 0. The head's jaxpr reads leaves 5, 6 and 0, in this
    order, and the stage takes the masters of groups 3 and 0::

        layouts = (<shapes (4,), (4,)>, <shape (10, 4)>)
        slots = (Slot(slab=0, leaf=0), Slot(slab=0, leaf=1), Slot(slab=1, leaf=0))

    A binding has no group numbers, so that equal blocks have equal bindings.

    Attributes:
        layouts: Layout of each slab of masters that the stage takes.
        slots: Place of each leaf of the stage, in the jaxpr's order.
    """

    layouts: tuple[Layout, ...]
    slots: tuple[Slot, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardMode:
    """The mode of a stage's backward: its further arguments, and its results.

    Attributes:
        gradients: For each slab, the dtype of its gradient; None if the group is frozen.
        accumulate: For each slab, whether a gradient exists already and is added to.
        arriving: For each output, whether a cotangent arrives.
        existing: For each input, whether another stage has already sent a cotangent to it.
        give_outputs: Whether to return the outputs as well, because the stage has no forward.
        rounding: For each slab, "stochastic" or "nearest" if its gradient is stored in bfloat16,
            and so is an existing gradient; None if it is stored in the dtype in `gradients`.
        is_partial: Whether the results are sums in fp32 over some of a wave's microbatches, kept
            beside the stored gradients. An existing gradient is such a sum, too.
        completes: Whether such sums are added to the stored gradients, by a wave's last microbatch.
    """

    gradients: tuple[str | None, ...]
    accumulate: tuple[bool, ...]
    arriving: tuple[bool, ...]
    existing: tuple[bool, ...]
    give_outputs: bool
    rounding: tuple[str | None, ...]
    is_partial: bool = False
    completes: bool = False

    def of_microbatch(self, *, first: bool, last: bool) -> "BackwardMode":
        """The mode for one of a wave's microbatches, the first or the last of them or neither.

        Gradients that are stored in bfloat16 are read and rounded once per wave: by the last
        microbatch, which adds the gradients in fp32 that the earlier ones have made.
        """
        if not any(self.rounding) or (first and last):
            return self
        # With several microbatches, all gradients are sums.
        assert all(self.rounding[i] for i, dtype in enumerate(self.gradients) if dtype)
        if last:
            return dataclasses.replace(self, completes=True)
        adds = tuple(rounding is not None and not first for rounding in self.rounding)
        stored = (None,) * len(self.rounding)
        return dataclasses.replace(self, accumulate=adds, rounding=stored, is_partial=True)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class BoundStage:
    """A stage bound to the groups it reads.

    Attributes:
        stage: The stage.
        groups: Numbers of the groups that the stage reads.
        binding: Places of the stage's leaves in their slabs.
        mode: Mode of the stage's backward; None without a backward.
        sent: Ids of inputs with a cotangent from another stage already, in input order.
        residuals: Residuals that the forward can save; None if none are worth saving.
        tiles: The tiles of a kernel, by its name; kernels that are missing here are not tiled.
        selective: Only the costliest residuals; None if none stand out.
    """

    stage: Stage
    groups: tuple[int, ...]
    binding: Binding
    mode: BackwardMode | None
    sent: tuple[int, ...]
    residuals: Residuals | None
    tiles: Mapping[str, Tiling] = dataclasses.field(default_factory=dict)
    selective: Residuals | None = None

    def __repr__(self) -> str:
        """Returns the stage's name, groups and size: its jaxpr may be long."""
        stage = self.stage
        return (
            f"BoundStage({stage.name!r}, groups={self.groups}, {len(stage.jaxpr.eqns)} equations)"
        )

    @property
    def key(self) -> Hashable:
        """Key of the stage's forward, equal for bound stages that share a compiled function."""
        return self.stage.key, self.binding

    @functools.cached_property
    def alike(self) -> tuple[tuple[int, ...], ...]:
        """The positions of leaves, grouped by slab and dtype; each group is gathered together."""
        # Equations may take leaves of one slab in several dtypes, such as norms in fp32 and
        # matrices in bf16.
        rows: dict[Hashable, list[int]] = {}
        pairs = zip(self.binding.slots, self.stage.leaf_dtypes, strict=True)
        for i, (slot, dtype) in enumerate(pairs):
            rows.setdefault((slot.slab, dtype), []).append(i)
        return tuple(map(tuple, rows.values()))

    def share_bytes(self, positions: Sequence[int]) -> int:
        """Bytes of one device's share of some leaves, in the dtypes of the equations."""
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
        """Ids of the outputs with a cotangent that the backward takes."""
        if self.mode is None:
            return ()
        pairs = zip(self.stage.outputs, self.mode.arriving, strict=True)
        return tuple(i for i, arrives in pairs if arrives)

    @property
    def accumulated(self) -> tuple[int, ...]:
        """Numbers of the groups with a gradient that the backward adds to."""
        if self.mode is None:
            return ()
        pairs = zip(self.groups, self.mode.accumulate, strict=True)
        return tuple(group for group, adds in pairs if adds)

    @property
    def rounded(self) -> tuple[int, ...]:
        """Numbers of the groups with a gradient that the backward rounds to bfloat16."""
        if self.mode is None:
            return ()
        pairs = zip(self.groups, self.mode.rounding, strict=True)
        return tuple(group for group, rounding in pairs if rounding is not None)

    def of_microbatch(self, number: int, count: int) -> "BoundStage":
        """The stage with the mode for the backward of microbatch `number` of a wave's `count`."""
        mode = self.mode and self.mode.of_microbatch(first=number == 0, last=number == count - 1)
        return self if mode is self.mode else dataclasses.replace(self, mode=mode)

    @property
    def leaving(self) -> tuple[int, ...]:
        """Ids of the inputs that get a cotangent from the backward."""
        pairs = zip(self.stage.inputs, self.stage.active, strict=True)
        return tuple(i for i, active in pairs if active)
