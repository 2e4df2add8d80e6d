"""Connects the site with the repository around docs/.

- Pages link to files outside docs/, such as `../experiments/results/README.md`. The site has docs/
  as its root, so these files are added under their own paths, and the links follow.
- The front page, at `<!-- repository -->`, and all footers link to the address of the repository.
- `<!-- quickstart -->` in a page becomes the quickstart's program, which the page's code needs.
- The site runs the notebooks and shows their outputs; a tiny random checkpoint stands for the one
  that a notebook would download. `python docs/site/hooks.py` writes the outputs of
  `first_steps.ipynb` into the file itself, for those who read it elsewhere; others have none there.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
import textwrap
from functools import cache
from pathlib import Path, PurePosixPath

import nbclient
import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority, get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_FOLDERS = {
    "experiments": {".csv", ".md", ".json", ".jsonl", ".png", ".py", ".sh", ".yaml"},
    "megatrain_jax": {".json", ".py"},
    "tests": {".json", ".py", ".txt"},
}
_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md")
_NOTEBOOKS = "notebooks"
_CHECKPOINT = "HuggingFaceTB/SmolLM2-135M-Instruct"
_STANDS = (
    f"\n\nThe outputs on this page are of a random tiny checkpoint in the place of {_CHECKPOINT}."
)
# Seconds that a cell may take.
_LONGEST_CELL = 300
_LOG = get_plugin_logger(__name__)
# Executed notebooks, until the process ends.
_SCRATCH = tempfile.TemporaryDirectory()
# The target of a Markdown link or image without its anchor; or code, to be left alone.
_TARGET = re.compile(r"^```.*?^```|`[^`\n]+`|(?<=\]\()(?![a-z]+:|#)[^)\s#]+", re.M | re.S)


# Hosts, paths: `git@host:owner/name.git`, `ssh://git@host/owner/name`, `https://host/owner/name.git`.
_REMOTE = re.compile(
    r"(?:https?://|ssh://)?(?:[^@/\s]+@)?([\w-]+(?:\.[\w-]+)+)(?::\d+)?[:/](.+?)(?:\.git)?/?$"
)
# The page with the widest tables: they need the room of the table of contents.
_WIDE = "experiments/results/README.md"
_QUICKSTART = "<!-- quickstart -->"
_PROGRAM = "<!-- program -->"
_REPOSITORY = "<!-- repository -->"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Links all footers to the repository that this copy was cloned from, if there is one."""
    # Not the theme's `repo_url`, with which each reader's browser asks the host for figures.
    command = ["git", "-C", config.docs_dir, "remote", "get-url", "origin"]
    found = subprocess.run(command, capture_output=True, text=True)
    if not found.returncode and (address := web_address(found.stdout)):
        link = {"icon": "fontawesome/brands/git-alt", "link": address, "name": "Repository"}
        config.extra["social"] = [link]
    return config


def web_address(remote: str) -> str | None:
    """The page of a Git remote in a browser; None for a folder on this machine."""
    match = _REMOTE.match(remote.strip())
    return f"https://{match[1]}/{match[2]}" if match else None


