"""Llama 4: attention within chunks in most layers, and experts with scaled inputs.

Layers that don't rotate see all tokens, and their queries grow with their position.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.activation_functions import ACTIVATIONS
from megatrain_jax._src.lm.models.causal_attention import attention
from megatrain_jax._src.lm.models.expert_blocks import mix
from megatrain_jax._src.lm.models.expert_functions import Weights, gated_fused
from megatrain_jax._src.lm.models.families.gemma4_layers import rms_normalized
from megatrain_jax._src.lm.models.family import Family, multimodal_family
from megatrain_jax._src.lm.models.hf_fields import Fields
from megatrain_jax._src.lm.models.layers import (
    MLP,
    Attention,
    Heads,
    HiddenStates,
    Layer,
    Linear,
    MixtureOfExperts,
    Segments,
)
from megatrain_jax._src.lm.models.moe import Experts
from megatrain_jax._src.lm.models.parameter_maker import ParameterMaker
from megatrain_jax._src.lm.models.rotary import Rotation, positions_in

if TYPE_CHECKING:
    from megatrain_jax._src.lm.models.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class Llama4Options:
    """Options of Llama 4's layers.

    Attributes:
        chunk: Number of tokens of a chunk.
        chunked: Numbers of the layers in which tokens attend within their chunk only.
        unit_heads: Whether layers that rotate normalise queries and keys, without a weight.
        growth: Queries at position p of layers that don't rotate get the factor 1 + growth * log(1
            + floor((p + 1) / span)); 0 for none.
        span: See `growth`.
        dense_size: The width inside an MLP of layers without experts.
    """

    chunk: int | None
    chunked: tuple[int, ...]
    unit_heads: bool
    growth: float
    span: int
    dense_size: int


class Llama4Attention(Attention):
    """Attention within chunks, or to all tokens before."""

    def __init__(self, config: "DecoderConfig", layer: int, make: ParameterMaker):
        """Makes the parameters of one layer's attention."""
        super().__init__(config, layer, make)
        options: Llama4Options = config.options
        self.options, self.eps = options, config.norm_eps
        self.chunk = options.chunk if layer in options.chunked else None
        self.grows = layer in config.unrotated and options.growth > 0

    def rotate(self, q: Heads, k: Heads, rotation: Rotation) -> tuple[Heads, Heads]:
        """Returns queries and keys rotated to their positions, then perhaps normalised."""
        q, k = super().rotate(q, k, rotation)
        return (
            (rms_normalized(q, self.eps), rms_normalized(k, self.eps))
            if self.options.unit_heads
            else (q, k)
        )

    def attend(self, q: Heads, k: Heads, v: Heads, segments: Segments) -> Heads:
        """Returns for each query the mean of values, weighted by the match of their keys."""
        if self.grows:
            spans = (positions_in(q.shape[1], segments) + 1) // self.options.span
            growth = 1 + self.options.growth * jnp.log1p(spans.astype(jnp.float32))
            q = (q * growth[:, :, None, None]).astype(q.dtype)
        return attention(
            q,
            k,
            v,
            segments=segments,
            window=self.window,
            chunk=self.chunk,
            softcap=self.softcap,
            scale=self.scale,
        )


class Llama4Experts(nnx.Module):
    """The parameters of all experts of one layer, laid out as in the files: (experts, in, out)."""

    def __init__(self, experts: Experts, wide: int, make: ParameterMaker):
        """Makes the parameters; the first half of `gate_up_proj` is the gate's."""
        num, inside = experts.num, experts.intermediate_size
        self.gate_up_proj = make.weight(num, wide, 2 * inside)
        self.down_proj = make.weight(num, inside, wide)


class Llama4Mixture(MixtureOfExperts):
    """Experts, and one that all tokens share; shares scale the experts' inputs."""

    def __init__(self, config: "DecoderConfig", experts: Experts, make: ParameterMaker):
        """Makes the parameters."""
        # The base class's constructor is not called: its experts have three matrices.
        self.settings = experts
        self.expert = gated_fused(ACTIVATIONS[config.activation], out_first=False)
        self.router = Linear(config.hidden_size, experts.num, make)
        self.experts = Llama4Experts(experts, config.hidden_size, make)
        self.shared_expert = MLP(config, make, experts.shared_size)

    def __call__(self, x: HiddenStates, segments: Segments) -> tuple[HiddenStates, None]:
        """Returns the result of all experts for x, and None: no loss balances them."""
        tokens = x.reshape(-1, x.shape[-1])
        logits, chosen = jax.lax.top_k(self.router(tokens), self.settings.per_token)
        shares = jax.nn.sigmoid(logits.astype(jnp.float32)).astype(x.dtype)
        # One token for each choice, because an expert is not linear in its input.
        scaled = (tokens[:, None] * shares[..., None]).reshape(-1, x.shape[-1])
        ones = jnp.ones((chosen.size, 1), jnp.float32)
        mixed = mix(scaled, chosen.reshape(-1, 1), ones, self.weights(), self.expert)
        mixed = mixed.reshape(*shares.shape, -1).sum(1)
        return mixed.reshape(x.shape) + self.shared_expert(x), None

    def weights(self) -> Weights:
        """Returns the experts' weights; each array has the experts as its first axis."""
        return self.experts.gate_up_proj[...], self.experts.down_proj[...]


