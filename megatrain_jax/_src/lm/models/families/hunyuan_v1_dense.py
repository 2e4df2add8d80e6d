"""Hunyuan's dense models: norms of queries and keys after their rotation."""

from typing import TYPE_CHECKING, Any

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields
from megatrain_jax._src.lm.models.layers import Attention, Heads, Layer, RMSNorm
from megatrain_jax._src.lm.models.parameter_maker import ParameterMaker
from megatrain_jax._src.lm.models.rotary import Rotation

if TYPE_CHECKING:
    from megatrain_jax._src.lm.models.config import DecoderConfig

# Fields of the released configurations that Transformers doesn't read: the original code's own, and
# identifiers of tokens.
_UNREAD = (
    *("attention_head_dim", "cla_share_factor", "class_num", "dense_list", "org_vocab_size"),
    *("pool_type", "eod_token_id", "im_end_id", "im_newline_id", "im_start_id", "mask_init_id"),
    *("pad_id", "text_end_id", "text_start_id"),
)


class HunyuanAttention(Attention):
    """Attention that normalises each head's queries and keys after they are rotated."""

    def __init__(self, config: "DecoderConfig", layer: int, make: ParameterMaker):
        """Makes the parameters of one layer's attention."""
        super().__init__(config, layer, make)
        self.query_layernorm = RMSNorm(config.head_dim, config, make)
        self.key_layernorm = RMSNorm(config.head_dim, config, make)

    def rotate(self, q: Heads, k: Heads, rotation: Rotation) -> tuple[Heads, Heads]:
        """Returns queries and keys rotated to their positions, then normalised."""
        q, k = super().rotate(q, k, rotation)
        return self.query_layernorm(q), self.key_layernorm(k)


class HunyuanLayer(Layer):
    """A layer that normalises queries and keys after their rotation."""

    attention = HunyuanAttention


def _rope_parameters(fields: Fields, head_dim: int) -> dict[str, Any]:
    """Returns the parameters of the rotary embedding.

    With `alpha`, the type "dynamic" stretches all texts alike: by a larger base.
    """
    values = fields.mapping("rope_scaling") or fields.mapping("rope_parameters")
    alpha = values.get("alpha")
    if alpha is None or values.get("rope_type", values.get("type")) != "dynamic":
        return values
    for name in ("alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        values.pop(name, None)  # only `alpha` is read by Transformers
    theta = values.get("rope_theta") or fields.take("rope_theta", 10_000.0)
    theta = checks.number("rope_theta", theta, above=0)
    growth = checks.number("alpha", alpha, above=0) ** (head_dim / (head_dim - 2))
    return values | {"rope_type": "default", "type": "default", "rope_theta": theta * growth}


def _read(fields: Fields) -> dict[str, Any]:
    # Fields that only the original code reads.
    fields.neutral(use_qk_norm=True, use_cla=False, mlp_bias=False, pretraining_tp=1)
    fields.neutral(use_mixed_mlp_moe=False, position_embedding_xdrope=False, num_experts=1)
    fields.neutral(use_rotary_pos_emb=True, norm_type="rms", add_classification_head=False)
    for name in _UNREAD:
        fields.take(name, None)
    sizes = hf_common.sizes(fields, eps=1e-5)
    parameters = _rope_parameters(fields, sizes["head_dim"])
    return {
        **sizes,
        **hf_common.attention_bias(fields),
        "rope": hf_common.rope(fields, sizes["head_dim"], parameters=parameters),
        "layer": HunyuanLayer,
    }


HUNYUAN_V1_DENSE = Family(
    model_type="hunyuan_v1_dense", architecture="HunYuanDenseV1ForCausalLM", read=_read
)
