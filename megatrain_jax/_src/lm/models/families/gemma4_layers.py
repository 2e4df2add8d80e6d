"""The layers of Gemma 4, and the values that they pass on beside hidden states.

Layers without a window have heads of a different width, and experts stand beside an MLP. The
smaller models also have token embeddings for each layer, and their last layers attend to keys and
values of an earlier layer. Both are in a memory passed from layer to layer.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from megatrain_jax._src.lm.models.activation_functions import ACTIVATIONS
from megatrain_jax._src.lm.models.expert_blocks import mix
from megatrain_jax._src.lm.models.expert_functions import gated
from megatrain_jax._src.lm.models.layers import (
    MLP,
    Attention,
    Buffer,
    Embedding,
    ExpertMatrices,
    HiddenStates,
    Layer,
    Linear,
    RMSNorm,
    Segments,
)
from megatrain_jax._src.lm.models.moe import Experts, route
from megatrain_jax._src.lm.models.parameter_maker import ParameterMaker
from megatrain_jax._src.lm.models.rotary import Rotation

if TYPE_CHECKING:
    from megatrain_jax._src.lm.models.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class Gemma4Options:
    """Sizes that differ between Gemma 4's layers.

    Attributes:
        local_head_dim: Width of a head in layers with a window; `head_dim` is for layers without.
        local_kv_heads: Key and value heads in layers with a window; `num_kv_heads` is for layers
            without.
        keys_are_values: Whether values are keys before their norm in layers without a window.
        first_shared: Number of the first layer without its own keys and values.
        lenders: Numbers of the layers that lend their keys and values to such layers.
        inputs_dim: Width of a layer's own embeddings; 0 for none.
        inputs_vocab: Rows of these embeddings.
        shared_intermediate_size: Width inside an MLP from `first_shared` on.
    """

    local_head_dim: int
    local_kv_heads: int
    keys_are_values: bool
    first_shared: int
    lenders: tuple[int, ...]
    inputs_dim: int
    inputs_vocab: int
    shared_intermediate_size: int


class Memory(NamedTuple):
    """The values passed from layer to layer beside the hidden states.

    Attributes:
        inputs: For each layer, its own embeddings of the tokens (rows, length, inputs_dim).
        local: Keys and values of the last layer with a window that has its own.
        full: The same for the last layer without a window.
        streams: Hidden states beside the layers' own (num, rows, length, width), in Gemma 3n.
    """

    inputs: tuple[Array, ...] = ()
    local: tuple[Array, Array] | None = None
    full: tuple[Array, Array] | None = None
    streams: Array | None = None


class MemoryMaker(nnx.Module):
    """The token embeddings of each layer, if there are any."""

    def __init__(self, config: "DecoderConfig", make: ParameterMaker):
        """Makes the parameters."""
        options: Gemma4Options = config.options
        self.num_layers, self.dim = config.num_layers, options.inputs_dim
        if self.dim:
            wide = self.num_layers * self.dim
            self.embed_tokens_per_layer = Embedding(options.inputs_vocab, wide, make)
            self.per_layer_model_projection = Linear(config.hidden_size, wide, make)
            self.per_layer_projection_norm = RMSNorm(self.dim, config, make)

    def __call__(self, tokens: Integer[Array, "rows length"], x: HiddenStates) -> Memory:
        """Returns the initial memory: for each layer, a sum of two embeddings of the tokens."""
        if not self.dim:
            return Memory()
        by_layer = (*x.shape[:2], self.num_layers, self.dim)
        own = self.embed_tokens_per_layer(tokens)
        own = (own * jnp.asarray(self.dim**0.5, own.dtype)).reshape(by_layer)
        projected = self.per_layer_model_projection(x) * x.shape[-1] ** -0.5
        both = (self.per_layer_projection_norm(projected.reshape(by_layer)) + own) * 2**-0.5
        return Memory(inputs=tuple(both[:, :, i] for i in range(self.num_layers)))

    def finish(self, x: HiddenStates, memory: Memory) -> HiddenStates:
        """Returns the hidden states for the last norm; here those of the last layer."""
        return x


def lender_of(config: "DecoderConfig", layer: int) -> int | None:
    """Returns the earlier layer with the keys and values that a layer uses; None for its own."""
    options: Gemma4Options = config.options
    if layer < options.first_shared:
        return None
    local = config.window(layer) is not None
    return next(i for i in options.lenders if (config.window(i) is not None) == local)


def rms_normalized(x: Float[Array, "*rows dim"], eps: float) -> Float[Array, "*rows dim"]:
    """Normalises the last axis in fp32, without a weight."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)).astype(x.dtype)


