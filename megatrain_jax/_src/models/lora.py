"""LoRA for any Flax NNX model: a few small matrices are trained beside those that stay as they are.

To the library adapters are parameters as any others, which `trainable` chooses. The others are
frozen, with all that follows: no gradient, no optimizer state, groups that travel one way only.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx

from megatrain_jax import Trainer
from megatrain_jax._src.common import checks
from megatrain_jax._src.models.decoder import Decoder
from megatrain_jax._src.models.layers import ExpertMatrix
from megatrain_jax._src.models.low_rank import (
    KNOWN,
    MergedMatrix,
    ModulePath,
    Settings,
    adapted_modules,
    add_adapters,
    matrix_of,
    modules_of,
    name_of,
    remove_adapters,
)
from megatrain_jax._src.models.tensors import some

TRAINABLE = r"(^|/)lora_[AB]$"


@dataclass(frozen=True, kw_only=True)
class Lora:
    """A model with adapters: ``fit(a.model, ..., params=a.params, trainable=a.trainable)``.

    Attributes:
        model: The model, or the function that builds it, as it was given.
        params: The parameters given, with fresh adapters among them; None if none were given.
        trainable: Pattern that finds the adapters' parameters: `lora_A` (..., rank, in) and
            `lora_B` (..., out, rank) beside the matrices. Trains more as part of a larger pattern.
        targets: Paths of the matrices that have adapters.
    """

    model: Any
    params: dict[str, Any] | None
    trainable: str
    targets: tuple[str, ...]


def lora(
    model: nnx.Module | Callable[[], nnx.Module],
    *,
    targets: str | Callable[[str], bool],
    rank: int = 16,
    alpha: float = 32.0,
    dropout: float = 0.0,
    rslora: bool = False,
    seed: int = 0,
    params: Any = None,
) -> Lora:
    """Gives matrices of a model low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685).

    Instead of `W x` a module computes `W x + scale * B A dropout(x)`. Fresh adapters change
    nothing: `A` is uniform within 1 / sqrt(in) and `B` is zero, as in PEFT. Both are in fp32 and
    have the precision of other parameters while they train. All other parameters keep their paths.

    Args:
        model: An `nnx.Module`, which stays as it is, or a function that builds one, of which only
            shapes are computed here.
        targets: A regular expression to be found in a matrix's path, such as
            `r"self_attn/(q|v)_proj"`, or a function of the path that tells. Matrices are those of
            `nnx.Linear`, `nnx.LinearGeneral` and a `Decoder`'s layers, experts among them, each of
            which has adapters of its own. Other parameters of one axis are left out, so that
            `"layers/"` chooses all matrices of layers. A module has to be called: whoever reads a
            matrix itself doesn't see its adapters.
        rank: Rows of `A` and columns of `B`.
        alpha: The scale is `alpha / rank`.
        dropout: Part of a module's inputs that its adapter doesn't see, below 1; not for experts.
        rslora: Whether the scale is `alpha / sqrt(rank)` (https://arxiv.org/abs/2312.03732).
        seed: Where fresh numbers and dropout's draws come from.
        params: Parameters to start from, a tree of arrays under the model's own paths as `fit`
            takes it, such as those of `load_pretrained`.

    Raises:
        TypeError: If an argument is of another kind.
        ValueError: If a number is out of its range, `targets` chooses no matrix or what can't have
            adapters, or the model has adapters already.
    """
    settings = _settings(rank, alpha, dropout, rslora, seed)
    chooses = _chooser(targets)
    if isinstance(model, nnx.Module):
        built = given = _copy(model)
        _add(given, chooses, targets, settings)
    elif callable(model) and not isinstance(model, type):

        def built() -> nnx.Module:
            made = model()
            if not isinstance(made, nnx.Module):
                raise TypeError(
                    checks.refused("model", "a function that builds an nnx.Module", made)
                )
            _add(made, chooses, targets, settings)
            return made

        # Shapes are enough to choose by: the model is built when a run begins.
        given = nnx.eval_shape(built)
    else:
        allowed = "an nnx.Module or a function that builds one"
        raise TypeError(checks.refused("model", allowed, model))
    # Read off the model that has them, not off `targets`: a module may be shared.
    chosen = dict(adapted_modules(given))
    return Lora(
        model=built,
        params=None if params is None else _completed(params, chosen, settings),
        trainable=TRAINABLE,
        targets=tuple(_matrix_name(path, module) for path, module in chosen.items()),
    )


def merge_lora(model: nnx.Module | Trainer) -> nnx.Module:
    """Returns a model without adapters that computes the same, its matrices in NumPy arrays.

    Args:
        model: A model with adapters, or its trainer. Both stay as they are.

    Returns:
        The model in its own classes. Matrices that had adapters are rounded to their dtype; all
        other parameters are those given, not copies.

    Raises:
        TypeError: If `model` is neither.
        ValueError: If it has no adapters.
    """
    # Its modules change class in place, so never the user's own.
    copy = _copy(_model(model))
    for _, module in _adapted(copy):
        matrix = matrix_of(module)
        assert matrix is not None
        variable = getattr(module, matrix.name)
        variable.set_value(np.asarray(MergedMatrix(module), variable.dtype))
        remove_adapters(module)
    return copy


def without_lora(model: nnx.Module) -> nnx.Module:
    """Returns the model as it was before it got adapters; it shares all parameters.

    In a loss, it is the reference model of preference learning: no second copy is held.

    Args:
        model: A model with adapters, which keeps them.

    Raises:
        TypeError: If `model` is no `nnx.Module`.
        ValueError: If it has no adapters.
    """
    copy = _copy(_model(model))
    for _, module in _adapted(copy):
        remove_adapters(module)
    return copy


def _settings(rank: Any, alpha: Any, dropout: Any, rslora: Any, seed: Any) -> Settings:
    settings = Settings(
        rank=checks.integer("rank", rank),
        alpha=checks.number("alpha", alpha, above=0),
        dropout=checks.number("dropout", dropout, least=0),
        rslora=checks.boolean("rslora", rslora),
        seed=checks.integer("seed", seed, least=0, most=2**32 - 1),
    )
    if settings.dropout >= 1:
        raise ValueError(checks.refused("dropout", "below 1", dropout))
    return settings


def _chooser(targets: Any) -> Callable[[str], bool]:
    if isinstance(targets, str):
        try:
            pattern = re.compile(targets)
        except re.error as error:
            raise ValueError(f"`targets`={targets!r} is no regular expression: {error}") from error
        return lambda name: pattern.search(name) is not None
    if not callable(targets):
        allowed = "a regular expression or a function of a path"
        raise TypeError(checks.refused("targets", allowed, targets))
    return lambda name: bool(targets(name))


def _add(
    model: nnx.Module, chooses: Callable[[str], bool], targets: Any, settings: Settings
) -> None:
    """Gives the matrices that were chosen their adapters, in place."""
    if any(adapted_modules(model)):
        raise ValueError("`model` has adapters already; merge_lora(model) makes them part of it")
    matrices = {
        _matrix_name(path, module): (path, module)
        for path, module in modules_of(model)
        if matrix_of(module) is not None
    }
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    shapes = {name_of(path): variable.shape for path, variable in state}  # type: ignore[arg-type]
    names = [name for name in shapes if chooses(name)]
    others = [name for name in names if name not in matrices and len(shapes[name]) > 1]
    if others:
        raise ValueError(
            f"`targets`={targets!r} chooses {some(others)}, which can't have adapters: these are "
            f"for {KNOWN}. Choose less, and train others whole by a larger pattern `trainable`"
        )
    chosen = [matrices[name] for name in names if name in matrices]
    if not chosen:
        raise ValueError(
            f"`targets`={targets!r} chooses no matrix; there are {some(list(matrices))}"
        )
    _check_chosen(model, chosen, settings)
    for path, module in chosen:
        add_adapters(path, module, settings)


def _check_chosen(
    model: nnx.Module, chosen: list[tuple[ModulePath, Any]], settings: Settings
) -> None:
    if isinstance(model, Decoder) and ("lm_head",) in dict(chosen):
        raise ValueError(
            "`targets` chooses lm_head/weight, which losses read as it is: train it whole, with a "
            "`trainable` that finds lm_head, too"
        )
    experts = [name_of(path) for path, module in chosen if isinstance(module, ExpertMatrix)]
    if settings.dropout and experts:
        raise ValueError(
            f"`dropout` is not for adapters of experts, such as {experts[0]}; pass 0.0, or choose "
            "`targets` without them"
        )


def _matrix_name(path: ModulePath, module: Any) -> str:
    matrix = matrix_of(module)
    assert matrix is not None
    return name_of((*path, matrix.name))


def _model(given: Any) -> nnx.Module:
    model = given.model if isinstance(given, Trainer) else given
    if not isinstance(model, nnx.Module):
        raise TypeError(checks.refused("model", "an nnx.Module with adapters", model))
    return model


def _copy(model: nnx.Module) -> nnx.Module:
    """A copy of a model's modules that shares its arrays."""
    return nnx.merge(*nnx.split(model), copy=True)


def _adapted(model: nnx.Module) -> list[tuple[ModulePath, Any]]:
    found = list(adapted_modules(model))
    if not found:
        raise ValueError("`model` has no adapters; models.lora gives it some")
    return found


class _Fresh:
    """A fresh `lora_A`: it has a shape and a dtype, and its numbers only while they are used."""

    dtype = np.dtype(np.float32)

    def __init__(self, path: ModulePath, shape: tuple[int, ...], settings: Settings):
        self.shape = shape
        self._path, self._settings = path, settings

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("fresh numbers can't be had without making them")
        return np.asarray(self._settings.initial_a(self._path, self.shape), dtype or self.dtype)


def _completed(params: Any, chosen: Mapping[ModulePath, Any], settings: Settings) -> dict[str, Any]:
    """Returns the parameters given with fresh adapters among them, those that the model has."""
    tree = _as_dicts(params)
    if not isinstance(tree, dict):
        hint = "a checkpoint with adapters goes to `fit` as it is"
        raise TypeError(checks.refused("params", "nested dicts of arrays", params, hint))
    for path, module in chosen.items():
        at = tree
        for key in path:
            # What the parameters lack otherwise is named when a run starts from them.
            at = at.setdefault(str(key), {})
        at["lora_A"] = _Fresh(path, module.lora_A.shape, settings)
        # Zeros of any shape in four bytes; read one by one, never held.
        at["lora_B"] = np.broadcast_to(np.float32(0), module.lora_B.shape)
    return tree


def _as_dicts(tree: Any) -> Any:
    """The same tree in dicts with names for keys; its leaves are not looked at."""
    if isinstance(tree, list | tuple):
        tree = dict(enumerate(tree))
    if not isinstance(tree, Mapping):
        return tree
    return {str(key): _as_dicts(value) for key, value in tree.items()}
