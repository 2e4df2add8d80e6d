"""`megatrain-jax merge`: from adapters and their base model to a checkpoint."""

from pathlib import Path

from megatrain_jax import models
from megatrain_jax._src.lm.cli.errors import as_command_errors
from megatrain_jax._src.lm.cli.merge_settings import MergeSettings


def run(settings: MergeSettings) -> int:
    """Merges; returns the exit status.

    Raises:
        CommandError: If the adapters don't fit the base model, or `out` is not new.
    """
    out = Path(settings.out).expanduser()
    with as_command_errors():
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise FileExistsError(f"there is something at `out` = {out} already: choose another")
        print(f"merged: {models.merge_adapter(settings.adapter, out, base=settings.base)}")
    return 0
