"""The table of a plan as cells, as plain text, and as HTML with bars of host and device memory.

Each cell row has a name, a number and a remark. The groups of parameters come first, then totals:
host memory, device memory, transfers and computation per step, and the bottleneck.
"""

import functools
import html
import math
from collections.abc import Callable
from dataclasses import dataclass

from megatrain_jax._src.common.keys import LASTING
from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.engine.report.plan import Bound, Plan, Resource
from megatrain_jax._src.engine.report.table import (
    RED,
    UNFIT,
    aligned,
    html_beside,
    html_box,
    html_red,
    html_table,
    seconds,
    short,
)
from megatrain_jax._src.engine.state.hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class Fill:
    """The use of one memory: the parts in it, and its limit.

    Attributes:
        name: The memory's name.
        parts: The parts by name, in bytes.
        limit: The available bytes; None if unknown.
    """

    name: str
    parts: tuple[tuple[str, int], ...]
    limit: int | None

    @property
    def needed(self) -> int:
        """Bytes of all parts."""
        return sum(size for _, size in self.parts)

    @property
    def fits(self) -> bool:
        """Whether the parts fit, as far as is known."""
        return self.limit is None or self.needed <= self.limit


def fills(plan: Plan) -> tuple[Fill, Fill]:
    """The memory use of one host and of one device in a plan.

    For example, with 100 GiB at rest on four devices of two hosts, 120 GiB at the peak and 65 GiB
    in each host's process, a host has 50 GiB of state, 10 GiB waiting or in flight, and 5 GiB of
    the rest.
    """
    machine, own, of = plan.hardware, plan.devices_per_host, plan.num_devices
    # A plan's bytes cover all devices; a host has the bytes of its own devices.
    host = [(name, size * own // of) for name, size in plan.host_parts.items() if size]
    device = [
        ("state and activations", plan.device_state_bytes),
        ("other values", plan.device_other_bytes),
    ]
    if plan.device_temporary_bytes is not None:
        device.append(("temporaries", plan.device_temporary_bytes))
    each = "each " if of > 1 else ""
    return (
        Fill(
            name=f"memory of {each if own < of else 'the '}host",
            parts=tuple(host),
            limit=machine and machine.assumed_host_bytes,
        ),
        Fill(
            name=f"memory of {each or 'the '}device",
            parts=tuple(device),
            limit=machine and machine.usable_bytes,
        ),
    )


# ---- plan table

_SHOWN_ROWS = 11
# Fraction of a step's operations from which attention gets its own line; likewise loops. A batch
# gets one if its copy takes more than this fraction of a step.
_LARGE_SHARE = 0.05
_OF_EXTRA = "of the extra `kernels`, which the run's machine needs"
_UNCOUNTED = "known where functions are compiled for a GPU"
BOUNDS: dict[Bound, str] = {
    "link": "the link",
    "host": "the host's memory",
    "disk": "the disk",
    "arithmetic": "arithmetic",
    "memory": "the device's memory traffic",
    "collectives": "the exchange between devices",
    "loops": "loops of short kernels and copies",
    "dispatch": "Python's dispatch",
    "neither": "neither: balanced",
}


def summary(plan: Plan) -> list[str]:
    """Whether the run fits, how fast it is, and what bounds it or would help, one line each."""
    size = _sizes(plan)
    device, host = size(plan.device_bytes), size(plan.host_process_bytes or plan.host_peak_bytes)
    if plan.fits is False:
        lines, needs, helps = [], [], []
        if plan.fits_device is False:
            needs.append(f"{device} of GPU memory")
            helps.append('`microbatches`="auto", smaller examples or `device_budget`="minimum"')
        if plan.fits_host is False:
            needs.append(f"{host} of host memory")
            elsewhere = "" if plan.disk_bytes else ", a `disk_dir` for state"
            helps.append(f'`precision`="compact"{elsewhere}, or fewer `trainable` parameters')
        lines.append(f"Does not fit: needs {' and '.join(needs)}, more than there is.")
    else:
        memory = f"{device} of GPU memory, {host} of host memory"
        known = "Fits" if plan.fits else "Needs" if plan.hardware is None else "May fit"
        lines, helps = [f"{known}: {memory}."], [_help(plan)]
    if plan.seconds_per_step:
        rate = plan.batch_size / plan.seconds_per_step
        each = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
        took = seconds(plan.seconds_per_step)
        lines.append(f"A step takes {took}: {each} {plan.batch_unit} per second.")
    if plan.hardware is None:
        lines.append('`hardware`, such as "H100", adds its limits and the seconds of a step.')
    else:
        bound = "its two busiest resources alike" if plan.bound == "neither" else bound_of(plan)
        lines.append(f"Bound by {bound}. What would help: {'; '.join(helps)}.")
    return [*lines, plan.state_choice] if plan.state_choice else lines


def _help(plan: Plan) -> str:
    """What would make a step faster per example, for the resource that bounds it."""
    coded = "" if plan.float8_flops_per_step else ', or products="float8" where the GPU has it'
    networked = ", or a faster network between the hosts" if plan.network_bytes else ""
    if plan.num_hosts > 1 and not plan.state_choice:
        networked = ", state_per_process=True" + networked
    dispatched = "larger batches or layers (the model is too small to keep a GPU busy)"
    return {
        "link": 'larger batches, `precision`="compact", or a larger `device_budget`',
        "host": "larger batches",
        "disk": f'{_hiding_disk(plan)}, `precision`="compact", {_instead_of_disk(plan)}',
        "arithmetic": f"a faster GPU{coded}",
        "memory": "larger layers, or fewer elementwise operations",
        "collectives": f"larger batches{networked}",
        "loops": "the extra `kernels`, or larger batches",
        "dispatch": dispatched,
        "neither": "larger batches, if one is the link",
    }[plan.bound]


def bound_of(plan: Plan) -> str:
    """The bottleneck in words."""
    return _disk(plan) if plan.bound == "disk" and plan.unpinned_bytes else BOUNDS[plan.bound]


def _instead_of_disk(plan: Plan) -> str:
    """What would shorten the way to and from what the pinned memory can't hold."""
    lifted = "or a higher limit of pinned memory"
    return lifted if plan.unpinned_bytes else "more host memory or faster drives"


def _disk(plan: Plan) -> str:
    """What holds the state that the pinned memory can't hold."""
    return "ordinary memory" if plan.unpinned_bytes else "disk"


def _hiding_disk(plan: Plan) -> str:
    """The size of batches whose computation takes as long as the disk does for a step."""
    computing = plan.busy["device"][1] if plan.busy else 0.0
    if not computing:
        return "larger batches"
    size = plan.batch_size * plan.busy["disk"][1] / computing
    return f"batches of {short(round(size))} {plan.batch_unit}"


def title(plan: Plan) -> str:
    """The line above the table: parameters, groups, stages, devices."""
    groups = sum(row.count for row in plan.groups)
    devices = "" if plan.num_devices == 1 else f"; {plan.num_devices} devices"
    devices += "" if plan.num_hosts == 1 else f" of {plan.num_hosts} hosts"
    devices += "" if plan.num_copies == 1 else f"; {plan.num_copies} hosts, each with all state"
    # A run that doesn't fit has the number of parts that takes the least.
    purpose = "" if plan.fits_device is False else " to fit"
    experts = plan.num_expert_groups
    divided = "" if experts == 1 else f", experts into {experts} groups"
    cut = f", blocks cut into {plan.num_parts} parts{divided}{purpose}"
    parts = "" if plan.num_parts == 1 else cut
    return (
        f"{short(plan.num_parameters)} parameters in {groups} groups; {plan.num_stages} stages "
        f"from {plan.num_templates} templates{parts}; {plan.update_mode} update{devices}"
    )


def group_cells(plan: Plan) -> list[list[str]]:
    """The table of parameter groups with a header; a long table omits its middle."""
    size = _sizes(plan)
    where = f"host, {_disk(plan)}" if plan.disk_bytes else "host memory"
    cells = [["group", "count", "parameters", where, "in all", "template"]]
    for row in plan.groups:
        cells.append(
            [
                row.name,
                str(row.count),
                short(row.num_parameters),
                size(row.host_bytes),
                size(row.count * row.host_bytes),
                str(row.template),
            ]
        )
    hidden = len(plan.groups) - _SHOWN_ROWS
    if hidden > 0:
        # Row 0 is the header; the row of dots counts as a shown row.
        middle = 1 + (_SHOWN_ROWS + 1) // 2
        count = sum(row.count for row in plan.groups[middle - 1 : middle - 1 + hidden])
        cells[middle : middle + hidden] = [["…", str(count), "", "", "", ""]]
    return cells


def total_cells(plan: Plan) -> list[list[str]]:
    """The table of a run's memory, transfers and computation: rows of name, number and remark."""
    machine, size = plan.hardware, _sizes(plan)
    known, budget = plan.device_temporary_bytes, plan.device_budget
    guess = "estimate" if plan.device_temporary_estimated else ""
    temporaries = ["not counted", _UNCOUNTED] if known is None else [size(known), guess]
    within = "the minimum" if budget is None else f"of a budget of {size(budget)}"
    if plan.num_frozen:
        trained = plan.num_parameters - plan.num_frozen
        # Bytes if every parameter were trained, at the average bytes per trained parameter.
        resting = plan.host_bytes + plan.disk_bytes - plan.frozen_bytes
        whole = resting * plan.num_parameters // max(1, trained)
        saved = f"{size(plan.frozen_bytes)}; at rest all trained takes {size(whole)}"
        frozen = [["parameters not trained", short(plan.num_frozen), saved]]
    else:
        frozen = []
    shared = "they share state and batch; the rows below are for one device"
    devices = [["devices", str(plan.num_devices), shared]] if plan.num_devices > 1 else []
    cells = [
        *frozen,
        *_host_cells(plan),
        *_disk_cells(plan),
        *devices,
        ["device memory, state and activations", size(plan.device_state_bytes), within],
        ["device memory, other values", size(plan.device_other_bytes), "estimate"],
        ["device memory, temporaries", *temporaries],
        ["device memory, in all", size(plan.device_bytes), _device_verdict(plan)],
        ["to the device, a step", size(plan.bytes_in), seconds(plan.seconds_in)],
        ["to the host, a step", size(plan.bytes_out), seconds(plan.seconds_out)],
        *_shared_cells(plan),
        *_part_cells(plan),
        *_batch_cells(plan),
        *_arithmetic_cells(plan),
        *_recompute_cells(plan),
        *_tile_cells(plan),
    ]
    if machine is not None:
        number = "" if plan.num_devices == 1 else f"{plan.num_devices} × "
        source = "from functions measured here" if plan.is_measured else ""
        cells += [
            ["a step, estimate", seconds(plan.seconds_per_step), source],
            ["on", f"{number}{machine.name}", _rates(plan, machine)],
            ["bound by", bound_of(plan), _busy(plan)],
        ]
    return cells


def _host_cells(plan: Plan) -> list[list[str]]:
    """Rows of host memory: the parts of the peak, then the parts of the process's memory."""
    size, number = _sizes(plan), plan.devices_per_host
    share = at_peak = ""
    if plan.num_devices > 1:
        share = f"{size(plan.host_share_bytes)} of each device"
    if number < plan.num_devices:
        share += f", {size(number * plan.host_share_bytes)} of each host"
        at_peak = f"{size(plan.host_peak_bytes * number // plan.num_devices)} of each host"
    # The first part is the state at rest. Parts after the fifth are reported per process.
    state, *parts = plan.host_parts.items()
    passing, beside = parts[:5], [(name, n // plan.num_processes) for name, n in parts[5:]]

    def cells(rows: list[tuple[str, int]]) -> list[list[str]]:
        return [[f"host memory, {name}", size(n), ""] for name, n in rows if n]

    rows = [["host memory at rest", size(state[1]), share], *cells(passing)]
    # The verdict appears once: in the row of the process if its memory is known.
    taken, fits = plan.host_process_bytes, _host_verdict(plan)
    said = at_peak if taken else ", ".join(filter(None, (at_peak, fits)))
    rows.append(["host memory at peak", size(plan.host_peak_bytes), said])
    if not taken:
        return rows
    several = f"one of {plan.num_processes}, " if plan.num_processes > 1 else ""
    said = ", ".join(filter(None, (f"{several}estimate", fits)))
    process = ["host memory, the process", size(taken), said]
    return [*rows, *cells(beside), process]


def _disk_cells(plan: Plan) -> list[list[str]]:
    """Rows of the state on disks and of a step's transfers; a drive wears out by writes."""
    if not plan.disk_bytes:
        return []
    size = _sizes(plan)
    each = " of each host" if plan.num_hosts > 1 else ""
    read, written = map(seconds, plan.seconds_disk or (None, None))
    name, terabytes = _disk(plan), plan.disk_written_bytes / 1e9
    worn = f"{terabytes:.3g} TB in 1,000 steps, where 2 TB drives endure 1,200"
    worn = "" if plan.unpinned_bytes else worn
    workload, waiting = plan.workload, 0
    if workload is not None:
        passing = (key for key in workload.on_disk if key.kind not in LASTING)
        waiting = plan.num_devices * sum(map(workload.size, passing))
    return [
        [f"{name}, state that rests there", size(plan.disk_bytes), ""],
        *([[f"{name}, values that wait there", size(waiting), ""]] if waiting else []),
        [f"from the {name}{each}, a step", size(plan.disk_read_bytes), read],
        [
            f"to the {name}{each}, a step",
            size(plan.disk_written_bytes),
            "; ".join(filter(None, (written, worn))),
        ],
    ]


def _sizes(plan: Plan) -> Callable[[int], str]:
    """A formatter of bytes that uses the unit of the table's largest number where it can."""
    process, through = plan.host_process_bytes or 0, plan.bytes_through_host
    return functools.partial(sized, largest=max(plan.host_peak_bytes, process, through))


def _busy(plan: Plan) -> str:
    """The busy seconds that decide the bottleneck: the GPU's, its link's, the host's, Python's.

    The GPU's are the sum of arithmetic, loops, remaining kernels and collectives.
    """
    names: dict[Resource, str] = {"device": "GPU", "link": "link"}
    if plan.num_devices > 1:
        names["host"] = "host's memory"
    if plan.disk_bytes:
        names["disk"] = _disk(plan)
    if plan.bound == "dispatch":
        names["dispatch"] = "Python"
    return ", ".join(f"{name} {seconds(plan.busy[key][1])}" for key, name in names.items())


def _shared_cells(plan: Plan) -> list[list[str]]:
    """Rows of the bytes exchanged between devices, and of all bytes through the host's memory."""
    size, cells = _sizes(plan), []
    if plan.num_devices > 1:
        exchanged = size(plan.collective_bytes)
        cells.append(["from other devices, a step", exchanged, seconds(plan.seconds_collectives)])
    if plan.num_hosts > 1 or plan.num_copies > 1:
        received = size(plan.network_bytes)
        told = seconds(plan.seconds_network)
        if plan.hardware and plan.hardware.network_bytes_per_s == math.inf:
            told = "counted as no time, as `network` is not given"
        cells.append(["network to each host, a step", received, told])
    if plan.seconds_host and plan.num_devices > 1:
        passed = size(plan.bytes_through_host)
        cells.append(["host memory, all transfers, a step", passed, seconds(plan.seconds_host)])
    return cells


def _part_cells(plan: Plan) -> list[list[str]]:
    """Rows of the number of microbatches, which the plan may have chosen, and of several waves."""
    cells = [["microbatches", str(plan.microbatches), ""]]
    if plan.waves > 1:
        each = plan.microbatches // plan.waves
        said = f"of {each} microbatch{'es' * (each > 1)} each"
        busy = "" if plan.link_share is None else f"; the link is busy for {plan.link_share:.0%}"
        cells.append(["waves", str(plan.waves), said + busy])
    return cells


def _batch_cells(plan: Plan) -> list[list[str]]:
    """A row of the time until a batch is on the device, if that is a large part of the step."""
    batch = 0.0 if plan.workload is None else plan.workload.costs.batch
    if plan.seconds_per_step is None or batch <= _LARGE_SHARE * plan.seconds_per_step:
        return []
    return [["the batch's arrival, a step", seconds(batch), "partly beside the previous step"]]


def _arithmetic_cells(plan: Plan) -> list[list[str]]:
    """Rows of a step's operations, of attention and loops if large, and of other kernels."""
    of_all = "" if plan.num_devices == 1 else " of all devices"
    flops, attention = plan.flops_per_step, plan.attention_flops_per_step
    name = f"arithmetic{of_all}, a step"
    cells = [[name, short(flops, flops=True), seconds(plan.seconds_compute)]]
    if attention > _LARGE_SHARE * flops:
        said = [seconds(plan.seconds_attention), f"{attention / flops:.0%} of it"]
        cells.append(
            ["attention, of that", short(attention, flops=True), ", ".join(filter(None, said))]
        )
    if float8 := plan.float8_flops_per_step:
        of_it = f"{float8 / flops:.0%} of it"
        cells.append(["float8 products, of that", short(float8, flops=True), of_it])
    if _has_own_rate(plan):
        wide = plan.float32_flops_per_step
        cells.append(
            ["float32 products, of that", short(wide, flops=True), f"{wide / flops:.0%} of it"]
        )
    if plan.by_kernels:
        cells.append([" and ".join(plan.by_kernels), "by kernels", _OF_EXTRA])
    if plan.seconds_loops > _LARGE_SHARE * (plan.seconds_compute or 0.0):
        kernels = f"{short(plan.loop_kernels_per_step)} kernels"
        cells.append(["loops, beside it", kernels, f"{seconds(plan.seconds_loops)} more"])
    if plan.seconds_memory:
        moved, more = _sizes(plan)(round(plan.memory_bytes)), seconds(plan.seconds_memory)
        cells.append(["other kernels, beside it", moved, f"of memory traffic, {more} more"])
    return cells


def _has_own_rate(plan: Plan) -> bool:
    """Whether float32 products are many, and the machine has a rate of their own for them."""
    has_rate = plan.hardware is not None and plan.hardware.float32_share < 1
    return has_rate and plan.float32_flops_per_step > _LARGE_SHARE * plan.flops_per_step


def _recompute_cells(plan: Plan) -> list[list[str]]:
    """Rows of the stages that save results for their backward, or run their forward again."""
    cells = []
    if plan.num_kept:
        every = "no recomputation of products in"
        which = "costliest products kept in" if plan.keeps_costliest else every
        cells.append([which, f"{plan.num_kept} of {plan.num_stages} stages", ""])
    if plan.num_again:
        again = f"{plan.num_again} of {plan.num_stages} stages"
        cells.append(["forward computed again in", again, "as the host can't hold all inputs"])
    return cells


def _tile_cells(plan: Plan) -> list[list[str]]:
    """Rows of the forwards and backwards that run in tiles."""
    return [
        [f"in tiles, {row.what} of {row.name}", str(row.num_tiles), f"of {row.num_rows:,} rows"]
        for row in plan.tiles
    ]


def _rates(plan: Plan, machine: Hardware) -> str:
    inward, outward = (rate / 1e9 for rate in machine.link_rates)
    alike = f"{inward:g} GB/s each way"
    rates = [alike if inward == outward else f"{inward:.3g} GB/s in and {outward:.3g} out"]
    if plan.num_devices > 1:
        if machine.host_bytes_per_s != math.inf:
            rates.append(f"{machine.host_bytes_per_s / 1e9:.4g} of the host's memory")
        if machine.peer_bytes_per_s is not None:
            rates.append(f"{machine.peer_bytes_per_s / 1e9:.4g} from other devices")
    several = plan.num_hosts > 1 or plan.num_copies > 1
    if several and machine.network_bytes_per_s != math.inf:
        rates.append(f"{machine.network_bytes_per_s / 1e9:.4g} of each host's network")
    if plan.disk_bytes and machine.disk_read_bytes_per_s and machine.disk_write_bytes_per_s:
        read, written = machine.disk_read_bytes_per_s / 1e9, machine.disk_write_bytes_per_s / 1e9
        rates.append(f"{read:.3g} read from the {_disk(plan)} and {written:.3g} written")
        if machine.disk_bytes_per_s != math.inf:
            rates.append(f"{machine.disk_bytes_per_s / 1e9:.3g} both ways together")
    computing = f"{machine.flops_per_s / 1e12:g} TFLOP/s"
    if plan.float8_flops_per_step and machine.float8_flops_per_s is not None:
        computing += f", {machine.float8_flops_per_s / 1e12:g} in float8"
    if _has_own_rate(plan):
        computing += f", {machine.float32_share * machine.flops_per_s / 1e12:.4g} in float32"
    return ", ".join([*rates, computing, machine.source])


def _host_verdict(plan: Plan) -> str:
    machine, most = plan.hardware, plan.host_process_limit
    limit = machine and machine.assumed_host_bytes
    if most is not None and most == plan.host_budget:
        return f"{_verdict(plan.fits_host)} in a budget of {sized(most)}"
    if machine is None:
        return ""
    if most is None or limit is None:
        return "unknown: the hardware has no `host_bytes`"
    typical = "" if machine.host_bytes is not None else ", a typical host"
    if plan.processes_per_host > 1:
        typical += f", together with {plan.processes_per_host - 1} more"
    if plan.fits_host is False and most < limit // plan.processes_per_host:
        typical += f", of which a process can take {sized(most)}"
    return f"{_verdict(plan.fits_host)} in {sized(limit)}{typical}"


def _device_verdict(plan: Plan) -> str:
    machine = plan.hardware
    if machine is None:
        return ""
    limit, whole = machine.usable_bytes, machine.device_bytes
    if limit is None or whole is None:
        return "unknown: the hardware has no `device_bytes`"
    if plan.fits_device is None:
        return "unknown: without temporaries"
    share = f", {limit / whole:.0%} of the card" if limit < whole else ""
    excess = f"; {plan.device_excess}" if plan.device_excess and not plan.fits_device else ""
    return f"{_verdict(plan.fits_device)} in {sized(limit)}{share}{excess}"


def _verdict(fits: bool | None) -> str:
    return "fits" if fits else UNFIT


_COLOURS = ("#4c72b0", "#dd8452", "#937860", "#55a868", "#c44e52", "#8172b3", "#64b5cd")
_FREE = "#8884"  # visible on white and on black pages


def _bar(fill: Fill) -> str:
    """A memory as a bar, scaled to its limit, or to the needed bytes if they are more."""
    # At least 1, to avoid a division by zero.
    scale = max(fill.needed, fill.limit or 0) or 1
    parts = [
        (name, size, colour) for (name, size), colour in zip(fill.parts, _COLOURS, strict=False)
    ]
    free = max(0, (fill.limit or 0) - fill.needed)
    if fill.limit is not None:
        parts.append(("free", free, _FREE))
    pieces = "".join(
        f'<div title="{name}: {sized(size)}" '
        f'style="width:{100 * size / scale:.2f}%;background:{colour}"></div>'
        for name, size, colour in parts
    )
    limit = ""
    if fill.limit is not None and not fill.fits:
        place = f"left:{100 * fill.limit / scale:.2f}%;top:0;bottom:0;border-left:2px solid {RED}"
        limit = f'<div title="{sized(fill.limit)}" style="position:absolute;{place}"></div>'
    bar = "display:flex;position:relative;height:1em;overflow:hidden;margin:4px 0"
    legend = "".join(
        f'<div><span style="color:{colour}">■</span> {name} {sized(size)}</div>'
        for name, size, colour in parts
    )
    return (
        f'<div style="margin-bottom:1em"><div>{_heading(fill)}</div>'
        f'<div style="{bar}">{pieces}{limit}</div>{legend}</div>'
    )


def _heading(fill: Fill) -> str:
    of = "" if fill.limit is None else f" of {sized(fill.limit)}"
    said = html.escape(f"{fill.name}: {sized(fill.needed)}{of}")
    return said if fill.fits else f"{said} {html_red(UNFIT)}"


class ShownPlan(Plan):
    """A plan as `plan` returns it."""

    def __repr__(self) -> str:
        """Returns the plan as a plain text table."""
        blocks = [aligned(group_cells(self)), aligned(total_cells(self))]
        if self.warnings:
            blocks.append("\n".join(f"warning: {warning}" for warning in self.warnings))
        return "\n".join([*summary(self), "", title(self), ""]) + "\n" + "\n\n".join(blocks)

    def _repr_html_(self) -> str:
        """Returns the plan as a notebook shows it."""
        tables = html_table(group_cells(self), header=True) + html_table(total_cells(self))
        bars = "".join(map(_bar, fills(self)))
        warnings = "".join(f"<p>{html_red(f'warning: {text}')}</p>" for text in self.warnings)
        lines = (f"<div><strong>{html.escape(line)}</strong></div>" for line in summary(self))
        heading = f"{''.join(lines)}<p>{html.escape(title(self))}</p>"
        return html_box(heading, warnings, html_beside(tables, bars))
