"""LoRA for any Flax NNX model: trains a few small matrices beside frozen ones.

To the library, adapters are ordinary parameters, selected by `trainable`. All remaining parameters
are frozen: no gradient, no optimizer state, and transfers in one direction only.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flax import nnx

from megatrain_jax import Trainer
from megatrain_jax._src.common import checks
from megatrain_jax._src.common.suggestions import ExplainedAttributes
from megatrain_jax._src.lm.models.decoder import Decoder
from megatrain_jax._src.lm.models.layers import ExpertMatrix
from megatrain_jax._src.lm.models.low_rank import (
    KNOWN,
    Matrix,
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
from megatrain_jax._src.lm.models.saved_modules import saved_modules
from megatrain_jax._src.lm.models.tensors import some

TRAINABLE = r"(^|/)lora_[AB]$"
DORA = r"(^|/)lora_([AB]|magnitude)$"


@dataclass(frozen=True, kw_only=True)
class Lora(ExplainedAttributes):
    """A model with adapters: ``fit(a.model, ..., params=a.params, trainable=a.trainable)``.

    Attributes:
        model: The given model, or the given function that builds it, with adapters added.
        params: The given parameters with fresh adapters added; None if none were given.
        trainable: Pattern that matches the adapters' parameters: `lora_A` (..., rank, in) and
            `lora_B` (..., out, rank) beside the matrices, and all parameters of `modules_to_save`.
            Make it part of a larger pattern to train more.
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
    modules_to_save: Sequence[str] = (),
    dora: bool = False,
    seed: int = 0,
    params: Any = None,
) -> Lora:
    """Adds low-rank adapters to matrices of a model (LoRA, https://arxiv.org/abs/2106.09685).

    Instead of `W x` a module computes `W x + scale * B A dropout(x)`. Fresh adapters change
    nothing: `A` is uniform within 1 / sqrt(in) and `B` is zero, as in PEFT. Both are fp32 and use
    the precision of ordinary parameters while they train. All existing parameters keep their paths.

    Args:
        model: An `nnx.Module`, which is not modified, or a function that builds one, which is only
            traced here for shapes.
        targets: A regular expression to search for in a matrix's path, such as
            `r"self_attn/(q|v)_proj"`, or a predicate of the path. Eligible are matrices of
            `nnx.Linear`, `nnx.LinearGeneral` and a `Decoder`'s layers, including experts, each with
            its own adapters. Parameters with one axis are skipped, so `"layers/"` selects all
            matrices of layers. The module must be called: code that reads a matrix directly doesn't
            see its adapters.
        rank: Rows of `A` and columns of `B`.
        alpha: The scale is `alpha / rank`.
        dropout: Fraction of a module's inputs hidden from its adapter, below 1; not for experts.
        rslora: Whether the scale is `alpha / sqrt(rank)` (https://arxiv.org/abs/2312.03732).
        modules_to_save: Modules that are trained whole beside the adapters and saved with them, as
            by PEFT: their paths, or the ends of these, such as `["embed_tokens", "lm_head"]`.
        dora: Whether the norm of each row of `W + scale * B A` is trained, too, as `lora_magnitude`
            (out,), in place of the norm that it has (DoRA, https://arxiv.org/abs/2402.09353); not
            for experts.
        seed: Seed of the initial numbers and of dropout.
        params: Parameters to start from, a tree of arrays under the model's own paths as for `fit`,
            such as those of `load_pretrained`.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If a number is out of range, `targets` selects no matrix or a parameter that
            can't have adapters, `modules_to_save` has a name without a module or a module that
            can't be saved, or the model already has adapters.
    """
    settings = _settings(rank, alpha, dropout, rslora, seed)
    settings = replace(settings, dora=checks.boolean("dora", dora))
    if isinstance(modules_to_save, str) or not all(isinstance(n, str) for n in modules_to_save):
        raise TypeError(checks.refused("modules_to_save", "a list of names", modules_to_save))
    chooses = _chooser(targets)
    if isinstance(model, nnx.Module):
        built = given = _copy(model)
        settings = replace(settings, saved=saved_modules(given, modules_to_save))
        _add(given, chooses, targets, settings)
    elif callable(model) and not isinstance(model, type):

        def built() -> nnx.Module:
            made = model()
            if not isinstance(made, nnx.Module):
                raise TypeError(
                    checks.refused("model", "a function that builds an nnx.Module", made)
                )
            own = replace(settings, saved=saved_modules(made, modules_to_save))
            _add(made, chooses, targets, own)
            return made

        # Shapes are enough to select matrices; the model is built when a run begins.
        given = nnx.eval_shape(built)
    else:
        allowed = "an nnx.Module or a function that builds one"
        raise TypeError(checks.refused("model", allowed, model))
    # Read from the model with adapters, not from `targets`, because a module may be shared.
    chosen = dict(adapted_modules(given))
    saved = next(iter(chosen.values())).lora_settings.saved
    pattern = DORA if dora else TRAINABLE
    return Lora(
        model=built,
        params=None if params is None else _with_fresh_adapters(params, chosen, settings),
        trainable="|".join([pattern, *(f"^{re.escape(path)}/" for path in saved)]),
        targets=tuple(_matrix_name(path, module) for path, module in chosen.items()),
    )


