"""Modules with low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685), and their merging.

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
import types
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from megatrain_jax._src.lm.models.expert_functions import LowRank
from megatrain_jax._src.lm.models.layers import ExpertMatrix, Linear

ModulePath = tuple[str | int, ...]
_PLAIN = "plain_class"  # attribute of an adapted class that holds the original class
KNOWN = "nnx.Linear, nnx.LinearGeneral and the layers of models.Decoder"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of all adapters of a model.

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


def matrix_of(module: Any) -> Matrix | None:
    """Returns the matrix of a module that can have adapters, or None."""
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
    assert matrix is not None
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
    assert matrix is not None and not is_adapted(module)
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


class MergedMatrix:
    """The effective matrix of a module with adapters, computed when it is converted to an array.

    Attributes:
        shape: Its shape.
        dtype: The dtype of the matrix without adapters; the array is in fp32 or wider.
    """

    def __init__(self, module: Any, index: int | None = None):
        """Refers to a module's matrix, or to one matrix of its stack, by index."""
        self._module, self._index = module, index
        matrix = matrix_of(module)
        assert matrix is not None
        self._matrix = matrix
        weight = getattr(module, matrix.name)
        self.shape = tuple(weight.shape) if index is None else tuple(weight.shape[1:])
        self.dtype = np.dtype(weight.dtype)

    def __iter__(self) -> Iterator["MergedMatrix"]:
        """Yields the matrices of a stack."""
        return (MergedMatrix(self._module, i) for i in range(self.shape[0]))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Computes the numbers; nothing is kept here."""
        if copy is False:
            raise ValueError("a merged matrix can't be had without computing it")
        weight, a, b = (
            np.asarray(getattr(self._module, name)[...])
            for name in (self._matrix.name, "lora_A", "lora_B")
        )
        if self._index is not None:
            weight, a, b = weight[self._index], a[self._index], b[self._index]
        wide = np.promote_types(a.dtype, np.float32)
        added = self._module.lora_settings.scale * (b.astype(wide) @ a.astype(wide))
        added = added if self._matrix.out_first else added.swapaxes(-1, -2)
        # Added in at least fp32: an adapter's change may be smaller than a bfloat16 weight's
        # resolution.
        total = weight + added.reshape(weight.shape).astype(wide)
        if self._module.lora_settings.dora:
            norms = np.linalg.norm(self._matrix.rows(total), axis=1)
            factor = np.asarray(self._module.lora_magnitude[...]).astype(wide)
            factor = factor / (norms + (norms == 0))
            # One row of the merged matrix for each output, wherever its axes are.
            last = total.shape[total.ndim - self._matrix.num_out :]
            shape = (-1, *([1] * self._matrix.num_in)) if self._matrix.out_first else last
            total = total * factor.reshape(shape)
        return total if dtype is None else total.astype(dtype)
