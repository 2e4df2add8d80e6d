"""Draws the gallery's pictures by the code of the examples and of the pages.

    PYTHONPATH=tests/helpers python experiments/gallery_pictures.py [NAME ...]

Each runs in a folder of its own, as the tests run it. Names are those of pictures; without any, all
are drawn, which takes some minutes.
"""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tiny_checkpoint
from matplotlib.figure import Figure

from pages import blocks, execute
from places import ROOT

DOCS, EXAMPLES = ROOT / "docs", ROOT / "experiments" / "examples"


def run(page: Path) -> dict[str, Any]:
    """Runs a page's code and returns its names."""
    namespace: dict[str, Any] = {"__name__": "page"}
    # Other pages go on with the quickstart's names.
    before = [] if page.parent.name == "tutorials" else blocks(DOCS / "quickstart.md")[:1]
    if page.stem in ("chat", "preferences"):
        tiny_checkpoint.make_checkpoint()
        tiny_checkpoint.make_chats()
        Path("checkpoints/Qwen3-8B").symlink_to(Path("checkpoints/tiny").resolve())
    for block in [*before, *blocks(page)]:
        if page.stem == "preferences" and "result" in namespace:
            break  # further losses, without a picture
        print(execute(page, block, namespace), end="")
    return namespace


def draw_losses(names: dict[str, Any]) -> Figure:
    """The loss of a run."""
    return names["result"].history.plot()


def draw_digits(names: dict[str, Any]) -> Figure:
    """Ten images held out, with what they are taken for and, if that is wrong, what they are."""
    figure = Figure(figsize=(8, 1.4), layout="constrained")
    shown = names["test"][:10]
    for axes, row, guess in zip(figure.subplots(1, 10), shown, names["guesses"], strict=True):
        label = names["labels"][row]
        axes.imshow(names["images"][row], cmap="gray_r")
        axes.set_title(f"{guess}" if guess == label else f"{guess}, is {label}", fontsize=9)
        axes.set_axis_off()
    return figure


def draw_photograph(names: dict[str, Any]) -> Figure:
    """The photograph beside the network's picture of it."""
    figure = Figure(figsize=(5, 3), layout="constrained")
    pictures = {"photograph": names["photo"], "network": np.clip(names["drawn"], 0, 1)}
    for axes, (title, picture) in zip(figure.subplots(1, 2), pictures.items(), strict=True):
        axes.imshow(picture)
        axes.set_title(title)
        axes.set_axis_off()
    return figure


# By the picture's name: the page that has its code, and what draws it.
PAGES: dict[str, tuple[str, Callable[[dict[str, Any]], Figure]]] = {
    "pretraining": ("tutorials/pretraining", draw_losses),
    "chat": ("tutorials/chat", draw_losses),
    "digits": ("tutorials/vision", draw_digits),
    "picture": ("tutorials/equinox", draw_photograph),
    "muon": ("tutorials/muon", lambda names: names["figure"]),
    "preferences": ("preferences", draw_losses),
    "long_sequences": ("long_sequences", lambda names: names["plan"].timeline()),
}


def run_example(script: Path) -> None:
    """Runs an example, which draws its picture into the folder at hand."""
    command = [sys.executable, str(script)]
    if script.stem != "two_processes":
        subprocess.run(command, check=True)
        return
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    running = [subprocess.Popen([*command, str(index), str(port)]) for index in (0, 1)]
    if any([process.wait() for process in running]):
        raise RuntimeError(f"{script} has failed")


def main(names: list[str]) -> None:
    """Runs pages and examples that have pictures, and draws them."""
    scripts = {path.stem: path for path in sorted(EXAMPLES.glob("*.py"))}
    for name in names or [*PAGES, *scripts]:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            picture = DOCS / "pictures" / f"{name}.png"
            if name in scripts:
                run_example(scripts[name])
                os.replace(f"{name}.png", picture)
            else:
                page, draw = PAGES[name]
                draw(run(DOCS / f"{page}.md")).savefig(picture, dpi=110)


if __name__ == "__main__":
    main(sys.argv[1:])
