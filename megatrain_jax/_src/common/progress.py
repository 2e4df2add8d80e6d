"""Progress bars: tqdm's, without its warning about notebooks that have no widgets."""

import warnings

from tqdm import TqdmWarning

# In a notebook without ipywidgets, bars are text, which needs no advice.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm

__all__ = ["tqdm"]
