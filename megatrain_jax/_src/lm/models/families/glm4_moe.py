"""GLM 4.5 and 4.6: grouped experts, chosen by scores with a load-balancing bias.

The bias is adapted only in pre-training; here, as in Transformers, it stays constant.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from megatrain_jax._src.lm.models import hf_common
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
from megatrain_jax._src.lm.models.moe import Experts, Routed
from megatrain_jax._src.lm.models.parameter_maker import ParameterMaker

if TYPE_CHECKING:
    from megatrain_jax._src.lm.models.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class GroupedRouting:
    """Options of expert routing that not every mixture has.

    Attributes:
        groups: Number of groups of experts, equally large.
        groups_per_token: Number of groups from which a token's experts may come: the groups with
            the highest sum of their two best scores.
        scale: Factor of the shares.
    """

    groups: int
    groups_per_token: int
    scale: float


class BiasedRouter(nnx.Module):
    """A router with a bias that affects the choice of experts, but not their shares."""

    def __init__(self, wide: int, num: int, make: ParameterMaker):
        """Makes the parameter, and the bias."""
        self.weight = make.weight(num, wide)
        self.e_score_correction_bias = Buffer(jnp.zeros(num))


class BiasedMixture(MixtureOfExperts):
    """Experts with a biased router, and one expert that all tokens share.

    Attributes:
        router: Class of the router; called with the width, the number of experts and a maker.
    """

    router: ClassVar[Callable[..., Any]] = BiasedRouter

    def __init__(self, config: "DecoderConfig", experts: Experts, make: ParameterMaker):
        """Makes the parameters."""
        super().__init__(config, experts, make)
        self.routing = config.options
        self.gate = self.router(config.hidden_size, experts.num, make)
        self.shared_experts = MLP(config, make, experts.shared_size)

    def __call__(self, x: HiddenStates, segments: Segments) -> tuple[HiddenStates, None]:
        """Returns the result of all experts for x, and None: no loss balances them."""
        mixed, _ = super().__call__(x, segments)
        return mixed + self.shared_experts(x), None

    def route(self, tokens: Float[Array, "tokens width"]) -> Routed:
        """Returns each token's experts, their shares, and all scores.

        For example, with groups of scores [0.5, 0.1] and [0.4, 0.3], a token's first group is the
        second one, with the sum 0.7.
        """
        weight = self.gate.weight[...].astype(jnp.float32)
        scores = jax.nn.sigmoid(tokens.astype(jnp.float32) @ weight.T)
        biased = scores + self.gate.e_score_correction_bias[...].astype(jnp.float32)
        grouped = biased.reshape(scores.shape[0], self.routing.groups, -1)
        # The bias balances loads: it affects the choice, but not the shares.
        best = jax.lax.top_k(grouped, 2)[0].sum(-1)
        _, groups = jax.lax.top_k(best, self.routing.groups_per_token)
        allowed = jax.nn.one_hot(groups, self.routing.groups).any(1)
        grouped = jnp.where(allowed[..., None], grouped, -jnp.inf)
        _, chosen = jax.lax.top_k(grouped.reshape(scores.shape), self.settings.per_token)
        shares = jnp.take_along_axis(scores, chosen, axis=-1)
        if self.settings.normalize:
            # Sigmoids may all be 0 in fp32; Transformers adds the same constant.
            shares = shares / (shares.sum(-1, keepdims=True) + 1e-20)
        return chosen, shares * self.routing.scale, scores


class Glm4MoeLayer(Layer):
    """A layer with experts chosen by biased scores."""

    mixture = BiasedMixture


def read_experts(
    fields: Fields,
    options: type[GroupedRouting] = GroupedRouting,
    *,
    per_token: int = 8,
    layers: tuple[int, ...] | None = None,
    **defaults: Any,
) -> dict[str, Any]:
    """Returns the arguments of `DecoderConfig` about experts and routing.

    Args:
        fields: The configuration.
        options: Class of the family's options.
        per_token: Default of `num_experts_per_tok`.
        layers: Numbers of the layers with experts; None for all from `first_k_dense_replace` on.
        **defaults: Defaults of the fields that differ between families.
    """
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        fields.take(name, None)  # multi-token prediction layers are kept unchanged
    names = ("n_group", "topk_group", "first_k_dense_replace", "moe_intermediate_size")
    groups, chosen, first, inside = (
        fields.integer(name, defaults.pop(name), least=name != "first_k_dense_replace")
        for name in names
    )
    if layers is None:
        layers = tuple(range(first, fields.integer("num_hidden_layers")))
    scale = fields.number("routed_scaling_factor", defaults.pop("routed_scaling_factor"))
    experts = hf_common.experts(
        fields,
        ("n_routed_experts", "num_local_experts"),
        num=defaults.pop("n_routed_experts"),
        per_token=per_token,
        intermediate_size=inside,
        shared_size=inside * fields.integer("n_shared_experts", 1),
        normalize=fields.flag("norm_topk_prob", True),
        layers=tuple(range(first, fields.integer("num_hidden_layers")))
        if layers is None
        else layers,
        balance=0.0,
    )
    if experts and (experts.num % groups or experts.num < 2 * groups or chosen > groups):
        raise ValueError(
            f"`n_group` = {groups} must divide the {experts.num} experts into groups of two at "
            f"least, and `topk_group` = {chosen} be at most as many"
        )
    routing = options(groups=groups, groups_per_token=chosen, scale=scale, **defaults)
    return {"experts": experts, "options": routing}


def _read(fields: Fields) -> dict[str, Any]:
    sizes = hf_common.sizes(fields, kv_heads=8, eps=1e-5)
    experts = read_experts(
        fields,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        moe_intermediate_size=1408,
        n_routed_experts=128,
        routed_scaling_factor=1.0,
    )
    return {
        **sizes,
        **experts,
        "rope": hf_common.rope(fields, sizes["head_dim"], share=0.5),
        "qkv_bias": fields.flag("attention_bias", False),
        "qk_norm": fields.flag("use_qk_norm", False),
        "layer": Glm4MoeLayer,
    }


GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    read=_read,
    kept=("model.layers.{num_layers}.",),
)
