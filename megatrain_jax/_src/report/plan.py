"""The plan of a run, before anything is allocated: memory, transfers, arithmetic.

The figures come from shapes and from the schedule's own records, so a plan for a machine that
isn't here, or a model that fits none, costs seconds; it prints as a table.
"""

import html
import math
from dataclasses import dataclass
from typing import Literal

from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.report.bound import Bound, find_bound
from megatrain_jax._src.report.table import aligned, html_row, seconds, short
from megatrain_jax._src.state.hardware import Hardware

_SHOWN_ROWS = 12
_BOUNDS: dict[Bound, str] = {
    "link": "the link",
    "host": "the host's memory",
    "compute": "arithmetic",
    "collectives": "what devices send each other",
    "neither": "neither: balanced",
}


@dataclass(frozen=True, kw_only=True)
class GroupRow:
    """A run of consecutive parameter groups that are alike.

    Attributes:
        name: The group's name, or the first and the last one's.
        count: How many groups the row stands for.
        num_parameters: Parameters of each of them.
        host_bytes: State at rest of each of them: master weights and optimizer state.
        template: The compiled template they share.
    """

    name: str
    count: int
    num_parameters: int
    host_bytes: int
    template: int | str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The memory, transfers and arithmetic that a run needs, and what bounds its step.

    Attributes:
        num_parameters: Parameters of the model.
        num_frozen: Parameters of the model that are not trained.
        frozen_bytes: Host memory of the frozen parameters.
        groups: The parameter groups, consecutive equal ones as one row.
        host_bytes: Host memory of the state at rest, of all devices' shares.
        host_peak_bytes: That with waiting gradients, activations and arrays in flight.
        host_process_bytes: Host memory that the process takes in all, with the pool's unused
            ends; None without a GPU.
        device_state_bytes: Most memory of each device that the schedule gives to state and
            activations.
        device_other_bytes: Estimate of the values between stages that the schedule doesn't count:
            small ones, and what the batch alone determines.
        device_temporary_bytes: Most that a compiled function needs for itself; None if unknown.
        device_temporary_estimated: Whether that is an estimate from the stages' largest values,
            since the functions aren't compiled for the device.
        bytes_in: Bytes that a step moves to each device.
        bytes_out: Bytes that a step moves from each device to the host.
        flops_per_step: Floating-point operations of a step, of all devices, as `make_plan` counts
            them.
        seconds_per_step: Estimate of a step's time, transfers and arithmetic overlapping as the
            schedule lets them; `None` without hardware.
        microbatches: Microbatches of a step.
        update_mode: Whether parameters are updated in the stage's own backward.
        num_stages: Stages of the forward.
        num_kept: Stages that keep the results of their matrix products for the backward, which
            then need not compute them again.
        num_templates: Templates that are compiled for the stages.
        num_devices: Devices that share the state and the batch.
        collective_bytes: Bytes that each device receives from the others in a step: gathered
            parameters, and gradients to be summed.
        warnings: Sentences on what could not be done well.
        hardware: The machine that times and limits refer to.
    """

    num_parameters: int
    num_frozen: int
    frozen_bytes: int
    groups: tuple[GroupRow, ...]
    host_bytes: int
    host_peak_bytes: int
    host_process_bytes: int | None
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
    num_devices: int = 1
    collective_bytes: int = 0
    warnings: tuple[str, ...] = ()
    hardware: Hardware | None = None

    @property
    def host_share_bytes(self) -> int:
        """Host memory of one device's share of the state at rest."""
        return self.host_bytes // self.num_devices

    @property
    def bytes_through_host(self) -> int:
        """Bytes that a step moves through the host's memory, of all devices, both ways.

        Without a connection of their own, devices write and read there what they send each other.
        """
        apart = self.hardware is None or self.hardware.peer_bytes_per_s is not None
        exchanged = 0 if apart else 2 * self.collective_bytes
        return self.num_devices * (self.bytes_in + self.bytes_out + exchanged)

    @property
    def device_bytes(self) -> int:
        """Device memory for state, values and temporaries, where these are known."""
        temporary = self.device_temporary_bytes or 0
        return self.device_state_bytes + self.device_other_bytes + temporary

    @property
    def seconds_in(self) -> float | None:
        """Seconds a step's transfers to the device take alone; `None` without hardware."""
        return self._seconds_alone(self.bytes_in)

    @property
    def seconds_out(self) -> float | None:
        """Seconds a step's transfers to the host take alone; `None` without hardware."""
        return self._seconds_alone(self.bytes_out)

    @property
    def seconds_compute(self) -> float | None:
        """Seconds a step's arithmetic takes alone; `None` without hardware."""
        rate = self.hardware and self.hardware.flops_per_s * self.num_devices
        return rate and self.flops_per_step / rate

    @property
    def seconds_collectives(self) -> float | None:
        """Seconds a step's exchange between devices takes alone; `None` without hardware."""
        if self.hardware is None:
            return None
        return self.collective_bytes / self.hardware.collective_bytes_per_s(self.num_devices)

    @property
    def seconds_host(self) -> float | None:
        """Seconds the host's memory takes for what passes through; `None` without hardware."""
        return self.hardware and self.bytes_through_host / self.hardware.host_bytes_per_s

    @property
    def bound(self) -> Bound:
        """The bound of a perfectly overlapped step: what it would wait for, by `find_bound`.

        "link" is each device's own link, "host" the host's memory, which all of them share,
        "collectives" what devices send each other. "neither" if two of them are within 10% of each
        other, or no hardware is given.
        """
        if self.hardware is None:
            return "neither"
        return find_bound(
            hardware=self.hardware,
            num_devices=self.num_devices,
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
            collective_bytes=self.collective_bytes,
            flops=self.flops_per_step,
        )

    def _seconds_alone(self, num_bytes: int) -> float | None:
        """Seconds for a step's transfers one way, of all devices at once."""
        return self.hardware and num_bytes / self.hardware.transfer_bytes_per_s(self.num_devices)

    @property
    def fits_host(self) -> bool | None:
        """Whether the host memory suffices for the process; `None` if it isn't known."""
        needed = self.host_process_bytes or self.host_peak_bytes
        return _fits(needed, self.hardware and self.hardware.assumed_host_bytes)

    @property
    def fits_device(self) -> bool | None:
        """Whether what JAX may take of the device suffices; `None` if it isn't known."""
        return _fits(self.device_bytes, self.hardware and self.hardware.usable_bytes)

    def __str__(self) -> str:
        """Returns the plan as a table of plain text."""
        blocks = [aligned(_group_cells(self)), aligned(_total_cells(self))]
        if self.warnings:
            blocks.append("\n".join(f"warning: {warning}" for warning in self.warnings))
        return f"{_title(self)}\n\n" + "\n\n".join(blocks)

    def _repr_html_(self) -> str:
        warnings = "".join(f"<p>warning: {html.escape(text)}</p>" for text in self.warnings)
        header, *rows = _group_cells(self)
        return (
            f"<p>{html.escape(_title(self))}</p>"
            f"<table>{html_row(header, 'th')}{''.join(map(html_row, rows))}</table>"
            f"<table>{''.join(map(html_row, _total_cells(self)))}</table>{warnings}"
        )


