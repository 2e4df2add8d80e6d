"""Qwen 1.5 and 2 with experts, plus one shared expert for all tokens."""

from typing import TYPE_CHECKING, Any

import jax
from jaxtyping import Array, Float

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields
from megatrain_jax._src.lm.models.layers import (
    MLP,
    HiddenStates,
    Layer,
    Linear,
    MixtureOfExperts,
    Segments,
)
from megatrain_jax._src.lm.models.moe import Experts
from megatrain_jax._src.lm.models.parameter_maker import ParameterMaker

if TYPE_CHECKING:
    from megatrain_jax._src.lm.models.config import DecoderConfig


class GatedSharedMixture(MixtureOfExperts):
    """Experts, and a shared expert with a gate that scales its result for each token."""

    def __init__(self, config: "DecoderConfig", experts: Experts, make: ParameterMaker):
        """Makes the parameters."""
        super().__init__(config, experts, make)
        self.shared_expert = MLP(config, make, experts.shared_size)
        self.shared_expert_gate = Linear(config.hidden_size, 1, make)

    def __call__(
        self, x: HiddenStates, segments: Segments
    ) -> tuple[HiddenStates, Float[Array, "3 num"]]:
        """Returns the result of all experts for x, and a load tally of the routed ones."""
        mixed, tally = super().__call__(x, segments)
        return mixed + jax.nn.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x), tally


class Qwen2MoeLayer(Layer):
    """A layer with experts, and a gated expert that all tokens share."""

    mixture = GatedSharedMixture


def _read(fields: Fields) -> dict[str, Any]:
    fields.neutral(use_mrope=False)
    sizes = hf_common.sizes(fields, kv_heads=16)
    # A window may be given but unused. If it is used, every second one of the first layers has it.
    used, size = fields.flag("use_sliding_window", False), hf_common.window(fields)
    window, first = size if used else None, fields.integer("max_window_layers", 28, least=0)
    types = [
        "sliding_attention" if window and i % 2 == 0 and i < first else "full_attention"
        for i in range(sizes["num_layers"])
    ]
    return {
        **sizes,
        "rope": hf_common.rope(fields, sizes["head_dim"]),
        "windows": hf_common.windows_by_type(fields, types, window),
        "qkv_bias": fields.flag("qkv_bias", True),
        "layer": Qwen2MoeLayer,
        "experts": hf_common.experts(
            fields,
            ("num_experts", "num_local_experts"),
            num=60,
            per_token=4,
            intermediate_size=fields.integer("moe_intermediate_size", 1408),
            shared_size=fields.integer("shared_expert_intermediate_size", 5632),
            normalize=fields.flag("norm_topk_prob", False),
            layers=hf_common.sparse_layers(fields),
        ),
    }


QWEN2_MOE = Family(model_type="qwen2_moe", architecture="Qwen2MoeForCausalLM", read=_read)
