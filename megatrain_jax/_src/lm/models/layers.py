"""A decoder layer and its parts. Matrices are stored as (out, in), as in checkpoints.

Nothing here fixes a dtype: everything computes in the dtype of its parameters. A family with
different computations derives a class from one of these in its own file.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from megatrain_jax._src.lm.models.causal_attention import attention
from megatrain_jax._src.lm.models.decoder_options import ACTIVATIONS, DecoderOptions, ParameterMaker
from megatrain_jax._src.lm.models.expert_blocks import mix
from megatrain_jax._src.lm.models.moe import (
    Experts,
    Matrix,
    Routed,
    Tally,
    Weights,
    gated,
    route,
    tally,
)
from megatrain_jax._src.lm.models.past import Past
from megatrain_jax._src.lm.models.rotary import Integers, Rotation, rotate

HiddenStates = Float[Array, "rows length width"]
"""Hidden states of rows of tokens."""
Segments = Integer[Array, "rows length"] | None
"""Number of each token's document in its row; None if each row is one document."""
Heads = Float[Array, "rows length heads head_dim"]
Projected = tuple[
    Float[Array, "rows length heads*head_dim"],
    Float[Array, "rows length kv_heads*head_dim"],
    Float[Array, "rows length kv_heads*head_dim"],
]
"""Queries, keys and values, with all heads side by side in the last axis."""
Tallied = tuple[HiddenStates, Tally | None]
"""Hidden states from a layer, and the tally of its experts' load; None without experts."""


class Buffer(nnx.Variable):
    """An array that is not a parameter: it is saved in files, but not trained."""


class Linear(nnx.Module):
    """A product with a matrix (out, in), and an optional bias."""

    def __init__(self, dim_in: int, dim_out: int, make: ParameterMaker, *, bias: bool = False):
        """Makes the parameters."""
        self.weight = make.weight(dim_out, dim_in)
        self.bias = make.constant(0.0, dim_out) if bias else None

    def __call__(self, x: Float[Array, "*rows dim_in"]) -> Float[Array, "*rows dim_out"]:
        """Multiplies the last axis by the matrix."""
        # Contracts the matrix's second axis, so it is never transposed.
        y = jax.lax.dot_general(x, self.weight[...], (((x.ndim - 1,), (1,)), ((), ())))
        return y if self.bias is None else y + self.bias[...]


class Embedding(nnx.Module):
    """An embedding table: one row for every token."""

    def __init__(self, num: int, dim: int, make: ParameterMaker):
        """Makes the table."""
        self.weight = make.weight(num, dim)

    def __call__(self, tokens: Integers) -> Float[Array, "rows length dim"]:
        """Returns the rows of tokens; NaN for tokens beyond the vocabulary."""
        rows = jnp.asarray(self.weight[...]).at[tokens]
        return rows.get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def rms_normalized(x: Float[Array, "*rows dim"], eps: float) -> Float[Array, "*rows dim"]:
    """Divides the last axis by its root mean square, in fp32, without a weight."""
    y = x.astype(jnp.float32)
    return y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """Root-mean-square norm (https://arxiv.org/abs/1910.07467) over the last axis, in fp32."""

    def __init__(self, dim: int, config: DecoderOptions, make: ParameterMaker):
        """Makes the weight; a fresh norm only normalises."""
        self.eps, self.offset = config.norm_eps, config.norm_offset
        self.in_fp32 = bool(config.norm_offset) or config.norm_in_fp32
        self.weight = make.constant(1.0 - config.norm_offset, dim)

    def __call__(self, x: Float[Array, "*rows dim"]) -> Float[Array, "*rows dim"]:
        """Normalises the last axis; keeps the dtype."""
        y, weight = rms_normalized(x, self.eps), self.weight[...]
        if self.in_fp32:  # such checkpoints were trained with the product in fp32
            return (y * (self.offset + weight.astype(jnp.float32))).astype(x.dtype)
        return y.astype(x.dtype) * weight


