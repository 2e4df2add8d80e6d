"""What a run will need, before anything is allocated: memory, transfers, arithmetic.

The figures come from shapes and from the schedule's own records, so a plan for a machine that
isn't here, or a model that fits none, costs seconds; it prints as a table.
"""

import html
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, Protocol

from megatrain_jax.memory import pool
from megatrain_jax.memory.hardware import Hardware

_GIB = 2**30
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


class Move(Protocol):
    """What a plan reads of a schedule's record; records of other ops may have `None` here."""

    @property
    def op(self) -> Any:
        """The operation, an enum member; only `FETCH` and `OFFLOAD` count."""

    @property
    def group(self) -> int | None:
        """The group that moves."""

    @property
    def part(self) -> str | None:
        """The part of it that moves: "P", "O" or "G"; "A" for a value with the group's number."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one training run needs, and what bounds its step.

    Attributes:
        num_parameters: Parameters of the model.
        num_frozen: Those of them that are not trained.
        frozen_bytes: Host memory that these take.
        groups: Its parameter groups, consecutive equal ones as one row.
        host_bytes: Host memory of the state at rest.
        host_peak_bytes: The same with waiting gradients, activations and arrays in flight.
        host_process_bytes: What the process takes in all on the machine, with the pool's unused
            ends; None without a GPU.
        device_state_bytes: Most device memory that the schedule gives to state and activations.
        device_other_bytes: Estimate of the values between stages that the schedule doesn't count:
            small ones, and what the batch alone determines.
        device_temporary_bytes: Most that a compiled function needs for itself; None before they
            are compiled, for the device that is there.
        bytes_in: Bytes that a step moves to the device.
        bytes_out: Bytes that a step moves to the host.
        flops_per_step: Floating-point operations of a step, as `make_plan` counts them.
        seconds_per_step: Estimate of a step's time, transfers and arithmetic overlapping as the
            schedule lets them; `None` without hardware.
        microbatches: Microbatches of a step.
        update_mode: Whether parameters are updated in the stage's own backward.
        num_stages: Stages of the forward.
        num_kept: Those that keep the results of their matrix products for the backward, which
            then need not compute them again.
        num_templates: Templates that are compiled for them.
        warnings: What could not be done well, in words.
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
    bytes_in: int
    bytes_out: int
    flops_per_step: int
    seconds_per_step: float | None
    microbatches: int
    update_mode: Literal["immediate", "deferred"]
    num_stages: int
    num_kept: int
    num_templates: int
    warnings: tuple[str, ...] = ()
    hardware: Hardware | None = None

    @property
    def device_bytes(self) -> int:
        """Device memory for state, values and, where they are known, temporaries."""
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
        return self.hardware and self.flops_per_step / self.hardware.flops_per_s

    @property
    def bound(self) -> Literal["link", "compute", "neither"]:
        """What a perfectly overlapped step would wait for.

        The link is full duplex, so its slower direction counts. "neither" if that and the
        arithmetic are within 10% of each other, or no hardware is given.
        """
        if self.hardware is None:
            return "neither"
        link = max(self.bytes_in, self.bytes_out) / self.hardware.link_bytes_per_s
        compute = self.flops_per_step / self.hardware.flops_per_s
        if 0.9 * compute <= link <= 1.1 * compute:
            return "neither"
        return "link" if link > compute else "compute"

    @property
    def fits_host(self) -> bool | None:
        """Whether the host memory suffices for the process; `None` if it isn't known."""
        needed = self.host_process_bytes or self.host_peak_bytes
        return _fits(needed, self.hardware and self.hardware.host_bytes)

    @property
    def fits_device(self) -> bool | None:
        """Whether the device memory suffices; `None` if it isn't known."""
        return _fits(self.device_bytes, self.hardware and self.hardware.device_bytes)

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
        f"Training needs {_memory(plan.device_bytes)} of device memory, {_memory(free_bytes)} "
        f"available: {_memory(plan.device_state_bytes)} for state and activations (least with "
        f'device_budget="least"), {_memory(plan.device_temporary_bytes or 0)} for what one '
        "compiled function needs. Nothing was allocated. Use more `microbatches`, smaller batches "
        "or a loss that makes fewer logits at a time."
    )


