"""Maps each of the model's parameters to tensors in a checkpoint's files.

Names differ by a prefix and by a family's renames. Experts are separate tensors in the files and
one stack in the model.
"""

from dataclasses import dataclass, replace

import jax
from flax import nnx

from megatrain_jax._src.lm.models.config import DecoderConfig
from megatrain_jax._src.lm.models.decoder import Decoder
from megatrain_jax._src.lm.models.families.llama import LLAMA
from megatrain_jax._src.lm.models.families.registry import FAMILIES
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.layers import Buffer
from megatrain_jax._src.lm.models.vision import VisionConfig

ParameterPath = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True)
class ParameterTensors:
    """One parameter of a decoder, and the tensors of a checkpoint's files that hold it.

    Attributes:
        path: The parameter's path in the model.
        shape: The parameter's shape.
        names: The tensors in the files: one, or one for each expert.
        stacked: Whether the tensors are stacked along a new first axis.
        trained: Whether it is a parameter rather than a buffer.
    """

    path: ParameterPath
    shape: tuple[int, ...]
    names: tuple[str, ...]
    stacked: bool
    trained: bool = True

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of each tensor."""
        return self.shape[1:] if self.stacked else self.shape


def parameter_tensors(config: DecoderConfig) -> tuple[ParameterTensors, ...]:
    """Returns the parameters and buffers of a decoder with their tensors, without any array."""
    # Only shapes, because the model itself may not fit this machine.
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    family, buffers = family_of(config), dict(_flat(model, Buffer))
    found = [_tensors_of(path, value.shape, family, config.vision) for path, value in leaves(model)]
    return tuple(replace(entry, trained=entry.path not in buffers) for entry in found)


def family_of(config: DecoderConfig) -> Family:
    """Returns the family that a configuration was read as; Llama for a hand-made one."""
    return FAMILIES[config.family or LLAMA.model_type]


def leaves(model: Decoder) -> list[tuple[ParameterPath, jax.Array]]:
    """Returns paths and values of a decoder's parameters and buffers; values may be just shapes."""
    return [*_flat(model, nnx.Param), *_flat(model, Buffer)]


def _flat(model: Decoder, kind: type[nnx.Variable]) -> list[tuple[ParameterPath, jax.Array]]:
    flat = nnx.to_flat_state(nnx.state(model, kind))
    return [(tuple(path), variable.get_value()) for path, variable in flat]  # type: ignore[misc]


def others(model: Decoder) -> list[ParameterPath]:
    """Returns the paths of variables that are no parameters, buffers or random keys."""
    kept = nnx.state(model, nnx.Not(nnx.Any(nnx.Param, Buffer, nnx.RngState, nnx.Intermediate)))
    return [tuple(path) for path, _ in nnx.to_flat_state(kept)]  # type: ignore[misc]


def _tensors_of(
    path: ParameterPath, shape: tuple[int, ...], family: Family, vision: VisionConfig | None
) -> ParameterTensors:
    if vision is not None and path[0] == "vision":
        name = vision.tensor_name(tuple(map(str, path[1:])))
        return ParameterTensors(path=path, shape=shape, names=(name,), stacked=False)
    parts = [name for part in map(str, path) if (name := family.renames.get(part, part))]
    if parts[0] == "lm_head":
        parts = [family.head, *parts[1:]]
    elif parts[0] != "score":
        parts = [family.body, *parts]
    if "experts" not in parts or family.stacked:
        return ParameterTensors(path=path, shape=shape, names=(".".join(parts),), stacked=False)
    at = parts.index("experts") + 1
    names = [".".join([*parts[:at], str(i), *parts[at:]]) for i in range(shape[0])]
    return ParameterTensors(path=path, shape=shape, names=tuple(names), stacked=True)
