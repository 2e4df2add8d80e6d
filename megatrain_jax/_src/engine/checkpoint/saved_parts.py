"""The numbers of microbatches and waves of a run that continues, if the plan may choose them."""

from contextlib import suppress
from dataclasses import replace
from os import PathLike

from megatrain_jax._src.engine.checkpoint import manifest, orbax
from megatrain_jax._src.engine.checkpoint.folder import (
    CheckpointError,
    in_first_process,
    local_path,
)
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.state.processes import Processes


def with_saved_parts(
    run: Options, path: str | PathLike[str], num_rows: int, processes: Processes
) -> Options:
    """The options with the newest checkpoint's numbers, if they divide a batch.

    On another machine the plan might choose different numbers, and random keys depend on them.

    Args:
        run: The options.
        path: The folder of the run's checkpoints.
        num_rows: Examples of a batch in this process.
        processes: The processes that share the run.

    Raises:
        TypeError: If `path` is not a path.
        ValueError: If Orbax can't read there.
    """
    folder = local_path(path, "continues")
    if run.microbatches != "auto":
        return run

    def newest() -> dict[str, int] | None:
        for step in reversed(orbax.candidates(folder)):
            with suppress(CheckpointError):
                return manifest.read(folder / str(step))["parts"]
        return None

    parts = in_first_process(processes, "the look for a batch's parts", newest)
    rows = num_rows * processes.count
    if parts is None or rows % (parts["microbatches"] * run.num_devices):
        return run
    return replace(run, **parts)