def make_plan(
    *,
    names: Sequence[str],
    sizes: Sequence[Mapping[str, int]],
    values: Mapping[int, int] | None = None,
    num_parameters: Sequence[int],
    templates: Sequence[int | str],
    stage_flops: Sequence[int],
    backward: Sequence[bool] | None = None,
    learned: Sequence[float] | None = None,
    frozen: Collection[int] = (),
    fused_last: bool = True,
    kept: Collection[int] = (),
    saved_flops: Sequence[int] = (),
    microbatches: int = 1,
    optimizer_flops: int = 0,
    seconds_per_step: float | None = None,
    records: Iterable[Move],
    deferred: bool,
    device_state_bytes: int,
    device_other_bytes: int,
    device_temporary_bytes: int | None = None,
    in_flight_bytes: int = 0,
    largest_slab_bytes: int = 0,
    num_templates: int,
    warnings: Iterable[str] = (),
    hardware: Hardware | None = None,
) -> Plan:
    """Builds the plan of a run from what is known of its groups, stages and schedule.

    With `f` the forward operations of a stage for one microbatch and `m` microbatches, a step
    performs `optimizer_flops + m · sum(c · f)`. The factor `c` is 4 for a stage with a backward:
    one forward, one more to recompute it, and a backward of twice a forward, as each product of
    matrices has two factors to differentiate. It is 3 for the last stage if it is fused, since
    that one's forward runs as part of its backward only, and 1 for a stage without a backward.
    Where parameters are frozen, products for their gradients don't count.
    Stages that keep residuals don't do all of their forward again.

    Args:
        names: The groups' names; like the three arguments that follow, one entry a group.
        sizes: Bytes of each group's parts: "P" master weights, "O" optimizer state, "G" gradient.
        values: Bytes of the values that move, by number.
        num_parameters: Parameters of each group.
        templates: The template that each group's stage uses.
        stage_flops: Forward operations of each stage for one microbatch.
        backward: Which stages have a backward; all of them unless given.
        learned: For each stage the part of its parameters that is trained; all unless given.
        frozen: The groups that are not trained.
        fused_last: Whether the last stage's forward runs only within its backward.
        kept: The stages that keep their residuals.
        saved_flops: For each stage, operations of one microbatch that keeping them saves.
        microbatches: Microbatches of a step.
        optimizer_flops: Operations of one update of all groups.
        seconds_per_step: The schedule's own estimate for `hardware`.
        records: The schedule's records for one steady step.
        deferred: Whether updates wait for the next step.
        device_state_bytes: Most device memory that the schedule gives to state and activations.
        device_other_bytes: Estimate of the values between stages that it doesn't count.
        device_temporary_bytes: Most that a compiled function needs for itself, if known.
        in_flight_bytes: Host memory for arrays in flight. Gradients and values that the schedule
            offloads are added to it here.
        largest_slab_bytes: Bytes of the largest array of the state.
        num_templates: Templates that are compiled.
        warnings: What could not be done well, in words.
        hardware: The machine that times and limits refer to.

    Returns:
        The plan.
    """
    bytes_in, bytes_out, waiting_bytes = _moved(records, sizes, values or {})
    state = [size["P"] + size["O"] for size in sizes]
    peak = sum(state) + waiting_bytes + in_flight_bytes
    process = hardware and pool.process_bytes(peak, largest_slab_bytes, hardware.host_bytes)
    has_backward = [True] * len(stage_flops) if backward is None else backward
    shares = [1.0] * len(stage_flops) if learned is None else learned
    factors = [
        3 + share if differentiated else 1.0
        for differentiated, share in zip(has_backward, shares, strict=True)
    ]
    if fused_last and factors:
        factors[-1] -= 1
    work = sum(round(factor * f) for factor, f in zip(factors, stage_flops, strict=True))
    work -= sum(saved_flops[stage] for stage in kept)
    return Plan(
        num_parameters=sum(num_parameters),
        num_frozen=sum(num_parameters[g] for g in frozen),
        frozen_bytes=sum(state[g] for g in frozen),
        groups=_fold(names, num_parameters, state, templates, frozen),
        host_bytes=sum(state),
        host_peak_bytes=peak,
        host_process_bytes=process,
        device_state_bytes=device_state_bytes,
        device_other_bytes=device_other_bytes,
        device_temporary_bytes=device_temporary_bytes,
        bytes_in=bytes_in,
        bytes_out=bytes_out,
        flops_per_step=microbatches * work + optimizer_flops,
        seconds_per_step=hardware and seconds_per_step,
        microbatches=microbatches,
        update_mode="deferred" if deferred else "immediate",
        num_stages=len(stage_flops),
        num_kept=len(kept),
        num_templates=num_templates,
        warnings=tuple(warnings),
        hardware=hardware,
    )


