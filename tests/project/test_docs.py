"""What the documentation says: its code runs and prints what it says, its links lead somewhere."""

import ast
import doctest
import hashlib
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint
from IPython.core.interactiveshell import InteractiveShell

from megatrain_jax._src.common.remembering import remembering
from megatrain_jax._src.engine import start
from megatrain_jax._src.engine.kernels.cache import KernelCache
from pages import NOTEBOOKS, PAGES, as_said, blocks, cells, execute, links
from places import ROOT
from site_pages import documented, parameters_had, parameters_said, rendered, shown_outputs

pytestmark = [
    # The tiny model that stands for a real one writes nothing that its page's functions tell apart.
    pytest.mark.filterwarnings("ignore:the reward function"),
]
START = ROOT / "docs" / "quickstart.md"
FINETUNE = ROOT / "docs" / "notebooks" / "finetune.ipynb"
# Pages whose reader has a checkpoint and conversations.
WITH_CHECKPOINT = {
    "README.md",
    "adapters.md",
    "after_training.md",
    "chat.md",
    "data.md",
    "finetuning.md",
    "generation.md",
    "grpo.md",
    "models.md",
    "preferences.md",
}
# Pages that train for long: their programs are worth optimising, unlike those of most tests.
FOR_LONG = {"equinox.md", "pretraining.md", "vision.md"}
# Pages that would take minutes, with what is shorter here.
SHORTER = {"images.md": ("steps = 400", "steps = 4")}


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.by_default(
    "docs/quickstart.md",
    "docs/api/distributed.md",
    "docs/api/models.md",
    "docs/api/planning.md",
    "docs/api/training.md",
    "docs/troubleshooting.md",
    "docs/tutorials/rewards.md",
)
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=short)
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "page"}
    longer, shorter = SHORTER.get(page.name, ("", ""))
    parts = [(page, block) for block in blocks(page)]
    assert longer in page.read_text(encoding="utf-8")
    if "<!-- quickstart -->" in page.read_text(encoding="utf-8"):
        # The site shows the quickstart's program on this page, which imports all else itself.
        program: dict[str, Any] = {"__name__": "page"}
        before, mark, _ = START.read_text(encoding="utf-8").partition("<!-- program -->")
        line = f"{before}{mark}".count("\n")
        execute(START, next(b for b in blocks(START) if b.line > line), program)
        shared = ("Block", "Model", "loss_fn", "batches")
        namespace |= {name: program[name] for name in shared}
    if page.name in FOR_LONG:
        options = {"xla_backend_optimization_level": "1"}
        monkeypatch.setattr(
            start,
            "KernelCache",
            lambda own, on, **more: KernelCache({**own, **options}, on, **more),
        )
    if page.name in WITH_CHECKPOINT:
        tiny_checkpoint.make_checkpoint()
        tiny_checkpoint.make_chats()
        Path("checkpoints/Qwen3-8B").symlink_to(Path("checkpoints/tiny").resolve())
    if page.name == "models.md":
        from gguf_writer import write_llama  # skips without gguf

        write_llama(Path("downloads/model-Q4_K_M.gguf"))
    if page.name == "chat.md":
        shutil.copytree("checkpoints/tiny", "checkpoints/mine")  # as if it had been run before
    try:
        with remembering():  # a page plans what it trains
            for source, block in parts:
                block = replace(block, code=block.code.replace(longer, shorter))
                printed = execute(source, block, namespace)
                assert as_said(block, printed), f"{source}:{block.line} prints\n{printed}"
    finally:
        # JAX never forgets a class of modules, nor its methods' globals, a trainer among them.
        namespace.clear()


def test_the_readme_has_the_program_of_the_quickstart():
    parts = [block.code for block in blocks(START)]
    programs = [ast.dump(ast.parse("".join(parts[:n]))) for n in range(1, len(parts))]
    assert ast.dump(ast.parse(blocks(ROOT / "README.md")[0].code)) in programs


MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "megatrain_jax").rglob("*.py"))
    if ">>>" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    found = doctest.testmod(importlib.import_module(name), optionflags=flags)
    assert found.attempted and not found.failed


