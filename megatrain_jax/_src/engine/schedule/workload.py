"""The workload of a schedule as plain data: a step's stages and groups, their bytes and times."""

import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from megatrain_jax._src.common.keys import LASTING, Key, Kind
from megatrain_jax._src.common.sizes import sized


@dataclass(frozen=True, kw_only=True)
class Link:
    """The full-duplex connection between a device and its host's memory.

    Attributes:
        inward: Seconds per byte to the device.
        outward: Seconds per byte from the device.
        shared: Seconds per byte in a resource that both directions share, such as the host's
            memory; 0 if it never limits transfers.
    """

    inward: float
    outward: float
    shared: float = 0.0


SLOTS = 2
"""Number of parts of equal shapes that may be between a disk and the device, each way."""


@dataclass(frozen=True, kw_only=True)
class DiskLink:
    """One device's share of the connection between the host's memory and its disks.

    Attributes:
        read: Seconds per byte to the host.
        written: Seconds per byte from the host.
        shared: Seconds of the disks for each byte read or written; 0 if both ways are independent.
    """

    read: float
    written: float
    shared: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Estimated times in seconds. They affect when parts move, never results.

    Attributes:
        forward: For each stage, the forward of one wave's microbatches.
        backward: For each stage, the backward of one wave's microbatches.
        update: For each group, its update.
        recompute: For each stage, the time that its backward saves if its residuals are saved;
            empty for none.
        forward_on_link: For each stage, the part of its forward in which devices exchange values
            over their links, which then carry nothing else; empty for none.
        backward_on_link: The same for the backward.
        rounding: For each stage, the time that its backward takes once per wave, for any number of
            microbatches, to add to narrow sums of gradients and to round them; empty for none.
        reduce: For each group, its REDUCE; empty if updates count it.
        summing: For each group, the sum of its gradient over the network, if each process holds all
            state; empty for none.
        delay: Delay of computations for each byte that a link copies, since the copy reads or
            writes the device's memory, too. Rates of real steps contain it, times of functions
            that were called alone do not.
        link: The connection to the host.
        disk: The connection between the host and its disks; unused if nothing rests there.
        dispatch: Dispatch of one instruction by the driver.
        batch: Arrival of a step's batch on the device, after the driver has dispatched the step
            before it. All computations of the step wait for it.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update: tuple[float, ...]
    recompute: tuple[float, ...] = ()
    forward_on_link: tuple[float, ...] = ()
    backward_on_link: tuple[float, ...] = ()
    rounding: tuple[float, ...] = ()
    reduce: tuple[float, ...] = ()
    summing: tuple[float, ...] = ()
    delay: float = 0.0
    link: Link
    disk: DiskLink | None = None
    dispatch: float = 0.0
    batch: float = 0.0

    def times(self, factor: float) -> "Costs":
        """The costs with `factor` times the microbatches."""

        def times(seconds: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(factor * x for x in seconds)

        return replace(
            self,
            forward=times(self.forward),
            backward=times(self.backward),
            recompute=times(self.recompute),
            forward_on_link=times(self.forward_on_link),
            backward_on_link=times(self.backward_on_link),
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class Workload:
    """A training step for the schedule: its stages and groups, their bytes and their costs.

    Attributes:
        stages: For each stage, in forward order, the groups that it reads.
        backward: For each stage, whether the loss depends on it.
        fused_last: The last stage has no FORWARD in training: its BACKWARD returns the loss.
        sizes: For each group, the bytes of its masters, optimizer state and gradient. A part that
            is missing or has no bytes never moves and appears in no FETCH, OFFLOAD or RELEASE.
        activations: Bytes of each counted activation, by its id.
        makes: For each stage, the counted activations it makes; empty for none.
        reads: For each stage, the counted activations it reads; empty for none.
        residuals: For each stage, bytes of the residuals that it can save, or 0; empty for none.
        may_offload_residuals: Whether residuals may be offloaded to the host until their backward.
        kept: The stages that save residuals.
        again: The stages with a forward that runs once more before their backward, so that their
            outputs need not be stored until then; see `order.py`.
        selective: Whether residuals are only the costliest results of each stage, instead of all.
        frozen: The groups that are only read: they have no gradients and are never updated.
        deferred: Updates need scalars of all gradients, so they happen in the next step.
        accumulate: A stage runs several microbatches, so its gradients have to start as ZEROS.
        waves: Number of equal parts of the microbatches that go through the stages one after
            another. Bytes of activations and residuals are counted for one wave.
        reduce_reads: Kinds that REDUCE reads besides the gradient.
        on_disk: The parts that rest on disks, each with the number of its class: parts of a class
            have equal shapes, and share slots in the host's memory.
        costs: Seconds that its computations and transfers take.
    """

    stages: tuple[tuple[int, ...], ...]
    backward: tuple[bool, ...]
    fused_last: bool
    sizes: tuple[Mapping[Kind, int], ...]
    activations: Mapping[int, int] = field(default_factory=dict)
    makes: tuple[tuple[int, ...], ...] = ()
    reads: tuple[tuple[int, ...], ...] = ()
    residuals: tuple[int, ...] = ()
    may_offload_residuals: bool = False
    kept: frozenset[int] = frozenset()
    again: frozenset[int] = frozenset()
    selective: bool = False
    frozen: frozenset[int] = frozenset()
    deferred: bool
    accumulate: bool = False
    waves: int = 1
    reduce_reads: frozenset[Kind] = frozenset()
    on_disk: Mapping[Key, int] = field(default_factory=dict)
    costs: Costs

    def __post_init__(self) -> None:
        """Checks the properties that schedules rely on."""
        assert self.stages and len(self.stages) == len(self.backward)
        assert self.backward[-1] or not self.fused_last, "a fused last stage yields the loss"
        assert all(0 <= group < len(self.sizes) for stage in self.stages for group in stage)
        assert self.reduce_reads <= LASTING
        assert self.waves == 1 or (self.waves > 1 and self.accumulate), "waves sum into zeros"
        # BACKWARD makes a gradient for each group that its stage reads, if it has bytes. A frozen
        # group's gradient would never be consumed.
        untrained = (Kind.OPTIMIZER_STATE, Kind.GRADIENT)
        assert not any(self.size(Key(kind, g)) for g in self.frozen for kind in untrained)
        assert len(self.costs.forward) == len(self.costs.backward) == len(self.stages)
        assert len(self.costs.update) == len(self.sizes)
        made, read = ({i for row in rows for i in row} for rows in (self.makes, self.reads))
        # An activation is dropped by its last reader, so without a reader it would stay forever.
        assert set(self.activations) == made == read, "every activation is made and read"
        assert all(self.residuals[s] and self.backward[s] for s in self.kept)
        assert all(self.backward[s] for s in self.again) and not self.again & self.kept
        assert len(self.stages) - 1 not in self.again, "nothing is computed after the last stage"
        # A fused last stage has no FORWARD that could save residuals.
        assert not self.fused_last or len(self.stages) - 1 not in self.kept

    def __repr__(self) -> str:
        """Returns a line of totals: most fields have an entry for each stage or group."""
        at_rest = sum(size for row in self.sizes for k, size in row.items() if k in LASTING)
        return (
            f"Workload({len(self.stages)} stages, {len(self.sizes)} groups with {sized(at_rest)} "
            f"of state, {'deferred' if self.deferred else 'immediate'} updates)"
        )

    def in_waves(self, waves: int) -> "Workload":
        """The same step in `waves` waves, a divisor of its microbatches."""
        if waves == self.waves:
            return self
        factor = self.waves / waves
        return replace(
            self,
            activations={i: round(factor * size) for i, size in self.activations.items()},
            residuals=tuple(round(factor * size) for size in self.residuals),
            waves=waves,
            costs=self.costs.times(factor),
        )

    def size(self, key: Key) -> int:
        """Bytes of one part."""
        return self.bytes_of[key]

    @functools.cached_property
    def bytes_of(self) -> Mapping[Key, int]:
        """The bytes of each part, cached because schedules read them very often."""
        of_groups = (Kind.MASTERS, Kind.OPTIMIZER_STATE, Kind.GRADIENT)
        sizes = {Key(k, g): row.get(k, 0) for g, row in enumerate(self.sizes) for k in of_groups}
        sizes.update((Key(Kind.ACTIVATION, i), size) for i, size in self.activations.items())
        sizes.update((Key(Kind.RESIDUALS, s), size) for s, size in enumerate(self.residuals))
        return sizes

    def seconds_inward(self, keys: Iterable[Key]) -> float:
        """Seconds to copy parts to the device."""
        # Assumes no traffic in the outward direction, so only the slower rate counts.
        link = self.costs.link
        return sum(map(self.size, keys)) * max(link.inward, link.shared)

    @property
    def resting_bytes(self) -> int:
        """Bytes of one device's masters and optimizer state in the host, and of disks' slots.

        Parts on disks have slots on their way to the device, and as many new arrays of those that
        are updated wait there until they are written.
        """
        in_memory = sum(
            size
            for group, row in enumerate(self.sizes)
            for kind, size in row.items()
            if kind in LASTING and Key(kind, group) not in self.on_disk
        )
        classes: dict[int, int] = {}
        for key, number in self.on_disk.items():
            classes[number] = max(classes.get(number, 0), self.slots(key) * self.size(key))
        return in_memory + sum(classes.values())

    def slots(self, key: Key) -> int:
        """Number of parts of a class that may be on their way to and from disks, by one of them."""
        ways = 1 if self.is_only_read(key) else 2
        return ways * SLOTS

    def is_only_read(self, key: Key) -> bool:
        """Whether a part is never written: the masters of a frozen group."""
        return key.kind is Kind.MASTERS and key.owner in self.frozen

    @property
    def trained_groups(self) -> list[int]:
        """The groups that are updated."""
        return [group for group in range(len(self.sizes)) if group not in self.frozen]

    @property
    def has_shared_sums(self) -> bool:
        """Whether a gradient is summed over stages, in an order that depends on the waves."""
        reached = zip(self.stages, self.backward, strict=True)
        reads = [g for groups, backward in reached if backward for g in dict.fromkeys(groups)]
        return any(count > 1 and g not in self.frozen for g, count in Counter(reads).items())

    @property
    def unused_groups(self) -> list[int]:
        """The trained groups that the loss does not depend on; Optax updates them with zeros."""
        reached = zip(self.stages, self.backward, strict=True)
        used = {group for stage, backward in reached if backward for group in stage}
        return [group for group in self.trained_groups if group not in used]
