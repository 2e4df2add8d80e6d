"""DeepSeek V3.2 and GLM 5: DeepSeek V3 with attention to the tokens that an indexer chooses.

An indexer scores all earlier tokens for each query, and attention sees those with the highest
scores (https://arxiv.org/abs/2512.02556, section 2). In rows of at most `index_topk` tokens these
are all. The choice has no derivative, so indexers have no gradients, as in Transformers; DeepSeek
trains them by a loss of their own. In GLM 5.2, most layers attend to the tokens that an earlier
layer has chosen.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.causal_attention import choose_keys
from megatrain_jax._src.lm.models.decoder_options import DecoderOptions, ParameterMaker
from megatrain_jax._src.lm.models.families import deepseek
from megatrain_jax._src.lm.models.hf_common import Fields
from megatrain_jax._src.lm.models.layers import HiddenStates, Layer, LayerNorm, Linear, Segments
from megatrain_jax._src.lm.models.rotary import Rotation, rotate


@dataclass(frozen=True, kw_only=True)
class SparseOptions(deepseek.DeepseekOptions):
    """The sizes of indexers, in addition to those of latent attention and of routing.

    Attributes:
        indexed: Numbers of the layers with an indexer; the others use the choice of the last one.
        index_heads: Number of heads of an indexer's queries.
        index_dim: Width of a head.
        index_most: Maximum number of tokens that a token attends to.
        index_interleaved: Whether rotary embeddings turn pairs of neighbours in indexers.
    """

    indexed: tuple[int, ...]
    index_heads: int
    index_dim: int
    index_most: int
    index_interleaved: bool


class Indexer(nnx.Module):
    """The choice of the tokens that each token attends to; its parameters are not trained."""

    def __init__(self, config: DecoderOptions, make: ParameterMaker):
        """Makes the parameters."""
        options: SparseOptions = config.options
        assert options.query_rank is not None
        make, wide, dim = make.untrained(), config.hidden_size, options.index_dim
        self.heads, self.most = options.index_heads, options.index_most
        self.interleaved, self.scale = options.index_interleaved, (dim * self.heads) ** -0.5
        self.wq_b = Linear(options.query_rank, self.heads * dim, make)
        self.wk = Linear(wide, dim, make)
        self.k_norm = LayerNorm(dim, config, make)
        self.k_norm.eps = 1e-6  # for any configuration, as in Transformers
        self.weights_proj = Linear(wide, self.heads, make)

    def __call__(
        self,
        x: HiddenStates,
        narrow: Float[Array, "rows length query_rank"],
        rotation: Rotation,
        segments: Segments,
    ) -> Any:
        """Returns the chosen tokens of `choose_keys`, from the tokens and the queries' latent."""
        q = self.wq_b(narrow).reshape(*x.shape[:2], self.heads, -1)
        k = self.k_norm(self.wk(x))[:, :, None]
        q, k = (rotate(y, rotation.cos_sin, interleaved=self.interleaved) for y in (q, k))
        matrix = self.weights_proj.weight[...].astype(jnp.float32)
        weights = x.astype(jnp.float32) @ matrix.T * self.scale
        return choose_keys(q, weights, k[:, :, 0], segments, self.most)


class SparseAttention(deepseek.LatentAttention):
    """Latent attention to chosen tokens."""

    def __init__(self, config: DecoderOptions, layer: int, make: ParameterMaker):
        """Makes the parameters of one layer's attention."""
        super().__init__(config, layer, make)
        self.indexer = Indexer(config, make) if layer in config.options.indexed else None

    def __call__(  # type: ignore[override]
        self, x: HiddenStates, rotation: Rotation, segments: Segments, chosen: Any
    ) -> tuple[HiddenStates, Any]:
        """Returns the result, and the chosen tokens: `chosen` in layers without an indexer."""
        narrow = self.narrow(x)
        if self.indexer is not None:
            chosen = self.indexer(x, narrow, rotation, segments)
        return self.mix(x, narrow, rotation, segments, chosen), chosen


class SparseLayer(Layer):
    """A layer that passes the chosen tokens on."""

    def __call__(
        self, x: HiddenStates, rotation: Rotation, segments: Segments, chosen: Any = None
    ) -> tuple[Any, ...]:
        """Returns the result, None for the tally (no loss balances experts), and the choice."""
        attention: Any = self.self_attn
        y, chosen = attention(self.input_layernorm(x), rotation, segments, chosen)
        x = x + y
        y, tally = self.feed_forward(self.post_attention_layernorm(x), segments)
        return x + y, tally, chosen


