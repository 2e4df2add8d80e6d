"""Figures that a notebook shows as pictures; imported only when something is drawn.

Matplotlib takes a quarter of the time that this library takes to be imported.
"""

import io
from typing import Any

from matplotlib.figure import Figure


class NotebookFigure(Figure):
    """A Matplotlib figure that a notebook shows, whatever its backend.

    It belongs to no window, so pyplot does not know it and does not show it again at a cell's end.
    `%matplotlib inline` registers a printer for `Figure` that goes before `_repr_png_`.
    """

    def __init__(self, **options: Any):
        """Makes an empty figure whose parts are laid out without overlap.

        Args:
            options: Arguments of Matplotlib's figure.
        """
        super().__init__(layout="constrained", **options)

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=100)
        return buffer.getvalue()