def merge_lora(model: nnx.Module | Trainer) -> nnx.Module:
    """Returns an equivalent model without adapters; its merged matrices are NumPy arrays.

    Args:
        model: A model with adapters, or its trainer. It is not modified.

    Returns:
        The model in its own classes. Matrices that had adapters are rounded to their dtype; all
        remaining parameters are the given ones, not copies.

    Raises:
        TypeError: If `model` is neither.
        ValueError: If it has no adapters.
    """
    # Modules change class in place, so this must be a copy of the user's model.
    copy = _copy(_model(model))
    for _, module in _adapted(copy):
        matrix = matrix_of(module)
        assert matrix is not None
        variable = getattr(module, matrix.name)
        variable.set_value(np.asarray(MergedMatrix(module), variable.dtype))
        remove_adapters(module)
    return copy


def without_lora(model: nnx.Module) -> nnx.Module:
    """Returns the model as it was before adapters were added; it shares all parameters.

    In a loss, it serves as the reference model of preference learning without a second copy.

    Args:
        model: A model with adapters; it is not modified.

    Raises:
        TypeError: If `model` is not an `nnx.Module`.
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
    """Adds adapters to the selected matrices, in place."""
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
            f"`targets`={targets!r} chooses {some(others)}, which can't have adapters: adapters "
            f"are for {KNOWN}. Choose fewer, and train the rest whole with a larger pattern "
            "`trainable`"
        )
    chosen = [matrices[name] for name in names if name in matrices]
    if not chosen:
        raise ValueError(
            f"`targets`={targets!r} chooses no matrix; there are {some(list(matrices))}"
        )
    _check_chosen(model, chosen, settings)
    both = [name_of(path) for path, _ in chosen if name_of(path) in settings.saved]
    if both:
        raise ValueError(f"`modules_to_save` and `targets` both choose {some(both)}")
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
    for name, value, off in (("dropout", settings.dropout, 0.0), ("dora", settings.dora, False)):
        if value and experts:
            raise ValueError(
                f"`{name}` is not for adapters of experts, such as {experts[0]}; pass {off}, or "
                "choose `targets` without them"
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
    """A fresh `lora_A` with shape and dtype; its numbers exist only while they are used."""

    dtype = np.dtype(np.float32)

    def __init__(self, path: ModulePath, shape: tuple[int, ...], settings: Settings):
        self.shape = shape
        self._path, self._settings = path, settings

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("fresh numbers can't be had without making them")
        return np.asarray(self._settings.initial_a(self._path, self.shape), dtype or self.dtype)


class _Norms:
    """The norms of a matrix's rows, computed when they are converted to an array."""

    dtype = np.dtype(np.float32)

    def __init__(self, weight: Any, matrix: Matrix, shape: tuple[int, ...]):
        self._weight, self._matrix, self.shape = weight, matrix, shape

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("norms can't be had without computing them")
        rows = self._matrix.rows(np.asarray(self._weight).astype(np.float32))
        return np.linalg.norm(rows, axis=1).astype(dtype or self.dtype)


def _with_fresh_adapters(
    params: Any, chosen: Mapping[ModulePath, Any], settings: Settings
) -> dict[str, Any]:
    """Returns the given parameters with the model's fresh adapters added."""
    tree = _as_dicts(params)
    if not isinstance(tree, dict):
        hint = "a checkpoint with adapters goes to `fit` as it is"
        raise TypeError(checks.refused("params", "nested dicts of arrays", params, hint))
    for path, module in chosen.items():
        at = tree
        for key in path:
            # Further missing parameters are reported when a run starts from this tree.
            at = at.setdefault(str(key), {})
        if settings.dora:
            matrix = matrix_of(module)
            assert matrix is not None
            at["lora_magnitude"] = _Norms(at.get(matrix.name), matrix, module.lora_magnitude.shape)
        at["lora_A"] = _Fresh(path, module.lora_A.shape, settings)
        # A broadcast zero takes four bytes for any shape; its elements are never stored.
        at["lora_B"] = np.broadcast_to(np.float32(0), module.lora_B.shape)
    return tree


def _as_dicts(tree: Any) -> Any:
    """The same tree as dicts with string keys; its leaves are not touched."""
    if isinstance(tree, list | tuple):
        tree = dict(enumerate(tree))
    if not isinstance(tree, Mapping):
        return tree
    return {str(key): _as_dicts(value) for key, value in tree.items()}
