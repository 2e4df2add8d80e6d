"""A process's place in a run, as the program that started it tells by environment variables.

Launchers may be nested, such as torchrun under Slurm. The innermost one is followed: it has started
the processes.
"""

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Variables = Mapping[str, str]

# Above the ports that Linux gives to outgoing connections; JAX chooses from these, too.
_FIRST_PORT, _NUM_PORTS = 61440, 4096
# Restarts, and steps of one job, get ports apart from those of the next jobs' numbers.
_RESTART_STRIDE, _STEP_STRIDE = 1009, 127
_LEAST_PORT, _MOST_PORT = 1024, 65535


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A process's place in a run.

    Attributes:
        launcher: Name of the launcher.
        counted_by: The variable with the number of processes.
        num_processes: Number of processes; None if JAX has to ask the cluster for all of these.
        process_id: Number of this process, from 0.
        address: Host and port of the first process.
        local_id: Number of this process among those of its host, from 0; None if it is the only one
            or the launcher doesn't say.
        num_local: Number of processes on this host; None if unknown.
    """

    launcher: str
    counted_by: str
    num_processes: int | None = None
    process_id: int | None = None
    address: str | None = None
    local_id: int | None = None
    num_local: int | None = None

    def devices(self, num_gpus: int) -> list[int] | None:
        """The numbers of this process's share of the GPUs that it sees; None for all of them.

        Args:
            num_gpus: Number of GPUs that this process sees; 0 if there is none.

        Raises:
            ValueError: If the processes of this host can't share them equally.
        """
        # With one GPU, the launcher has already given each process its own.
        if self.local_id is None or self.num_local == 1 or num_gpus <= 1:
            return None
        count = num_gpus if self.num_local is None else self.num_local
        share, left = divmod(num_gpus, count)
        if left or not share or self.local_id >= count:
            raise ValueError(
                f"{self.launcher} has started {count} processes on this host, which sees "
                f"{num_gpus} GPUs: start as many, a divisor of them, or one process for all. Or "
                "pass `local_device_ids`"
            )
        return list(range(self.local_id * share, (self.local_id + 1) * share))


def find_launch(given: Variables) -> Launch | None:
    """This process's place in a run; None if no launcher is known by its variables.

    Args:
        given: The environment variables.

    Raises:
        ValueError: If variables contradict each other, or one is missing or no number.
    """
    given = {name: value for name, value in given.items() if value.strip()}
    found = [launch for read in _READERS if (launch := read(given)) is not None]
    if not found:
        # Otherwise, each process would train alone.
        for least, names in _TOGETHER:
            if sum(name in given for name in names) >= least:
                _require(given, *names)
        return None
    chosen, *around = found
    if chosen.launcher == _JAX:  # whoever sets these means them
        return chosen
    for other in around:
        if (chosen.num_processes or 1) < (other.num_processes or 1):
            raise ValueError(
                f"{chosen.counted_by}={chosen.num_processes}, of {chosen.launcher}, but "
                f"{other.counted_by}={other.num_processes}, of {other.launcher}: processes of one "
                "run are counted over all hosts. If each is a run of its own, set "
                "JAX_NUM_PROCESSES=1"
            )
    return chosen


def _by_jax_variables(given: Variables) -> Launch | None:
    """Kubeflow's Trainer sets these, and a user by hand; an indexed job of Kubernetes the index."""
    count = "JAX_NUM_PROCESSES"
    if count not in given:
        return None
    if given[count].strip() == "1":
        return Launch(launcher=_JAX, counted_by=count, num_processes=1, process_id=0)
    place = "JAX_PROCESS_ID" if "JAX_PROCESS_ID" in given else "JOB_COMPLETION_INDEX"
    _require(given, count, place if place in given else "JAX_PROCESS_ID", _ADDRESS)
    return _launch(given, _JAX, count, place, given[_ADDRESS], None)


def _by_jax_job(given: Variables) -> Launch | None:
    """Kubeflow's JAXJob; the names are common, so all of them are needed."""
    names = ("COORDINATOR_ADDRESS", "COORDINATOR_PORT", "NUM_PROCESSES", "PROCESS_ID")
    if any(name not in given for name in names):
        return None
    host, port, count, place = names
    return _launch(given, "Kubeflow's JAXJob", count, place, given[host], _port(given, port))


