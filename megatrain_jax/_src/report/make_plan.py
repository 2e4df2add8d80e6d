"""The arithmetic of a plan: what a step moves, computes and holds, from shapes and its schedule."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

from megatrain_jax._src.common.keys import LASTING, Key, Kind
from megatrain_jax._src.report.plan import GroupRow, Plan
from megatrain_jax._src.state import pool
from megatrain_jax._src.state.hardware import Hardware


class Move(Protocol):
    """What a plan reads of an instruction; those of other ops may have `None` here."""

    @property
    def op(self) -> Any:
        """The operation, an enum member; only `FETCH` and `OFFLOAD` count."""

    @property
    def key(self) -> Key | None:
        """What moves."""


def make_plan(
    *,
    names: Sequence[str],
    sizes: Sequence[Mapping[Kind, int]],
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
    instructions: Iterable[Move],
    deferred: bool,
    device_state_bytes: int,
    device_other_bytes: int,
    device_temporary_bytes: int | None = None,
    device_temporary_estimated: bool = False,
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
        sizes: Bytes of each group's masters, optimizer state and gradient.
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
        instructions: The schedule's instructions for one steady step.
        deferred: Whether updates wait for the next step.
        device_state_bytes: Most device memory that the schedule gives to state and activations.
        device_other_bytes: Estimate of the values between stages that it doesn't count.
        device_temporary_bytes: Most that a compiled function needs for itself, if known.
        device_temporary_estimated: Whether that is an estimate.
        in_flight_bytes: Host memory for arrays in flight. Gradients and values that the schedule
            offloads are added to it here.
        largest_slab_bytes: Bytes of the largest array of the state.
        num_templates: Templates that are compiled.
        warnings: What could not be done well, in words.
        hardware: The machine that times and limits refer to.

    Returns:
        The plan.
    """
    bytes_in, bytes_out, waiting_bytes = _moved(instructions, sizes, values or {})
    state = [sum(size[kind] for kind in LASTING) for size in sizes]
    peak = sum(state) + waiting_bytes + in_flight_bytes
    process = hardware and pool.process_bytes(peak, largest_slab_bytes, hardware.assumed_host_bytes)
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
        device_temporary_estimated=device_temporary_estimated,
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
    instructions: Iterable[Move], sizes: Sequence[Mapping[Kind, int]], values: Mapping[int, int]
) -> tuple[int, int, int]:
    """Returns bytes in, bytes out, and bytes of gradients and values that wait in the host."""
    moved: dict[str, int] = {"FETCH": 0, "OFFLOAD": 0}
    waiting: dict[Key, int] = {}
    for instruction in instructions:
        name, key = instruction.op.name, instruction.key
        if name in moved and key is not None:
            kind, owner = key
            size = values[owner] if kind is Kind.ACTIVATION else sizes[owner][kind]
            moved[name] += size
            if name == "OFFLOAD" and kind not in LASTING:
                waiting[key] = size
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
