"""Figures that a notebook shows as pictures; imported only when something is drawn.

Importing Matplotlib takes a quarter of the time of importing this library.
"""

import io
from typing import Any

from matplotlib.figure import Figure


class NotebookFigure(Figure):
    """A Matplotlib figure that a notebook shows, with any backend.

    It belongs to no window, so pyplot does not know it and does not show it again at a cell's end.
    `%matplotlib inline` registers a printer for `Figure` that takes precedence over `_repr_png_`.
    """

    def __init__(self, **options: Any):
        """Makes an empty figure with a layout without overlaps.

        Args:
            options: Arguments of Matplotlib's figure.
        """
        super().__init__(layout="constrained", **options)

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=100)
        return buffer.getvalue()