def _moved(
    records: Iterable[Move], sizes: Sequence[Mapping[str, int]], values: Mapping[int, int]
) -> tuple[int, int, int]:
    """Returns bytes in, bytes out, and bytes of gradients and values that wait in the host."""
    moved, waiting = {"FETCH": 0, "OFFLOAD": 0}, {}
    for record in records:
        name, group, part = record.op.name, record.group, record.part
        if name in moved and group is not None and part is not None:
            size = values[group] if part == "A" else sizes[group][part]
            moved[name] += size
            if name == "OFFLOAD" and part in "GA":
                waiting[part, group] = size
    return moved["FETCH"], moved["OFFLOAD"], sum(waiting.values())


def _fold(
    names: Sequence[str],
    num_parameters: Sequence[int],
    state: Sequence[int],
    templates: Sequence[int | str],
    frozen: Collection[int],
) -> tuple[GroupRow, ...]:
    entries = list(zip(names, num_parameters, state, templates, strict=True))
    # A block may have a group of each kind: those of one kind are next to each other here.
    order = sorted(range(len(entries)), key=lambda g: g in frozen)
    entries = [entries[g] for g in order]
    rows = []
    for (count, host_bytes, template), run in groupby(entries, key=lambda entry: entry[1:]):
        alike = [name for name, *_ in run]
        rows.append(
            GroupRow(
                name=alike[0] if len(alike) == 1 else f"{alike[0]} … {alike[-1]}",
                count=len(alike),
                num_parameters=count,
                host_bytes=host_bytes,
                template=template,
            )
        )
    return tuple(rows)


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
                _memory(row.host_bytes),
                _memory(row.count * row.host_bytes),
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
    host, device = machine and machine.host_bytes, machine and machine.device_bytes
    batches = "" if plan.microbatches == 1 else f", {plan.microbatches} microbatches"
    known = plan.device_temporary_bytes
    temporaries = [["device memory, temporaries", _memory(known), ""]] if known is not None else []
    kept = f"{plan.num_kept} of {plan.num_stages} stages"
    taken = plan.host_process_bytes
    fits = _verdict(plan.fits_host, host)
    process = [["host memory, the process", _memory(taken), f"estimate, {fits}"]] if taken else []
    recompute = [["no recomputation of products in", kept, ""]] if plan.num_kept else []
    if plan.num_frozen:
        trained = plan.num_parameters - plan.num_frozen
        whole = (plan.host_bytes - plan.frozen_bytes) * plan.num_parameters // max(1, trained)
        saved = f"{_memory(plan.frozen_bytes)}; at rest all trained takes {_memory(whole)}"
        frozen = [["parameters not trained", _short(plan.num_frozen), saved]]
    else:
        frozen = []
    cells = [
        *frozen,
        ["host memory at rest", _memory(plan.host_bytes), ""],
        ["host memory at peak", _memory(plan.host_peak_bytes), "" if taken else fits],
        *process,
        ["device memory, state and activations", _memory(plan.device_state_bytes), ""],
        ["device memory, other values", _memory(plan.device_other_bytes), "estimate"],
        *temporaries,
        ["device memory, in all", _memory(plan.device_bytes), _verdict(plan.fits_device, device)],
        ["to the device, a step", _memory(plan.bytes_in), _seconds(plan.seconds_in)],
        ["to the host, a step", _memory(plan.bytes_out), _seconds(plan.seconds_out)],
        [
            f"arithmetic, a step{batches}",
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
        cells += [["on", machine.name, rates], ["bound by", limit[plan.bound], ""]]
    return cells


def _verdict(fits: bool | None, limit: int | None) -> str:
    if fits is None or limit is None:
        return ""
    return f"{'fits' if fits else 'DOES NOT FIT'} in {_memory(limit)}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3g} s"


def _memory(num_bytes: int) -> str:
    for unit, scale in (("GiB", _GIB), ("MiB", 2**20), ("KiB", 2**10)):
        # Two decimals still show a hundredth, and a large model's table stays in one unit.
        if num_bytes >= (scale / 100 if scale == _GIB else scale):
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes} B"


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