@event_priority(100)  # before the plugin that shows notebooks
def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the files outside docs/ that pages may link to, and runs the notebooks."""
    root = Path(config.docs_dir).parent
    for notebook in sorted((root / "docs" / _NOTEBOOKS).glob("*.ipynb")):
        uri = f"{_NOTEBOOKS}/{notebook.name}"
        if old := files.get_file_from_path(uri):
            files.remove(old)
        folder = _executed(notebook.name, notebook.read_text(encoding="utf-8"))
        files.append(File(uri, str(folder), config.site_dir, config.use_directory_urls))
    for folder, suffixes in _FOLDERS.items():
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in suffixes and path.is_file():
                uri = path.relative_to(root).as_posix()
                files.append(File.generated(config, uri, abs_src_path=str(path)))
    for name in _PAGES:
        files.append(File.generated(config, name, abs_src_path=str(root / name)))
    return files


@cache  # `mkdocs serve` builds again after each change of any page
def _executed(name: str, text: str) -> Path:
    """Runs a notebook in an empty folder, and returns the folder that has it with outputs.

    A warning that a cell prints becomes a warning of the build, an error with `--strict`. A cell
    that fails ends the build.
    """
    notebook = run_notebook(name, text)
    scratch = Path(_SCRATCH.name)
    (scratch / _NOTEBOOKS).mkdir(exist_ok=True)
    nbformat.write(notebook, scratch / _NOTEBOOKS / name)
    return scratch


def run_notebook(name: str, text: str) -> nbformat.NotebookNode:
    """Runs a notebook in an empty folder at its place; its outputs are without progress bars."""
    notebook = nbformat.reads(text, as_version=4)
    experiments = Path(__file__).parents[2] / "experiments"
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root, "docs", _NOTEBOOKS)
        folder.mkdir(parents=True)
        Path(root, "experiments").symlink_to(experiments)
        if _CHECKPOINT in text:
            command = [sys.executable, experiments / "tiny_checkpoint.py", folder / _CHECKPOINT]
            subprocess.run(command, check=True)
            notebook.cells[0].source += _STANDS
        where = {"metadata": {"path": str(folder)}}
        nbclient.NotebookClient(notebook, timeout=_LONGEST_CELL, resources=where).execute()
    for cell in notebook.cells:
        outputs = cell.get("outputs", [])
        for printed in (o.text for o in outputs if o.output_type == "stream"):
            # Without ipywidgets, tqdm says so.
            if "Warning" in printed and "ipywidgets" not in printed:
                _LOG.warning(f"{name} prints a warning: {printed}")
        if cell.cell_type == "code":
            cell["outputs"] = [output for output in outputs if not _is_progress(output)]
        cell["metadata"].pop("execution", None)  # times
    return notebook


def code_digest(notebook: nbformat.NotebookNode) -> str:
    """A hash of a notebook's code, kept beside its outputs: these are of this code."""
    code = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def _is_progress(output: nbformat.NotebookNode) -> bool:
    """Whether an output is a progress bar: in a notebook's widget, or as text."""
    is_widget = "application/vnd.jupyter.widget-view+json" in output.get("data", {})
    return is_widget or output.get("name") == "stderr"


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links to the rest of the repository into links within the site; adds shared code."""
    if page.file.src_uri == _WIDE:
        page.meta["hide"] = ["toc"]
    # Where the page lies in the repository: those that `on_files` added lie outside docs/.
    inside = PurePosixPath(page.file.src_uri).parts[0] not in (*_FOLDERS, *_PAGES)
    here = PurePosixPath("docs" if inside else "") / PurePosixPath(page.file.src_uri).parent
    depth = len(PurePosixPath(page.file.src_uri).parent.parts)

    def turned(match: re.Match[str]) -> str:
        if match[0].startswith("`"):
            return match[0]
        target = _normal(here / match[0])
        on_site = target.relative_to("docs") if target.parts[:1] == ("docs",) else target
        return "../" * depth + on_site.as_posix()

    links = [f" · [Repository]({social['link']})" for social in config.extra.get("social", ())]
    markdown = _TARGET.sub(turned, markdown).replace(_QUICKSTART, _shared_code(config))
    return markdown.replace(_REPOSITORY, "".join(links))


def _shared_code(config: MkDocsConfig) -> str:
    """The quickstart's program for the other pages, folded."""
    text = (Path(config.docs_dir) / "quickstart.md").read_text(encoding="utf-8")
    text = text.partition(_PROGRAM)[2]
    code = re.findall(r"^```python\n.*?^```$", text, re.M | re.S)[0]
    title = "`Model`, `loss_fn` and `batches` of the quickstart"
    return f'??? example "{title}"\n\n' + textwrap.indent(code, "    ")


def _normal(path: PurePosixPath) -> PurePosixPath:
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts:
            parts.pop()
        else:
            parts.append(part)
    return PurePosixPath(*parts)


if __name__ == "__main__":
    file = Path(__file__).parents[1] / _NOTEBOOKS / "first_steps.ipynb"
    shown = run_notebook(file.name, file.read_text(encoding="utf-8"))
    shown.metadata["outputs_of"] = code_digest(shown)
    nbformat.write(shown, file)
