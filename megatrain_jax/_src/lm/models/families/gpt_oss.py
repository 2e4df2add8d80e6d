"""gpt-oss: attention with a sink per head, and experts with biases and a clamped gate."""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.causal_attention import attention
from megatrain_jax._src.lm.models.expert_functions import Expert, LastProduct, Weights
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields
from megatrain_jax._src.lm.models.layers import Attention, Heads, Layer, Linear, MixtureOfExperts
from megatrain_jax._src.lm.models.moe import Experts, Routed, route
from megatrain_jax._src.lm.models.parameter_maker import ParameterMaker

if TYPE_CHECKING:
    from megatrain_jax._src.lm.models.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class GptOssOptions:
    """Options of gpt-oss's experts beyond those of every mixture.

    Attributes:
        alpha: Factor within the gate's sigmoid.
        limit: Upper bound of the gate, and bound in both directions of the up product.
    """

    alpha: float
    limit: float


class GptOssAttention(Attention):
    """Attention with a sink for each head: queries may attend to it, and it contributes nothing."""

    def __init__(self, config: "DecoderConfig", layer: int, make: ParameterMaker):
        """Makes the parameters of one layer's attention."""
        super().__init__(config, layer, make)
        self.sinks = make.weight(config.num_heads)

    def attend(
        self, q: Heads, k: Heads, v: Heads, segments: Integer[Array, "rows length"] | None
    ) -> Heads:
        """Returns for each query the mean of values, with zeros for the sink."""
        sinks = self.sinks[...]
        return attention(q, k, v, segments=segments, window=self.window, sinks=sinks)


class GptOssExperts(nnx.Module):
    """The parameters of all experts of one layer, laid out as in the files: (experts, in, out)."""

    def __init__(self, experts: Experts, wide: int, make: ParameterMaker):
        """Makes the parameters; even columns of `gate_up_proj` are the gate's."""
        num, inside = experts.num, experts.intermediate_size
        self.gate_up_proj = make.weight(num, wide, 2 * inside)
        self.gate_up_proj_bias = make.constant(0.0, num, 2 * inside)
        self.down_proj = make.weight(num, inside, wide)
        self.down_proj_bias = make.constant(0.0, num, wide)


class GptOssMixture(MixtureOfExperts):
    """Experts with biases, and a router with a bias."""

    def __init__(self, config: "DecoderConfig", experts: Experts, make: ParameterMaker):
        """Makes the parameters."""
        # The base class's constructor is not called: its router has no bias, and its experts have
        # three matrices.
        self.settings = experts
        self.expert = _clamped(config.options.alpha, config.options.limit)
        self.router = Linear(config.hidden_size, experts.num, make, bias=True)
        self.experts = GptOssExperts(experts, config.hidden_size, make)

    def route(self, tokens: Float[Array, "tokens width"]) -> Routed:
        """Returns each token's experts, their shares, and the probabilities of all experts."""
        return route(self.router(tokens), self.settings)

    def weights(self) -> Weights:
        """Returns the experts' matrices and biases."""
        e = self.experts
        arrays = e.gate_up_proj, e.gate_up_proj_bias, e.down_proj, e.down_proj_bias
        return tuple(array[...] for array in arrays)


@cache
def _clamped(alpha: float, limit: float) -> Expert:
    def expert(x, weights, product):
        gate_up, gate_up_bias, down, down_bias = weights
        both = product(x, gate_up, gate_up_bias, out_first=False)
        gate, up = jnp.minimum(both[..., ::2], limit), jnp.clip(both[..., 1::2], -limit, limit)
        inside = (up + 1) * gate * jax.nn.sigmoid(alpha * gate)
        return LastProduct(inside, down, down_bias, out_first=False)

    return expert


class GptOssLayer(Layer):
    """A layer with attention sinks and biased experts."""

    attention = GptOssAttention
    mixture = GptOssMixture


def _read(fields: Fields) -> dict[str, Any]:
    for name in ("experts_per_token", "initial_context_length"):
        fields.take(name, None)  # read only by the original code, not by Transformers
    sizes = hf_common.sizes(fields, kv_heads=8, head_dim=64, eps=1e-5)
    layers = range(sizes["num_layers"])
    types = ["full_attention" if i % 2 else "sliding_attention" for i in layers]
    parameters = fields.mapping("rope_scaling") or fields.mapping("rope_parameters")
    yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False}
    yarn |= {"original_max_position_embeddings": 4096}
    rope = hf_common.rope(fields, sizes["head_dim"], theta=150_000.0, parameters=parameters or yarn)
    alpha, limit = fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0, above=0)
    return {
        **sizes,
        **hf_common.attention_bias(fields, True),
        "rope": rope,
        "windows": hf_common.windows_by_type(fields, types, hf_common.window(fields, 128)),
        "layer": GptOssLayer,
        "options": GptOssOptions(alpha=alpha, limit=limit),
        "experts": hf_common.experts(
            fields,
            ("num_local_experts", "num_experts"),
            num=128,
            per_token=4,
            intermediate_size=sizes["intermediate_size"],
            normalize=True,
            layers=tuple(layers),
        ),
    }


GPT_OSS = Family(model_type="gpt_oss", architecture="GptOssForCausalLM", read=_read, stacked=True)
