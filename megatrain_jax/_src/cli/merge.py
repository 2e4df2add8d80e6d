"""`megatrain-jax merge`: from adapters and their base model to a checkpoint."""

from pathlib import Path

from megatrain_jax import models
from megatrain_jax._src.cli.errors import checking
from megatrain_jax._src.cli.merge_settings import MergeSettings


def run(settings: MergeSettings) -> int:
    """Merges; returns the exit status.

    Raises:
        AskedWronglyError: If the adapters don't fit the base model, or `out` is not new.
    """
    out = Path(settings.out).expanduser()
    with checking():
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise FileExistsError(f"there is something at `out` = {out} already: choose another")
        print(f"merged: {models.merge_adapter(settings.adapter, out, base=settings.base)}")
    return 0
