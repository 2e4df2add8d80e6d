"""A process's place in a run, from what launchers put into its environment."""

import os
from types import SimpleNamespace
from typing import Any

import jax
import pytest

import megatrain_jax as mt
from megatrain_jax._src.engine import distributed
from megatrain_jax._src.engine.startup.driver_memory import GpuMemory
from megatrain_jax._src.engine.startup.launchers import Launch, find_launch, first_node
from messages import refuses, tells

TORCHRUN = {
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[007-008]",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_STEP_ID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5\n",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-2026-01-01-00-00-00-000001_train_1",
}
TRAINER = {
    "JAX_COORDINATOR_ADDRESS": "run-node-0-0.run:6666",
    "JAX_COORDINATOR_PORT": "6666",
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "1",
}
JAX_JOB = {
    "COORDINATOR_ADDRESS": "run-worker-0",
    "COORDINATOR_PORT": "6666",
    "NUM_PROCESSES": "3",
    "PROCESS_ID": "2",
}
INDEXED = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}


def place(given: dict[str, str]) -> tuple[Any, ...]:
    launch = find_launch(given)
    assert launch is not None
    return launch.address, launch.num_processes, launch.process_id


def port(given: dict[str, str]) -> int:
    return int(str(place(given)[0]).rpartition(":")[2])


def test_each_launcher_tells_a_process_its_place():
    # torchrun itself listens at MASTER_PORT, so the next one is taken.
    assert place(TORCHRUN) == ("node0:29501", 8, 5)
    by_hand = {k: v for k, v in TORCHRUN.items() if not k.startswith(("TORCHELASTIC", "LOCAL"))}
    assert place(by_hand) == ("node0:29500", 8, 5)
    # The step's tasks, not the job's.
    assert place(SLURM) == ("node007:61441", 3, 1)
    assert place({k: v for k, v in SLURM.items() if "NUM_TASKS" not in k})[1] == 16
    assert place(OPEN_MPI)[1:] == (4, 3)
    assert str(place(OPEN_MPI)[0]).startswith("10.96.0.1:")
    assert place(SKYPILOT)[1:] == (2, 1)
    assert str(place(SKYPILOT)[0]).startswith("10.0.0.4:")
    assert place(TRAINER) == ("run-node-0-0.run:6666", 2, 1)
    assert place(JAX_JOB) == ("run-worker-0:6666", 3, 2)
    by_index = {**TRAINER, **INDEXED, "JOB_COMPLETION_INDEX": "0"}
    del by_index["JAX_PROCESS_ID"]
    assert place(by_index) == ("run-node-0-0.run:6666", 2, 0)
    assert place(INDEXED) == (None, None, None), "JAX asks the cluster"


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # a batch script
        {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"},
        {"WORLD_SIZE": "2", "RANK": ""},
        {"NUM_PROCESSES": "2", "PROCESS_ID": "1"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
    ],
)
def test_half_of_a_launchers_variables_are_none(given: dict[str, str]):
    assert find_launch(given) is None


