"""The precision of a run: dtypes for storage, for computation and for the optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import jax.numpy as jnp
from jax.typing import DTypeLike

from megatrain_jax._src.common.checks import refused, word
from megatrain_jax._src.common.other_libraries import DTYPES
from megatrain_jax._src.engine.options.precision_values import FLOAT8_HINT, FLOAT8_NAMES, canonical
from megatrain_jax._src.engine.state.hardware import Hardware

Rounding = Literal["stochastic", "nearest"]
_FLOAT32 = jnp.dtype("float32")
Products = Literal["float8"] | None


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of one run.

    The optimizer computes in fp32, or in float64 if the masters are float64. Numbers stored in a
    narrower dtype are widened before an update and rounded after it.

    If an attribute is a mapping, its keys are patterns of paths in a checkpoint, where `"*"` stands
    for any text: `"layers/*/bias"` or, for state, `"*/nu/*"`. The first matching pattern decides;
    arrays without a match are stored in fp32. A pattern that matches nothing is refused.

    Attributes:
        master: dtype of the trained parameters in the host: bfloat16, float32 or, if JAX's 64-bit
            types are enabled, float64; "int8" for codes with one scale per block of 128; or a
            mapping from paths to bfloat16, float32 or "int8". Without a mapping, parameters with
            one axis (norms, biases) are not coded but stay in fp32.
        compute: dtype that parameters are cast to before the model sees them: bfloat16, float16,
            float32 or float64; None for bfloat16, or float16 on a GPU without bfloat16. With
            float16 the loss is scaled dynamically for its gradients: steps with gradients that are
            not finite are skipped, and records have the metrics "loss_scale" and "skipped".
        frozen: dtype of parameters in the host that are not trained; None for the masters' dtype,
            with a warning if that is "int8". bfloat16 halves their memory and transfer time. int8,
            with one scale per block of 128, quarters them, and also applies to norms and biases.
            "nf4" stores matrices in the model's blocks in 4.13 bits, as QLoRA does; embeddings,
            head, norms and biases are bfloat16.
        state: storage of optimizer state with the parameters' shapes, such as Adam's moments:
            bfloat16; "int8" or "int4" for codes with one scale per block of 128; None (or float32)
            for the optimizer's own dtype; or a mapping from paths to these. Without a mapping,
            codes apply to matrices with these exceptions: the state of parameters with one axis
            (norms, biases) stays in fp32, and so does state if an optimizer takes the root of its
            difference; state that begins as a copy of parameters is stored in bfloat16.
        sums: dtype of the stored sums of gradients, if a step has several microbatches or
            several blocks read a parameter: float32, or bfloat16 with half the memory and transfer
            time. Gradients are summed in fp32 within a wave and rounded at its end, so that results
            depend on the number of waves.
        products: "float8" to compute matrix products of the batch with parameters in float8, in
            forward and backward; None for the dtypes that the model asks for. Products stay as they
            are if the parameter is narrower than 1,024 on either side or too small to gain, if they
            are the first ones with the batch itself (embeddings), and if they belong to heads,
            routers or adapters. With a mapping from paths of parameters to "float8" or None,
            exactly the named parameters' products are in float8, but never an adapter's. The page
            on float8 has the exceptions.
        rounding: rounding of numbers that are stored narrower: "stochastic", up or down at random
            so that the mean is right, or "nearest", which loses updates smaller than half of the
            gap between two numbers (in bfloat16 1/256 to 1/512 of a number). Random bits depend on
            the seed, the step, the parameter's group (a part of a block, if the device is small),
            and the number of devices.

    Raises:
        TypeError: `rounding` or a path is not a string.
        ValueError: a dtype is not allowed for the attribute, or has 64 bits while JAX's 64-bit
            types are disabled; a mapping is empty; `rounding` or `products` is unknown; or coded
            masters are to be rounded to nearest.
    """

    master: DTypeLike | Mapping[str, DTypeLike] = jnp.float32
    compute: DTypeLike | None = None
    frozen: DTypeLike | None = None
    state: DTypeLike | Mapping[str, DTypeLike] | None = None
    sums: DTypeLike = jnp.float32
    rounding: Rounding = "stochastic"
    products: Products | Mapping[str, Products] = None

    def __post_init__(self) -> None:
        """Checks the dtypes and stores them in their canonical form, mappings as pairs."""
        # Pairs in place of mappings keep the record hashable, and the order of the patterns.
        for name, value in canonical(self).items():
            object.__setattr__(self, name, value)
        word("Precision.rounding", self.rounding, get_args(Rounding))
        forms = self.master if isinstance(self.master, tuple) else (("*", self.master),)
        if self.rounding == "nearest" and any(form == jnp.dtype("int8") for _, form in forms):
            raise ValueError(
                "Precision(master='int8', rounding='nearest') would not train: an update smaller "
                "than 1/254 of the largest number in its block is lost. Use rounding='stochastic'."
            )

    @classmethod
    def compact(
        cls,
        compute: DTypeLike | None = None,
        sums: DTypeLike = jnp.float32,
        products: Products | Mapping[str, Products] = None,
    ) -> "Precision":
        """Four bytes per parameter with Adam: masters in bfloat16, moments in 8 bits.

        Args:
            compute: dtype that parameters are cast to before the model sees them; see `Precision`.
            sums: dtype in which sums of gradients are stored.
            products: "float8" for matrix products in float8.
        """
        return cls(
            master=jnp.bfloat16, state=jnp.int8, compute=compute, sums=sums, products=products
        )

    @classmethod
    def two_bytes(
        cls,
        compute: DTypeLike | None = None,
        sums: DTypeLike = jnp.float32,
        products: Products | Mapping[str, Products] = None,
    ) -> "Precision":
        """Two bytes per parameter with Adam: masters in 8 bits, moments in 4.

        With Muon or Lion, which have one moment, a parameter takes 1.6 bytes.

        Args:
            compute: dtype that parameters are cast to before the model sees them; see `Precision`.
            sums: dtype in which sums of gradients are stored.
            products: Form of large products; see `Precision`.
        """
        return cls(master=jnp.int8, state=jnp.int4, compute=compute, sums=sums, products=products)

    @classmethod
    def of(cls, value: Any, name: str = "precision") -> "Precision":
        """Returns a precision as a record, also if it is a name.

        "auto" is `Precision()`; "compact" and "two_bytes" are `Precision.compact()` and
        `.two_bytes()`. "bfloat16", "float16" and "float32" are dtypes of the computation; masters
        and optimizer state are fp32. `--precision` of the command has the same names.

        Args:
            value: The precision or its name.
            name: Name of the argument, for errors.

        Raises:
            TypeError: If it is neither a precision nor text.
            ValueError: If no precision has this name.
        """
        if isinstance(value, Precision):
            return value
        names = '"auto", "compact", "two_bytes", "float32", "bfloat16" or "float16"'
        allowed = f"a megatrain_jax.Precision, {names}"
        hint = "pass for example Precision(compute=jnp.bfloat16)"
        if not isinstance(value, str):
            raise TypeError(refused(name, allowed, value, hint))
        if value in ("compact", "two_bytes"):
            return getattr(cls, value)()
        if value in ("auto", "float32", "bfloat16", "float16"):
            return cls() if value == "auto" else cls(compute=value)
        if meant := DTYPES.get(value.lower()):
            hint = f'did you mean "{meant}"?'
        hint = FLOAT8_HINT if value.lower() in FLOAT8_NAMES else hint
        raise ValueError(refused(name, allowed, value, hint))

    def on(self, machine: Hardware | None) -> "Precision":
        """The same precision with the compute dtype of a machine, if none was chosen.

        Args:
            machine: The machine; None for one with bfloat16, or without a GPU.

        Examples:
            >>> from megatrain_jax import card
            >>> Precision().on(card("T4")).compute, Precision().on(None).compute
            (dtype('float16'), dtype(bfloat16))
        """
        if self.compute is not None:
            return self
        has_bfloat16 = machine is None or machine.has_bfloat16
        return replace(self, compute=jnp.bfloat16 if has_bfloat16 else jnp.float16)

    @property
    def asks_for_float8(self) -> bool:
        """Whether some products are to be computed in float8."""
        given: Any = self.products
        return "float8" in (dict(given).values() if isinstance(given, tuple) else (given,))

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled for its gradients, so that float16 can hold small ones."""
        return self.compute == jnp.dtype("float16")

    @property
    def update(self) -> Any:
        """The dtype that the optimizer computes in: fp32, or float64 if the masters are."""
        return self.master if self.master == jnp.dtype("float64") else _FLOAT32

    def master_of(self, path: str) -> Any:
        """The dtype in which the host stores a trained parameter of this path."""
        return _chosen(self.master, path)

    def state_of(self, path: str) -> Any | None:
        """The stored dtype of state with a parameter's shape; None for the optimizer's own."""
        found = None if self.state is None else _chosen(self.state, path)
        return None if found == _FLOAT32 else found

    def is_float8(self, path: str) -> bool:
        """Whether products with the parameter of this path may be computed in float8."""
        return self.float8_pattern(path) is not None

    def float8_pattern(self, path: str) -> str | None:
        """The pattern by which this parameter's products may be in float8; None if they may not."""
        pairs = self.products if isinstance(self.products, tuple) else (("*", self.products),)
        fits = ((at, form) for at, form in pairs if fnmatchcase(path, at))
        pattern, form = next(fits, (None, None))
        return None if form is None else pattern


def _chosen(given: Any, path: str) -> Any:
    if not isinstance(given, tuple):
        return given
    fits = (dtype for pattern, dtype in given if fnmatchcase(path, pattern))
    return next(fits, _FLOAT32)
