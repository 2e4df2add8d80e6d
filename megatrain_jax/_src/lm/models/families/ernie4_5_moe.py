"""ERNIE 4.5 with experts: chosen by biased probabilities, and some that all tokens share."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.families import ernie4_5
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields
from megatrain_jax._src.lm.models.layers import (
    MLP,
    Buffer,
    HiddenStates,
    Layer,
    MixtureOfExperts,
    Segments,
)
from megatrain_jax._src.lm.models.moe import Experts, Routed, route_biased
from megatrain_jax._src.lm.models.parameter_maker import ParameterMaker

if TYPE_CHECKING:
    from megatrain_jax._src.lm.models.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class ErnieRouting:
    """Options of expert routing that not every mixture has.

    Attributes:
        least: Lower bound of the divisor of shares, their sum.
    """

    least: float


class ErnieStatics(nnx.Module):
    """The bias of the experts' choice, under its name in the files."""

    def __init__(self, num: int):
        """Makes the bias."""
        self.e_score_correction_bias = Buffer(jnp.zeros((1, num)))


class ErnieMixture(MixtureOfExperts):
    """Experts chosen with a bias that balances their loads, and shared experts."""

    biased = True

    def __init__(self, config: "DecoderConfig", experts: Experts, make: ParameterMaker):
        """Makes the parameters, and the bias."""
        super().__init__(config, experts, make)
        self.least = config.options.least
        self.moe_statics = ErnieStatics(experts.num)
        size = experts.shared_size
        self.shared_experts = None if size is None else MLP(config, make, size)

    def __call__(
        self, x: HiddenStates, segments: Segments
    ) -> tuple[HiddenStates, Float[Array, "3 num"]]:
        """Returns the result of all experts for x, and a load tally of the routed ones."""
        mixed, tally = super().__call__(x, segments)
        return mixed if self.shared_experts is None else mixed + self.shared_experts(x), tally

    def route(self, tokens: Float[Array, "tokens width"]) -> Routed:
        """Returns each token's experts, their shares, and the probabilities of all experts."""
        weight = self.gate.weight[...].astype(jnp.float32)
        probabilities = jax.nn.softmax(tokens.astype(jnp.float32) @ weight.T, axis=-1)
        bias = self.moe_statics.e_score_correction_bias[...][0]
        chosen, shares = route_biased(probabilities, bias, self.settings, least=self.least)
        return chosen, shares.astype(tokens.dtype), probabilities


class ErnieLayer(Layer):
    """A layer with experts chosen by biased probabilities."""

    mixture = ErnieMixture


def _read(fields: Fields) -> dict[str, Any]:
    # Only the original code reads these; layers that predict further tokens are kept unchanged.
    for name in ("num_nextn_predict_layers", "moe_capacity", "moe_gate", "moe_use_aux_free"):
        fields.take(name, None)
    arguments = ernie4_5.common(fields, kv_heads=4)
    num_layers = arguments["num_layers"]
    first, step = (
        fields.integer("moe_layer_start_index", 1, least=0),
        fields.integer("moe_layer_interval", 1),
    )
    last = fields.integer("moe_layer_end_index", -1, least=-1)
    last = num_layers - 1 if last == -1 else min(last, num_layers - 1)
    inside = fields.integer("moe_intermediate_size", 1536)
    return {
        **arguments,
        "head_bias": arguments["mlp_bias"],
        "layer": ErnieLayer,
        "options": ErnieRouting(least=fields.number("moe_norm_min", 1e-12, least=0)),
        "experts": hf_common.experts(
            fields,
            ("num_experts", "moe_num_experts"),
            num=64,
            per_token=fields.integer("moe_k", 6),
            intermediate_size=inside,
            shared_size=inside * fields.integer("moe_num_shared_experts", 2, least=0) or None,
            normalize=True,
            layers=tuple(i for i in range(first, last + 1) if (i + 1) % step == 0),
        ),
    }


ERNIE4_5_MOE = Family(
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    read=_read,
    kept=("model.mtp",),
)
