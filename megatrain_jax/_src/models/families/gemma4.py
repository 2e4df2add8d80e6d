"""Gemma 4: heads of another width in layers without a window, experts beside an MLP.

The family of the 31B model and of the mixture of experts. The smaller ones also have embeddings for
each layer, and layers that use the keys and values of others, which aren't supported.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from megatrain_jax._src.common import checks
from megatrain_jax._src.models import hf_common
from megatrain_jax._src.models.activations import ACTIVATIONS
from megatrain_jax._src.models.family import Family, text_part
from megatrain_jax._src.models.hf_fields import Fields
from megatrain_jax._src.models.hf_rope import KINDS, read_rope
from megatrain_jax._src.models.layers import (
    Attention,
    Buffer,
    ExpertMatrices,
    Layer,
    Linear,
    Maker,
    RMSNorm,
)
from megatrain_jax._src.models.moe import Experts, gated, mix, route
from megatrain_jax._src.models.rotary import Rope, Rotation
from megatrain_jax._src.models.tensors import some

if TYPE_CHECKING:
    from megatrain_jax._src.models.config import DecoderConfig

Tokens = Float[Array, "rows length width"]
Segments = Integer[Array, "rows length"] | None
_ROPES: dict[str, dict[str, Any]] = {
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@dataclass(frozen=True, kw_only=True)
class Gemma4Options:
    """What differs between layers with a window and those without.

    Attributes:
        local_head_dim: Width of a head in layers with a window; `head_dim` is that of the others.
        local_kv_heads: Heads of keys and values there; `num_kv_heads` is that of the others.
        keys_are_values: Whether values are keys before their norm in layers without a window.
    """

    local_head_dim: int
    local_kv_heads: int
    keys_are_values: bool


def _unit(x: Float[Array, "*rows dim"], eps: float) -> Float[Array, "*rows dim"]:
    """Normalises the last axis, in fp32, without a weight."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)).astype(x.dtype)


class Gemma4Attention(Attention):
    """Attention whose queries, keys and values are all normalised."""

    def __init__(self, config: "DecoderConfig", layer: int, make: Maker):
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
        self.k_proj = Linear(wide, key_size, make, bias=bias)
        own_values = local or not options.keys_are_values
        self.v_proj = Linear(wide, key_size, make, bias=bias) if own_values else None
        self.o_proj = Linear(query_size, wide, make, bias=config.out_bias)
        self.q_norm = RMSNorm(self.head_dim, config, make)
        self.k_norm = RMSNorm(self.head_dim, config, make)

    def __call__(self, x: Tokens, rotation: Rotation, segments: Segments) -> Tokens:
        """Attends within rows, and within documents where `segments` numbers them."""

        def heads(y: Array) -> Array:
            return y.reshape(*x.shape[:2], -1, self.head_dim)

        k = heads(self.k_proj(x))
        v = k if self.v_proj is None else heads(self.v_proj(x))
        q, k = self.rotate(self.q_norm(heads(self.q_proj(x))), self.k_norm(k), rotation)
        mixed = self.attend(q, k, _unit(v, self.eps), segments)
        return self.o_proj(mixed.reshape(*x.shape[:2], -1))


class Gemma4Router(nnx.Module):
    """A router that normalises what it reads, and has a factor of each expert's result."""

    def __init__(self, config: "DecoderConfig", experts: Experts, make: Maker):
        """Makes the parameters."""
        self.eps, self.settings = config.norm_eps, experts
        self.proj = Linear(config.hidden_size, experts.num, make)
        self.scale = make.constant(1.0, config.hidden_size)
        self.per_expert_scale = make.constant(1.0, experts.num)

    def __call__(
        self, tokens: Float[Array, "tokens width"]
    ) -> tuple[Integer[Array, "tokens per_token"], Float[Array, "tokens per_token"]]:
        """Returns the experts of each token, and their shares in fp32."""
        x = _unit(tokens, self.eps) * self.scale[...] * tokens.shape[-1] ** -0.5
        chosen, shares, _ = route(self.proj(x), self.settings)
        return chosen, shares * self.per_expert_scale[...].astype(jnp.float32)[chosen]


class Gemma4Layer(Layer):
    """Attention, then an MLP and experts beside it, with norms around each of them."""

    def __init__(self, config: "DecoderConfig", layer: int, make: Maker):
        """Makes the parameters of one layer."""

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config, make)

        self.input_layernorm = norm()
        self.self_attn = Gemma4Attention(config, layer, make)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = self.dense(config, make)
        self.post_feedforward_layernorm = norm()
        self.layer_scalar = Buffer(jnp.ones(1))
        self.sparse = config.experts is not None
        if config.experts is not None:
            self.expert = gated(ACTIVATIONS[config.activation])
            self.router = Gemma4Router(config, config.experts, make)
            self.experts = ExpertMatrices(config.experts, config.hidden_size, make)
            self.post_feedforward_layernorm_1 = norm()
            self.pre_feedforward_layernorm_2 = norm()
            self.post_feedforward_layernorm_2 = norm()

    def __call__(self, x: Tokens, rotation: Rotation, segments: Segments) -> tuple[Tokens, None]:
        """Returns the layer's result; no tally, since no loss balances experts."""
        y = self.self_attn(self.input_layernorm(x), rotation, segments)
        x = x + self.post_attention_layernorm(y)
        y = self.mlp(self.pre_feedforward_layernorm(x))
        if self.sparse:
            y = self.post_feedforward_layernorm_1(y) + self._mixture(x)
        x = x + self.post_feedforward_layernorm(y)
        return x * self.layer_scalar[...].astype(x.dtype), None

    def _mixture(self, x: Tokens) -> Tokens:
        tokens, e = x.reshape(-1, x.shape[-1]), self.experts
        chosen, shares = self.router(tokens)
        weights = e.gate_proj(), e.up_proj(), e.down_proj()
        y = self.pre_feedforward_layernorm_2(tokens)
        y = mix(y, chosen, shares, weights, self.expert)
        return self.post_feedforward_layernorm_2(y).reshape(x.shape)


