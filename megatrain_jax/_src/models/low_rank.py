"""Modules with low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685), and their merging.

A module with adapters keeps its parameters under their paths, so that checkpoints of the model fit
as before; its class is exchanged for one that computes a term more. `nnx.Linear(3, 5)` of rank 2:

    kernel  (3, 5)    as it was
    lora_A  (2, 3)    uniform within 1 / sqrt(3)
    lora_B  (5, 2)    zeros
    y = x @ kernel + bias + scale * (dropout(x) @ lora_A.T) @ lora_B.T

Matrices in a stack, as those of experts, have stacks of adapters: (experts, 2, 3), (experts, 5, 2).
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

from megatrain_jax._src.models.expert_blocks import LowRank
from megatrain_jax._src.models.layers import ExpertMatrix, Linear

ModulePath = tuple[str | int, ...]
_PLAIN = "plain_class"  # the attribute of a class with adapters that holds the one without
KNOWN = "nnx.Linear, nnx.LinearGeneral and the layers of models.Decoder"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of all adapters of a model.

    Attributes:
        rank: Rows of `lora_A`.
        alpha: The scale is alpha / rank, or alpha / sqrt(rank).
        dropout: Part of a module's inputs that its adapter doesn't see.
        rslora: Whether the scale is alpha / sqrt(rank) (https://arxiv.org/abs/2312.03732).
        seed: Where the numbers of `lora_A` and of dropout come from.
    """

    rank: int
    alpha: float
    dropout: float
    rslora: bool
    seed: int

    @property
    def scale(self) -> float:
        """The factor of what adapters add."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def initial_a(self, path: ModulePath, shape: tuple[int, ...]) -> Float[Array, "*num rank in"]:
        """Returns a fresh `lora_A` of a module, distributed as PEFT's (Kaiming's, a = sqrt(5))."""
        bound = shape[-1] ** -0.5
        return jax.random.uniform(self._key(path), shape, jnp.float32, -bound, bound)

    def dropout_rngs(self, path: ModulePath) -> nnx.Rngs:
        """Returns the source of a module's dropout."""
        return nnx.Rngs(dropout=jax.random.fold_in(self._key(path), 1))

    def _key(self, path: ModulePath) -> Array:
        # Of the path alone, so that a layer's numbers are the same whatever else has adapters.
        return jax.random.fold_in(jax.random.key(self.seed), zlib.crc32(name_of(path).encode()))


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The place of a module's matrix among its parameters, and its form.

    Attributes:
        name: The parameter's name.
        num_in: Number of its axes that the input is multiplied along.
        num_out: Number of its axes that the output has.
        out_first: Whether the output's axes come before the input's.
    """

    name: str
    num_in: int = 1
    num_out: int = 1
    out_first: bool = False

    def shapes(self, shape: tuple[int, ...], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of both adapters of a matrix of this shape."""
        stack = shape[: len(shape) - self.num_in - self.num_out]
        axes = shape[len(stack) :]
        first = self.num_out if self.out_first else self.num_in
        sizes = math.prod(axes[:first]), math.prod(axes[first:])
        size_out, size_in = sizes if self.out_first else sizes[::-1]
        return (*stack, rank, size_in), (*stack, size_out, rank)


def matrix_of(module: Any) -> Matrix | None:
    """Returns the matrix of a module that can have adapters, None for any other."""
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
    """Returns a path as checkpoints and patterns have it, such as "layers/0/mlp"."""
    return "/".join(map(str, path))


def _adapted_product(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """A product with a matrix, and that of its adapters: `__call__` of a module that has some."""
    # Whatever it is, with its own biases, precision and options.
    y = self.plain_class.__call__(self, x, *args, **kwargs)
    axes = getattr(self, "axis", (-1,))
    x = jnp.moveaxis(x, axes, range(-len(axes), 0))
    # All axes that the product takes as one, which is how both adapters have them.
    x = x.reshape(*x.shape[: x.ndim - len(axes)], -1)
    if self.lora_settings.dropout:
        x = self.lora_dropout(x)
    a, b = self.lora_A[...], self.lora_B[...]
    added = self.lora_settings.scale * ((x.astype(a.dtype) @ a.T) @ b.T)
    return y + added.reshape(y.shape).astype(y.dtype)


def _adapted_experts(self: Any) -> LowRank:
    """The matrices of all experts with their adapters: `__call__` of a module that has some."""
    weight = self.plain_class.__call__(self)
    # The scale goes into an adapter, which is far smaller than what it is added to.
    scaled = (self.lora_settings.scale * self.lora_B[...]).astype(weight.dtype)
    return LowRank(weight, self.lora_A[...].astype(weight.dtype), scaled)


@functools.cache
def _adapted_class(plain: type) -> type:
    """The class of modules of a class with adapters; one for each, as JAX compares classes.

    It has one base: only then may an object's class be exchanged for it.
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
    """Gives a module fresh adapters, in place; it must have a `matrix_of`."""
    matrix = matrix_of(module)
    assert matrix is not None and not is_adapted(module)
    shapes = matrix.shapes(getattr(module, matrix.name).shape, settings.rank)
    # In place of a module around it, which would change the paths of its parameters.
    module.__class__ = _adapted_class(type(module))
    module.lora_A = nnx.Param(settings.initial_a(path, shapes[0]))
    module.lora_B = nnx.Param(jnp.zeros(shapes[1], jnp.float32))
    module.lora_settings = settings
    if settings.dropout:
        module.lora_dropout = nnx.Dropout(settings.dropout, rngs=settings.dropout_rngs(path))


def remove_adapters(module: Any) -> None:
    """Gives a module its own class back, in place."""
    for name in [name for name in vars(module) if name.startswith("lora_")]:
        delattr(module, name)
    module.__class__ = module.plain_class


def modules_of(model: nnx.Module) -> list[tuple[ModulePath, Any]]:
    """Returns all modules of a model with their paths, in the order of these; shared ones once."""
    nodes = nnx.iter_graph(model)
    return [(tuple(p), node) for p, node in nodes if isinstance(node, nnx.Module)]  # type: ignore


def adapted_modules(model: nnx.Module) -> Iterator[tuple[ModulePath, Any]]:
    """Gives the modules of a model that have adapters, with their paths."""
    return ((path, module) for path, module in modules_of(model) if is_adapted(module))


class MergedMatrix:
    """The matrix that a module with adapters multiplies by, computed when it becomes an array.

    Attributes:
        shape: Its shape.
        dtype: The dtype of the matrix without adapters; the array is in fp32 or wider.
    """

    def __init__(self, module: Any, index: int | None = None):
        """Refers to a module's matrix, or to the one of this number in its stack."""
        self._module, self._index = module, index
        matrix = matrix_of(module)
        assert matrix is not None
        self._matrix = matrix
        weight = getattr(module, matrix.name)
        self.shape = tuple(weight.shape) if index is None else tuple(weight.shape[1:])
        self.dtype = np.dtype(weight.dtype)

    def __iter__(self) -> Iterator["MergedMatrix"]:
        """Gives the matrices of a stack."""
        return (MergedMatrix(self._module, i) for i in range(self.shape[0]))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Computes the numbers; nothing of them is kept here."""
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
        # Added in fp32 at least: an adapter's change may be below what a bfloat16 weight resolves.
        total = weight + added.reshape(weight.shape).astype(wide)
        return total if dtype is None else total.astype(dtype)
