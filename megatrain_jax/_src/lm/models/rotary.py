"""Rotary embeddings with the scalings that published checkpoints use.

Only the tables of cosines and sines depend on the scaling. They are computed once per call, before
the layers, because they are small enough to stay on the device while layers stream past.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models.past import Past

RopeKind = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"]
CosSin = tuple[Float[Array, "rows length pairs"], Float[Array, "rows length pairs"]]
"""Cosines and sines of the rotation angles of the pairs of a head."""
Positions = Integer[Array | np.ndarray, "rows length *pairs"]
Integers = Integer[Array | np.ndarray, "rows length"]
"""A number for each token, such as its id or its document."""


class Rotation(NamedTuple):
    """The rotary embedding of a call's tokens; it may have only one row.

    Attributes:
        cos_sin: From `cos_sin_tables`.
        query_scale: Factors of the queries, (rows, length), if they depend on positions.
    """

    cos_sin: CosSin
    query_scale: Float[Array, "rows length"] | None


@dataclass(frozen=True, kw_only=True)
class Rope:
    """A rotary embedding: how positions rotate queries and keys.

    RoFormer, https://arxiv.org/abs/2104.09864.

    Attributes:
        dim: Number of dimensions of a head that are rotated, counted from its first.
        base: The base of the wavelengths, `rope_theta` in a Hugging Face configuration.
        kind: How wavelengths are stretched for long texts.
        factor: Factor of the stretching, for all kinds but "default" and "longrope".
        attention_factor: Factor of cosines and sines.
        max_length: For "dynamic": length up to which nothing is stretched.
        original_length: For "yarn", "longrope" and "llama3": the length before stretching.
        low_freq_factor: For "llama3": turns within that length up to which pairs are fully
            stretched.
        high_freq_factor: For "llama3": turns from which on pairs are not stretched.
        beta_fast: For "yarn" (https://arxiv.org/abs/2309.00071): turns of pairs that stay
            unchanged.
        beta_slow: For "yarn": turns of pairs that are fully stretched.
        truncate: For "yarn": whether the ends of its ramp are rounded to whole dimensions.
        short_factors: For "longrope" (https://arxiv.org/abs/2402.13753): dim / 2 divisors.
        long_factors: The same for texts longer than `original_length`.
        turning: For "proportional": number of pairs that are rotated, from the first; the
            wavelengths are still those for `dim` dimensions.
        interleaved: Whether neighbours form a pair, instead of dimensions i and i + dim / 2.
        query_growth: Queries at position p get the factor 1 + query_growth * log(1 + floor(p /
            original_length)).
    """

    dim: int
    base: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    attention_factor: float = 1.0
    max_length: int | None = None
    original_length: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    turning: int = 0
    interleaved: bool = False
    query_growth: float = 0.0

    def __post_init__(self):
        """Checks each number, and that the kind's parameters are given."""
        checks.word("kind", self.kind, get_args(RopeKind))
        checks.integer("dim", self.dim)
        bounds: dict[str, Any] = {f.name: {"above": 0} for f in fields(self) if f.type is float}
        bounds |= dict.fromkeys(("max_length", "original_length", "query_growth"), {"least": 0})
        checks.numbers(self, Rope, **bounds, turning={"least": 0, "most": self.dim // 2})
        if self.query_growth and not self.original_length:
            raise ValueError("a Rope with `query_growth` needs `original_length`")
        if self.dim % 2:
            raise ValueError(f"`dim` of a Rope must be even, but is {self.dim}")
        for name in ("short_factors", "long_factors"):
            factors = checks.instance(name, getattr(self, name), tuple, "a tuple of numbers")
            for factor in factors:
                checks.number(name, factor, above=0)
            if self.kind == "longrope" and len(factors) != self.dim // 2:
                allowed = f"{self.dim // 2} numbers, half of `dim`"
                raise ValueError(checks.refused(name, allowed, factors))
        needs_original = self.kind in ("yarn", "longrope", "llama3")
        if needs_original and not self.original_length:
            raise ValueError(f"a Rope of kind {self.kind!r} needs `original_length`")
        if self.kind == "dynamic" and not (self.max_length and self.dim > 2):
            raise ValueError("a Rope of kind 'dynamic' needs `max_length`, and `dim` above 2")
        if self.kind == "llama3" and self.high_freq_factor < self.low_freq_factor:
            raise ValueError(
                f"`high_freq_factor` must be at least `low_freq_factor`, {self.low_freq_factor}, "
                f"but is {self.high_freq_factor}"
            )
        if self.kind == "yarn" and self.base <= 1:
            raise ValueError(f"`base` of a Rope of kind 'yarn' must be above 1, but is {self.base}")


def cos_sin_tables(rope: Rope, positions: Positions) -> CosSin:
    """Returns cosines and sines in fp32 for positions; a rotary embedding has dim / 2 pairs.

    Positions may also be given for each pair, (rows, length, pairs).

    Kinds "dynamic" and "longrope" depend on the largest position in the call, as in Transformers.

    For example, with `dim` = 4 and `base` = 100, position 3 rotates the pair (0, 2) by 3 radians
    and the pair (1, 3) by 3 · 100^(-2/4) = 0.3.
    """
    # In fp32 for any model dtype: bfloat16 can't tell positions beyond 256 apart.
    each = positions if positions.ndim == 3 else positions[..., None]
    angles = each.astype(jnp.float32) * frequencies(rope, positions)
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def rotation(rope: Rope, positions: Positions) -> Rotation:
    """Returns the rotary embedding of tokens at these positions, in fp32; see `cos_sin_tables`."""
    scale = None
    if rope.query_growth:
        assert rope.original_length
        spans = jnp.floor(positions / rope.original_length)
        scale = 1 + rope.query_growth * jnp.log1p(spans.astype(jnp.float32))
    return Rotation(cos_sin_tables(rope, positions), scale)


def positions_in(length: int, segments: Integers | Past | None) -> Integer[Array, "rows length"]:
    """Returns positions that count from 0 in every document; one row if there are no segments.

    For example, segments [1, 1, 1, 2, 2, 0] give positions [0, 1, 2, 0, 1, 0]. While text is
    generated, positions count on from the `Past`.
    """
    if isinstance(segments, Past):
        return segments.positions(length)
    index = jnp.arange(length, dtype=jnp.int32)[None]
    if segments is None:
        return index
    starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


def rotate(
    x: Float[Array, "rows length heads head_dim"], cos_sin: CosSin, *, interleaved: bool = False
) -> Float[Array, "rows length heads head_dim"]:
    """Rotates each pair (i, i + dim / 2) of every head by its angle.

    Args:
        x: Queries or keys; dimensions after the first `dim` of a head are unchanged.
        cos_sin: From `cos_sin_tables`; it may have only one row.
        interleaved: Whether the pairs are neighbours, (2 * i, 2 * i + 1).

    Returns:
        An array with the same dtype; computed in fp32.
    """
    cosines, sines = (table[:, :, None, :] for table in cos_sin)
    # Half of the rotated dimensions; the rest of a wider head is unchanged.
    half = cosines.shape[-1]
    turned, rest = x[..., : 2 * half].astype(jnp.float32), x[..., 2 * half :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = jnp.split(turned, 2, axis=-1)
    rotated = [first * cosines - second * sines, second * cosines + first * sines]
    if interleaved:
        rotated = [jnp.stack(rotated, axis=-1).reshape(turned.shape)]
    return jnp.concatenate([*(part.astype(x.dtype) for part in rotated), rest], axis=-1)


def frequencies(rope: Rope, positions: Positions) -> Float[Array | np.ndarray, " pairs"]:
    """Returns the radians by which each pair is rotated from one position to the next, in fp32."""
    exponents = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    plain = (1.0 / np.float32(rope.base) ** exponents).astype(np.float32)
    match rope.kind:
        case "default":
            return plain
        case "linear":
            return plain / np.float32(rope.factor)
        case "proportional":
            turning = np.arange(rope.dim // 2) < rope.turning
            return np.where(turning, plain, np.float32(0)) / np.float32(rope.factor)
        case "llama3":
            return _llama3(rope, plain)
        case "yarn":
            return _yarn(rope, plain)
        case "longrope":
            assert rope.original_length
            length = jnp.max(positions) + 1
            short, long = (
                (plain / np.asarray(factors, np.float32)).astype(np.float32)
                for factors in (rope.short_factors, rope.long_factors)
            )
            return jnp.where(length > rope.original_length, long, short)
        case "dynamic":
            assert rope.max_length
            length = jnp.maximum(jnp.max(positions) + 1, rope.max_length).astype(jnp.float32)
            # 1 up to `max_length`, so that short texts are rotated without stretching.
            stretch = rope.factor * length / rope.max_length - (rope.factor - 1)
            base = rope.base * stretch ** (rope.dim / (rope.dim - 2))
            return 1.0 / base**exponents


def _llama3(rope: Rope, plain: Float[np.ndarray, " pairs"]) -> Float[np.ndarray, " pairs"]:
    """Llama 3's frequencies: low ones divided by the factor, high ones unchanged, blended between.

    The blend depends on the number of full turns that a pair makes within the original length.
    """
    assert rope.original_length
    low, high = rope.low_freq_factor, rope.high_freq_factor
    turns = rope.original_length * plain / (2 * math.pi)  # within the original length
    if high == low:  # no pairs between the two
        return np.where(turns < low, plain / rope.factor, plain).astype(np.float32)
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return ((1 - blend) * plain / rope.factor + blend * plain).astype(np.float32)


def _yarn(rope: Rope, plain: Float[np.ndarray, " pairs"]) -> Float[np.ndarray, " pairs"]:
    """YaRN's frequencies: like Llama 3's, but the blend depends on the pair's number."""

    def dimension(turns: float) -> float:
        assert rope.original_length
        ratio = rope.original_length / (turns * 2 * math.pi)
        return rope.dim * math.log(ratio) / (2 * math.log(rope.base))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    # As in Transformers, so that the ramp can be divided by its width.
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(rope.dim // 2, dtype=np.float32) - low) / (high - low), 0.0, 1.0)
    return (ramp * plain / rope.factor + (1 - ramp) * plain).astype(np.float32)