@pytest.mark.exhaustive
def test_cells_of_the_other_notebook_run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Without a kernel, which would import Transformers and JAX again.
    folder = tmp_path / "docs" / "notebooks"
    folder.mkdir(parents=True)
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    monkeypatch.chdir(folder)
    tiny_checkpoint.make_checkpoint("HuggingFaceTB/SmolLM2-135M-Instruct")
    shell = InteractiveShell(ipython_dir=str(tmp_path))
    try:
        # Twice, as whoever opens it again does: the second run goes on with a run that is done.
        for code in 2 * cells(FINETUNE, "code"):
            shell.run_cell(code).raise_error()
        before, after = (shell.user_ns[name] for name in ("before", "after"))
        assert after["eval_loss"] < before["loss"] - 0.5
    finally:
        shell.reset()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=short)
def test_a_notebook_is_kept_with_outputs_of_its_own_code_or_without(notebook: Path):
    content = json.loads(notebook.read_text(encoding="utf-8"))
    outputs = [cell["outputs"] for cell in content["cells"] if cell["cell_type"] == "code"]
    assert any(outputs) == (notebook.stem == "first_steps")
    # Neither progress nor warnings.
    assert not [o for some in outputs for o in some if o.get("name") == "stderr"]
    assert not any("widget" in kind for some in outputs for o in some for kind in o.get("data", ()))
    if any(outputs):
        code = "\0".join(cells(notebook, "code"))
        digest = hashlib.sha256(code.encode()).hexdigest()[:16]
        assert content["metadata"]["outputs_of"] == digest, "run `python docs/site/hooks.py`"
        text = json.dumps(outputs)
        assert all(word in text for word in SHOWN[notebook.stem])


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=short)
def test_links_lead_somewhere(page: Path):
    lost = [target for target in links(page) if not (page.parent / target).exists()]
    assert not lost


def test_a_row_of_a_table_is_one_line():
    lines = [(short(page), line) for page in PAGES for line in page.read_text().splitlines()]
    assert not [line for line in lines if line[1].startswith("|") and not line[1].endswith("|")]


@pytest.mark.parametrize("name", ["", *".callbacks .data .losses .models .objectives".split()])
def test_reference_has_every_public_name(name: str):
    package = f"megatrain_jax{name}"
    public = importlib.import_module(package).__all__
    pages = [ROOT / "docs" / "api.md", *(ROOT / "docs" / "api").glob("*.md")]
    listed = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    lines = [line for line in listed.splitlines() if line.startswith(f"::: {package}.")]
    assert set(public) <= {line.rpartition(".")[2] for line in lines}


# What cells of the notebooks print or show.
SHOWN = {
    "first_steps": ["iB", "eval_worst"],
    "finetune": ["iB", "model.safetensors"],
}


@pytest.mark.exhaustive
def test_site_is_built_with_outputs_of_notebooks_and_with_the_arguments_that_there_are(
    tmp_path: Path,
):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    # The theme's makers advertise on every build.
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    # An environment may find nbconvert in another one's folder, but not its templates.
    found = importlib.util.find_spec("nbconvert")
    assert found is not None and found.origin is not None
    env["JUPYTER_PATH"] = str(Path(found.origin).parents[4] / "share/jupyter")
    built = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert not built.returncode, built.stderr
    assert (tmp_path / "experiments/results/pictures/timeline-clip-least.png").exists()
    assert SHOWN.keys() == {notebook.stem for notebook in NOTEBOOKS}
    for name, words in SHOWN.items():
        outputs = shown_outputs(tmp_path / "notebooks" / name / "index.html")
        assert all(word in outputs for word in words), outputs
    said, had = {}, {}
    for path, signature in rendered(tmp_path):
        value, takes_self = documented(path)
        said[path] = parameters_said(signature, value)
        had[path] = parameters_had(value, takes_self)
    assert {"megatrain_jax.fit", "megatrain_jax.Trainer.step", "megatrain_jax.Plan"} <= said.keys()
    assert said == had
