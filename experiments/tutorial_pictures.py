"""Draws the pictures of the tutorials and of docs/long_sequences.md by the pages' own code.

    PYTHONPATH=tests python experiments/tutorial_pictures.py

Each page's blocks of Python run in a folder of their own, as the tests run them.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pages import ROOT, blocks, execute

DOCS = ROOT / "docs"


def run(page: Path) -> dict[str, Any]:
    """Runs a page's code and returns its names."""
    namespace: dict[str, Any] = {"__name__": "page"}
    # Other pages go on with the quickstart's names.
    before = [] if page.parent.name == "tutorials" else blocks(DOCS / "quickstart.md")[:1]
    for block in [*before, *blocks(page)]:
        print(execute(page, block, namespace), end="")
    return namespace


def draw_losses(names: dict[str, Any]) -> Figure:
    """The loss of the language model."""
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


PAGES: dict[str, tuple[str, Callable[[dict[str, Any]], Figure]]] = {
    "tutorials/pretraining": ("pretraining", draw_losses),
    "tutorials/vision": ("digits", draw_digits),
    "tutorials/equinox": ("picture", draw_photograph),
    "tutorials/muon": ("muon", lambda names: names["figure"]),
    "long_sequences": ("long_sequences", lambda names: names["plan"].timeline()),
}


def main() -> None:
    """Runs the pages that have pictures and draws them."""
    for page, (picture, draw) in PAGES.items():
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            draw(run(DOCS / f"{page}.md")).savefig(DOCS / "pictures" / f"{picture}.png", dpi=110)


if __name__ == "__main__":
    main()
