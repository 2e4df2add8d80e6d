"""Modules that are trained whole beside adapters, and saved with them."""

from collections.abc import Sequence

from flax import nnx

from megatrain_jax._src.lm.models.decoder import Decoder
from megatrain_jax._src.lm.models.layers import ExpertMatrix
from megatrain_jax._src.lm.models.low_rank import modules_of, name_of
from megatrain_jax._src.lm.models.tensors import some


def saved_modules(model: nnx.Module, wanted: Sequence[str]) -> tuple[str, ...]:
    """The paths of modules with these names.

    Args:
        model: The model.
        wanted: Paths of modules, or the ends of paths. A whole path means only its own module.

    Raises:
        ValueError: If a name has no module, or one that PEFT could not save as it is trained.
    """
    modules = {name_of(path): module for path, module in modules_of(model) if path}
    found: dict[str, nnx.Module] = {}
    for given in wanted:
        name = given.replace(".", "/")
        ends = [path for path in modules if path.endswith(f"/{name}")]
        paths = [name] if name in modules else ends
        if not paths:
            raise ValueError(
                f"`modules_to_save` has {given!r}, but no module has this name; there are "
                f"{some(sorted({path.rpartition('/')[2] for path in modules}))}"
            )
        found |= {path: modules[path] for path in paths}
    for path, module in found.items():
        if isinstance(module, ExpertMatrix) or any(p.startswith(f"{path}/") for p in modules):
            raise ValueError(
                f"`modules_to_save` chooses {path}, which has further modules or experts: choose "
                "single matrices, embeddings and norms"
            )
    tied = isinstance(model, Decoder) and model.config.tie_embeddings
    if tied and "embed_tokens" in found:
        raise ValueError(
            "`modules_to_save` chooses embed_tokens, whose matrix is the head, too, and PEFT would "
            "load two: train it by a larger pattern `trainable`, and export the merged model"
        )
    return tuple(sorted(found))