def _read(fields: Fields) -> dict[str, Any]:
    for name, default in (("hidden_size_per_layer_input", 256), ("num_kv_shared_layers", 0)):
        if fields.integer(name, default, least=0):
            raise ValueError(
                f"`{name}` = {fields.integer(name, default)} of a {fields.family} isn't supported; "
                "only 0 is, as in the 31B model and the mixture of experts"
            )
    # Of layers and embeddings that aren't there.
    fields.flag("use_double_wide_mlp", False)
    fields.integer("vocab_size_per_layer_input", None)
    activation = hf_common.read_activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    local = hf_common.sizes(fields, kv_heads=4, head_dim=256, tied=True, activation=activation)
    num_layers = local["num_layers"]
    types = [
        "full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(num_layers)
    ]
    types = fields.listed("layer_types", str, "names") or types
    windows = hf_common.windows_by_type(fields, types, hf_common.window(fields, 512))
    windows = (*windows[:-1], None)  # whatever `layer_types` says, as in Transformers
    shared = fields.flag("attention_k_eq_v", False)
    full = _full_heads(fields, windows, local, shared=shared)
    return {
        **local,
        **hf_common.attention_bias(fields),
        **_ropes(fields, full["head_dim"], local["head_dim"]),
        **full,
        "windows": windows,
        "norm_in_fp32": True,
        "scale_embedding": True,
        "attention_scale": 1.0,
        "final_softcap": fields.number("final_logit_softcapping", None, above=0),
        "experts": _experts(fields, num_layers),
        "layer": Gemma4Layer,
        "options": Gemma4Options(
            local_head_dim=local["head_dim"],
            local_kv_heads=local["num_kv_heads"],
            keys_are_values=shared,
        ),
    }


def _full_heads(
    fields: Fields, windows: hf_common.Windows, local: dict[str, Any], *, shared: bool
) -> dict[str, int]:
    """Returns the sizes of heads in layers without a window.

    Released checkpoints have fields for them; what Transformers writes has an object a layer.
    """
    head_dim = fields.integer("global_head_dim", 512)
    kv_heads = fields.integer("num_global_key_value_heads", None)
    given = {str(key): value for key, value in fields.mapping("per_layer_config").items()}
    if not given:
        kv_heads = (kv_heads if shared else None) or local["num_kv_heads"]
        return {"head_dim": head_dim, "num_kv_heads": kv_heads}
    names = {"head_dim", "num_key_value_heads"}
    ours = [str(i) for i, window in enumerate(windows) if window is None]
    first = given.get(ours[0])
    alike = isinstance(first, dict) and all(given.get(i) == first for i in ours)
    if first is None or not alike or set(given) != set(ours) or set(first) - names:
        raise ValueError(
            "`per_layer_config` must have one and the same object for each layer without a window, "
            f"{some(ours)}, with no other fields than {some(sorted(names))}"
        )
    values = {"head_dim": local["head_dim"], "num_key_value_heads": local["num_kv_heads"]} | first
    head_dim, kv_heads = (checks.integer(name, values[name]) for name in sorted(names))
    return {"head_dim": head_dim, "num_kv_heads": kv_heads}


def _ropes(fields: Fields, full_dim: int, local_dim: int) -> dict[str, Rope]:
    parameters = fields.mapping("rope_parameters") or _ROPES
    if set(parameters) != set(_ROPES) or not all(isinstance(v, dict) for v in parameters.values()):
        raise ValueError(f"`rope_parameters` must have objects {' and '.join(_ROPES)}")
    shared = {
        "family": fields.family,
        "max_length": fields.integer("max_position_embeddings", 131_072),
        "original_length": None,
        "kinds": KINDS | {"proportional": "proportional"},
    }
    full, local = (parameters[name] for name in _ROPES)
    return {
        "rope": read_rope(full, head_dim=full_dim, **shared),
        "local_rope": read_rope(local, head_dim=local_dim, **shared),
    }


def _experts(fields: Fields, num_layers: int) -> Experts | None:
    names = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if not fields.flag("enable_moe_block", False):
        for name in names:
            fields.integer(name, None)
        return None
    num, per_token, inside = (fields.integer(name) for name in names)
    return Experts(
        num=num,
        per_token=per_token,
        intermediate_size=inside,
        normalize=True,
        layers=tuple(range(num_layers)),
    )


GEMMA4 = Family(
    model_type="gemma4_text", architecture="Gemma4ForCausalLM", read=_read, joined_experts=True
)
GEMMA4_MULTIMODAL = text_part(
    GEMMA4,
    model_type="gemma4",
    architecture="Gemma4ForConditionalGeneration",
    kept=(
        "model.vision_tower.",
        "model.embed_vision.",
        "model.audio_tower.",
        "model.embed_audio.",
    ),
    beside="audio_config audio_token_id boa_token_id boi_token_id eoa_token_id eoa_token_index "
    "eoi_token_id image_token_id video_token_id vision_soft_tokens_per_image",
    tied=True,
    body="model.language_model",
    head="lm_head",
)
