"""The settings of `megatrain-jax merge`."""

from dataclasses import dataclass

from megatrain_jax._src.common import checks


@dataclass(frozen=True, kw_only=True)
class MergeSettings:
    """Merges adapters into their base model, and writes the result as a checkpoint.

    Attributes:
        adapter: Folder of the adapters, in PEFT's format, or a name on the Hugging Face Hub.
        out: Folder to write.
        base: Folder or name of the base model; default: the one that the adapters name.
    """

    adapter: str
    out: str
    base: str | None = None

    def __post_init__(self) -> None:
        """Checks that paths are not empty.

        Raises:
            ValueError: If one is.
        """
        for name in ("adapter", "out"):
            checks.path(name, getattr(self, name))
