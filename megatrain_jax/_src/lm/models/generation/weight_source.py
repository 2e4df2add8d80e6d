"""The models that generation can use, and their weights before they are on the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from megatrain_jax import FitResult, Trainer
from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models.arrays import check_floating
from megatrain_jax._src.lm.models.decoder import Decoder, policy_of
from megatrain_jax._src.lm.models.generation.sharing import Sharing
from megatrain_jax._src.lm.models.lora import Lora
from megatrain_jax._src.lm.models.pretrained import Pretrained, filled, without_dropout
from megatrain_jax._src.lm.models.rotary import Rope

_ALLOWED = (
    "a Trainer, a result of fit, a models.Pretrained, a models.Lora, a models.Decoder, or "
    "(model, params)"
)
Read = Callable[[Sequence[Any]], list[jax.Array]]
"""A function that reads parameters onto the device, given their places in the model."""


@dataclass(frozen=True, kw_only=True)
class LayerForm:
    """A layer without its arrays.

    Attributes:
        graph: Its modules.
        kind: The name of its class.
        rope: Its rotary embedding; None if it has none.
        borrows: Number of the layer with the keys and values that it uses; None for its own.
    """

    graph: nnx.GraphDef
    kind: str
    rope: Rope | None
    borrows: int | None


@dataclass(frozen=True, kw_only=True)
class ModelForm:
    """A decoder without its arrays.

    Attributes:
        ends: The decoder without layers.
        layers: Its layers.
    """

    ends: nnx.GraphDef
    layers: tuple[LayerForm, ...]


@dataclass(frozen=True, kw_only=True)
class WeightsPart:
    """The weights of a layer, or of all that is outside the layers.

    Attributes:
        leaves: Its parameters and buffers as the source has them.
        treedef: The structure from which the leaves make the modules' state.
        num_bytes: Bytes on the device.
    """

    leaves: tuple[Any, ...]
    treedef: Any
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class WeightSource:
    """A model whose weights are read part by part.

    Attributes:
        form: The model without its arrays.
        config: Its configuration.
        ends: The weights outside its layers.
        layers: The weights of its layers.
        dtype: The dtype that is computed with.
        device: The device of this process that it is computed on.
        bytes_at_rest: Bytes of the layers in pinned memory, if each read copies from there and the
            layers can be streamed; None otherwise.
        read: Reads some leaves.
        end_tokens: Ids of the tokens that end a text.
        sharing: The processes that write texts together. Each read needs all of them.
    """

    form: ModelForm
    config: Any
    ends: WeightsPart
    layers: tuple[WeightsPart, ...]
    dtype: Any
    device: Any
    bytes_at_rest: int | None
    read: Read
    end_tokens: tuple[int, ...]
    sharing: Sharing = Sharing()

    def weights(self, part: WeightsPart) -> Any:
        """Returns the weights of a part, on the device; they may still be in flight."""
        return jax.tree.unflatten(part.treedef, self.read(part.leaves))


def open_source(
    given: Any, dtype: Any = None, params: Literal["trained", "ema"] = "trained"
) -> WeightSource:
    """Opens the model that a user has passed.

    Args:
        given: See `generate`.
        dtype: See `generate`.
        params: See `generate`.

    Raises:
        TypeError: If it is not such a model.
        ValueError: If parameters are missing, or the dtype differs from a trainer's.
    """
    if dtype is not None:
        check_floating("dtype", dtype)
        dtype = jnp.dtype(dtype)
    if isinstance(given, FitResult):
        given = given.trainer
    if isinstance(given, Trainer):
        return _of_trainer(given, dtype, params)
    if params != "trained":
        raise ValueError(f"`params`={params!r} needs a trainer as `source`")
    if isinstance(given, Lora) and given.params is None:
        given = given.model
    if isinstance(given, Pretrained | Lora):
        given = given.model, given.params
    if isinstance(given, Decoder):
        return _of_arrays(without_dropout(given), dtype)
    if isinstance(given, tuple) and len(given) == 2:
        return _of_arrays(filled("source", *given, _ALLOWED), dtype)
    raise TypeError(checks.refused("source", _ALLOWED, given))


def _of_trainer(trainer: Trainer, dtype: Any, params: Literal["trained", "ema"]) -> WeightSource:
    copy = trainer.compute_copy(params)
    model = policy_of(copy.model)
    if not isinstance(model, Decoder):
        name = type(model).__qualname__
        raise TypeError(f"`source` trains a {name}, not a models.Decoder")
    if dtype not in (None, copy.dtype):
        raise ValueError(
            f"`dtype`={dtype} differs from {copy.dtype}, which this run computes in; leave it out"
        )

    def read(leaves: Sequence[Any]) -> list[jax.Array]:
        unread = [leaf for leaf in leaves if hasattr(leaf, "number")]
        arrays = iter(copy.read(unread))
        return [next(arrays) if hasattr(leaf, "number") else leaf for leaf in leaves]

    def at_rest(leaves: Sequence[Any]) -> int:
        return copy.bytes_at_rest([leaf for leaf in leaves if hasattr(leaf, "number")])

    source = _source(model, copy.dtype, copy.device, read, at_rest)
    ends, sharing = (*source.end_tokens, *trainer.end_tokens), Sharing(trainer.processes)
    return replace(source, end_tokens=ends, sharing=sharing)


def _of_arrays(model: Decoder, dtype: Any) -> WeightSource:
    params = jax.tree.leaves(nnx.state(model, nnx.Param), is_leaf=_is_array)
    if dtype is None:
        dtype = jnp.result_type(*{jnp.dtype(x.dtype) for x in params})
    numbers = {id(x) for x in params}

    def read(leaves: Sequence[Any]) -> list[jax.Array]:
        return [
            jnp.asarray(np.asarray(leaf) if not isinstance(leaf, jax.Array) else leaf, dtype)
            if id(leaf) in numbers
            else leaf
            for leaf in leaves
        ]

    return _source(model, dtype, jnp.zeros(()).device, read, None)


def _source(
    model: Decoder,
    dtype: Any,
    device: Any,
    read: Read,
    at_rest: Callable[[Sequence[Any]], int] | None,
) -> WeightSource:
    """Splits a model: each layer is a part, and everything outside the layers is one."""
    model = without_dropout(model)
    config, layers, forms = model.config, list(model.layers), []
    if config.scores:
        raise ValueError("`source` is a reward model, whose head scores tokens and writes none")
    parts = []
    for i, layer in enumerate(layers):
        graph, part = _part(layer, dtype)
        kind, borrows = type(layer).__name__, getattr(layer, "borrows", None)
        forms.append(LayerForm(graph=graph, kind=kind, rope=config.rope_of(i), borrows=borrows))
        parts.append(part)
    model.layers = nnx.List([])
    graph, ends = _part(model, dtype)
    return WeightSource(
        form=ModelForm(ends=graph, layers=tuple(forms)),
        config=config,
        ends=ends,
        layers=tuple(parts),
        dtype=dtype,
        device=device,
        bytes_at_rest=at_rest and sum(at_rest(part.leaves) for part in parts),
        read=read,
        end_tokens=config.end_tokens,
    )


def _part(module: nnx.Module, dtype: Any) -> tuple[nnx.GraphDef, WeightsPart]:
    graph, state = nnx.split(module)
    leaves, treedef = jax.tree.flatten(state, is_leaf=_is_array)
    itemsize = jnp.dtype(dtype).itemsize
    num_bytes = sum(int(np.prod(x.shape)) * itemsize for x in leaves)
    return graph, WeightsPart(leaves=tuple(leaves), treedef=treedef, num_bytes=num_bytes)


def _is_array(x: Any) -> bool:
    """Whether a leaf is an array, or has the shape and dtype of one."""
    return hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, nnx.Variable)