def _fits(need: int, limit: int | None) -> bool | None:
    return None if limit is None else need <= limit


def _title(plan: Plan) -> str:
    groups = sum(row.count for row in plan.groups)
    devices = "" if plan.num_devices == 1 else f"; {plan.num_devices} devices"
    return (
        f"{short(plan.num_parameters)} parameters in {groups} groups; {plan.num_stages} stages "
        f"from {plan.num_templates} templates; {plan.update_mode} update{devices}"
    )


def _group_cells(plan: Plan) -> list[list[str]]:
    cells = [["group", "count", "parameters", "host memory", "in all", "template"]]
    for row in plan.groups:
        cells.append(
            [
                row.name,
                str(row.count),
                short(row.num_parameters),
                sized(row.host_bytes),
                sized(row.count * row.host_bytes),
                str(row.template),
            ]
        )
    hidden = len(plan.groups) - _SHOWN_ROWS
    if hidden > 0:
        middle = 1 + _SHOWN_ROWS // 2
        count = sum(row.count for row in plan.groups[middle - 1 : middle - 1 + hidden])
        cells[middle : middle + hidden] = [["…", str(count), "", "", "", ""]]
    return cells


def _total_cells(plan: Plan) -> list[list[str]]:
    machine = plan.hardware
    batches = "" if plan.microbatches == 1 else f", {plan.microbatches} microbatches"
    of_all, share = "", ""
    if plan.num_devices > 1:
        of_all, share = " of all devices", f"{sized(plan.host_share_bytes)} of each device"
    known = plan.device_temporary_bytes
    guess = "estimate" if plan.device_temporary_estimated else ""
    temporaries = [["device memory, temporaries", sized(known or 0), guess]]
    kept = f"{plan.num_kept} of {plan.num_stages} stages"
    taken = plan.host_process_bytes
    fits = _host_verdict(plan)
    process = [["host memory, the process", sized(taken), f"estimate, {fits}"]] if taken else []
    recompute = [["no recomputation of products in", kept, ""]] if plan.num_kept else []
    if plan.num_frozen:
        trained = plan.num_parameters - plan.num_frozen
        whole = (plan.host_bytes - plan.frozen_bytes) * plan.num_parameters // max(1, trained)
        saved = f"{sized(plan.frozen_bytes)}; at rest all trained takes {sized(whole)}"
        frozen = [["parameters not trained", short(plan.num_frozen), saved]]
    else:
        frozen = []
    shared = "each has a share of the state and of the batch; what follows is one's"
    devices = [["devices", str(plan.num_devices), shared]] if plan.num_devices > 1 else []
    cells = [
        *frozen,
        ["host memory at rest", sized(plan.host_bytes), share],
        ["host memory at peak", sized(plan.host_peak_bytes), "" if taken else fits],
        *process,
        *devices,
        ["device memory, state and activations", sized(plan.device_state_bytes), ""],
        ["device memory, other values", sized(plan.device_other_bytes), "estimate"],
        *(temporaries if known is not None else []),
        ["device memory, in all", sized(plan.device_bytes), _device_verdict(plan)],
        ["to the device, a step", sized(plan.bytes_in), seconds(plan.seconds_in)],
        ["to the host, a step", sized(plan.bytes_out), seconds(plan.seconds_out)],
        *_shared_cells(plan),
        [
            f"arithmetic{of_all}, a step{batches}",
            short(plan.flops_per_step, flops=True),
            seconds(plan.seconds_compute),
        ],
        *recompute,
    ]
    if machine is not None:
        number = "" if plan.num_devices == 1 else f"{plan.num_devices} × "
        cells += [
            ["a step, estimate", seconds(plan.seconds_per_step), ""],
            ["on", f"{number}{machine.name}", _rates(plan, machine)],
            ["bound by", _BOUNDS[plan.bound], ""],
        ]
    return cells


