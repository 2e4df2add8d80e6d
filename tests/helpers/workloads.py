"""Workloads that schedules are made for in tests, and the spelling of instructions."""

import random
import sys
from dataclasses import replace

from megatrain_jax._src.common.keys import Kind
from megatrain_jax._src.engine.schedule.instructions import WAITS, Instruction, Op
from megatrain_jax._src.engine.schedule.memory_demand import least_bytes
from megatrain_jax._src.engine.schedule.schedule import Schedule
from megatrain_jax._src.engine.schedule.search import find_schedule
from megatrain_jax._src.engine.schedule.tasks import build_task_lists
from megatrain_jax._src.engine.schedule.workload import Costs, Link, Workload

LISTS = ("cold", "steady", "flush", "evaluation")  # a schedule's lists of instructions
COPIES = {Op.FETCH, Op.OFFLOAD, Op.RELEASE}
MOVES = COPIES | WAITS
OF_GROUPS = (Kind.MASTERS, Kind.OPTIMIZER_STATE, Kind.GRADIENT)
BLOCK = dict(zip(OF_GROUPS, (4, 8, 4), strict=True))


def host(seconds: float) -> Link:
    """A link to the host over which a byte takes as long either way."""
    return Link(inward=seconds, outward=seconds)


def random_workload(seed: int) -> Workload:
    """Tied, looped, frozen, unused and empty parts in any combination."""
    rng = random.Random(seed)
    num_groups, num_stages = rng.randint(1, 7), rng.randint(1, 9)
    if rng.random() < 0.5:
        stages: list[tuple[int, ...]] = [(at % num_groups,) for at in range(num_stages)]
    else:
        stages = [(rng.randrange(num_groups),) * rng.randint(0, 2) for _ in range(num_stages)]
    for _ in range(rng.randint(0, 3)):
        at = rng.randrange(num_stages)
        stages[at] = (*stages[at], rng.randrange(num_groups))
    backward = [rng.random() < 0.9 for _ in stages[1:]] + [True]
    sizes = []
    for _ in range(num_groups):
        empty = rng.choice(((), (), (), OF_GROUPS[1:2], OF_GROUPS[1:]))
        sizes.append({kind: 0 if kind in empty else rng.randint(1, 50) for kind in OF_GROUPS})
    makes: list[tuple[int, ...]] = [()] * num_stages
    reads: list[tuple[int, ...]] = [()] * num_stages
    activations = {}
    for i in range(rng.choice((0, 3, 3, 9)) if num_stages > 1 else 0):
        maker = rng.randrange(num_stages - 1)
        makes[maker] += (i,)
        for reader in sorted({rng.randrange(maker + 1, num_stages) for _ in range(2)}):
            reads[reader] += (i,)
        activations[i] = rng.randint(1, 50)
    fused_last = rng.random() < 0.7
    keeps = [b and not (fused_last and s == num_stages - 1) for s, b in enumerate(backward)]
    again = [b and rng.random() < 0.5 for b in backward[:-1]] if seed % 3 == 0 else []
    backward_seconds = [rng.choice((0.0, 3.0, 60.0)) for _ in stages]
    return Workload(
        stages=tuple(stages),
        backward=tuple(backward),
        fused_last=fused_last,
        sizes=tuple(sizes),
        activations=activations,
        makes=tuple(makes),
        reads=tuple(reads),
        residuals=tuple(rng.choice((0, rng.randint(1, 50))) if k else 0 for k in keeps),
        may_offload_residuals=seed % 2 == 0,
        again=frozenset(s for s, yes in enumerate(again) if yes),
        deferred=rng.random() < 0.5,
        accumulate=rng.random() < 0.5,
        reduce_reads=frozenset(kind for kind in OF_GROUPS[:2] if rng.random() < 0.3),
        costs=Costs(
            forward=tuple(rng.choice((0.0, 1.0, 20.0)) for _ in stages),
            backward=tuple(backward_seconds),
            recompute=tuple(rng.choice((0.1, 0.3)) * seconds for seconds in backward_seconds),
            update=tuple(rng.random() for _ in sizes),
            link=host(rng.choice((0.0, 0.1, 1.0))),
            dispatch=rng.choice((0.0, 0.1)),
        ),
    )


def chain(num_groups: int, **changes) -> Workload:
    """One group per stage, as in a plain stack of blocks; compute and link take equally long."""
    stages = changes.get("stages", tuple((group,) for group in range(num_groups)))
    plain = {
        "stages": stages,
        "backward": (True,) * len(stages),
        "fused_last": True,
        "sizes": (BLOCK,) * num_groups,
        "deferred": False,
        "costs": costs(len(stages), num_groups),
    }
    return Workload(**plain | changes)


def costs(num_stages: int, num_groups: int, **changes) -> Costs:
    plain = Costs(
        forward=(4.0,) * num_stages,
        backward=(12.0,) * num_stages,
        update=(0.0,) * num_groups,
        link=host(1.0),
    )
    return replace(plain, **changes)


def spell(instructions: tuple[Instruction, ...]) -> list[str]:
    """Instructions as words such as "FETCH M0", "FORWARD 0", "WAIT -1" and "LAND A2"."""
    words = []
    for instruction in instructions:
        numbers = (
            instruction.stage,
            instruction.group,
            instruction.task if instruction.op is Op.WAIT else None,
        )
        of = next((str(number) for number in numbers if number is not None), "")
        if instruction.key is not None:
            of = f"{instruction.key.kind.name[0]}{instruction.key.owner}"
        words.append(f"{instruction.op.name} {of}".strip())
    return words


def computing(instructions: tuple[Instruction, ...]) -> list[str]:
    return spell(tuple(instruction for instruction in instructions if instruction.op not in MOVES))


def decoder(**changes) -> Workload:
    """Blocks between an embedding and a head that are four times as large."""
    large = {kind: 4 * size for kind, size in BLOCK.items()}
    return chain(20, sizes=(large, *(BLOCK,) * 18, large), **changes)


def all_resident_bytes(workload: Workload) -> int:
    """The budget from which on a steady step without residuals moves nothing."""
    bare = replace(workload, residuals=(), kept=frozenset())
    resident = find_schedule(bare, sys.maxsize).resident
    return least_bytes(build_task_lists(bare), resident)


def bytes_moved(workload: Workload, schedule: Schedule, op: Op, when: str = "steady") -> int:
    """Bytes that a list of instructions fetches or offloads."""
    return sum(workload.size(r.key) for r in getattr(schedule, when) if r.op is op and r.key)
