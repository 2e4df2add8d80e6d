"""`initialize`: connects the processes of a run, on one host or on several."""

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import jax

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.host_memory import memory_owner
from megatrain_jax._src.engine.startup.driver_memory import gpu_memories
from megatrain_jax._src.engine.startup.launchers import (
    KUBERNETES,
    Launch,
    Variables,
    find_launch,
)
from megatrain_jax._src.engine.state.placement import default_mesh, placed_on
from megatrain_jax._src.engine.state.processes import Processes

_BY_HAND = "the arguments"


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: Sequence[int] | int | None = None,
    timeout_seconds: int = 1800,
    progress: bool = True,
) -> bool:
    """Connects this process to the other ones of its run, if a launcher has started several.

    It calls `jax.distributed.initialize`, and so comes before anything that starts JAX's devices.
    The launcher's environment variables say where this process belongs: those of Slurm (`srun`),
    Open MPI, torchrun, SkyPilot, Kubeflow (Trainer, JAXJob and PyTorchJob) or an indexed job of
    Kubernetes; or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, which come before
    all others. JAX_NUM_PROCESSES=1 makes each process a run of its own. Where processes share a
    host, each gets an equal part of its GPUs. The port differs for each restart of a job, so that
    no process meets the one before.

    Processes that are already connected, as in Ray's `JaxTrainer`, stay so. A process that no
    launcher has started, or only one, is a run of its own.

    Args:
        coordinator_address: Host and port of the first process, such as "node0:12345". Without a
            launcher, the first three arguments are passed together.
        num_processes: Number of processes.
        process_id: Number of this process, from 0.
        local_device_ids: Numbers of this process's GPUs among the ones that it sees; None for its
            part.
        timeout_seconds: Seconds to wait until all processes have started. Those of a large job may
            start many minutes apart.
        progress: Whether the first process prints who is there.

    Returns:
        Whether this process shares a run with others.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If arguments are missing or out of range, differ from those of an earlier call,
            or variables contradict each other.
        RuntimeError: If JAX's devices were started before.
    """
    given = _checked_arguments(coordinator_address, num_processes, process_id)
    timeout_seconds = checks.integer("timeout_seconds", timeout_seconds)
    progress = checks.boolean("progress", progress)
    if jax.distributed.is_initialized():
        _check_equal(given)
        return jax.process_count() > 1
    launch = find_place(os.environ, given)
    if launch is None or launch.num_processes == 1:
        if progress:
            print(_alone(launch, os.environ), flush=True)
        return False
    connect(launch, local_device_ids, timeout_seconds, jax.distributed.initialize)
    owners = _processes().gather("the connection of processes", memory_owner())
    if progress and is_first():
        print(_present(launch, owners, jax.devices()), flush=True)
    return jax.process_count() > 1


def find_place(environment: Variables, given: dict[str, Any]) -> Launch | None:
    """This process's place, from the arguments by name, and what these leave open from variables.

    Raises:
        ValueError: If arguments are missing, or variables contradict each other.
    """
    missing = [name for name, value in given.items() if value is None]
    launch = None
    if len(missing) == len(given):
        launch = find_launch(environment)
        no_package = find_spec("kubernetes") is None
        return None if launch and launch.launcher == KUBERNETES and no_package else launch
    if missing:
        raise ValueError(
            f"{' and '.join(f'`{name}`' for name in given if name not in missing)} need "
            f"{' and '.join(f'`{name}`' for name in missing)}, too; without any of them, the "
            "launcher's variables are read"
        )
    if given["process_id"] >= given["num_processes"]:
        allowed = f"below `num_processes`={given['num_processes']}"
        raise ValueError(checks.refused("process_id", allowed, given["process_id"]))
    return Launch(
        launcher=_BY_HAND,
        counted_by="num_processes",
        num_processes=given["num_processes"],
        process_id=given["process_id"],
        address=given["coordinator_address"],
    )


def connect(
    launch: Launch,
    local_device_ids: Sequence[int] | int | None,
    timeout_seconds: int,
    call: Callable[..., None],
) -> None:
    """Calls `jax.distributed.initialize`.

    Args:
        launch: This process's place.
        local_device_ids: See `initialize`.
        timeout_seconds: See `initialize`.
        call: That function.
    """
    if local_device_ids is None and not os.environ.get("JAX_LOCAL_DEVICE_IDS"):
        local_device_ids = launch.devices(len(gpu_memories()))
    options: dict[str, Any] = {"initialization_timeout": timeout_seconds}
    if launch.num_processes is not None:
        # JAX would give each process the one GPU with its number.
        options["cluster_detection_method"] = "deactivate"
    call(
        launch.address,
        launch.num_processes,
        launch.process_id,
        local_device_ids=local_device_ids,
        **options,
    )


def is_first() -> bool:
    """Whether this is the process that prints, and writes the files that exist once.

    Before `initialize`, every process is.
    """
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def from_first(value: Any) -> Any:
    """The first process's value, in every process; all have to call this.

    Args:
        value: A value of JSON; that of other processes is not used.
    """
    if not jax.distributed.is_initialized():
        return value
    return _processes().gather("asking the first process", value)[0]


def _processes() -> Processes:
    return placed_on(default_mesh()).processes


def _checked_arguments(address: Any, count: Any, index: Any) -> dict[str, Any]:
    if address is not None:
        if not isinstance(address, str):
            raise TypeError(checks.refused("coordinator_address", "a text", address))
        if not address.rpartition(":")[2].isdigit() or not address.rpartition(":")[0]:
            allowed = 'a host and a port, such as "node0:12345"'
            raise ValueError(checks.refused("coordinator_address", allowed, address))
    return {
        "coordinator_address": address,
        "num_processes": count if count is None else checks.integer("num_processes", count),
        "process_id": index if index is None else checks.integer("process_id", index, least=0),
    }


def _check_equal(given: dict[str, Any]) -> None:
    """Checks that a further call asks for what is there."""
    there = {"num_processes": jax.process_count(), "process_id": jax.process_index()}
    for name, value in there.items():
        if given[name] not in (None, value):
            raise ValueError(
                f"`{name}`={given[name]}, but this process is connected already, with {value}: "
                "leave it out"
            )


def _alone(launch: Launch | None, environment: Variables) -> str:
    if launch is not None:
        return f"one process, by {launch.counted_by}"
    if environment.get("JOB_COMPLETION_INDEX"):
        return (
            "one process: this is an indexed job, whose processes are connected if "
            "JAX_NUM_PROCESSES and JAX_COORDINATOR_ADDRESS are set, or by the package kubernetes"
        )
    return "one process: no launcher has set its variables"


def _present(launch: Launch, owners: Sequence[str], devices: Sequence[Any]) -> str:
    hosts, kind = len(set(owners)), devices[0].device_kind
    on = f"on {hosts} hosts" if hosts > 1 else "on one host"
    return (
        f"{len(owners)} processes {on}, {len(devices)} devices ({kind}), by {launch.launcher}"
        + (f", at {launch.address}" if launch.address else "")
    )