def _by_torchrun(given: Variables) -> Launch | None:
    """Also Kubeflow's PyTorchJob, and Ray's trainer of PyTorch."""
    count, place, host, port = "WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"
    if not {count, place} & given.keys() or not ({count, place} <= given.keys() or host in given):
        return None
    if given.get(count, "").strip() == "1":
        return Launch(launcher="torchrun", counted_by=count, num_processes=1, process_id=0)
    _require(given, count, place, host, port)
    number = _port(given, port)
    if "TORCHELASTIC_RUN_ID" in given:
        # torchrun itself listens at its port, for as long as it restarts processes.
        restarts = _number(given, "TORCHELASTIC_RESTART_COUNT", 0)
        number = _after(number, 1 + restarts)
    local = _optional(given, "LOCAL_RANK"), _optional(given, "LOCAL_WORLD_SIZE")
    return _launch(given, "torchrun", count, place, given[host], number, *local)


def _by_open_mpi(given: Variables) -> Launch | None:
    count, place = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"
    if count not in given or place not in given:
        return None
    local = (
        _optional(given, "OMPI_COMM_WORLD_LOCAL_RANK"),
        _optional(given, "OMPI_COMM_WORLD_LOCAL_SIZE"),
    )
    uri = given.get("OMPI_MCA_orte_hnp_uri", "")
    # Another name for each start.
    port = _hashed(uri or given.get("PMIX_NAMESPACE", ""))
    if "MASTER_PORT" in given:
        port = _port(given, "MASTER_PORT")
    # Open MPI 4 tells the address of mpirun, which runs beside the first process.
    found = re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", uri)
    host = given.get("MASTER_ADDR")
    if host is None and found:
        host = found[1] or f"[{found[2]}]"
    if host is None and local[1] == _number(given, count):
        host = "localhost"
    if host is None and _ADDRESS not in given:
        raise ValueError(
            f"{count}={given[count]}, but Open MPI doesn't say where the first process is: start "
            "them by `mpirun -x MASTER_ADDR=...` with the name of its host"
        )
    return _launch(given, "Open MPI", count, place, host or "", port, *local)


def _by_slurm(given: Variables) -> Launch | None:
    """A task of `srun`; a batch script by itself has no step."""
    place, nodes = "SLURM_PROCID", "SLURM_STEP_NODELIST"
    count = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in given else "SLURM_NTASKS"
    if any(name not in given for name in ("SLURM_JOB_ID", nodes, count, place)):
        return None
    job, step = _number(given, "SLURM_JOB_ID", 0), _number(given, "SLURM_STEP_ID", 0)
    restarts = _number(given, "SLURM_RESTART_COUNT", 0)
    shift = job + _RESTART_STRIDE * restarts + _STEP_STRIDE * step
    return _launch(
        given,
        "Slurm",
        count,
        place,
        first_node(given[nodes]),
        _FIRST_PORT + shift % _NUM_PORTS,
        _optional(given, "SLURM_LOCALID"),
        _tasks_here(given),
    )


def _by_skypilot(given: Variables) -> Launch | None:
    """A process per node, for all of its GPUs."""
    count, place, ips = "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"
    if place not in given or ips not in given:
        return None
    addresses = given[ips].split()
    if count in given and _number(given, count) != len(addresses):
        raise ValueError(f"{count}={given[count]}, but {ips} has {len(addresses)} addresses")
    known = {**given, count: str(len(addresses))}
    port = _hashed(given.get("SKYPILOT_TASK_ID", ""))
    return _launch(known, "SkyPilot", count, place, addresses[0], port)


def _by_kubernetes(given: Variables) -> Launch | None:
    """An indexed job, about which JAX asks the cluster."""
    if "KUBERNETES_SERVICE_HOST" not in given or "JOB_COMPLETION_INDEX" not in given:
        return None
    return Launch(launcher=KUBERNETES, counted_by="JOB_COMPLETION_INDEX")


