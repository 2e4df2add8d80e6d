"""`Plan`: the memory, transfers and computation of a run, before anything is allocated.

The numbers come from shapes and from the schedule's own records, so a plan takes seconds even for
an absent machine or a model too large for any. `plan_table.py` prints it as a table.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from megatrain_jax._src.engine.report.timeline_figure import draw_timeline, title_of
from megatrain_jax._src.engine.schedule.schedule import Schedule
from megatrain_jax._src.engine.schedule.timeline import memory, timeline
from megatrain_jax._src.engine.schedule.workload import Workload
from megatrain_jax._src.engine.state.hardware import Hardware, card
from megatrain_jax._src.engine.state.pool import usable_bytes
from megatrain_jax._src.engine.state.pool_limit import beside_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Bound = Literal[
    "link", "host", "disk", "arithmetic", "memory", "collectives", "loops", "dispatch", "neither"
]
Resource = Literal["device", "link", "host", "disk", "dispatch"]
Busy = Mapping[Resource, tuple[Bound, float]]
"""For each resource, its bottleneck and its busy seconds."""
# If another resource is busy for at least this fraction of the longest time, neither is named.
_AS_LONG = 0.9
# The parts of the host's memory, in the order of a plan's table.
STATE, UNUSED_PARTS = "masters and optimizer state", "the pool's unused parts"
WAITING = "gradients that wait", "activations that wait", "residuals that wait"
SLOTS, MOVING = "on the way to and from disks", "arrays on their way"
UNPINNED, REST = "state and values that aren't pinned", "the rest of the process"


@dataclass(frozen=True, kw_only=True)
class GroupRow:
    """Parameter groups that are alike: consecutive ones, or one part of each of several blocks.

    Attributes:
        name: The group's name, or the first and the last one's.
        count: Number of groups in the row.
        num_parameters: Parameters of each group.
        host_bytes: State at rest of each group: master weights and optimizer state.
        template: The compiled template they share.
    """

    name: str
    count: int
    num_parameters: int
    host_bytes: int
    template: int | str


@dataclass(frozen=True, kw_only=True)
class TileRow:
    """Stages with a forward or backward that is tiled, because its temporaries are too large.

    Attributes:
        name: The name of a stage's first group, or the first and the last such stage's.
        count: Number of stages in the row.
        what: "forward" or "backward".
        num_tiles: Number of tiles, computed one after another.
        num_rows: Rows per tile along the divided axis, such as tokens.
    """

    name: str
    count: int
    what: str
    num_tiles: int
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The memory, transfers and computation that a run needs, and the bottleneck of its step.

    Attributes:
        num_parameters: Parameters of the model.
        num_frozen: Parameters of the model that are not trained.
        frozen_bytes: Host memory of the frozen parameters.
        groups: The parameter groups, consecutive equal ones as one row.
        host_bytes: Host memory of the state at rest, summed over all devices.
        host_peak_bytes: The same plus slots for disks, waiting gradients, activations and arrays in
            flight.
        host_slot_bytes: Host memory of the parts on their way to and from disks.
        disk_bytes: State that rests on disks, summed over all devices.
        disk_read_bytes: Bytes that each host reads from its disks in a step.
        disk_written_bytes: Bytes that each host writes to its disks in a step.
        unpinned_bytes: All that would rest on disks, if it rests in memory that isn't pinned.
        host_gradient_bytes: Gradients that wait in the host for their update, at the moment when
            most bytes wait there.
        host_activation_bytes: Activations in the host at that moment.
        host_residual_bytes: Residuals in the host at that moment.
        host_process_bytes: Total host memory of a process for its devices' shares, with the pool's
            unused parts. On a CPU, which computes in the host's memory, it includes the bytes of
            the device, the process as it is now, and the compiler. None if neither is known.
        host_pool_bytes: Pinned memory in it, including the pool's unused parts; None without a GPU.
        host_fixed_bytes: Host memory that a process takes before it has state; None if unknown.
        host_budget: Maximum host memory of a process; None for its share of the machine's.
        device_budget: Bytes per device for state and activations; None for the minimum.
        device_state_bytes: Peak bytes per device that the schedule uses for them.
        device_excess: The reason why the run doesn't fit on the device, such as "at least 22.73 GiB
            with blocks in 3 parts, most in the backward and update of lm_head"; empty if it fits.
        device_other_bytes: Estimate of values between stages that the schedule doesn't count: small
            ones, and values that depend only on the batch.
        device_temporary_bytes: Peak temporary bytes of a compiled function; None if unknown.
        device_temporary_estimated: Whether that is estimated from the stages' largest values,
            because the functions aren't compiled for the device.
        bytes_in: Bytes per step from the host to each device.
        bytes_out: Bytes per step from each device to the host.
        flops_per_step: Floating-point operations per step, over all devices, as counted by
            `make_plan`.
        attention_flops_per_step: Operations of attention kernels among them.
        float8_flops_per_step: Operations of float8 products among them.
        float32_flops_per_step: Operations of float32 products among them.
        loop_kernels_per_step: Estimate of the kernels that loops in the stages launch per step, on
            each device: loops over a layer's experts, or over chunks of a row.
        by_kernels: The computations that kernels of the extra `kernels` do, such as "experts". A
            plan for one Hopper GPU, made on another machine, assumes that the extra is installed.
        seconds_loops: Estimate of the time of these loops beyond their computation, because their
            kernels are short or only copy.
        memory_bytes: Bytes that each device could read and write in the time of its remaining
            kernels, such as norms and updates.
        seconds_per_step: Estimate of a step's time, with transfers and computation overlapping as
            scheduled; `None` without hardware.
        is_measured: Whether that estimate comes from the measured times of the step's compiled
            functions on this GPU, instead of their operations and bytes.
        batch_size: Size of a batch, in `batch_unit`.
        batch_unit: "tokens" if the batch has an array of token ids, else "examples" or "batches".
        microbatches: Microbatches per step.
        waves: Equal parts of them that go through the stages one after another.
        update_mode: Whether parameters are updated in the stage's own backward.
        num_stages: Stages of the forward.
        num_kept: Stages that save the results of their matrix products for the backward, which then
            need not recompute them.
        keeps_costliest: Whether they save only the results that take the most time to recompute for
            their bytes, such as attention's on long sequences.
        num_templates: Templates that are compiled for the stages.
        num_parts: Number of parts that each block is cut into, because a whole block doesn't fit on
            the device: the fewest that fit; 1 if a whole block fits, or no number of parts.
        num_expert_groups: Number of groups that the experts of each block are divided into, because
            they don't fit together: the fewest that fit; 1 if they do, or there are none.
        tiles: The tiled stages, in order.
        num_again: Stages whose forward is computed once more before their backward, so that less
            waits in the host.
        num_devices: Devices that share the state and the batch.
        num_processes: Processes that share the run, each with equally many devices.
        processes_per_host: Number of them that share a host and its memory.
        collective_bytes: Bytes that each device receives from its peers per step: gathered
            parameters, and gradients to be summed.
        num_copies: Processes that each hold all state. The plan is that of one of them, but
            `batch_size` counts the batches of all.
        state_choice: A sentence on the way that `state_per_process="auto"` chose, and on the other
            one; "" if nothing was chosen.
        summed_bytes: Bytes that each host receives per step for sums of gradients, if each holds
            all state; see `state_per_process` of `Trainer`.
        seconds_dispatch: Estimate of the time in which Python dispatches a step.
        warnings: Sentences about parts of the run that perform badly.
        hardware: The machine that times and limits refer to.
        workload: The computation, bytes and rates of a step, from which it is scheduled.
        schedule: Its transfers and computations in order; like the workload, None if made by hand.
    """

    num_parameters: int
    num_frozen: int
    frozen_bytes: int
    groups: tuple[GroupRow, ...]
    host_bytes: int
    host_peak_bytes: int
    host_process_bytes: int | None = None
    device_state_bytes: int
    device_other_bytes: int
    device_temporary_bytes: int | None
    device_temporary_estimated: bool
    bytes_in: int
    bytes_out: int
    flops_per_step: int
    seconds_per_step: float | None
    microbatches: int
    update_mode: Literal["immediate", "deferred"]
    num_stages: int
    num_kept: int
    num_templates: int
    batch_size: int = 1
    batch_unit: str = "batches"
    is_measured: bool = False
    waves: int = 1
    num_parts: int = 1
    num_expert_groups: int = 1
    keeps_costliest: bool = False
    attention_flops_per_step: int = 0
    float8_flops_per_step: int = 0
    float32_flops_per_step: int = 0
    loop_kernels_per_step: int = 0
    by_kernels: tuple[str, ...] = ()
    seconds_loops: float = 0.0
    memory_bytes: float = 0.0
    tiles: tuple[TileRow, ...] = ()
    num_again: int = 0
    host_slot_bytes: int = 0
    disk_bytes: int = 0
    disk_read_bytes: int = 0
    disk_written_bytes: int = 0
    unpinned_bytes: int = 0
    host_gradient_bytes: int = 0
    host_activation_bytes: int = 0
    host_residual_bytes: int = 0
    host_pool_bytes: int | None = None
    host_fixed_bytes: int | None = None
    host_budget: int | None = None
    device_budget: int | None = None
    device_excess: str = ""
    num_devices: int = 1
    num_processes: int = 1
    processes_per_host: int = 1
    collective_bytes: int = 0
    num_copies: int = 1
    state_choice: str = ""
    summed_bytes: int = 0
    seconds_dispatch: float = 0.0
    warnings: tuple[str, ...] = ()
    hardware: Hardware | None = None
    workload: Workload | None = field(default=None, compare=False)
    schedule: Schedule | None = field(default=None, compare=False)

    @property
    def host_share_bytes(self) -> int:
        """Host memory of one device's share of the state at rest."""
        return self.host_bytes // self.num_devices

    @property
    def host_parts(self) -> dict[str, int]:
        """Host memory by part, of all processes together.

        The first six parts add up to `host_peak_bytes`, all of them to the memory of the
        processes where that is known.
        """
        waiting = self.host_gradient_bytes, self.host_activation_bytes, self.host_residual_bytes
        parts = {STATE: self.host_bytes, SLOTS: self.host_slot_bytes}
        parts |= dict(zip(WAITING, waiting, strict=True))
        parts[MOVING] = self.host_peak_bytes - sum(parts.values())
        if self.host_process_bytes is not None:
            pools = max(self.host_peak_bytes, (self.host_pool_bytes or 0) * self.num_processes)
            parts[UNUSED_PARTS] = pools - self.host_peak_bytes
            parts[UNPINNED] = self.unpinned_bytes
            parts[REST] = max(
                0, self.host_process_bytes * self.num_processes - pools - self.unpinned_bytes
            )
        return parts

    @property
    def num_hosts(self) -> int:
        """Hosts that share the run, each with equally many devices."""
        return self.num_processes // self.processes_per_host

    @property
    def devices_per_host(self) -> int:
        """Devices that share a host's memory."""
        return self.num_devices // self.num_hosts

    @property
    def bytes_through_host(self) -> int:
        """Bytes per step through a host's memory, for all its devices in both directions.

        Without direct connections, devices exchange data through it too.
        """
        apart = self.hardware is None or self.hardware.peer_bytes_per_s is not None
        # Each byte is written there by its sender and read by its receiver.
        exchanged = 0 if apart else 2 * self.collective_bytes
        return self.devices_per_host * (self.bytes_in + self.bytes_out + exchanged)

    @property
    def network_bytes(self) -> int:
        """Bytes per step that each host receives from the others; see `Hardware`."""
        if self.num_copies > 1:
            return self.summed_bytes
        return 0 if self.num_hosts == 1 else self.collective_bytes

    @property
    def device_bytes(self) -> int:
        """Device memory for state, values and temporaries, as far as known."""
        temporary = self.device_temporary_bytes or 0
        return self.device_state_bytes + self.device_other_bytes + temporary

    @property
    def seconds_in(self) -> float | None:
        """Seconds of a step's transfers to the device alone; `None` without hardware."""
        return self._seconds_alone(self.bytes_in, 0)

    @property
    def seconds_out(self) -> float | None:
        """Seconds of a step's transfers to the host alone; `None` without hardware."""
        return self._seconds_alone(self.bytes_out, 1)

    @property
    def link_share(self) -> float | None:
        """Share of a step in which its link is busy, with exchanges; `None` without hardware."""
        busy, seconds = self.busy, self.seconds_per_step
        return busy["link"][1] / seconds if busy and seconds else None

    @property
    def seconds_compute(self) -> float | None:
        """Seconds of a step's computation alone; `None` without hardware."""
        return self._seconds_computing(
            self.flops_per_step,
            self.attention_flops_per_step,
            self.float8_flops_per_step,
            self.float32_flops_per_step,
        )

    @property
    def seconds_attention(self) -> float | None:
        """Seconds of attention kernels in it; `None` without hardware."""
        attention = self.attention_flops_per_step
        return self._seconds_computing(attention, attention)

    @property
    def seconds_collectives(self) -> float | None:
        """Seconds of a step's exchange between devices alone; `None` without hardware."""
        if self.hardware is None:
            return None
        return self.collective_bytes / self.hardware.collective_bytes_per_s(self.devices_per_host)

    @property
    def seconds_network(self) -> float | None:
        """Seconds in which a host receives a step's exchange alone; `None` without hardware."""
        return self.hardware and self.network_bytes / self.hardware.network_bytes_per_s

    @property
    def seconds_disk(self) -> tuple[float, float] | None:
        """Seconds in which a host's disks read and write for a step; `None` without hardware."""
        if self.hardware is None:
            return None
        rates = self.hardware.disk_read_bytes_per_s, self.hardware.disk_write_bytes_per_s
        moved = self.disk_read_bytes, self.disk_written_bytes
        read, written = (n / (rate or math.inf) for n, rate in zip(moved, rates, strict=True))
        return read, written

    @property
    def seconds_host(self) -> float | None:
        """Seconds of the host's memory for the bytes that pass it; `None` without hardware."""
        return self.hardware and self.bytes_through_host / self.hardware.host_bytes_per_s

    @property
    def seconds_memory(self) -> float | None:
        """Seconds of all remaining kernels on each device; `None` without hardware."""
        return self.hardware and self.memory_bytes / self.hardware.memory_bytes_per_s

    @property
    def bound(self) -> Bound:
        """The bottleneck of a perfectly overlapped step, from the times of `busy`.

        "arithmetic" is each device's operations, "link" its own link, "host" the host's memory,
        shared by all devices, "disk" its disks, "collectives" the exchange between devices,
        "memory" the device's memory, for kernels other than products and attention, "loops" the
        short kernels of loops, "dispatch" the Python that dispatches a step of a toy model.
        "neither" if a second one takes at least 90% as long, or no hardware is given.
        """
        longest: dict[Bound, float] = {}
        for name, seconds in self.busy.values():
            longest[name] = max(longest.get(name, 0.0), seconds)
        most = max(longest.values(), default=0.0)
        as_long: list[Bound] = [n for n, s in longest.items() if s >= _AS_LONG * most]
        return as_long[0] if len(as_long) == 1 else "neither"

    @property
    def busy(self) -> Busy:
        """The busy seconds of each resource in a step; empty without hardware.

        For "device", "link", "host" and "dispatch", the name of the largest part, as in `bound`,
        and the seconds of all parts.

        Each device computes and takes part in collectives, one after the other. Of its operations,
        loops and remaining kernels, the longest names the part. Its link is full duplex, so its
        slower direction counts. The host's memory serves all links in both directions. If devices
        are connected only by their links, collectives use these too, and the host's memory twice.
        Collectives are the largest part if they take more than half of the time. Python dispatches
        a step while the previous one runs; steps of toy models wait for that.

        Example: four devices. Each receives 20 bytes from the host, sends 16 there, receives 12
        from its peers and does a quarter of 400 operations. Per second, a link carries 10 bytes,
        the host's memory 40, and a device does 100 operations::

            link        max(20, 16) / 10 = 2       and 12 / 10 = 1.2 of collectives     3.2 s
            host        4 * (20 + 16) / 40 = 3.6   and 4 * 2 * 12 / 40 = 2.4            6.0 s
            arithmetic  400 / (4 * 100) = 1        and 12 / min(10, 40 / 8) = 2.4       3.4 s

        The bottleneck is the host's memory. If devices received 10 bytes per second from each other
        directly, link and host would have no collectives, and the device 1.2 s of them.
        """
        if (machine := self.hardware) is None:
            return {}
        # For one host: its memory and its links limit a step; all hosts do the same in parallel.
        own, of = self.devices_per_host, self.num_devices
        flops, attention, float8, float32 = (
            number * own // of
            for number in (
                self.flops_per_step,
                self.attention_flops_per_step,
                self.float8_flops_per_step,
                self.float32_flops_per_step,
            )
        )
        computing = machine.compute_seconds(flops, attention, machine.sustained, float8, float32)
        on_device: dict[Bound, float] = {
            "arithmetic": computing / own,
            "loops": self.seconds_loops,
            "memory": self.seconds_memory or 0.0,
        }
        exchanged, host = self.collective_bytes, machine.host_bytes_per_s
        # Over a direct connection, collectives use neither the links nor the host.
        over_links = exchanged if machine.peer_bytes_per_s is None else 0
        (inward, outward), moved = machine.link_rates, self.bytes_in + self.bytes_out
        copying = max(self.bytes_in / inward, self.bytes_out / outward)
        collecting = exchanged / machine.collective_bytes_per_s(own)
        collecting += self.summed_bytes / machine.network_bytes_per_s
        both_ways = (self.disk_read_bytes + self.disk_written_bytes) / machine.disk_bytes_per_s
        name = max(on_device, key=lambda name: on_device[name])
        shares: tuple[tuple[Resource, Bound, float, float], ...] = (
            ("device", name, sum(on_device.values()), collecting),
            ("link", "link", copying, over_links / min(inward, outward)),
            ("host", "host", own * moved / host, own * 2 * over_links / host),
            ("disk", "disk", max(*(self.seconds_disk or ()), both_ways), 0.0),
        )
        busy: dict[Resource, tuple[Bound, float]] = {
            "dispatch": ("dispatch", self.seconds_dispatch)
        }
        for resource, name, alone, collectives in shares:
            # The larger contribution names the bottleneck.
            busy[resource] = "collectives" if collectives > alone else name, alone + collectives
        return busy

    def _seconds_computing(
        self, flops: int, attention: int, float8: int = 0, float32: int = 0
    ) -> float | None:
        """Seconds for operations of all devices, of which some have a rate of their own."""
        if (machine := self.hardware) is None:
            return None
        found = machine.compute_seconds(flops, attention, machine.sustained, float8, float32)
        return found / self.num_devices

    def _seconds_alone(self, num_bytes: int, way: int) -> float | None:
        """Seconds for a step's transfers in one direction, for all devices at once."""
        number = self.devices_per_host
        return self.hardware and num_bytes / self.hardware.transfer_rates(number)[way]

    @property
    def host_process_limit(self) -> int | None:
        """Host memory that one process may take: its budget or its share; `None` if unknown."""
        total = self.hardware and self.hardware.assumed_host_bytes
        own = self.devices_per_host // self.processes_per_host
        lists = own * self.hardware.list_bytes if self.hardware else 0
        unpinned = max(0, (self.host_fixed_bytes or 0) - beside_bytes(0, lists))
        return usable_bytes(self.host_budget, total, own, self.processes_per_host, lists, unpinned)

    @property
    def fits_host(self) -> bool | None:
        """Whether a host's memory suffices for its processes; `None` if unknown."""
        # Without a GPU there is no pool, and a process takes only its arrays.
        process = self.host_process_bytes or self.host_peak_bytes // self.num_processes
        return _fits(process, self.host_process_limit)

    @property
    def fits_device(self) -> bool | None:
        """Whether the device memory available to JAX suffices; `None` if unknown.

        While the functions' memory is unknown, this is known only if the rest is already too much.
        """
        fits = _fits(self.device_bytes, self.hardware and self.hardware.usable_bytes)
        return None if fits and self.device_temporary_bytes is None else fits

    @property
    def fits(self) -> bool | None:
        """Whether the run fits host and device; `None` if unknown, as without hardware."""
        known = self.fits_host, self.fits_device
        return False if False in known else None if None in known else True

    def timeline(self) -> "Figure":
        """Draws a steady step by the schedule's clock: copies, computation, and memory.

        It begins when the device has finished the previous step, so copies made ahead lie before 0.
        Times are estimates with the rates of `hardware`; without it, of an H200.

        Returns:
            A Matplotlib figure, which a notebook shows as a picture. It belongs to no window.

        Raises:
            ValueError: If the plan has no schedule.
        """
        if self.workload is None or self.schedule is None:
            raise ValueError("this plan was made by hand: only those of `plan` have a schedule")
        title = title_of(self.schedule.seconds, (self.hardware or card("H200")).name)
        what = self.workload, self.schedule
        return draw_timeline(timeline(*what), memory(*what), title)


def _fits(need: int, limit: int | None) -> bool | None:
    return None if limit is None else need <= limit
