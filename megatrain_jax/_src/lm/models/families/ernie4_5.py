"""ERNIE 4.5: rotary embeddings of neighbours, and one option for all biases."""

from typing import Any

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields


def common(fields: Fields, **sizes: Any) -> dict[str, Any]:
    """Returns the arguments that the family with and the one without experts share.

    Args:
        fields: The configuration.
        **sizes: See `hf_common.sizes`.
    """
    arguments = hf_common.sizes(fields, eps=1e-5, tied=True, **sizes)
    bias = fields.flag("use_bias", False)
    rope = hf_common.rope(fields, arguments["head_dim"], theta=500_000.0, interleaved=True)
    biases = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), bias)
    return {**arguments, **biases, "rope": rope}


def _read(fields: Fields) -> dict[str, Any]:
    return common(fields, kv_heads=2, head_dim=hf_common.head_dim(fields, 128))


ERNIE4_5 = Family(model_type="ernie4_5", architecture="Ernie4_5ForCausalLM", read=_read)