class Gemma4Attention(Attention):
    """Attention with normalised queries, keys and values."""

    def __init__(self, config: "DecoderConfig", layer: int, make: ParameterMaker):
        """Makes the parameters of one layer's attention."""
        options: Gemma4Options = config.options
        self.window, self.eps = config.window(layer), config.norm_eps
        local = self.window is not None
        self.head_dim = options.local_head_dim if local else config.head_dim
        kv_heads = options.local_kv_heads if local else config.num_kv_heads
        self.interleaved, self.softcap, self.scale = False, None, config.attention_scale
        wide, bias = config.hidden_size, config.qkv_bias
        query_size, key_size = config.num_heads * self.head_dim, kv_heads * self.head_dim
        self.q_proj = Linear(wide, query_size, make, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, config, make)
        self.o_proj = Linear(query_size, wide, make, bias=config.out_bias)
        self.lent = layer >= options.first_shared
        if self.lent:
            return
        self.k_proj = Linear(wide, key_size, make, bias=bias)
        own_values = local or not options.keys_are_values
        self.v_proj = Linear(wide, key_size, make, bias=bias) if own_values else None
        self.k_norm = RMSNorm(self.head_dim, config, make)

    def __call__(
        self,
        x: HiddenStates,
        rotation: Rotation,
        segments: Segments,
        lent: tuple[Array, Array] | None = None,
    ) -> tuple[HiddenStates, tuple[Array, Array]]:
        """Computes attention within rows, or within documents if `segments` numbers them.

        Args:
            x: The tokens.
            rotation: Their rotary embedding.
            segments: Their documents.
            lent: Keys and values of an earlier layer, used if this one has none.

        Returns:
            The result, and the keys and values.
        """

        def heads(y: Array) -> Array:
            return y.reshape(*x.shape[:2], -1, self.head_dim)

        q = self.q_norm(heads(self.q_proj(x)))
        if self.lent:
            assert lent is not None
            # Lent keys are already rotated.
            (q, _), (k, v) = self.rotate(q, q, rotation), lent
        else:
            k = heads(self.k_proj(x))
            v = rms_normalized(k if self.v_proj is None else heads(self.v_proj(x)), self.eps)
            q, k = self.rotate(q, self.k_norm(k), rotation)
        mixed = self.attend(q, k, v, segments)
        return self.o_proj(mixed.reshape(*x.shape[:2], -1)), (k, v)


class Gemma4Router(nnx.Module):
    """A router that normalises its input, and scales each expert's result."""

    def __init__(self, config: "DecoderConfig", experts: Experts, make: ParameterMaker):
        """Makes the parameters."""
        self.eps, self.settings = config.norm_eps, experts
        self.proj = Linear(config.hidden_size, experts.num, make)
        self.scale = make.constant(1.0, config.hidden_size)
        self.per_expert_scale = make.constant(1.0, experts.num)

    def __call__(
        self, tokens: Float[Array, "tokens width"]
    ) -> tuple[Integer[Array, "tokens per_token"], Float[Array, "tokens per_token"]]:
        """Returns each token's experts, and their shares in fp32."""
        x = rms_normalized(tokens, self.eps) * self.scale[...] * tokens.shape[-1] ** -0.5
        chosen, shares, _ = route(self.proj(x), self.settings)
        return chosen, shares * self.per_expert_scale[...].astype(jnp.float32)[chosen]


class Gemma4Layer(Layer):
    """Attention, then an MLP and experts side by side, with norms around each."""

    def __init__(self, config: "DecoderConfig", layer: int, make: ParameterMaker):
        """Makes the parameters of one layer."""

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config, make)

        self.input_layernorm = norm()
        options: Gemma4Options = config.options
        self.number, self.local = layer, config.window(layer) is not None
        self.lends = layer in options.lenders
        self.self_attn = Gemma4Attention(config, layer, make)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.borrows = lender_of(config, layer)
        shared = self.borrows is not None
        self.mlp = MLP(config, make, options.shared_intermediate_size if shared else None)
        self.post_feedforward_layernorm = norm()
        self.has_inputs = options.inputs_dim > 0
        if self.has_inputs:
            self.activation = ACTIVATIONS[config.activation]
            self.per_layer_input_gate = Linear(config.hidden_size, options.inputs_dim, make)
            self.per_layer_projection = Linear(options.inputs_dim, config.hidden_size, make)
            self.post_per_layer_input_norm = norm()
        # Saved in files but not trained: no gradient and no optimizer state.
        self.layer_scalar = Buffer(jnp.ones(1))
        self.sparse = config.experts is not None
        if config.experts is not None:
            self.expert = gated(ACTIVATIONS[config.activation])
            self.router = Gemma4Router(config, config.experts, make)
            self.experts = ExpertMatrices(config.experts, config.hidden_size, make)
            self.post_feedforward_layernorm_1 = norm()
            self.pre_feedforward_layernorm_2 = norm()
            self.post_feedforward_layernorm_2 = norm()

    def __call__(
        self, x: HiddenStates, rotation: Rotation, segments: Segments, memory: Memory
    ) -> tuple[Any, ...]:
        """Returns the result, None for the tally (no loss balances experts), and the memory."""
        kind = "local" if self.local else "full"
        lent = getattr(memory, kind)
        y, kept = self.self_attn(self.input_layernorm(x), rotation, segments, lent)
        memory = memory._replace(**{kind: kept}) if self.lends else memory
        x = x + self.post_attention_layernorm(y)
        y = self.mlp(self.pre_feedforward_layernorm(x))
        if self.sparse:
            # In parallel with the MLP: both read the result of attention.
            y = self.post_feedforward_layernorm_1(y) + self._mixture(x)
        x = x + self.post_feedforward_layernorm(y)
        if self.has_inputs:
            y = self.activation(self.per_layer_input_gate(x)) * memory.inputs[self.number]
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(y))
        return x * self.layer_scalar[...].astype(x.dtype), None, memory

    def _mixture(self, x: HiddenStates) -> HiddenStates:
        tokens, e = x.reshape(-1, x.shape[-1]), self.experts
        chosen, shares = self.router(tokens)
        weights = e.gate_proj(), e.up_proj(), e.down_proj()
        y = self.pre_feedforward_layernorm_2(tokens)
        y = mix(y, chosen, shares, weights, self.expert)
        return self.post_feedforward_layernorm_2(y).reshape(x.shape)
