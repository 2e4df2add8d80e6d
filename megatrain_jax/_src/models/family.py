"""What a family of open-weights models is to the library: how its files are read and written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatrain_jax._src.models.hf_fields import Fields


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of open-weights models; the files in `families/` make one each.

    Attributes:
        model_type: Its name in a `config.json`.
        architecture: The class of Transformers that its checkpoints are for.
        read: Function that returns the arguments of `DecoderConfig` for the fields of a
            `config.json`. A field that it doesn't read is refused.
        renames: Names in the files for those in the model, where they differ: a part of a
            parameter's path, such as `mlp`, to the part of a tensor's name, `block_sparse_moe`.
    """

    model_type: str
    architecture: str
    read: Callable[[Fields], dict[str, Any]]
    renames: Mapping[str, str] = field(default_factory=dict)