def test_a_restarted_job_has_another_port():
    ports = {
        port({**SLURM, "SLURM_RESTART_COUNT": f"{n}", "SLURM_STEP_ID": f"{step}"})
        for n in range(4)
        for step in range(4)
    }
    following = {port({**SLURM, "SLURM_JOB_ID": f"{4097 + n}"}) for n in range(1, 100)}
    assert len(ports) == 16 and not ports & following
    elastic = [port({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": f"{n}"}) for n in range(3)]
    assert elastic == [29501, 29502, 29503]
    at_the_end = {**TORCHRUN, "MASTER_PORT": "65535"}
    assert port(at_the_end) == 1024
    uri = OPEN_MPI["OMPI_MCA_orte_hnp_uri"].replace("1531576320", "1531580416")
    assert port(OPEN_MPI) != port({**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": uri})
    assert port(SKYPILOT) != port({**SKYPILOT, "SKYPILOT_TASK_ID": "another"})
    assert all(1024 <= x <= 65535 for x in ports | following | {port(OPEN_MPI), port(SKYPILOT)})


def test_jaxs_own_address_and_port_come_before_a_launchers():
    there = {"JAX_COORDINATOR_ADDRESS": "node9:1234"}
    assert place(SLURM | there)[0] == "node9:1234"
    assert place(SLURM | there | {"JAX_COORDINATOR_PORT": "99"})[0] == "node9:1234"
    assert place(SLURM | {"JAX_COORDINATOR_PORT": "99"})[0] == "node007:99"
    assert place(TRAINER | {"JAX_COORDINATOR_ADDRESS": "[fe80::1]"})[0] == "[fe80::1]:6666"


def test_the_innermost_launcher_is_followed():
    assert place(SLURM | SKYPILOT | TORCHRUN | INDEXED)[1:] == (8, 5)
    assert place(SLURM | OPEN_MPI)[1:] == (4, 3)
    assert place(TORCHRUN | TRAINER)[1:] == (2, 1)
    alone = find_launch(SLURM | {"JAX_NUM_PROCESSES": "1"})
    assert alone is not None and alone.num_processes == 1


@pytest.mark.parametrize(
    ("given", "named"),
    [
        # Each of four tasks would train alone.
        (SLURM | {"RANK": "0", "WORLD_SIZE": "1"}, ("WORLD_SIZE=1", "SLURM_STEP_NUM_TASKS=3")),
        (TORCHRUN | {"RANK": "8"}, ("RANK=8", "WORLD_SIZE=8")),
        (TORCHRUN | {"MASTER_PORT": ""}, ("MASTER_PORT",)),
        (TORCHRUN | {"MASTER_PORT": "70000"}, ("MASTER_PORT=70000",)),
        (TORCHRUN | {"WORLD_SIZE": ""}, ("RANK=5", "WORLD_SIZE")),
        (TORCHRUN | {"WORLD_SIZE": "two"}, ("WORLD_SIZE=two",)),
        (TRAINER | {"JAX_PROCESS_ID": ""}, ("JAX_NUM_PROCESSES=2", "JAX_PROCESS_ID")),
        ({"JAX_COORDINATOR_ADDRESS": "node0:1234"}, ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")),
        (TRAINER | {"JAX_NUM_PROCESSES": ""}, ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES")),
        (SKYPILOT | {"SKYPILOT_NODE_IPS": ""}, ("SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS")),
        (SLURM | {"SLURM_STEP_NODELIST": ""}, ("SLURM_STEP_NUM_TASKS=3", "SLURM_STEP_NODELIST")),
        (
            {"COORDINATOR_ADDRESS": "node0", "NUM_PROCESSES": "2", "PROCESS_ID": "1"},
            ("COORDINATOR_PORT", "NUM_PROCESSES=2"),
        ),
        (TRAINER | {"JAX_COORDINATOR_ADDRESS": "run", "JAX_COORDINATOR_PORT": ""}, ("run",)),
        (SKYPILOT | {"SKYPILOT_NUM_NODES": "3"}, ("SKYPILOT_NUM_NODES=3", "SKYPILOT_NODE_IPS")),
        (OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": ""}, ("OMPI_COMM_WORLD_SIZE=4", "MASTER_ADDR")),
        (SLURM | {"SLURM_NODEID": "2"}, ("SLURM_NODEID=2", "SLURM_STEP_TASKS_PER_NODE")),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2x"}, ("SLURM_STEP_TASKS_PER_NODE=2x",)),
    ],
)
def test_variables_that_contradict_each_other_are_named(
    given: dict[str, str], named: tuple[str, ...]
):
    with refuses(ValueError, *named):
        find_launch(given)


def test_open_mpi_five_tells_no_address_but_that_of_one_host_is_known():
    here = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    here |= {"OMPI_MCA_orte_hnp_uri": "", "PMIX_NAMESPACE": "prterun-node0-17@1"}
    assert str(place(here)[0]).startswith("localhost:")
    assert port(here) != port({**here, "PMIX_NAMESPACE": "prterun-node0-18@1"})
    elsewhere = OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "", "MASTER_ADDR": "node3"}
    assert str(place(elsewhere)[0]).startswith("node3:")
    six = "1531576320.0;tcp6://[fe80::1,fe80::2]:34911"
    assert str(place(OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": six})[0]).startswith("[fe80::1]:")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a1", "a1"), ("a1,b[2-3]", "a1"), ("a[01,03-04]", "a01"), ("r[3-4]n[7,9]-ib,x", "r3n7-ib")],
)
def test_the_first_host_of_slurms_lists(nodes: str, first: str):
    assert first_node(nodes) == first


def test_processes_of_one_host_share_its_gpus():
    launch = find_launch(SLURM)
    assert launch is not None and (launch.local_id, launch.num_local) == (1, 2)
    assert launch.devices(8) == [4, 5, 6, 7]
    assert launch.devices(1) is None, "the launcher has given each task its own"
    assert launch.devices(0) is None
    with refuses(ValueError, 3, 2, "local_device_ids"):
        launch.devices(3)
    last = find_launch(SLURM | {"SLURM_NODEID": "1", "SLURM_PROCID": "2", "SLURM_LOCALID": "0"})
    assert last is not None and last.devices(8) is None, "the only task of its node has all GPUs"
    many = find_launch(SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x2),1", "SLURM_NODEID": "1"})
    assert many is not None and many.num_local == 4
    unknown = find_launch({k: v for k, v in TORCHRUN.items() if k != "LOCAL_WORLD_SIZE"})
    assert unknown is not None and unknown.devices(8) == [1]
    with refuses(ValueError, 2):
        find_launch(TORCHRUN | {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}).devices(8)  # type: ignore[union-attr]
    assert find_launch(SKYPILOT).devices(8) is None  # type: ignore[union-attr]


NOTHING = {"coordinator_address": None, "num_processes": None, "process_id": None}
BY_HAND = {"coordinator_address": "node0:1234", "num_processes": 3, "process_id": 2}


def test_arguments_come_in_place_of_variables():
    found = distributed.find_place(SLURM, BY_HAND)
    assert found is not None
    assert (found.address, found.num_processes, found.process_id) == ("node0:1234", 3, 2)
    assert distributed.find_place(SLURM, NOTHING) == find_launch(SLURM)
    with refuses(ValueError, "num_processes", "process_id", "coordinator_address"):
        distributed.find_place(SLURM, NOTHING | {"coordinator_address": "node0:1234"})
    with refuses(ValueError, "process_id", 3):
        distributed.find_place({}, BY_HAND | {"process_id": 3})


def test_a_port_that_is_given_is_taken_under_open_mpi():
    launches = [find_launch({**OPEN_MPI, **more}) for more in ({}, {"MASTER_PORT": "29500"})]
    (host, port), (same, given) = (launch.address.rsplit(":", 1) for launch in launches)  # type: ignore[union-attr]
    assert host == same and given == "29500" != port


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"coordinator_address": 5}, TypeError),
        ({"coordinator_address": "node0"}, ValueError),
        ({"coordinator_address": ":12"}, ValueError),
        ({"num_processes": 0}, ValueError),
        ({"process_id": -1}, ValueError),
        ({"timeout_seconds": 0}, ValueError),
        ({"progress": 1}, TypeError),
    ],
)
def test_wrong_arguments_are_named(given: dict[str, Any], error: type[Exception]):
    with refuses(error, *given):
        mt.distributed.initialize(**given)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Without any launcher's variables."""
    for name in os.environ:
        if name.startswith(("SLURM", "JAX_", "OMPI", "SKYPILOT", "WORLD", "RANK", "JOB_")):
            monkeypatch.delenv(name)
    return monkeypatch


def test_a_process_by_itself_connects_to_nobody(bare, capsys):
    bare.setattr(jax.distributed, "initialize", lambda *_, **__: pytest.fail("connects"))
    assert not mt.distributed.initialize()
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert not mt.distributed.initialize("node0:1234", 1, 0, progress=False)
    assert not capsys.readouterr().out
    bare.setenv("JAX_NUM_PROCESSES", "1")
    bare.setenv("SLURM_NTASKS", "4")
    assert not mt.distributed.initialize()
    assert tells(capsys.readouterr().out, "JAX_NUM_PROCESSES")
    assert mt.distributed.is_first() and mt.distributed.in_first(lambda: {"a": 1}) == {"a": 1}
    with pytest.raises(UnicodeDecodeError):
        mt.distributed.in_first(lambda: b"\xff".decode())
    bare.setenv("JAX_NUM_PROCESSES", "2")
    bare.setenv("JAX_COORDINATOR_ADDRESS", "node0:1234")
    for number in range(2):
        bare.setenv("JAX_PROCESS_ID", str(number))
        assert mt.distributed.is_first() == (number == 0)


def test_an_indexed_job_is_joined_only_with_the_package_that_asks_the_cluster(bare, capsys):
    for name, value in INDEXED.items():
        bare.setenv(name, value)
    bare.setattr(distributed, "find_spec", lambda name: None)
    assert not mt.distributed.initialize()
    assert tells(capsys.readouterr().out, "JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS")
    bare.setattr(distributed, "find_spec", lambda name: name)
    found = distributed.find_place(os.environ, NOTHING)
    assert found is not None and found.num_processes is None
    assert mt.distributed.is_first(), "nobody knows yet that it is not"


def test_jax_gets_what_the_launcher_tells(bare):
    calls: list[Any] = []

    def call(*given: Any, **options: Any) -> None:
        calls.append((given, options))

    words: list[Any] = []
    bare.setattr(distributed, "gpu_memories", lambda: [GpuMemory(1, 1)] * 8)
    bare.setattr(distributed, "explain_aborts", words.append)
    launch = find_launch(TORCHRUN)
    assert launch is not None
    distributed.connect(launch, None, 1800, call)
    given, options = calls.pop()
    assert given == ("node0:29501", 8, 5)
    assert tells(words.pop()(True), 5, 8, "node0:29501", 1800), "if one never comes"
    assert options["local_device_ids"] == [2, 3] and options["initialization_timeout"] == 1800
    assert options["cluster_detection_method"] == "deactivate"
    distributed.connect(launch, [7], 60, call)
    assert calls.pop()[1]["local_device_ids"] == [7]
    bare.setenv("JAX_LOCAL_DEVICE_IDS", "3")
    distributed.connect(launch, None, 60, call)
    assert calls.pop()[1]["local_device_ids"] is None, "JAX reads them"
    distributed.connect(Launch(launcher="Kubernetes", counted_by="it"), None, 60, call)
    given, options = calls.pop()
    assert given == (None, None, None) and "cluster_detection_method" not in options


@pytest.mark.parametrize("index", range(2))
@pytest.mark.parametrize("progress", [True, False])
@pytest.mark.parametrize(("name", "reached"), [("node0", "10.77.0.1"), ("[fd00::1]", None)])
def test_the_first_of_several_processes_says_who_is_there(
    index, progress, name, reached, bare, capsys
):
    taken: list[Any] = []
    asked: list[Any] = []

    def connects(*_: Any, **__: Any) -> None:
        bare.setattr(jax.distributed, "is_initialized", lambda: True)

    def reached_at(places: Any, *given: Any) -> str | None:
        asked.append(given)
        return reached

    bare.setattr(jax.distributed, "initialize", connects)
    bare.setattr(jax, "process_count", lambda: 2)
    bare.setattr(jax, "process_index", lambda: index)
    bare.setattr(distributed, "explain_aborts", lambda words: None)
    bare.setattr(distributed, "CoordinationService", object)
    bare.setattr(distributed.gloo, "reached_at", reached_at)
    bare.setattr(distributed.gloo, "take", taken.append)
    bare.setattr(distributed, "summary", lambda: "2 processes on one host")
    assert mt.distributed.initialize(f"{name}:1234", 2, index, progress=progress)
    assert bool(capsys.readouterr().out) == (progress and index == 0)
    assert asked == [(2, index, name.strip("[]"))] and taken == ([reached] if reached else [])


def test_a_connected_process_stays_so(bare):
    bare.setattr(jax.distributed, "is_initialized", lambda: True)
    bare.setattr(jax, "process_count", lambda: 2)
    bare.setattr(jax.distributed, "initialize", lambda *_, **__: pytest.fail("connects anew"))
    assert mt.distributed.initialize()
    assert mt.distributed.initialize("node0:1234", 2, 0)
    with refuses(ValueError, "num_processes", 3, 2):
        mt.distributed.initialize("node0:1234", 3, 0)


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (None, None),
        (FileExistsError("there"), FileExistsError),
        (PermissionError("there"), OSError),
        (KeyError("there"), RuntimeError),
    ],
)
def test_what_the_first_process_finds_is_known_to_all(raised, kind):
    told: list[Any] = []

    def action() -> int:
        told.append("called")
        if raised is not None:
            raise raised
        return 5

    def gather(where: str, value: Any) -> list[Any]:
        told.append(value)
        return [told[1], value]

    for index in (0, 1):
        processes = SimpleNamespace(count=2, index=index, is_first=not index, gather=gather)
        trainer: Any = SimpleNamespace(processes=processes)
        if kind is None:
            assert mt.distributed.in_first(action, trainer) == 5
            continue
        with pytest.raises(Exception, match="there") as caught:
            mt.distributed.in_first(action, trainer)
        assert caught.value is raised if index == 0 else type(caught.value) is kind
    assert told.count("called") == 1
