"""Settings made before JAX starts: tiny models spend their time in the CPU's code generator."""

import atexit
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from drawn import digest, drawn

# Concern the CPU's code generator only; a GPU's programs are compiled as ever.
FLAGS = [
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    # For meshes; without one, runs use the first device alone.
    "--xla_force_host_platform_device_count=4",
]
if metadata.version("jaxlib").startswith("0.10."):
    # Its fusions take two thirds of compiling tiny programs; later versions don't know the flag.
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])
# A GPU has to have room for the processes that a test starts.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# What tests and the libraries in them leave behind, such as W&B's media, goes with this folder: the
# first process makes it, its workers inherit it. pytest keeps the files of its last runs as ever.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    scratch = tempfile.mkdtemp(prefix="megatrain-tests-")
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    os.environ["TMPDIR"] = tempfile.tempdir = scratch
    # Tests compile many equal programs.
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{scratch}/programs"
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        # With XLA's own cache of timed products, two programs of one run take different kernels.
        os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"
    # Commands keep tokenised data in the user's cache folder. All that others keep there stays in
    # use.
    if "XDG_CACHE_HOME" not in os.environ:
        os.environ["XDG_CACHE_HOME"] = f"{scratch}/cache"
        Path(scratch, "cache").mkdir()
        for kept in Path.home().glob(".cache/*"):
            if kept.name != "megatrain_jax":
                Path(scratch, "cache", kept.name).symlink_to(kept)

# A shell's background jobs ignore SIGINT, and the tests of interrupts would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def programs_share_contexts() -> Iterator[None]:
    """Lowering a tiny program takes a quarter of the time."""
    from contexts import shared_contexts  # imports JAX, which reads what is set above

    with shared_contexts():
        yield


@pytest.fixture(scope="session", autouse=True)
def drives_are_timed_briefly() -> Iterator[None]:
    """A run with a `disk_dir` begins at once."""
    from disks import timed_briefly  # imports JAX

    with timed_briefly():
        yield


@pytest.fixture(scope="module", autouse=True)
def earlier_files_are_left_alone() -> None:
    """What earlier files have compiled stays; garbage is collected without looking at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def started_once() -> Iterator[None]:
    """Runs of one model, loss, optimizer and options are traced and compiled once in a file."""
    from started import Started  # imports JAX, which reads what is set above

    with Started().replacing():
        yield


@pytest.fixture
def started_once_in_test() -> Iterator[None]:
    """As `started_once`, within one test: models of other tests may have shapes and loss alike."""
    from started import Started

    with Started().replacing():
        yield


@pytest.fixture(scope="module")
def traced_once() -> Iterator[None]:
    """Plans and run specs of a file share what doesn't depend on their options, such as traces."""
    from megatrain_jax._src.common.remembering import remembering

    with remembering():
        yield


@pytest.fixture(scope="module")
def trainer() -> Any:
    """The small model's trainer after two steps; it may be restored, not trained."""
    from small import trained

    return trained()


@pytest.fixture
def saved(trainer: Any, tmp_path: Path) -> Path:
    """A checkpoint of that trainer."""
    trainer.save(tmp_path / "2")
    return tmp_path / "2"


@pytest.fixture
def pretending_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has trainers take this CPU for a GPU, and time steps however short they are.

    Its machine is returned.
    """
    from megatrain_jax._src.engine.spec import measured
    from megatrain_jax._src.engine.state import pool
    from runs import SLOW

    gib = 2**30
    machine = replace(SLOW, device_bytes=gib, host_bytes=64 * gib, link_bytes_per_s=1e5)
    monkeypatch.setattr("megatrain_jax._src.engine.start.card_here", lambda: machine)
    monkeypatch.setattr("megatrain_jax._src.engine.start.measured_rates", lambda *_: (1e5, 1e5))
    monkeypatch.setattr(pool, "free_device_bytes", lambda placement: machine.device_bytes)
    monkeypatch.setattr(measured, "_SHORTEST", 0.0)
    return machine


def pytest_addoption(parser: pytest.Parser) -> None:
    drawn_by = "of a random order, a quarter of the exhaustive tests, and combinations in waves"
    parser.addoption("--draw", default="", metavar="SEED", help=drawn_by)


def pytest_configure(config: pytest.Config) -> None:
    # Tracing makes so many objects that looking for garbage as often as Python does by default took
    # a twentieth of the time or more.
    gc.set_threshold(20_000, 20, 50)
    # Toy models compare in fp32 what a plan wants in bf16. What documents show has to be right,
    # and what is warned of has tests of its own.
    config.addinivalue_line("filterwarnings", "ignore::megatrain_jax.PlanWarning")


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str) -> Any:
    """Marks the cases of a test that its mark `by_default` doesn't name as exhaustive.

    What is long is nothing else.
    """
    made = yield
    items = made if isinstance(made, list) else []
    if items and (mark := items[0].get_closest_marker("by_default")):
        cases = {item.name.partition("[")[2][:-1]: item for item in items}
        if unknown := set(mark.args) - cases.keys():
            raise collector.CollectError(
                f"{name} has no cases {sorted(unknown)}, but {sorted(cases)}"
            )
        for case in cases.keys() - set(mark.args):
            cases[case].add_marker("exhaustive")
    for item in items:
        if item.get_closest_marker("long"):
            item.own_markers = [mark for mark in item.own_markers if mark.name != "exhaustive"]
    return made


def draw_of(item: pytest.Item) -> str:
    """What is drawn for a test: itself, or all that wait for the same processes."""
    if mark := item.get_closest_marker("together"):
        for fixture in mark.args:
            if fixture in getattr(item, "fixturenames", ()):
                return f"{item.nodeid.split('::')[0]}::{fixture}"
    return item.nodeid


@pytest.hookimpl(trylast=True)  # after tests were deselected by -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--draw`, runs a quarter of the exhaustive tests, and all tests in a random order.

    Files stay together, since their tests share fixtures, and so do the cases of a test.
    """
    if seed := str(config.getoption("--draw")):
        draws = {item: draw_of(item) for item in items if item.get_closest_marker("exhaustive")}
        kept = drawn(seed, {*draws.values()}, -(-len({*draws.values()}) // 4))
        left_out = {item for item, draw in draws.items() if draw not in kept}
        if left_out:
            config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
        # Those that wait for processes begin, as they take long and another worker, which takes
        # tests from the end, would start the processes again.
        items.sort(
            key=lambda item: [
                draw_of(item) == item.nodeid,
                digest(seed, str(item.path)),
                digest(seed, item.nodeid.split("[")[0]),
            ]
        )