_JAX, KUBERNETES = "JAX's variables", "Kubernetes"
_ADDRESS = "JAX_COORDINATOR_ADDRESS"
# Variables that mean nothing by themselves, if at least so many of them are there.
_TOGETHER = (
    (1, ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", _ADDRESS)),
    (3, ("COORDINATOR_ADDRESS", "COORDINATOR_PORT", "NUM_PROCESSES", "PROCESS_ID")),
    (1, ("SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS")),
    (1, ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")),
)
# From the innermost outwards.
_READERS: tuple[Callable[[Variables], Launch | None], ...] = (
    _by_jax_variables,
    _by_jax_job,
    _by_torchrun,
    _by_open_mpi,
    _by_slurm,
    _by_skypilot,
    _by_kubernetes,
)


def _launch(
    given: Variables,
    launcher: str,
    counted_by: str,
    place: str,
    host: str,
    port: int | None,
    local_id: int | None = None,
    num_local: int | None = None,
) -> Launch:
    """The place that is read from the variables `counted_by` and `place`."""
    count, index = _number(given, counted_by, least=1), _number(given, place)
    if index >= count:
        raise ValueError(f"{place}={index}, but {counted_by}={count}: it must be below")
    address = given.get(_ADDRESS, host)
    has_port = re.search(r"[^:\]]:\d+\Z|\]:\d+\Z", address) is not None
    if "JAX_COORDINATOR_PORT" in given and not (has_port and _ADDRESS in given):
        port = _port(given, "JAX_COORDINATOR_PORT")
    if not has_port:
        if port is None:
            raise ValueError(f"{_ADDRESS}={address} has no port, as in {address}:12345")
        address = f"{address}:{port}"
    return Launch(
        launcher=launcher,
        counted_by=counted_by,
        num_processes=count,
        process_id=index,
        address=address,
        local_id=local_id,
        num_local=num_local,
    )


def first_node(nodes: str) -> str:
    """The first host of a list of Slurm's.

    Examples:
        >>> first_node("rack[3-4]-node[007,009-012],login")
        'rack3-node007'
    """
    first = re.split(r",(?![^\[]*\])", nodes.strip())[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def _tasks_here(given: Variables) -> int | None:
    """The number of a step's tasks on this node, from a list such as "4(x2),3"."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    if name not in given or "SLURM_NODEID" not in given:
        return None
    counts = []
    for part in given[name].split(","):
        found = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if found is None:
            raise ValueError(f"{name}={given[name]} must be a list such as 4(x2),3")
        counts += [int(found[1])] * int(found[2] or 1)
    node = _number(given, "SLURM_NODEID")
    if node >= len(counts):
        raise ValueError(f"SLURM_NODEID={node}, but {name}={given[name]}")
    return counts[node]


def _require(given: Variables, *names: str) -> None:
    there = [name for name in names if name in given]
    missing = [name for name in names if name not in given]
    if missing:
        has = " and ".join(f"{name}={given[name]}" for name in there)
        raise ValueError(f"{has} but without {' and '.join(missing)}: set all of them, or none")


def _number(given: Variables, name: str, default: int | None = None, least: int = 0) -> int:
    if name not in given and default is not None:
        return default
    value = given[name].strip()
    if not re.fullmatch(r"\d+", value) or int(value) < least:
        raise ValueError(f"{name}={value} must be an integer of at least {least}")
    return int(value)


def _optional(given: Variables, name: str) -> int | None:
    return _number(given, name) if name in given else None


def _port(given: Variables, name: str) -> int:
    number = _number(given, name, least=1)
    if number > _MOST_PORT:
        raise ValueError(f"{name}={number} must be a port, up to {_MOST_PORT}")
    return number


def _after(port: int, number: int) -> int:
    """The port some places after another; after the last one comes the first without privileges."""
    return _LEAST_PORT + (port + number - _LEAST_PORT) % (_MOST_PORT + 1 - _LEAST_PORT)


def _hashed(name: str) -> int:
    """A port for a name."""
    return _FIRST_PORT + zlib.crc32(name.encode()) % _NUM_PORTS
