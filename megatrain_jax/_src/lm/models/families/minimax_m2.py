"""MiniMax M2: experts chosen by biased scores, and norms of queries and keys as a whole."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.families.mixtral import MIXTRAL
from megatrain_jax._src.lm.models.families.olmo2 import WideNormAttention
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields
from megatrain_jax._src.lm.models.layers import Buffer, Layer, MixtureOfExperts
from megatrain_jax._src.lm.models.moe import Experts, Routed, route_biased
from megatrain_jax._src.lm.models.parameter_maker import ParameterMaker

if TYPE_CHECKING:
    from megatrain_jax._src.lm.models.config import DecoderConfig


class MiniMaxMixture(MixtureOfExperts):
    """Experts with sigmoids as scores, chosen with a bias that balances their loads."""

    biased = True

    def __init__(self, config: "DecoderConfig", experts: Experts, make: ParameterMaker):
        """Makes the parameters, and the bias."""
        super().__init__(config, experts, make)
        self.e_score_correction_bias = Buffer(jnp.zeros(experts.num))

    def route(self, tokens: Float[Array, "tokens width"]) -> Routed:
        """Returns each token's experts, their shares, and the probabilities of all experts."""
        logits = self.gate(tokens).astype(jnp.float32)
        bias = self.e_score_correction_bias[...]
        chosen, shares = route_biased(jax.nn.sigmoid(logits), bias, self.settings)
        return chosen, shares, jax.nn.softmax(logits, axis=-1)


class MiniMaxLayer(Layer):
    """A layer with experts chosen by biased scores, and norms over all heads together."""

    attention = WideNormAttention
    mixture = MiniMaxMixture


def _read(fields: Fields) -> dict[str, Any]:
    for name in ("use_mtp", "mtp_transformer_layers", "num_mtp_modules"):
        fields.take(name, None)  # not read by Transformers; checkpoints have no such layers
    # Fields that only the original code reads.
    fields.neutral(use_qk_norm=True, qk_norm_type="per_layer", use_routing_bias=True)
    fields.neutral(scoring_func="sigmoid", shared_intermediate_size=0, router_jitter_noise=0.0)
    sizes = hf_common.sizes(fields, kv_heads=8, head_dim=128)
    fields.neutral(attn_type_list=[1] * sizes["num_layers"])
    rotated = fields.integer("rotary_dim", None, null=True)
    share = 1.0 if rotated is None else rotated / sizes["head_dim"]
    return {
        **sizes,
        "rope": hf_common.rope(fields, sizes["head_dim"], theta=5_000_000.0, share=share),
        "layer": MiniMaxLayer,
        "experts": hf_common.experts(
            fields,
            ("num_experts", "num_local_experts"),
            num=256,
            per_token=8,
            intermediate_size=sizes["intermediate_size"],
            normalize=True,
            layers=tuple(range(sizes["num_layers"])),
        ),
    }


MINIMAX_M2 = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    read=_read,
    renames=MIXTRAL.renames,
)
