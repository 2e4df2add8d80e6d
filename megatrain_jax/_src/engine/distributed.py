"""`initialize`: connects the processes of a run, on one host or on several."""

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import jax

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.host_memory import memory_owner
from megatrain_jax._src.engine.startup import launchers
from megatrain_jax._src.engine.startup.driver_memory import gpu_memories
from megatrain_jax._src.engine.state import gloo
from megatrain_jax._src.engine.state.aborts import explain_aborts
from megatrain_jax._src.engine.state.coordination import CoordinationService
from megatrain_jax._src.engine.state.placement import default_mesh, placed_on
from megatrain_jax._src.engine.state.processes import PeerEndedError, Processes

if TYPE_CHECKING:  # a plan needs no trainer
    from megatrain_jax._src.engine.trainer import Trainer

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
    """Connects the processes of a run, if a launcher has started several.

    It calls `jax.distributed.initialize`, and so comes before anything that starts JAX's devices.
    It finds its place by the environment variables of Slurm (`srun`), Open MPI, torchrun, SkyPilot,
    Kubeflow (Trainer, JAXJob and PyTorchJob) or an indexed job of Kubernetes.
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID come before all of them.
    JAX_NUM_PROCESSES=1 makes each process a run of its own. Where processes share a host, each gets
    an equal part of its GPUs. The port differs for each restart of a job, so that
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
        timeout_seconds: Seconds to wait until all processes have started. In a large job they may
            start many minutes apart.
        progress: Whether the first process prints who is there.

    Returns:
        Whether the run has more than one process.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If arguments are missing or out of range, differ from an earlier call's, or
            variables contradict one another.
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
    if launch.address is not None and launch.num_processes and launch.process_id is not None:
        first, places = launch.address.rpartition(":")[0].strip("[]"), CoordinationService()
        if own := gloo.reached_at(places, launch.num_processes, launch.process_id, first):
            gloo.take(own)
    if (text := summary()) and progress and is_first():
        print(text, flush=True)
    return jax.process_count() > 1


def find_place(environment: launchers.Variables, given: dict[str, Any]) -> launchers.Launch | None:
    """This process's place: from the arguments by name, and from variables where these are None.

    Raises:
        ValueError: If arguments are missing, or variables contradict one another.
    """
    missing = [name for name, value in given.items() if value is None]
    launch = None
    if len(missing) == len(given):
        launch = launchers.find_launch(environment)
        no_package = find_spec("kubernetes") is None
        return None if launch and launch.launcher == launchers.KUBERNETES and no_package else launch
    if missing:
        raise ValueError(
            f"{' and '.join(f'`{name}`' for name in given if name not in missing)} need "
            f"{' and '.join(f'`{name}`' for name in missing)}, too; without any of them, the "
            "launcher's variables are read"
        )
    if given["process_id"] >= given["num_processes"]:
        allowed = f"below `num_processes`={given['num_processes']}"
        raise ValueError(checks.refused("process_id", allowed, given["process_id"]))
    return launchers.Launch(
        launcher=_BY_HAND,
        counted_by="num_processes",
        num_processes=given["num_processes"],
        process_id=given["process_id"],
        address=given["coordinator_address"],
    )


def connect(
    launch: launchers.Launch,
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
    # JAX ends the process if one never comes.
    explain_aborts(lambda _: _incomplete(launch, timeout_seconds))
    call(
        launch.address,
        launch.num_processes,
        launch.process_id,
        local_device_ids=local_device_ids,
        **options,
    )


@functools.cache
def summary() -> str:
    """The processes, hosts and devices that are connected, in one line; all have to call this."""
    owners = _processes().gather("the connection of processes", memory_owner())
    hosts, devices = len(set(owners)), list(default_mesh().devices.flat)
    return (
        f"{len(owners)} processes on {'one host' if hosts == 1 else f'{hosts} hosts'}, "
        f"{len(devices)} devices ({devices[0].device_kind})"
    )


def is_first() -> bool:
    """Whether this is the process that prints, and writes the files that exist once.

    Before `initialize`, the launcher's variables tell.

    Raises:
        ValueError: Before `initialize`, if the variables contradict one another.
    """
    if jax.distributed.is_initialized():
        return jax.process_index() == 0
    launch = launchers.find_launch(os.environ)
    return launch is None or not launch.process_id


def gather(value: Any) -> list[Any]:
    """The values of all processes, in order; all have to call this, and wait for the last one.

    Args:
        value: A value that JSON can have.
    """
    connected = jax.distributed.is_initialized()
    return _processes().gather("the values of all processes", value) if connected else [value]


def in_first(action: Callable[[], Any], trainer: "Trainer | None" = None) -> Any:
    """Calls a function in the first process only, and returns its result in every process.

    All processes have to call this; each goes on when all have, and the function has returned.

    Examples:
        >>> in_first(lambda: {"steps": 5})
        {'steps': 5}

    Args:
        action: The function. Its result is a value that JSON can have.
        trainer: The trainer of these processes; None for all connected processes.

    Raises:
        Exception: If the function raises one. The first process raises the original, every further
            process a built-in one with its text, of the same kind if there is one.
    """
    if trainer is not None:
        processes = trainer.processes
    else:
        processes = _processes() if jax.distributed.is_initialized() else Processes()
    if processes.count == 1:
        return action()
    value = error = None
    if processes.is_first:
        try:
            value = action()
        except Exception as raised:
            error = raised
    kind = None
    if error is not None:
        kinds = (i for i, each in enumerate(_KINDS) if isinstance(error, each))
        kind = next(kinds, len(_KINDS) - 1)
    row = (value, kind, error and str(error))
    value, kind, text = processes.gather("waiting for the first process", row)[0]
    if error is not None:
        raise error
    if kind is not None:
        raise _KINDS[kind](f"in the first process: {text}")
    return value


# Every further process raises the first of these kinds that the error is, or else the last one.
_KINDS: tuple[type[Exception], ...] = (
    FileExistsError,
    FileNotFoundError,
    OSError,
    ValueError,
    TypeError,
    ImportError,
    MemoryError,
    RuntimeError,
)


def leave(why: str) -> None:
    """Tells the run's processes that this one ends, before a run has begun or after it.

    A process that waits for it raises a `PeerEndedError`. In `fit` and `train`, errors tell them.

    Args:
        why: The reason, for their error.
    """
    if jax.distributed.is_initialized():
        with contextlib.suppress(PeerEndedError):
            _processes().leave(why)


def _processes() -> Processes:
    return placed_on(default_mesh()).processes


def _checked_arguments(address: Any, count: Any, index: Any) -> dict[str, Any]:
    if address is not None:
        checks.instance("coordinator_address", address, str, "a text")
        if not address.rpartition(":")[2].isdigit() or not address.rpartition(":")[0]:
            allowed = 'a host and a port, such as "node0:12345"'
            raise ValueError(checks.refused("coordinator_address", allowed, address))
    return {
        "coordinator_address": address,
        "num_processes": count if count is None else checks.integer("num_processes", count),
        "process_id": index if index is None else checks.integer("process_id", index, least=0),
    }


def _check_equal(given: dict[str, Any]) -> None:
    """Checks that a further call asks for this process's own place."""
    there = {"num_processes": jax.process_count(), "process_id": jax.process_index()}
    for name, value in there.items():
        if given[name] not in (None, value):
            raise ValueError(
                f"`{name}`={given[name]}, but this process is connected already, with {value}: "
                "leave it out"
            )


def _incomplete(launch: launchers.Launch, seconds: int) -> str:
    """The error's text if not all processes have come."""
    if launch.num_processes is None:
        return f"not all processes of this job have come within {seconds} s"
    return (
        f"this is process {launch.process_id} of {launch.num_processes}, of which some have not "
        f"come within {seconds} s, or not to the first one at {launch.address}: see that all are "
        "started, and that every host reaches that port"
    )


def _alone(launch: launchers.Launch | None, environment: launchers.Variables) -> str:
    if launch is not None:
        return f"one process, by {launch.counted_by}"
    if environment.get("JOB_COMPLETION_INDEX"):
        return (
            "one process: this is an indexed job, whose processes are connected if "
            "JAX_NUM_PROCESSES and JAX_COORDINATOR_ADDRESS are set, or by the package kubernetes"
        )
    return "one process: no launcher has set its variables"