class LayerNorm(nnx.Module):
    """Layer norm (https://arxiv.org/abs/1607.06450) over the last axis, in fp32."""

    def __init__(self, dim: int, config: DecoderOptions, make: ParameterMaker):
        """Makes the weight, and the bias if there is one; a fresh norm only normalises."""
        self.eps, self.offset = config.norm_eps, config.norm_offset
        self.weight = make.constant(1.0 - config.norm_offset, dim)
        self.bias = make.constant(0.0, dim) if config.norm_bias else None

    def __call__(self, x: Float[Array, "*rows dim"]) -> Float[Array, "*rows dim"]:
        """Normalises the last axis; keeps the dtype."""
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        y = y * (self.offset + self.weight[...].astype(jnp.float32))
        return (y if self.bias is None else y + self.bias[...]).astype(x.dtype)


def make_norm(dim: int, config: DecoderOptions, make: ParameterMaker) -> RMSNorm | LayerNorm:
    """Returns a norm of the configured kind."""
    return (RMSNorm if config.norm == "rms" else LayerNorm)(dim, config, make)


class Attention(nnx.Module):
    """Causal attention with grouped queries and rotary embeddings."""

    def __init__(self, config: DecoderOptions, layer: int, make: ParameterMaker):
        """Makes the parameters of one layer's attention."""
        self.head_dim, self.window = config.head_dim, config.window(layer)
        self.interleaved = config.rope.interleaved
        self.softcap, self.scale = config.attention_softcap, config.attention_scale
        self.chunk: int | None = None
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
        self, x: HiddenStates, rotation: Rotation | None, segments: Segments
    ) -> HiddenStates:
        """Computes attention within rows, or within documents if `segments` numbers them."""
        q, k, v = (y.reshape(*x.shape[:2], -1, self.head_dim) for y in self.project(x))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = self.rotate(q, k, rotation)
        mixed = self.attend(q, k, v, segments)
        return self.o_proj(self.gated(mixed.reshape(*x.shape[:2], -1), x))

    def gated(self, mixed: HiddenStates, x: HiddenStates) -> HiddenStates:
        """Returns the input of the last product, from attention's results and its own input."""
        return mixed

    def attend(self, q: Heads, k: Heads, v: Heads, segments: Segments, **options: Any) -> Heads:
        """Returns for each query the mean of values, weighted by the match of their keys."""
        options |= {"window": self.window, "chunk": self.chunk}
        options |= {"softcap": self.softcap, "scale": self.scale}
        return attention(q, k, v, segments=segments, **options)

    def rotate(self, q: Heads, k: Heads, rotation: Rotation) -> tuple[Heads, Heads]:
        """Returns queries and keys rotated to their positions."""
        q, k = (rotate(y, rotation.cos_sin, interleaved=self.interleaved) for y in (q, k))
        if rotation.query_scale is not None:
            q = q * rotation.query_scale[:, :, None, None].astype(q.dtype)
        return q, k

    def project(self, x: HiddenStates) -> Projected:
        """Returns queries, keys and values, with all heads side by side in the last axis."""
        if self.fused:
            parts = [self.query_size, self.query_size + self.key_size]
            q, k, v = jnp.split(self.qkv_proj(x), parts, axis=-1)
            return q, k, v
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


class MLP(nnx.Module):
    """A gated MLP (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: DecoderOptions, make: ParameterMaker, inside: int | None = None):
        """Makes the parameters; `inside` is the hidden width, by default the configuration's."""
        wide, bias = config.hidden_size, config.mlp_bias
        inside = inside or config.intermediate_size
        self.activation = ACTIVATIONS[config.activation]
        self.gate_proj = Linear(wide, inside, make, bias=bias)
        self.up_proj = Linear(wide, inside, make, bias=bias)
        self.down_proj = Linear(inside, wide, make, bias=bias)

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """Maps each row separately."""
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class PlainMLP(nnx.Module):
    """Two products with an activation between them."""

    def __init__(self, config: DecoderOptions, make: ParameterMaker):
        """Makes the parameters."""
        wide, inside, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.activation = ACTIVATIONS[config.activation]
        self.up_proj = Linear(wide, inside, make, bias=bias)
        self.down_proj = Linear(inside, wide, make, bias=bias)

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """Maps each row separately."""
        return self.down_proj(self.activation(self.up_proj(x)))