class Llama4MLP(MLP):
    """The MLP of layers without experts."""

    def __init__(self, config: "DecoderConfig", make: ParameterMaker):
        """Makes the parameters."""
        super().__init__(config, make, config.options.dense_size)


class Llama4Layer(Layer):
    """A layer with attention within chunks or to all tokens, and experts or an MLP."""

    attention = Llama4Attention
    dense = Llama4MLP
    mixture = Llama4Mixture


def _layers(fields: Fields, num_layers: int) -> tuple[list[bool], tuple[int, ...]]:
    """Returns whether each layer rotates, and the layers with experts."""
    step = fields.integer("no_rope_layer_interval", 4)
    default = [int((i + 1) % step != 0) for i in range(num_layers)]
    rotated = fields.listed("no_rope_layers", int, "integers") or default
    if len(rotated) != num_layers:
        allowed = f"a list of {num_layers} integers, one a layer"
        raise ValueError(checks.refused("no_rope_layers", allowed, rotated))
    step = fields.integer("interleave_moe_layer_step", 1)
    sparse = fields.listed("moe_layers", int, "integers")
    sparse = list(range(step - 1, num_layers, step)) if sparse is None else sparse
    return [bool(x) for x in rotated], tuple(sorted({i for i in sparse if 0 <= i < num_layers}))


def _chunked(fields: Fields, rotated: list[bool], chunk: int | None) -> tuple[int, ...]:
    kinds = ["full_attention", "chunked_attention"]
    default = [kinds[rotates and chunk is not None] for rotates in rotated]
    types = fields.listed("layer_types", str, "names")
    types = default if types is None else types
    if len(types) != len(rotated) or set(types) - set(kinds[: 1 if chunk is None else 2]):
        allowed = f"names of {len(rotated)} layers, of {', '.join(kinds)}"
        hint = f"`attention_chunk_size` is {chunk}"
        raise ValueError(checks.refused("layer_types", allowed, types, hint))
    return tuple(i for i, name in enumerate(types) if name == kinds[1])


def _read(fields: Fields) -> dict[str, Any]:
    fields.neutral(router_jitter_noise=0.0)
    fields.take("router_aux_loss_coef", None)  # Transformers adds no loss for balance
    fields.take("for_llm_compressor", None)
    sizes = hf_common.sizes(fields, kv_heads=8, head_dim=128, eps=1e-5)
    rotated, sparse = _layers(fields, sizes["num_layers"])
    chunk = fields.integer("attention_chunk_size", 8192, null=True)
    growth = fields.number("attn_scale", 0.1, least=0)
    options = Llama4Options(
        chunk=chunk,
        chunked=_chunked(fields, rotated, chunk),
        unit_heads=fields.flag("use_qk_norm", True),
        growth=growth if fields.flag("attn_temperature_tuning", True) else 0.0,
        span=fields.integer("floor_scale", 8192),
        dense_size=fields.integer("intermediate_size_mlp", 16_384),
    )
    return {
        **sizes,
        **hf_common.attention_bias(fields),
        "rope": hf_common.rope(fields, sizes["head_dim"], theta=500_000.0, interleaved=True),
        "unrotated": tuple(i for i, rotates in enumerate(rotated) if not rotates),
        "layer": Llama4Layer,
        "options": options,
        "experts": hf_common.experts(
            fields,
            ("num_local_experts", "num_local_experts"),
            num=16,
            per_token=1,
            intermediate_size=sizes["intermediate_size"],
            shared_size=sizes["intermediate_size"],
            normalize=False,
            layers=sparse,
            balance=0.0,
        ),
    }


LLAMA4 = Family(
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    read=_read,
    stacked=True,
    renames={"mlp": "feed_forward"},
)
LLAMA4_MULTIMODAL = multimodal_family(
    LLAMA4,
    model_type="llama4",
    architecture="Llama4ForConditionalGeneration",
    kept=("vision_model.", "multi_modal_projector."),
    beside="boi_token_index eoi_token_index image_token_index",
    tied=False,
)
