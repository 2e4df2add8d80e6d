"""Host memory as control groups and the kernel tell it, from files of made-up machines."""

import dataclasses
import platform
import resource
import sys

import pytest

from megatrain_jax._src.common import host_memory

GIB = 2**30


def write_group(folder, *, limit, usage, cache, version):
    folder.mkdir(parents=True, exist_ok=True)
    limit_file, usage_file, cache_key = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }[version]
    (folder / limit_file).write_text(f"{limit}\n")
    (folder / usage_file).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"active_file 77\n{cache_key} {cache}\n")


def machine(tmp_path, *, membership, total_gib=125, available_gib=120):
    (tmp_path / "cgroup").write_text(membership)
    (tmp_path / "meminfo").write_text(
        f"MemTotal:       {total_gib * 2**20} kB\nMemFree:        12 kB\n"
        f"MemAvailable:   {available_gib * 2**20} kB\n"
    )
    return host_memory.KernelFiles(
        root=tmp_path / "fs", membership=tmp_path / "cgroup", meminfo=tmp_path / "meminfo"
    )


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_all_ancestors_bind(tmp_path, version):
    base = tmp_path / "fs" / ("memory" if version == 1 else "")
    membership = "5:cpu:/x\n4:cpuset,memory:/a/b\n" if version == 1 else "0::/a/b\n"
    unlimited = 9223372036854771712 if version == 1 else "max"
    write_group(base / "a/b", limit=40 * GIB, usage=9 * GIB, cache=4 * GIB, version=version)
    write_group(base / "a", limit=30 * GIB, usage=10 * GIB, cache=1 * GIB, version=version)
    write_group(base, limit=unlimited, usage=50 * GIB, cache=0, version=version)
    where = machine(tmp_path, membership=membership)
    groups = host_memory.cgroup_memory(where)
    assert groups == (
        host_memory.MemoryLimit(limit_bytes=40 * GIB, used_bytes=5 * GIB),
        host_memory.MemoryLimit(limit_bytes=30 * GIB, used_bytes=9 * GIB),
    )
    assert host_memory.total_bytes(where) == 30 * GIB
    assert host_memory.available_bytes(where) == 21 * GIB


def test_container_whose_path_is_not_mounted_finds_its_root(tmp_path):
    write_group(tmp_path / "fs", limit=16 * GIB, usage=6 * GIB, cache=0, version=2)
    where = machine(tmp_path, membership="0::/../../docker/123\n")
    assert host_memory.available_bytes(where) == 10 * GIB


def test_without_limits_the_kernel_is_asked(tmp_path):
    where = machine(tmp_path, membership="0::/\n", total_gib=64, available_gib=50)
    assert host_memory.cgroup_memory(where) == ()
    assert host_memory.total_bytes(where) == 64 * GIB
    assert host_memory.available_bytes(where) == 50 * GIB


def test_limit_near_the_machines_size_leaves_the_machine_its_say(tmp_path):
    write_group(tmp_path / "fs", limit=128 * GIB, usage=GIB, cache=0, version=2)
    where = machine(tmp_path, membership="0::/\n", total_gib=125, available_gib=90)
    assert host_memory.total_bytes(where) == 125 * GIB
    assert host_memory.available_bytes(where) == 90 * GIB
    # Beside another group with a limit that the machine never reaches.
    write_group(tmp_path / "fs/a", limit=999 * GIB, usage=GIB, cache=0, version=2)
    where = machine(tmp_path, membership="0::/a\n", total_gib=125, available_gib=90)
    assert host_memory.total_bytes(where) == 125 * GIB
    assert host_memory.available_bytes(where) == 90 * GIB


def test_limit_wins_where_memory_comes_on_demand(tmp_path):
    write_group(tmp_path / "fs", limit=128 * GIB, usage=8 * GIB, cache=0, version=2)
    where = machine(tmp_path, membership="0::/\n", total_gib=16, available_gib=7)
    assert host_memory.total_bytes(where) == 128 * GIB
    assert host_memory.available_bytes(where) == 120 * GIB


def test_system_that_tells_nothing(tmp_path):
    none = tmp_path / "none"
    where = host_memory.KernelFiles(root=none, membership=none, meminfo=none)
    assert host_memory.total_bytes(where) is None
    assert host_memory.available_bytes(where) == sys.maxsize


def test_this_machine_has_memory():
    total = host_memory.total_bytes()
    assert total is not None
    assert 0 < host_memory.available_bytes() <= total


def test_a_process_s_own_limits_bind_beside_those_of_its_groups(tmp_path, monkeypatch):
    write_group(tmp_path / "fs", limit=16 * GIB, usage=6 * GIB, cache=0, version=2)
    where = machine(tmp_path, membership="0::/\n", total_gib=64, available_gib=50)
    where = dataclasses.replace(where, status=tmp_path / "status")
    where.status.write_text(f"Name: python\nVmSize: {3 * 2**20} kB\nVmData: {2**20} kB\n")
    given = dict.fromkeys((resource.RLIMIT_AS, resource.RLIMIT_DATA), resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (given[kind], resource.RLIM_INFINITY))
    assert host_memory.process_limits(where) == ()
    for limits, total, available in (
        ({resource.RLIMIT_AS: 20 * GIB}, 16, 10),
        ({resource.RLIMIT_AS: 12 * GIB}, 12, 9),
        ({resource.RLIMIT_DATA: 8 * GIB}, 8, 7),
        ({resource.RLIMIT_DATA: GIB // 2}, 0.5, 0),
    ):
        given |= limits
        assert host_memory.total_bytes(where) == total * GIB
        assert host_memory.available_bytes(where) == available * GIB


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only this C library can do it")
def test_freed_memory_between_arrays_in_use_is_returned():
    arrays = [bytearray(100_000) for _ in range(4000)]
    full = host_memory.resident_bytes()
    used = arrays[::50]
    del arrays
    host_memory.return_freed_memory()
    assert host_memory.resident_bytes() < full - 300_000_000 and len(used) == 80


@pytest.mark.parametrize("limits", [(None, None), (16, 16), (64, 64), (None, 16)])
def test_memory_has_one_owner_where_processes_share_it(tmp_path, limits):
    """A limit of 64 GiB is all of the machine, so that containers with it share the machine."""

    def owner(name: str, limit: int | None, container: str, boot: str = "a-b-c") -> str:
        folder = tmp_path / name
        folder.mkdir()
        if limit is not None:
            write_group(folder / "fs", limit=limit * GIB, usage=GIB, cache=0, version=2)
        where = machine(folder, membership="0::/\n", total_gib=64)
        (folder / "boot").write_text(f"{boot}\n")
        (folder / "namespace").symlink_to(f"cgroup:[{container}]")
        return host_memory.memory_owner(
            dataclasses.replace(where, boot=folder / "boot", namespace=folder / "namespace")
        )

    first, second = limits
    assert owner("1", first, "7") == owner("2", first, "7") != owner("3", first, "7", boot="d")
    is_apart = 16 in (first, second)
    assert (owner("4", first, "7") != owner("5", second, "8")) == is_apart


def test_without_an_id_the_machine_is_named(tmp_path, monkeypatch):
    none = host_memory.KernelFiles(boot=tmp_path / "none", root=tmp_path, membership=tmp_path / "x")
    monkeypatch.setattr(host_memory.socket, "gethostname", lambda: "worker")
    assert host_memory.memory_owner(none) == "worker"