class BiasedMLP(nnx.Module):
    """Two products with biases and an activation between them, `fc1` and `fc2` in files."""

    def __init__(self, config: DecoderOptions, make: ParameterMaker):
        """Makes the parameters."""
        self.activation = ACTIVATIONS[config.activation]
        self.fc1 = Linear(config.hidden_size, config.intermediate_size, make, bias=True)
        self.fc2 = Linear(config.intermediate_size, config.hidden_size, make, bias=True)

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """Maps each row separately."""
        return self.fc2(self.activation(self.fc1(x)))


class FusedMLP(nnx.Module):
    """A gated MLP with gate and up matrices joined in one."""

    def __init__(self, config: DecoderOptions, make: ParameterMaker):
        """Makes the parameters."""
        wide, inside = config.hidden_size, config.intermediate_size
        self.activation = ACTIVATIONS[config.activation]
        self.gate_up_proj = Linear(wide, 2 * inside, make)
        self.down_proj = Linear(inside, wide, make)

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """Maps each row separately."""
        gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(self.activation(gate) * up)


def make_mlp(config: DecoderOptions, make: ParameterMaker) -> Any:
    """Returns an MLP of the configured kind."""
    usual = FusedMLP if config.fused else MLP
    return (config.dense or usual)(config, make)


class ExpertMatrix(nnx.Module):
    """One matrix of every expert, stacked: (experts, out, in)."""

    def __init__(self, num: int, dim_in: int, dim_out: int, make: ParameterMaker):
        """Makes the matrices."""
        self.weight = make.weight(num, dim_out, dim_in)

    def __call__(self) -> Matrix:
        """Returns all experts' matrices."""
        return self.weight[...]


class ExpertMatrices(nnx.Module):
    """The three matrices of all experts of one layer."""

    def __init__(self, experts: Experts, wide: int, make: ParameterMaker):
        """Makes the matrices."""
        inside = experts.intermediate_size
        self.gate_proj = ExpertMatrix(experts.num, wide, inside, make)
        self.up_proj = ExpertMatrix(experts.num, wide, inside, make)
        self.down_proj = ExpertMatrix(experts.num, inside, wide, make)


class MixtureOfExperts(nnx.Module):
    """A router and its experts, in place of an MLP.

    Attributes:
        biased: Whether a bias is added to the probabilities for the choice of experts. As in
            Transformers, the balancing loss counts the loads without this bias.
        shared_experts: An MLP for all tokens; None in mixtures without one.
    """

    biased: ClassVar[bool] = False
    shared_experts: Any = None

    def __init__(self, config: DecoderOptions, experts: Experts, make: ParameterMaker):
        """Makes the parameters."""
        self.settings = experts
        self.expert = gated(ACTIVATIONS[config.activation])
        self.gate = Linear(config.hidden_size, experts.num, make)
        self.experts = ExpertMatrices(experts, config.hidden_size, make)

    def __call__(self, x: HiddenStates, segments: Segments) -> tuple[HiddenStates, Tally]:
        """Returns the experts' result for x, and a tally of their load (see `moe.tally`).

        Tokens in segment 0 are padding and don't count in the tally.
        """
        tokens = x.reshape(-1, x.shape[-1])
        chosen, shares, probabilities = self.route(tokens)
        mixed = mix(tokens, chosen, shares, self.weights(), self.expert)
        counted = None
        if segments is not None and not isinstance(segments, Past):
            counted = segments.reshape(-1) != 0
        if self.biased:
            _, chosen = jax.lax.top_k(probabilities, self.settings.per_token)
        load = tally(chosen, probabilities, counted)
        return self.with_shared(mixed.reshape(x.shape), x), load

    def with_shared(self, mixed: HiddenStates, x: HiddenStates) -> HiddenStates:
        """Adds the result of an expert that all tokens share, if there is one."""
        return mixed if self.shared_experts is None else mixed + self.shared_experts(x)

    def route(self, tokens: Float[Array, "tokens width"]) -> Routed:
        """Returns each token's experts, their shares, and the probabilities of all experts."""
        return route(self.gate(tokens), self.settings)

    def weights(self) -> Weights:
        """Returns the experts' weights; each array has the experts as its first axis."""
        e = self.experts
        return e.gate_proj(), e.up_proj(), e.down_proj()


