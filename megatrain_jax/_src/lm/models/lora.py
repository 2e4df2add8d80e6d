"""LoRA (https://arxiv.org/abs/2106.09685) for any Flax NNX model, and its merging.

To the library, adapters are ordinary parameters, selected by `trainable`. All remaining parameters
are frozen: no gradient, no optimizer state, and transfers in one direction only.

A module with adapters keeps its parameters under their paths, so checkpoints of the model still
fit; its class is replaced by one that computes one more term. `nnx.Linear(3, 5)` with rank 2:

    kernel  (3, 5)    unchanged
    lora_A  (2, 3)    uniform within 1 / sqrt(3)
    lora_B  (5, 2)    zeros
    y = x @ kernel + bias + scale * (dropout(x) @ lora_A.T) @ lora_B.T

Stacked matrices, such as experts', have stacked adapters: (experts, 2, 3), (experts, 5, 2).
"""

import functools
import math
import re
import types
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

import megatrain_jax as mt
from megatrain_jax._src.common import checks
from megatrain_jax._src.common.computed_array import ComputedArray
from megatrain_jax._src.common.suggestions import ExplainedAttributes
from megatrain_jax._src.common.trees import may_train
from megatrain_jax._src.lm.models.decoder import Decoder
from megatrain_jax._src.lm.models.layers import ExpertMatrix, Linear
from megatrain_jax._src.lm.models.moe import LowRank
from megatrain_jax._src.lm.models.tensors import some

