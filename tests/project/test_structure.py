"""The structure that a reader relies on: imports between rooms, and questions with one place."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megatrain_jax
from megatrain_jax import models
from places import HELPERS, ROOT, TESTS

SOURCES = ROOT / "megatrain_jax" / "_src"
# From the ground up: a room imports from those in the lines above its own, and from itself.
ENGINE = (
    "startup",
    "schedule program",
    "program/layers",
    "program/optimizer program/loss program/tiling",
    "state adapt",
    "kernels",
    "options",
    "spec",
    "report runtime",
    "checkpoint",
    "history load",
    "start",
    "run_state",
    "trainer",
    "train planning distributed",
    "fit",
)
LM = (
    "common cross_entropy",
    "objectives",
    "data models",
    "objectives/decoder_objectives samples",
    "grpo",
    "cli",
)
FLOORS = (
    "common",
    *(" ".join(f"engine/{room}" for room in line.split()) for line in ENGINE),
    "callbacks",
    *(" ".join(f"lm/{room}" for room in line.split()) for line in LM),
)
FLOOR_OF = {room: floor for floor, line in enumerate(FLOORS) for room in line.split()}
FILES = sorted(SOURCES.rglob("*.py"))


def short(path: Path) -> str:
    return str(path.relative_to(SOURCES))


def room_of(file: str) -> str:
    """The room a file is in; the files beside the rooms are rooms of their own."""
    parts = Path(file).with_suffix("").parts
    return max((x for n in (1, 2, 3) if (x := "/".join(parts[:n])) in FLOOR_OF), key=len)


def imported(path: Path) -> set[str]:
    """The files of the library that a file imports from."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, f"{path} imports by a relative path"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    inside = {n.removeprefix("megatrain_jax._src.") for n in names if n.startswith("megatrain_jax")}
    return {f for name in inside if (SOURCES / (f := name.replace(".", "/") + ".py")).exists()}


def test_a_room_imports_from_rooms_below_it():
    for path in FILES:
        if path.name == "__init__.py":
            assert not imported(path), path
            continue
        mine = room_of(short(path))
        others = {f for f in imported(path) if room_of(f) != mine}
        assert not {f for f in others if FLOOR_OF[room_of(f)] >= FLOOR_OF[mine]}, path


def test_schedules_need_nothing_but_the_standard_library():
    for path in (SOURCES / "engine" / "schedule").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "import jax" not in text and "import numpy" not in text, path


@pytest.mark.parametrize("house", ["lm", "callbacks"])
def test_what_is_built_on_the_engine_uses_its_public_names(house: str):
    for path in (SOURCES / house).rglob("*.py"):
        houses = {file.split("/")[0] for file in imported(path)}
        assert houses <= {house, "common", "callbacks"}, path


@pytest.mark.parametrize("house", ["engine", "common"])
def test_the_engine_knows_no_language_model(house: str):
    """Neither a family's name nor a primitive's."""
    files = (SOURCES / "lm/models/families").glob("*.py")
    families = {x for path in files for x in re.findall(r'model_type="(\w+)"', path.read_text())}
    assert len(families) > 50
    defined = re.compile(r'= define\(\s*"(\w+)"')
    primitives = {
        x for path in (SOURCES / "lm").rglob("*.py") for x in defined.findall(path.read_text())
    }
    assert len(primitives) >= 4
    words = re.compile(rf"""["']({"|".join(families | primitives)})\b""")
    for path in (SOURCES / house).rglob("*.py"):
        assert not words.search(path.read_text(encoding="utf-8")), path


@pytest.mark.exhaustive
def test_where_arrays_live_is_asked_in_one_place():
    """Built on the library, models choose what computes them, the command line counts GPUs, and
    GRPO packs rows that they divide."""
    asking = {"devices", "local_devices", "device_count", "default_backend"}
    found = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in asking:
                if isinstance(node.value, ast.Name) and node.value.id == "jax":
                    found.add(short(path))
    assert found == {
        "engine/state/placement.py",
        "common/capability.py",
        "lm/cli/run_report.py",
        "lm/grpo/grpo_run.py",
    }