class Layer(nnx.Module):
    """Attention, then an MLP or experts, each with norms and a residual connection.

    The classes of its parts are those of the configuration.
    """

    def __init__(self, config: DecoderOptions, layer: int, make: ParameterMaker):
        """Makes the parameters of one layer."""

        def norm() -> RMSNorm | LayerNorm:
            return make_norm(config.hidden_size, config, make)

        experts = config.experts
        self.sparse = bool(experts and layer in experts.layers)
        self.at_inputs, self.residual_scale = not config.output_norms, config.residual_scale
        self.at_outputs = config.output_norms or config.sandwich_norms
        if self.at_inputs:
            self.input_layernorm = norm()
        self.make_mixer(config, layer, make)
        self.post_attention_layernorm = norm()
        if config.sandwich_norms:
            self.pre_feedforward_layernorm = norm()
        if self.at_outputs:
            self.post_feedforward_layernorm = norm()
        if experts and self.sparse:
            self.mlp = (config.mixture or MixtureOfExperts)(config, experts, make)
        else:
            self.mlp = make_mlp(config, make)

    def __call__(self, x: HiddenStates, rotation: Rotation | None, segments: Segments) -> Tallied:
        """Returns the layer's result, and the tally of its experts' load if it has experts."""
        y = self.mix(self.input_layernorm(x) if self.at_inputs else x, rotation, segments)
        if self.at_outputs:
            x = x + self.post_attention_layernorm(y)
            y = self.pre_feedforward_layernorm(x) if self.at_inputs else x
        else:
            x = x + self.added(y)
            y = self.post_attention_layernorm(x)
        y, tally = self.feed_forward(y, segments)
        y = self.post_feedforward_layernorm(y) if self.at_outputs else self.added(y)
        return x + y, tally

    def make_mixer(self, config: DecoderOptions, layer: int, make: ParameterMaker) -> None:
        """Makes the part that mixes tokens, under its name in the files."""
        self.is_linear = config.linear is not None and layer in config.options.layers
        if config.linear is not None and self.is_linear:
            self.linear_attn = config.linear(config, make)
        else:
            self.self_attn = (config.attention or Attention)(config, layer, make)

    def mix(self, x: HiddenStates, rotation: Rotation | None, segments: Segments) -> HiddenStates:
        """Returns the result of that part."""
        if self.is_linear:
            return self.linear_attn(x, segments)
        return self.self_attn(x, rotation, segments)

    def added(self, y: HiddenStates) -> HiddenStates:
        """Returns the term that a part's result adds to the hidden states."""
        return y if self.residual_scale == 1.0 else y * self.residual_scale

    def feed_forward(self, x: HiddenStates, segments: Segments) -> Tallied:
        """Returns the result of the MLP or the experts, and the tally of the experts' load."""
        if isinstance(self.mlp, MixtureOfExperts):
            return self.mlp(x, segments)
        return self.mlp(x), None


class ParallelLayer(Layer):
    """Attention and an MLP on the same normalised input, both added to the residual."""

    def __init__(self, config: DecoderOptions, layer: int, make: ParameterMaker):
        """Makes the parameters of one layer."""
        # `Layer`'s own constructor is not called: one norm serves both parts.
        self.input_layernorm = make_norm(config.hidden_size, config, make)
        self.make_mixer(config, layer, make)
        self.mlp = make_mlp(config, make)

    def __call__(self, x: HiddenStates, rotation: Rotation | None, segments: Segments) -> Tallied:
        """Returns the layer's result, and None: there are no experts to tally."""
        y = self.input_layernorm(x)
        return self.self_attn(y, rotation, segments) + self.mlp(y) + x, None
