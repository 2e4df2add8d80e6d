"""DeepSeek V2 and V2-Lite: latent attention, and experts chosen by their probabilities."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.families import deepseek_v3, glm4_moe
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields
from megatrain_jax._src.lm.models.layers import Linear
from megatrain_jax._src.lm.models.moe import Routed


class ProbableMixture(glm4_moe.BiasedMixture):
    """Experts chosen by their probabilities, and one that all tokens share."""

    router = Linear

    def route(self, tokens: Float[Array, "tokens width"]) -> Routed:
        """Returns each token's experts, their shares, and the probabilities of all experts.

        A token's experts come from the groups with the most probable best expert.
        """
        weight = self.gate.weight[...].astype(jnp.float32)
        probabilities = jax.nn.softmax(tokens.astype(jnp.float32) @ weight.T, axis=-1)
        grouped = probabilities.reshape(tokens.shape[0], self.routing.groups, -1)
        _, groups = jax.lax.top_k(grouped.max(-1), self.routing.groups_per_token)
        allowed = jax.nn.one_hot(groups, self.routing.groups).any(1)
        allowed = jnp.where(allowed[..., None], grouped, 0.0).reshape(probabilities.shape)
        shares, chosen = jax.lax.top_k(allowed, self.settings.per_token)
        return chosen, shares * self.routing.scale, probabilities


class DeepseekV2Layer(deepseek_v3.DeepseekLayer):
    """A layer with latent attention, and experts chosen by their probabilities."""

    mixture = ProbableMixture


def _groups(fields: Fields, num: int) -> tuple[int, int]:
    """Returns the number of groups of experts, and the number that a token may choose from."""
    method = fields.take("topk_method", "greedy")
    names = ("n_group", "topk_group")
    if method == "greedy":
        for name in names:
            fields.take(name, None)
        return 1, 1
    if method != "group_limited_greedy":
        fields.neutral(topk_method="greedy")
    groups, chosen = (fields.integer(name) for name in names)
    if num % groups or chosen > groups:
        raise ValueError(
            f"`n_group` = {groups} must divide the {num} experts, and `topk_group` = {chosen} be "
            "at most as many"
        )
    return groups, chosen


def _read(fields: Fields) -> dict[str, Any]:
    for name in ("ep_size", "aux_loss_alpha", "seq_aux", "pretraining_tp", "qk_head_dim"):
        fields.take(name, None)  # not read by Transformers
    fields.neutral(moe_layer_freq=1, scoring_func="softmax", norm_topk_prob=False)
    fields.neutral(rope_interleave=True)
    arguments, options = deepseek_v3.read_latent(fields)
    first = fields.integer("first_k_dense_replace", 0, least=0)
    inside = fields.integer("moe_intermediate_size", 1407)
    experts = hf_common.experts(
        fields,
        ("num_experts", "n_routed_experts"),
        num=64,
        per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=inside,
        shared_size=inside * fields.integer("n_shared_experts", 2),
        normalize=False,
        layers=tuple(range(first, arguments["num_layers"])),
        balance=0.0,
    )
    groups, chosen = _groups(fields, experts.num if experts else 1)
    routing = {
        "groups": groups,
        "groups_per_token": chosen,
        "scale": fields.number("routed_scaling_factor", 1.0),
    }
    return {
        **arguments,
        "mlp_bias": fields.flag("mlp_bias", False),
        "layer": DeepseekV2Layer,
        "options": deepseek_v3.DeepseekOptions(**routing, **options),
        "experts": experts,
    }


DEEPSEEK_V2 = Family(model_type="deepseek_v2", architecture="DeepseekV2ForCausalLM", read=_read)
