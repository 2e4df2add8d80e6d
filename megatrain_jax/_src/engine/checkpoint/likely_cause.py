"""The likely cause of differences between a checkpoint's arrays and a run's, and the remedy."""

from collections.abc import Collection
from pathlib import Path

from megatrain_jax._src.engine.checkpoint.contents import PARAMS, STATE, VARIABLES, TreePath


def likely_cause(folder: Path, unequal: Collection[TreePath], only_dtypes: bool) -> str:
    """Sentences on the argument that probably differs from the run that saved a checkpoint.

    Args:
        folder: The checkpoint's folder.
        unequal: Paths of the arrays that differ, or that only the checkpoint or the run has.
        only_dtypes: Whether both have the same arrays in the same shapes.
    """
    if only_dtypes:
        return (
            "The likely cause is another `precision`, or jax_enable_x64: set both as in the run "
            "that saved it."
        )
    # A model's other parameters change the optimizer's state, too.
    if {path[0] for path in unequal} & {PARAMS, VARIABLES}:
        return (
            "The likely cause is another `model`: other layers, sizes or names. Build the model of "
            "the run that saved it, or choose another `checkpoint_dir` for this one."
        )
    if any(path[0] == STATE for path in unequal):
        return (
            "The likely cause is another `optimizer`, or another `trainable`: pass those of the "
            "run that saved it. To go on with new ones, start a new run from its parameters: "
            f"params={str(folder)!r}, with another `checkpoint_dir`."
        )
    return "The likely cause is another version of JAX, or another kind of random keys."
