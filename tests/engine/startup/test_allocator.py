"""Which allocator of device memory the import chooses, and how much it may take."""

import os
import shutil
import subprocess

import pytest

from megatrain_jax._src.engine.startup import allocator, driver_memory
from megatrain_jax._src.engine.startup.driver_memory import GpuMemory, gpu_memories

SET = allocator.VARIABLE, allocator.FRACTION, allocator.OLD_FRACTION
CHOSEN = {allocator.VARIABLE: "cuda_async", allocator.FRACTION: "0.85"}


GIB = 2**30


def chosen(given, plugin, monkeypatch, gpus=()):
    for name in (*SET, allocator.PREALLOCATE):
        monkeypatch.setenv(name, "")  # put back afterwards, whatever it was
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(allocator, "find_spec", lambda name: name == plugin or None)
    monkeypatch.setattr(allocator, "gpu_memories", lambda: list(gpus))
    allocator.choose()
    return {name: os.environ[name] for name in SET if name in os.environ}


@pytest.mark.parametrize("plugin", ["jax_cuda12_plugin", "jax_cuda13_plugin"])
def test_cudas_pool_allocates_most_of_a_gpu(plugin, monkeypatch):
    assert chosen({}, plugin, monkeypatch) == CHOSEN


@pytest.mark.parametrize(
    ("gpus", "share"),
    [
        ([(10, 9.7)], 0.85),
        ([(24, 23.6)], 0.85),
        ([(40, 39.4)], 0.91),
        ([(80, 79.3)], 0.93),
        ([(140, 139)] * 8, 0.93),
        ([(80, 77.3)], 0.93),  # another program has 2 GiB: 5.6 stay outside in any case
        ([(80, 73.3)], 0.88),  # another program has 6 GiB, and 3.6 more stay outside
        ([(80, 40)], 0.85),  # as without a word from the driver
        ([(80, 79.3), (80, 73.3)], 0.88),
    ],
)
def test_a_large_gpu_that_no_other_program_uses_gives_more(gpus, share, monkeypatch):
    every = [GpuMemory(round(total * GIB), round(free * GIB)) for total, free in gpus]
    found = float(chosen({}, "jax_cuda12_plugin", monkeypatch, every)[allocator.FRACTION])
    assert found == pytest.approx(share, abs=2e-4)
    for gpu in every:
        assert (1 - found) * gpu.total >= min(3.59 * GIB, 0.1499 * gpu.total)
        # A plan made elsewhere counts on no more for this card, and on no less if it is unused.
        monkeypatch.delenv(allocator.FRACTION, raising=False)
        assert allocator.share_of(gpu.total) >= found - 1e-4


def test_a_plan_for_another_card_counts_on_its_own_share(monkeypatch):
    chosen({}, "jax_cuda12_plugin", monkeypatch, [GpuMemory(80 * GIB, 80 * GIB)])
    assert allocator.share_of(24 * GIB) == 0.85
    assert allocator.share_of(80 * GIB) == 0.93


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A driver's library with the memory of some GPUs; the second one's is `sizes[1]`."""

    def build(sizes, mig=None):
        """`mig` is whether a GPU is divided; None for GPUs that can't be."""
        source, library = tmp_path / "nvml.c", tmp_path / "nvml.so"
        rows = ", ".join(f"{total * GIB}ull" for total in sizes)
        source.write_text(
            f"""
            static unsigned long long sizes[] = {{{rows}}};
            int nvmlInit_v2() {{ return 0; }}
            int nvmlShutdown() {{ return 0; }}
            int nvmlDeviceGetCount_v2(unsigned* n) {{ *n = {len(sizes)}; return 0; }}
            int nvmlDeviceGetHandleByIndex_v2(unsigned i, void** d) {{
                *d = sizes + i; return 0; }}
            int nvmlDeviceGetMemoryInfo(unsigned long long* d, unsigned long long* m) {{
                m[0] = *d; m[1] = *d - {GIB}ull; m[2] = {GIB}ull; return 0; }}
            int nvmlDeviceGetMigMode(void* d, unsigned* now, unsigned* later) {{
                *now = *later = {int(mig or 0)}; return {3 if mig is None else 0}; }}
            """
        )
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        monkeypatch.setattr(driver_memory, "_LIBRARY", str(library))

    return build


@pytest.mark.skipif(shutil.which("gcc") is None, reason="a library has to be compiled")
@pytest.mark.parametrize(
    ("sizes", "visible", "found"),
    [
        ([80, 80], None, [80, 80]),
        ([80, 80, 80], "1,2", [80, 80]),
        ([80, 24], "1", [80, 24]),  # CUDA may count them in another order
        ([80, 80], "GPU-1234", [80, 80]),
        ([80, 80], "2", [80, 80]),  # there is none
    ],
)
def test_the_driver_tells_the_memory_of_visible_gpus(sizes, visible, found, driver, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    driver(sizes)
    assert gpu_memories() == [GpuMemory(n * GIB, (n - 1) * GIB) for n in found]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="a library has to be compiled")
@pytest.mark.parametrize(("mig", "found"), [(True, []), (False, [GpuMemory(80 * GIB, 79 * GIB)])])
def test_parts_of_a_divided_gpu_have_unknown_memory(mig, found, driver):
    driver([80], mig)
    assert gpu_memories() == found


def test_without_a_driver_no_memory_is_known(monkeypatch):
    for name in ("/nowhere/libnvidia-ml.so.1", "libc.so.6"):  # missing, and without these functions
        monkeypatch.setattr(driver_memory, "_LIBRARY", name)
        assert gpu_memories() == []


def test_nothing_is_chosen_without_a_plugin(monkeypatch):
    assert chosen({}, None, monkeypatch) == {}


@pytest.mark.parametrize(
    "given",
    [
        {allocator.VARIABLE: "default"},
        {allocator.FRACTION: "0.5"},
        {allocator.VARIABLE: "bfc", allocator.FRACTION: "0.5"},
    ],
)
def test_what_a_user_chose_stays(given, monkeypatch):
    assert chosen(given, "jax_cuda12_plugin", monkeypatch) == CHOSEN | given


def test_a_fraction_under_its_old_name_stays_alone(monkeypatch):
    given = {allocator.OLD_FRACTION: "0.5"}
    found = chosen(given, "jax_cuda12_plugin", monkeypatch)
    assert found == {allocator.VARIABLE: "cuda_async"} | given


@pytest.mark.parametrize(
    ("variable", "preallocate", "lists"),
    [
        (None, None, False),
        ("DEFAULT", None, True),
        ("bfc", "true", True),
        ("bfc", "false", False),
        ("platform", None, False),
    ],
)
def test_jaxs_own_allocator_keeps_lists_where_it_takes_a_gpu_at_once(
    variable, preallocate, lists, monkeypatch
):
    for name, value in ((allocator.VARIABLE, variable), (allocator.PREALLOCATE, preallocate)):
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    assert allocator.keeps_lists() is lists


@pytest.mark.parametrize(("preallocate", "allocates"), [("true", True), ("0", False)])
def test_cudas_pool_has_to_preallocate_to_tell_its_limit(preallocate, allocates, monkeypatch):
    given = {allocator.PREALLOCATE: preallocate}
    found = chosen(given, "jax_cuda12_plugin", monkeypatch)
    assert (allocator.VARIABLE in found) == allocates and found[allocator.FRACTION] == "0.85"
