"""Apertus: a plain MLP with the activation xIELU, with two trained numbers per layer."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields
from megatrain_jax._src.lm.models.layers import Buffer, Layer, Linear
from megatrain_jax._src.lm.models.parameter_maker import ParameterMaker

if TYPE_CHECKING:
    from megatrain_jax._src.lm.models.config import DecoderConfig

_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


class XIELU(nnx.Module):
    """An activation with trained curvatures (https://arxiv.org/abs/2411.13010).

    It is `p x^2 + beta x` above zero and `n (exp(x) - 1 - x) + beta x` below, with
    `p = softplus(alpha_p)` and `n = beta + softplus(alpha_n)`.
    """

    def __init__(self, make: ParameterMaker):
        """Makes the two parameters, and the constants that files contain."""
        # Their softplus is 0.8, and 0.8 - beta.
        self.alpha_p = make.constant(float(np.log(np.expm1(0.8))), 1)
        self.alpha_n = make.constant(float(np.log(np.expm1(0.3))), 1)
        self.beta = Buffer(jnp.asarray(0.5, make.dtype))
        self.eps = Buffer(jnp.asarray(-1e-6, make.dtype))

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """Maps each number separately."""
        beta, eps = self.beta[...].astype(x.dtype), self.eps[...].astype(x.dtype)
        up = jax.nn.softplus(self.alpha_p[...])
        down = beta + jax.nn.softplus(self.alpha_n[...])
        below = (jnp.expm1(jnp.minimum(x, eps)) - x) * down
        return jnp.where(x > 0, up * x * x, below) + beta * x


class ApertusMLP(nnx.Module):
    """Two products with xIELU between them."""

    def __init__(self, config: "DecoderConfig", make: ParameterMaker):
        """Makes the parameters."""
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, make)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, make)
        self.act_fn = XIELU(make)

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """Maps each row separately."""
        return self.down_proj(self.act_fn(self.up_proj(x)))


class ApertusLayer(Layer):
    """A layer with an MLP of xIELU."""

    dense = ApertusMLP


def _read(fields: Fields) -> dict[str, Any]:
    # Fields that only the original code reads.
    fields.neutral(hidden_dropout=0.0, mlp_bias=False, post_norm=False, qk_norm=True)
    fields.neutral(hidden_act="xielu")
    sizes = hf_common.sizes(fields, eps=1e-5, activation="silu")
    parameters = fields.mapping("rope_scaling") or fields.mapping("rope_parameters") or dict(_ROPE)
    rope = hf_common.rope(fields, sizes["head_dim"], theta=12_000_000.0, parameters=parameters)
    return {
        **sizes,
        **hf_common.attention_bias(fields),
        "rope": rope,
        "qk_norm": True,
        "layer": ApertusLayer,
    }


APERTUS = Family(
    model_type="apertus",
    architecture="ApertusForCausalLM",
    read=_read,
    renames={
        "input_layernorm": "attention_layernorm",
        "post_attention_layernorm": "feedforward_layernorm",
    },
)