ModulePath = tuple[str | int, ...]
_PLAIN = "plain_class"  # attribute of an adapted class that holds the original class
KNOWN = "nnx.Linear, nnx.LinearGeneral and the layers of models.Decoder"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of a module's adapters; all but rank and alpha are one model's.

    Attributes:
        rank: Rows of `lora_A`.
        alpha: The scale is alpha / rank, or alpha / sqrt(rank).
        dropout: Fraction of a module's inputs hidden from its adapter.
        rslora: Whether the scale is alpha / sqrt(rank) (https://arxiv.org/abs/2312.03732).
        seed: Seed of `lora_A` and of dropout.
        saved: Paths of modules that are trained whole and saved with the adapters.
        dora: Whether each row of a merged matrix has a trained norm
            (https://arxiv.org/abs/2402.09353).
    """

    rank: int
    alpha: float
    dropout: float
    rslora: bool
    seed: int
    saved: tuple[str, ...] = ()
    dora: bool = False

    @property
    def scale(self) -> float:
        """The factor of the adapters' product."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def initial_a(self, path: ModulePath, shape: tuple[int, ...]) -> Float[Array, "*num rank in"]:
        """Returns a fresh `lora_A` of a module, distributed like PEFT's (Kaiming, a = sqrt(5))."""
        bound = shape[-1] ** -0.5
        return jax.random.uniform(self._key(path), shape, jnp.float32, -bound, bound)

    def dropout_rngs(self, path: ModulePath) -> nnx.Rngs:
        """Returns the random keys of a module's dropout."""
        return nnx.Rngs(dropout=jax.random.fold_in(self._key(path), 1))

    def _key(self, path: ModulePath) -> Array:
        # Derived from the path alone, so a layer's numbers don't depend on the remaining targets.
        return jax.random.fold_in(jax.random.key(self.seed), zlib.crc32(name_of(path).encode()))


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The name and the layout of a module's matrix.

    Attributes:
        name: The parameter's name.
        num_in: Number of its axes that are contracted with the input.
        num_out: Number of its axes that appear in the output.
        out_first: Whether the output's axes come before the input's.
    """

    name: str
    num_in: int = 1
    num_out: int = 1
    out_first: bool = False

    def shapes(self, shape: tuple[int, ...], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of both adapters for a matrix with this shape."""
        stack = shape[: len(shape) - self.num_in - self.num_out]
        axes = shape[len(stack) :]
        first = self.num_out if self.out_first else self.num_in
        sizes = math.prod(axes[:first]), math.prod(axes[first:])
        size_out, size_in = sizes if self.out_first else sizes[::-1]
        return (*stack, rank, size_in), (*stack, size_out, rank)

    def rows(self, weight: Any) -> Any:
        """Returns a matrix as (out, in), with each side's axes flattened to one."""
        if self.out_first:
            return weight.reshape(math.prod(weight.shape[: self.num_out]), -1)
        return weight.reshape(math.prod(weight.shape[: self.num_in]), -1).T


def matrix_of(module: Any) -> Matrix:
    """Returns the matrix of a module that can have adapters."""
    found = find_matrix(module)
    assert found is not None
    return found


def find_matrix(module: Any) -> Matrix | None:
    """Returns the matrix of a module if it can have adapters, or None."""
    if isinstance(module, Linear | ExpertMatrix):
        return Matrix(name="weight", out_first=True)
    if isinstance(module, nnx.Linear):
        return Matrix(name="kernel")
    if isinstance(module, nnx.LinearGeneral) and not module.batch_axis:
        return Matrix(
            name="kernel", num_in=len(module.in_features), num_out=len(module.out_features)
        )
    return None


def name_of(path: ModulePath) -> str:
    """Returns a path as written in checkpoints and patterns, such as "layers/0/mlp"."""
    return "/".join(map(str, path))


def _adapted_product(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """`__call__` of an adapted module: the original product, plus the adapters' product."""
    # The original may have its own biases, precision and options.
    y = self.plain_class.__call__(self, x, *args, **kwargs)
    axes = getattr(self, "axis", (-1,))
    x = jnp.moveaxis(x, axes, range(-len(axes), 0))
    # The contracted axes are flattened to one, as in both adapters.
    x = x.reshape(*x.shape[: x.ndim - len(axes)], -1)
    if self.lora_settings.dropout:
        x = self.lora_dropout(x)
    a, b = self.lora_A[...], self.lora_B[...]
    added = self.lora_settings.scale * ((x.astype(a.dtype) @ a.T) @ b.T)
    if self.lora_settings.dora:
        added = _with_norms(self, x, y.reshape(added.shape), added, a, b)
    return y + added.reshape(y.shape).astype(y.dtype)


def _with_norms(self: Any, x: Any, y: Any, added: Any, a: Any, b: Any) -> Any:
    """The adapters' term with DoRA, which gives the merged matrix's rows trained norms.

    With the factor m of each row, the trained norm divided by that of `W + scale * B A`, it is
    `(m - 1) W x + m scale B A x`. As in PEFT, the divisor has no gradient, and dropout hides inputs
    of both products. A row of zeros, without a direction, stays one; in PEFT it becomes NaN.
    """
    matrix = matrix_of(self)
    rows = matrix.rows(getattr(self, matrix.name)[...]).astype(a.dtype)
    norms = jnp.linalg.norm(rows + self.lora_settings.scale * (b @ a), axis=1)
    factor = self.lora_magnitude[...] / jax.lax.stop_gradient(norms + (norms == 0))
    if self.lora_settings.dropout:
        plain = x.astype(a.dtype) @ rows.T
    else:
        bias = getattr(self, "bias", None)
        plain = y.astype(a.dtype)
        plain = plain if bias is None else plain - bias[...].astype(a.dtype).reshape(-1)
    return (factor - 1) * plain + factor * added


def _adapted_experts(self: Any) -> LowRank:
    """`__call__` of adapted experts: all experts' matrices with their adapters."""
    weight = self.plain_class.__call__(self)
    # The scale is applied to an adapter, which is far smaller than the result.
    scaled = (self.lora_settings.scale * self.lora_B[...]).astype(weight.dtype)
    return LowRank(weight, self.lora_A[...].astype(weight.dtype), scaled)


@functools.cache
def _adapted_class(plain: type) -> type:
    """The adapted subclass of a module class; one for each, because JAX compares classes.

    It has one base, because only then may an object's class be changed to it.
    """
    call = _adapted_experts if issubclass(plain, ExpertMatrix) else _adapted_product
    members = {"__call__": call, "__module__": __name__, _PLAIN: plain}
    return types.new_class(
        f"Adapted{plain.__name__}", (plain,), {}, lambda body: body.update(members)
    )


def is_adapted(module: Any) -> bool:
    """Whether a module has adapters."""
    return hasattr(type(module), _PLAIN)


def add_adapters(path: ModulePath, module: Any, settings: Settings) -> None:
    """Adds fresh adapters to a module, in place; it must have a `matrix_of`."""
    matrix = matrix_of(module)
    assert not is_adapted(module)
    shapes = matrix.shapes(getattr(module, matrix.name).shape, settings.rank)
    # Changing the class, not wrapping the module, keeps its parameters' paths.
    module.__class__ = _adapted_class(type(module))
    module.lora_A = nnx.Param(settings.initial_a(path, shapes[0]))
    module.lora_B = nnx.Param(jnp.zeros(shapes[1], jnp.float32))
    if settings.dora:
        rows = matrix.rows(getattr(module, matrix.name)[...])
        module.lora_magnitude = nnx.Param(jnp.linalg.norm(rows.astype(jnp.float32), axis=1))
    module.lora_settings = settings
    if settings.dropout:
        module.lora_dropout = nnx.Dropout(settings.dropout, rngs=settings.dropout_rngs(path))


def remove_adapters(module: Any) -> None:
    """Restores a module's original class, in place."""
    for name in [name for name in vars(module) if name.startswith("lora_")]:
        delattr(module, name)
    module.__class__ = module.plain_class


def modules_of(model: nnx.Module) -> list[tuple[ModulePath, Any]]:
    """Returns all modules of a model with their paths, in path order; shared modules once."""
    nodes = nnx.iter_graph(model)
    return [(tuple(p), node) for p, node in nodes if isinstance(node, nnx.Module)]  # type: ignore


def adapted_modules(model: nnx.Module) -> Iterator[tuple[ModulePath, Any]]:
    """Yields the modules of a model that have adapters, with their paths."""
    return ((path, module) for path, module in modules_of(model) if is_adapted(module))


def merged_matrix(module: Any, index: int | None = None) -> ComputedArray:
    """Returns the effective matrix of a module with adapters, in fp32 or wider; `dtype` is its own.

    Args:
        module: The module.
        index: The matrix's number in a stack; None for all.
    """
    matrix, settings = matrix_of(module), module.lora_settings
    whole = getattr(module, matrix.name)
    at = ... if index is None else index

    def numbers(dtype: Any) -> np.ndarray:
        names = (matrix.name, "lora_A", "lora_B")
        weight, a, b = (np.asarray(getattr(module, name).get_value())[at] for name in names)
        wide = np.promote_types(a.dtype, np.float32)
        added = settings.scale * (b.astype(wide) @ a.astype(wide))
        added = added if matrix.out_first else added.swapaxes(-1, -2)
        # Added in at least fp32: an adapter's change may be smaller than a bfloat16 weight's
        # resolution.
        total = weight + added.reshape(weight.shape).astype(wide)
        if settings.dora:
            norms = np.linalg.norm(matrix.rows(total), axis=1)
            factor = np.asarray(module.lora_magnitude.get_value()).astype(wide)
            factor = factor / (norms + (norms == 0))
            # One row of the merged matrix for each output, wherever its axes are.
            last = total.shape[total.ndim - matrix.num_out :]
            shape = (-1, *([1] * matrix.num_in)) if matrix.out_first else last
            total = total * factor.reshape(shape)
        return total

    shape = tuple(whole.shape if index is None else whole.shape[1:])
    return ComputedArray("a merged matrix", shape, whole.dtype, numbers)


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
    rank: int | Callable[[str], int] = 16,
    alpha: float | Callable[[str], float] = 32.0,
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
        rank: Rows of `A` and columns of `B`, or a function that returns them for a matrix's path.
        alpha: The scale is `alpha / rank`; also a number, or a function of the path.
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
    dropout = checks.number("dropout", dropout, least=0, below=1)
    if isinstance(modules_to_save, str) or not all(isinstance(n, str) for n in modules_to_save):
        raise TypeError(checks.refused("modules_to_save", "a list of names", modules_to_save))
    chooses = _chooser(targets)

    def settings(path: str) -> Settings:
        own_rank, own_alpha = (n(path) if callable(n) else n for n in (rank, alpha))
        return Settings(
            rank=checks.integer("rank", own_rank),
            alpha=checks.number("alpha", own_alpha, above=0),
            dropout=dropout,
            rslora=checks.boolean("rslora", rslora),
            seed=checks.integer("seed", seed, least=0, most=2**32 - 1),
            dora=checks.boolean("dora", dora),
        )

    def adapted(made: nnx.Module) -> nnx.Module:
        saved = saved_modules(made, modules_to_save)
        _add(made, chooses, targets, lambda path: replace(settings(path), saved=saved))
        return made

    if isinstance(model, nnx.Module):
        built = given = adapted(_copy(model))
    elif callable(model) and not isinstance(model, type):

        def built() -> nnx.Module:
            allowed = "a function that builds an nnx.Module"
            return adapted(checks.instance("model", model(), nnx.Module, allowed))

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
        params=None if params is None else _with_fresh_adapters(params, chosen),
        trainable="|".join([pattern, *(f"^{re.escape(path)}/" for path in saved)]),
        targets=tuple(_matrix_name(path, module) for path, module in chosen.items()),
    )


def merge_lora(model: "nnx.Module | mt.Trainer") -> nnx.Module:
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
        variable = getattr(module, matrix.name)
        variable.set_value(np.asarray(merged_matrix(module), variable.dtype))
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


def _chooser(targets: Any) -> Callable[[str], bool]:
    if isinstance(targets, str):
        pattern = checks.pattern("targets", targets)
        return lambda name: pattern.search(name) is not None
    if not callable(targets):
        allowed = "a regular expression or a function of a path"
        raise TypeError(checks.refused("targets", allowed, targets))
    return lambda name: bool(targets(name))


def _add(
    model: nnx.Module,
    chooses: Callable[[str], bool],
    targets: Any,
    settings: Callable[[str], Settings],
) -> None:
    """Adds adapters to the selected matrices, in place; `settings` returns those of a path."""
    if any(adapted_modules(model)):
        raise ValueError("`model` has adapters already; merge_lora(model) makes them part of it")
    matrices = {
        _matrix_name(path, module): (path, module)
        for path, module in modules_of(model)
        if find_matrix(module) is not None
    }
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    shapes = {name_of(path): x.shape for path, x in state if may_train(x)}  # type: ignore[arg-type]
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
            f"`targets`={targets!r} chooses no matrix; there are "
            f"{some([name for name in matrices if name in shapes])}"
        )
    if isinstance(model, Decoder) and ("lm_head",) in dict(chosen):
        raise ValueError(
            "`targets` chooses lm_head/weight, which losses read as it is: train it whole, with a "
            "`trainable` that finds lm_head, too"
        )
    experts = [name_of(path) for path, module in chosen if isinstance(module, ExpertMatrix)]
    own = [settings(_matrix_name(path, module)) for path, module in chosen]
    for name, value, off in (("dropout", own[0].dropout, 0.0), ("dora", own[0].dora, False)):
        if value and experts:
            raise ValueError(
                f"`{name}` is not for adapters of experts, such as {experts[0]}; pass {off}, or "
                "choose `targets` without them"
            )
    both = [name_of(path) for path, _ in chosen if name_of(path) in own[0].saved]
    if both:
        raise ValueError(f"`modules_to_save` and `targets` both choose {some(both)}")
    for (path, module), one in zip(chosen, own, strict=True):
        add_adapters(path, module, one)


def _matrix_name(path: ModulePath, module: Any) -> str:
    return name_of((*path, matrix_of(module).name))


def _model(given: Any) -> nnx.Module:
    model = given.model if isinstance(given, mt.Trainer) else given
    checks.instance("model", model, nnx.Module, "an nnx.Module with adapters")
    return model


def _copy(model: nnx.Module) -> nnx.Module:
    """A copy of a model's modules that shares its arrays."""
    return nnx.merge(*nnx.split(model), copy=True)


def _adapted(model: nnx.Module) -> list[tuple[ModulePath, Any]]:
    found = list(adapted_modules(model))
    if not found:
        raise ValueError("`model` has no adapters; models.lora gives it some")
    return found


def _norms(weight: Any, matrix: Matrix, shape: tuple[int, ...]) -> ComputedArray:
    """The norms of a matrix's rows."""

    def numbers(dtype: Any) -> np.ndarray:
        rows = matrix.rows(np.asarray(weight).astype(np.float32))
        return np.linalg.norm(rows, axis=1)

    return ComputedArray("norms of rows", shape, np.float32, numbers)


def _fresh(path: ModulePath, shape: tuple[int, ...], settings: Settings) -> ComputedArray:
    """A fresh `lora_A`."""

    def numbers(dtype: Any) -> np.ndarray:
        return np.asarray(settings.initial_a(path, shape))

    return ComputedArray("a fresh adapter", shape, np.float32, numbers)


def _with_fresh_adapters(params: Any, chosen: Mapping[ModulePath, Any]) -> dict[str, Any]:
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
        if module.lora_settings.dora:
            matrix = matrix_of(module)
            at["lora_magnitude"] = _norms(at.get(matrix.name), matrix, module.lora_magnitude.shape)
        at["lora_A"] = _fresh(path, module.lora_A.shape, module.lora_settings)
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
