"""Lets pages link to files outside docs/ as they lie in the repository, without copies of them.

`../experiments/results/README.md` is right where the repository is browsed. On the site, which has
docs/ as its root, those files are added under their own paths, and the links follow.
"""

import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_FOLDERS = {
    "experiments": {".md", ".json", ".png", ".py"},
    "megatrain_jax": {".py"},
    "tests": {".py", ".txt"},
}
_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md")
# What a Markdown link or image points to, up to its anchor; or code, which has none.
_TARGET = re.compile(r"^```.*?^```|`[^`\n]+`|(?<=\]\()(?![a-z]+:|#)[^)\s#]+", re.M | re.S)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the files outside docs/ that pages may link to."""
    root = Path(config.docs_dir).parent
    for folder, suffixes in _FOLDERS.items():
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in suffixes and path.is_file():
                uri = path.relative_to(root).as_posix()
                files.append(File.generated(config, uri, abs_src_path=str(path)))
    for name in _PAGES:
        files.append(File.generated(config, name, abs_src_path=str(root / name)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links between docs/ and the rest of the repository into links within the site."""
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

    return _TARGET.sub(turned, markdown)


def _normal(path: PurePosixPath) -> PurePosixPath:
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts:
            parts.pop()
        else:
            parts.append(part)
    return PurePosixPath(*parts)