def _shared_cells(plan: Plan) -> list[list[str]]:
    """What passes between several devices, and through the host's memory for all of them."""
    if plan.num_devices == 1:
        return []
    exchanged = sized(plan.collective_bytes)
    cells = [["from other devices, a step", exchanged, seconds(plan.seconds_collectives)]]
    if plan.seconds_host:
        passed = sized(plan.bytes_through_host)
        cells.append(["host memory, all transfers, a step", passed, seconds(plan.seconds_host)])
    return cells


def _rates(plan: Plan, machine: Hardware) -> str:
    rates = [f"{machine.link_bytes_per_s / 1e9:g} GB/s each way"]
    if plan.num_devices > 1:
        if machine.host_bytes_per_s != math.inf:
            rates.append(f"{machine.host_bytes_per_s / 1e9:.4g} of the host's memory")
        if machine.peer_bytes_per_s is not None:
            rates.append(f"{machine.peer_bytes_per_s / 1e9:.4g} from other devices")
    return ", ".join([*rates, f"{machine.flops_per_s / 1e12:g} TFLOP/s", machine.source])


def _host_verdict(plan: Plan) -> str:
    machine = plan.hardware
    if machine is None:
        return ""
    if (limit := machine.assumed_host_bytes) is None:
        return "unknown: the hardware has no `host_bytes`"
    typical = "" if machine.host_bytes is not None else ", a typical host"
    return f"{_verdict(plan.fits_host)} in {sized(limit)}{typical}"


def _device_verdict(plan: Plan) -> str:
    machine = plan.hardware
    if machine is None:
        return ""
    limit, whole = machine.usable_bytes, machine.device_bytes
    if limit is None or whole is None:
        return "unknown: the hardware has no `device_bytes`"
    share = f", {limit / whole:.0%} of the card" if limit < whole else ""
    return f"{_verdict(plan.fits_device)} in {sized(limit)}{share}"


def _verdict(fits: bool | None) -> str:
    return "fits" if fits else "DOES NOT FIT"