def test_bodies_of_calls_and_loops_are_asked_for_in_one_place():
    # A key stands for the body itself, and is kept as long as it.
    allowed = {"engine/program/jaxpr.py", "engine/program/structural_key.py"}
    names = re.compile(r"""["'](call_jaxpr|body_jaxpr|cond_jaxpr|branches)["']""")
    found = {short(path) for path in FILES if names.search(path.read_text(encoding="utf-8"))}
    assert found <= allowed, "use called, loop_body, loop_condition and branches of jaxpr.py"


SMALL_RUN = """
import sys
import small, megatrain_jax as mt
given = small.params(), small.loss_fn
mt.plan(*given, small.OPTIMIZER, small.batch(0), hardware="H100")
early = mt.callbacks.EarlyStopping("loss")
result = mt.fit(*given, [small.batch(0)], small.OPTIMIZER, eval_data=[small.batch(1)],
                callbacks=[early], progress=False)
assert isinstance(result.trainer, mt.Trainer) and repr(result)
modules = "_src.lm", "data", "losses", "models", "objectives"
found = [m for m in sys.modules if m.startswith(tuple(f"megatrain_jax.{n}" for n in modules))]
assert not found, found
assert mt.callbacks.Samples and "megatrain_jax._src.lm" in sys.modules
"""


@pytest.mark.exhaustive
def test_plans_and_runs_import_no_language_model():
    paths = os.pathsep.join([str(HELPERS), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", SMALL_RUN], check=True, env=environment)


NEEDS_LM = re.compile(
    r"megatrain_jax(\._src\.lm|\.(data|losses|models|objectives))\b"
    r"|from megatrain_jax import .*\b(data|losses|models|objectives)\b"
)


@pytest.mark.parametrize("house", ["callbacks", "common", "engine"])
def test_tests_of_the_engine_need_no_language_model(house: str):
    """Neither themselves nor by helpers, so they pass without that house."""
    shared = *(TESTS / "helpers").glob("*.py"), *(ROOT / "experiments").rglob("*.py")
    helpers = {path.stem: path for path in shared}

    def needs_lm(path: Path) -> bool:
        text = path.read_text(encoding="utf-8")
        names = re.findall(r"^ *(?:from|import) (\w+)", text, re.MULTILINE)
        imports = "\n".join(line for line in text.splitlines() if "import" in line)
        return bool(NEEDS_LM.search(imports)) or any(
            needs_lm(helpers[n]) for n in names if n in helpers
        )

    assert not [str(path) for path in (TESTS / house).rglob("*.py") if needs_lm(path)]


def test_one_file_of_the_tests_knows_where_a_trainer_keeps_its_parts():
    """The others read public views, or test a part by itself."""
    parts = {"_state", "run_state"}
    found = set()
    for path in TESTS.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if any(part in text for part in parts) else ():
            if isinstance(node, ast.Attribute) and node.attr in parts:
                found.add(path.name)
    assert found == {"inside.py"}


def typed_names(file: str) -> list[tuple[str, str | None]]:
    """The names that a public module imports for type checkers alone, and their modules."""
    return [
        (alias.name, node.module)
        for block in ast.parse((SOURCES.parent / file).read_text(encoding="utf-8")).body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]


@pytest.mark.parametrize("module", [megatrain_jax, models], ids=lambda module: module.__name__)
def test_public_names_are_imported_when_they_are_asked_for_from_where_types_are(module):
    typed = typed_names(Path(module.__file__).name)
    modules = {name for name, place in typed if place == "megatrain_jax"}
    assert modules == {*getattr(module, "_MODULES", ())} <= set(dir(module))
    typed = {name: place for name, place in typed if place != "megatrain_jax"}
    places = {name: place for place, names in module._NAMES.items() for name in names.split()}
    assert typed == {name: f"megatrain_jax._src.{place}" for name, place in places.items()}
    assert set(typed) == set(module.__all__) <= set(dir(module))
    assert all(getattr(module, name) is not None for name in typed)


PLANNED = """
import sys
from megatrain_jax._src.lm.cli.main import main
assert main(["plan", "Qwen3-0.6B", "--gpu", "H100", "--tokens", "4096"]) == 0
found = {"grain", "orbax", "pyarrow", "scipy", "transformers"} & set(sys.modules)
assert not found, found
"""


@pytest.mark.exhaustive
def test_a_plan_imports_no_package_that_only_training_needs():
    subprocess.run([sys.executable, "-c", PLANNED], check=True, capture_output=True)
