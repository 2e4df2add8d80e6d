"""The choice between state that hosts share and a copy of all state on each host, by the clock.

Weights of shared state cross the network for each microbatch, and gradients, too. With a copy on
each host, only gradients do, once per step, but each device streams as many times more bytes over
its link as there are hosts. Example: Qwen3-14B on two hosts of eight H100s::

    network of each host    shared state    a copy on each host
    50 GB/s                 64,000          78,000 tokens per second: a copy
    400 GB/s                95,000          92,000: shared

A copy computes the loss of its own part of the batch, so that a step computes the same only if no
microbatch has examples of two hosts. Rates that are measured decide about nothing else, so that
results don't depend on them beyond the order of sums.
"""

import dataclasses
import math
from collections.abc import Callable

from jax.sharding import AbstractMesh, Mesh

from megatrain_jax._src.common.sizes import counted, sized
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.schedule.schedule import BudgetError
from megatrain_jax._src.engine.spec.cut_run import reason_against_microbatches
from megatrain_jax._src.engine.spec.host import rank
from megatrain_jax._src.engine.spec.run_spec import RunSpec

# Fraction of a step's estimated time that copies, which take more memory, must save.
_WORTH = 0.05


def copied(run: Options, mesh: Mesh | AbstractMesh, copies: int) -> Options | str:
    """The options of a process with a copy of the state, which computes the same steps.

    Args:
        run: The options with shared state.
        mesh: The process's own devices.
        copies: Number of such processes.

    Returns:
        The options; or a reason why no copy computes the same.
    """
    number = run.microbatches
    if number == "auto":
        return run.on_own_devices(mesh, copies)
    own, rest = divmod(number, copies)
    if rest or own % (run.waves or 1):
        waves = "" if run.waves is None else f" and `waves`={run.waves}"
        hosts = counted(copies, "host")
        return f"`microbatches`={number}{waves} of the whole batch can't be divided over {hosts}"
    return dataclasses.replace(run.on_own_devices(mesh, copies), microbatches=own)


def choose_state(
    shared: Options, own: Options | str, fitted: Callable[[Options], RunSpec]
) -> RunSpec:
    """The run with the faster way to hold the state; its `state_choice` says why.

    Args:
        shared: The options with state that the hosts share.
        own: Those with a copy on each host, or a reason against copies.
        fitted: Fits a run to its machine.
    """
    run = fitted(shared)
    reason = own if isinstance(own, str) else None
    reason = reason or reason_against_microbatches(run.adapted, run.first.program)
    if isinstance(own, str) or reason is not None:
        return _chosen(run, shared_because(str(reason)))
    try:
        copy = fitted(own)
    except BudgetError as error:
        return _chosen(run, shared_because(f"for a copy, {error}"))
    of_device, of_host = copy.lacking
    if any(copy.lacking) and copy.lacking >= run.lacking:
        lacks = f"{sized(of_host)} of host" if of_host else f"{sized(of_device)} of GPU"
        return _chosen(run, shared_because(f"for a copy, a host lacks {lacks} memory"))
    seconds = [x.first.schedule.seconds for x in (run, copy)]
    is_copied = rank(copy) < (run.lacking, (1 - _WORTH) * seconds[0])
    machine = run.options.machine
    rate = math.inf if machine is None else machine.network_bytes_per_s
    network = "that takes no time" if rate == math.inf else f"of {rate / 1e9:.3g} GB/s"
    told = [f"{x:.3g} s" for x in seconds]
    told, others = (told[::-1], "shared state") if is_copied else (told, "a copy on each host")
    why = f"estimated {told[0]} a step, {told[1]} with {others}, over a network {network}"
    why = f"Each host holds all state: {why}." if is_copied else shared_because(why)
    return _chosen(copy if is_copied else run, why)


def shared_because(reason: str) -> str:
    """The sentence that state is shared, for a reason."""
    return f"Hosts share the state: {reason.rstrip('.')}."


def _chosen(run: RunSpec, why: str) -> RunSpec:
    return dataclasses.replace(run, state_choice=why)
