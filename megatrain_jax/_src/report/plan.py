"""The plan of a run, before anything is allocated: memory, transfers, arithmetic.

The figures come from shapes and from the schedule's own records, so a plan for a machine that
isn't here, or a model that fits none, costs seconds; it prints as a table.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.state.hardware import Hardware

_SHOWN_ROWS = 12


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
        host_bytes: Host memory of the state at rest.
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
    warnings: tuple[str, ...] = ()
    hardware: Hardware | None = None

    @property
    def device_bytes(self) -> int:
        """Device memory for state, values and temporaries, where these are known."""
        temporary = self.device_temporary_bytes or 0
        return self.device_state_bytes + self.device_other_bytes + temporary

    @property
    def seconds_in(self) -> float | None:
        """Seconds a step's transfers to the device take alone; `None` without hardware."""
        return self.hardware and self.bytes_in / self.hardware.link_bytes_per_s

    @property
    def seconds_out(self) -> float | None:
        """Seconds a step's transfers to the host take alone; `None` without hardware."""
        return self.hardware and self.bytes_out / self.hardware.link_bytes_per_s

    @property
    def seconds_compute(self) -> float | None:
        """Seconds a step's arithmetic takes alone; `None` without hardware."""
        rate = self.hardware and self.hardware.flops_per_s * self.num_devices
        return rate and self.flops_per_step / rate

    @property
    def bound(self) -> Literal["link", "compute", "neither"]:
        """The bound of a perfectly overlapped step: what it would wait for.

        The link is full duplex, so its slower direction counts. "neither" if that and the
        arithmetic are within 10% of each other, or no hardware is given.
        """
        if self.hardware is None:
            return "neither"
        link = max(self.bytes_in, self.bytes_out) / self.hardware.link_bytes_per_s
        compute = self.flops_per_step / self.hardware.flops_per_s / self.num_devices
        if 0.9 * compute <= link <= 1.1 * compute:
            return "neither"
        return "link" if link > compute else "compute"

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
        blocks = [_aligned(_group_cells(self)), _aligned(_total_cells(self))]
        if self.warnings:
            blocks.append("\n".join(f"warning: {warning}" for warning in self.warnings))
        return f"{_title(self)}\n\n" + "\n\n".join(blocks)

    def _repr_html_(self) -> str:
        warnings = "".join(f"<p>warning: {html.escape(text)}</p>" for text in self.warnings)
        header, *rows = _group_cells(self)
        return (
            f"<p>{html.escape(_title(self))}</p>"
            f"<table>{_html_row(header, 'th')}{''.join(map(_html_row, rows))}</table>"
            f"<table>{''.join(map(_html_row, _total_cells(self)))}</table>{warnings}"
        )


def check_device(plan: Plan, free_bytes: int | None) -> None:
    """Refuses what can't fit the device, before anything is allocated.

    Args:
        plan: A plan whose functions have been compiled for the device.
        free_bytes: Device memory that there is; None if unknown.

    Raises:
        MemoryError: If the plan needs more.
    """
    if free_bytes is None or plan.device_bytes <= free_bytes:
        return
    raise MemoryError(
        f"Training needs {sized(plan.device_bytes)} of device memory, {sized(free_bytes)} "
        f"available: {sized(plan.device_state_bytes)} for state and activations (least with "
        f'device_budget="least"), {sized(plan.device_temporary_bytes or 0)} for what one '
        "compiled function needs. Nothing was allocated. Use more `microbatches`, smaller batches "
        "or a loss that makes fewer logits at a time."
    )


def _fits(need: int, limit: int | None) -> bool | None:
    return None if limit is None else need <= limit


def _title(plan: Plan) -> str:
    groups = sum(row.count for row in plan.groups)
    return (
        f"{_short(plan.num_parameters)} parameters in {groups} groups; {plan.num_stages} stages "
        f"from {plan.num_templates} templates; {plan.update_mode} update"
    )


def _group_cells(plan: Plan) -> list[list[str]]:
    cells = [["group", "count", "parameters", "host memory", "in all", "template"]]
    for row in plan.groups:
        cells.append(
            [
                row.name,
                str(row.count),
                _short(row.num_parameters),
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
    of_all = "" if plan.num_devices == 1 else " of all devices"
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
        frozen = [["parameters not trained", _short(plan.num_frozen), saved]]
    else:
        frozen = []
    shared = "each has a share of the state and of the batch; what follows is one's"
    devices = [["devices", str(plan.num_devices), shared]] if plan.num_devices > 1 else []
    cells = [
        *frozen,
        ["host memory at rest", sized(plan.host_bytes), ""],
        ["host memory at peak", sized(plan.host_peak_bytes), "" if taken else fits],
        *process,
        *devices,
        ["device memory, state and activations", sized(plan.device_state_bytes), ""],
        ["device memory, other values", sized(plan.device_other_bytes), "estimate"],
        *(temporaries if known is not None else []),
        ["device memory, in all", sized(plan.device_bytes), _device_verdict(plan)],
        ["to the device, a step", sized(plan.bytes_in), _seconds(plan.seconds_in)],
        ["to the host, a step", sized(plan.bytes_out), _seconds(plan.seconds_out)],
        [
            f"arithmetic{of_all}, a step{batches}",
            _short(plan.flops_per_step, flops=True),
            _seconds(plan.seconds_compute),
        ],
        *recompute,
    ]
    if machine is not None:
        rates = (
            f"{machine.link_bytes_per_s / 1e9:g} GB/s each way, "
            f"{machine.flops_per_s / 1e12:g} TFLOP/s, {machine.source}"
        )
        limit = {"link": "the link", "compute": "arithmetic", "neither": "neither: balanced"}
        cells.append(["a step, estimate", _seconds(plan.seconds_per_step), ""])
        number = "" if plan.num_devices == 1 else f"{plan.num_devices} × "
        cells += [["on", f"{number}{machine.name}", rates], ["bound by", limit[plan.bound], ""]]
    return cells


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


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3g} s"


def _short(value: int, flops: bool = False) -> str:
    steps = ("", "K", "M", "G" if flops else "B", "T", "P", "E")
    size = float(value)
    while size >= 999.5 and len(steps) > 1:
        size, steps = size / 1000, steps[1:]
    return f"{size:.3g} {steps[0]}FLOP" if flops else f"{size:.3g}{steps[0]}"


def _aligned(cells: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        first = row[0].ljust(widths[0])
        middle = [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)]
        lines.append("  ".join([first, *middle, row[-1]]).rstrip())
    return "\n".join(lines)


def _html_row(cells: Sequence[str], tag: str = "td") -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
