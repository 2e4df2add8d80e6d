"""The parts of a decoder layer. Matrices lie as (out, in), which is how checkpoints keep them.

Nothing here fixes a dtype: everything computes in that of the parameters it is given.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from megatrain_jax._src.models.activations import ACTIVATIONS
from megatrain_jax._src.models.causal_attention import attention
from megatrain_jax._src.models.config import DecoderConfig
from megatrain_jax._src.models.moe import Experts, Matrix, mix, route, tally
from megatrain_jax._src.models.rotary import CosSin, rotate


class Maker:
    """The maker of a model's parameters: one dtype, one source of random numbers."""

    def __init__(self, rngs: nnx.Rngs, dtype: jax.typing.DTypeLike, std: float):
        """Keeps the random keys, the dtype and the standard deviation of fresh weights."""
        self.rngs, self.dtype = rngs, dtype
        self.normal = nnx.initializers.normal(std)

    def weight(self, *shape: int) -> nnx.Param[jax.Array]:
        """Returns a parameter of normally distributed numbers."""
        return nnx.Param(self.normal(self.rngs.params(), shape, self.dtype))

    def constant(self, value: float, *shape: int) -> nnx.Param[jax.Array]:
        """Returns a parameter that is one number everywhere."""
        return nnx.Param(jnp.full(shape, value, self.dtype))


class Linear(nnx.Module):
    """A product with a matrix (out, in), and a bias if there is one."""

    def __init__(self, dim_in: int, dim_out: int, make: Maker, *, bias: bool = False):
        """Makes the parameters."""
        self.weight = make.weight(dim_out, dim_in)
        self.bias = make.constant(0.0, dim_out) if bias else None

    def __call__(self, x: Float[Array, "*rows dim_in"]) -> Float[Array, "*rows dim_out"]:
        """Multiplies the last axis by the matrix."""
        y = jax.lax.dot_general(x, self.weight[...], (((x.ndim - 1,), (1,)), ((), ())))
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """Root-mean-square norm (https://arxiv.org/abs/1910.07467) over the last axis, in fp32."""

    def __init__(self, dim: int, config: DecoderConfig, make: Maker):
        """Makes the weight, with which a fresh norm does nothing but normalise."""
        self.eps, self.offset = config.norm_eps, config.norm_offset
        self.weight = make.constant(1.0 - config.norm_offset, dim)

    def __call__(self, x: Float[Array, "*rows dim"]) -> Float[Array, "*rows dim"]:
        """Normalises the last axis; keeps the dtype."""
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...]
        if self.offset:  # such checkpoints were trained with the product in fp32
            return (y * (self.offset + weight.astype(jnp.float32))).astype(x.dtype)
        return y.astype(x.dtype) * weight


class Attention(nnx.Module):
    """Causal attention with grouped queries and rotary embeddings."""

    def __init__(self, config: DecoderConfig, layer: int, make: Maker):
        """Makes the parameters of one layer's attention."""
        self.head_dim, self.window = config.head_dim, config.window(layer)
        self.softcap, self.scale = config.attention_softcap, config.attention_scale
        self.query_size = config.num_heads * config.head_dim
        self.key_size = config.num_kv_heads * config.head_dim
        wide = config.hidden_size
        if config.fused:
            self.qkv_proj = Linear(wide, self.query_size + 2 * self.key_size, make)
        else:
            self.q_proj = Linear(wide, self.query_size, make, bias=config.qkv_bias)
            self.k_proj = Linear(wide, self.key_size, make, bias=config.qkv_bias)
            self.v_proj = Linear(wide, self.key_size, make, bias=config.qkv_bias)
        self.o_proj = Linear(self.query_size, wide, make, bias=config.out_bias)
        self.fused, self.qk_norm = config.fused, config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config, make)
            self.k_norm = RMSNorm(config.head_dim, config, make)

    def __call__(
        self,
        x: Float[Array, "rows length width"],
        cos_sin: CosSin,
        segments: Integer[Array, "rows length"] | None,
    ) -> Float[Array, "rows length width"]:
        """Attends within rows, and within documents where `segments` numbers them."""
        if self.fused:
            parts = [self.query_size, self.query_size + self.key_size]
            projected = jnp.split(self.qkv_proj(x), parts, axis=-1)
        else:
            projected = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (y.reshape(*x.shape[:2], -1, self.head_dim) for y in projected)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        mixed = attention(
            rotate(q, cos_sin),
            rotate(k, cos_sin),
            v,
            segments=segments,
            window=self.window,
            softcap=self.softcap,
            scale=self.scale,
        )
        return self.o_proj(mixed.reshape(*x.shape[:2], -1))


class MLP(nnx.Module):
    """A gated MLP (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: DecoderConfig, make: Maker):
        """Makes the parameters."""
        wide, inside, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.activation, self.fused = ACTIVATIONS[config.activation], config.fused
        if config.fused:
            self.gate_up_proj = Linear(wide, 2 * inside, make)
        else:
            self.gate_proj = Linear(wide, inside, make, bias=bias)
            self.up_proj = Linear(wide, inside, make, bias=bias)
        self.down_proj = Linear(inside, wide, make, bias=bias)

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """Maps each row on its own."""
        if self.fused:
            gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(self.activation(gate) * up)


class ExpertMatrix(nnx.Module):
    """One matrix of every expert, stacked: (experts, out, in)."""

    def __init__(self, num: int, dim_in: int, dim_out: int, make: Maker):
        """Makes the matrices."""
        self.weight = make.weight(num, dim_out, dim_in)

    def __call__(self) -> Matrix:
        """Returns all experts' matrices."""
        return self.weight[...]


class ExpertMatrices(nnx.Module):
    """The three matrices of all experts of one layer."""

    def __init__(self, experts: Experts, wide: int, make: Maker):
        """Makes the matrices."""
        inside = experts.intermediate_size
        self.gate_proj = ExpertMatrix(experts.num, wide, inside, make)
        self.up_proj = ExpertMatrix(experts.num, wide, inside, make)
        self.down_proj = ExpertMatrix(experts.num, inside, wide, make)


class MixtureOfExperts(nnx.Module):
    """A router and its experts, in place of an MLP."""

    def __init__(self, config: DecoderConfig, experts: Experts, make: Maker):
        """Makes the parameters."""
        self.settings, self.activation = experts, ACTIVATIONS[config.activation]
        self.gate = Linear(config.hidden_size, experts.num, make)
        self.experts = ExpertMatrices(experts, config.hidden_size, make)

    def __call__(
        self, x: Float[Array, "rows length width"], segments: Integer[Array, "rows length"] | None
    ) -> tuple[Float[Array, "rows length width"], Float[Array, "3 num"]]:
        """Returns the experts' result for x, and a tally of their load (see `moe.tally`).

        Tokens of segment 0 are padding and don't count in the tally.
        """
        tokens = x.reshape(-1, x.shape[-1])
        chosen, shares, probabilities = route(self.gate(tokens), self.settings)
        e = self.experts
        weights = e.gate_proj(), e.up_proj(), e.down_proj()
        mixed = mix(tokens, chosen, shares, weights, self.activation)
        counted = None if segments is None else segments.reshape(-1) != 0
        return mixed.reshape(x.shape), tally(chosen, probabilities, counted)