def _sparse(
    fields: Fields,
    sizes: dict[str, Any],
    *,
    indexed: tuple[int, ...],
    heads: int,
    interleaved: bool,
    query_rank: int = 1536,
    plain_dim: int = 128,
    value_dim: int = 128,
    **groups: int,
) -> dict[str, Any]:
    """Returns the arguments of `DecoderConfig` about attention and experts; numbers are defaults.

    Args:
        fields: The configuration.
        sizes: The arguments so far.
        indexed: See `SparseOptions`.
        heads: Default of `index_n_heads`.
        interleaved: See `SparseOptions`.
        query_rank: See `latent_attention`.
        plain_dim: See `latent_attention`.
        value_dim: See `latent_attention`.
        **groups: See `grouped_experts`.
    """
    num_layers = sizes["num_layers"]
    fields.neutral(layer_types=["indexed_attention"] * num_layers)
    widths = {"query_rank": query_rank, "plain_dim": plain_dim, "value_dim": value_dim}
    attention, options = deepseek.latent_attention(fields, sizes, **widths)
    fields.integer("q_lora_rank", query_rank)  # null is refused: an indexer reads this latent
    first = fields.integer("first_k_dense_replace", 3, least=0)
    experts = deepseek.grouped_experts(
        fields,
        sizes,
        options=SparseOptions,
        layers=deepseek.sparse_layers(fields, num_layers, first),
        moe_intermediate_size=2048,
        n_routed_experts=256,
        routed_scaling_factor=2.5,
        indexed=indexed,
        index_heads=fields.integer("index_n_heads", heads),
        index_dim=fields.integer("index_head_dim", 128, least=options["rotated_dim"]),
        index_most=fields.integer("index_topk", 2048),
        index_interleaved=interleaved,
        **groups,
        **options,
    )
    return attention | experts


def _deepseek_v32(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    every = tuple(range(sizes["num_layers"]))
    groups = {"n_group": 8, "topk_group": 4}
    return _sparse(fields, sizes, indexed=every, heads=64, interleaved=False, **groups)


def _glm_moe_dsa(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    num_layers, kinds = sizes["num_layers"], {"full": True, "shared": False}
    step = fields.integer("index_topk_freq", 1, least=0) or 1
    start = fields.integer("index_skip_topk_offset", 2, least=0) - 1
    types = [[*kinds][max(i - start, 0) % step > 0] for i in range(num_layers)]
    pattern = fields.take("index_topk_pattern", None)
    if isinstance(pattern, str):
        types = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    else:
        types = fields.listed("index_topk_pattern", str, "names") or types
    indexed = hf_common.layers_of_kind(fields, "indexer_types", kinds, types, num_layers)
    if 0 not in indexed:
        raise ValueError('`indexer_types` must have "full" for the first layer')
    widths = {"query_rank": 2048, "plain_dim": 192, "value_dim": 256}
    return _sparse(fields, sizes, indexed=indexed, heads=32, interleaved=True, **widths)


# Transformers doesn't read the neutral and the unread fields.
DEEPSEEK_V32 = replace(
    deepseek.DEEPSEEK_V3,
    model_type="deepseek_v32",
    scorer=None,
    neutral={
        **deepseek.DEEPSEEK_V3.neutral,
        "rope_interleave": True,
        "indexer_rope_interleave": False,
    },
    unread=f"{deepseek.DEEPSEEK_V3.unread} mlp_bias",
    always={**deepseek.DEEPSEEK_V3.always, "attention": SparseAttention, "layer": SparseLayer},
    more=_deepseek_v32,
)

# GLM 5 and its successors. The first unread field is about layers that predict further tokens.
GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    model_type="glm_moe_dsa",
    neutral={
        **DEEPSEEK_V32.neutral,
        "indexer_rope_interleave": True,
        "moe_router_dtype": "float32",
    },
    unread=f"index_share_for_mtp_iteration {DEEPSEEK_V32.unread}",
    sizes=partial(deepseek.latent_sizes, kv_heads=64, eps=1e-5),
    more=_glm_moe_dsa,
)
