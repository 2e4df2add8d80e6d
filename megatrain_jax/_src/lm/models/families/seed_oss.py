"""Seed-OSS: biases of queries, keys and values, and dropout in its released configurations."""

from typing import Any

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields


def _read(fields: Fields) -> dict[str, Any]:
    fields.neutral(pretraining_tp=1)
    for name in ("attention_dropout", "residual_dropout"):
        # Unlike in most families, a missing field means dropout.
        value = fields.number(name, 0.1, least=0)
        if value and name not in fields.ignore:
            raise ValueError(
                f"`{name}` = {value} in a {fields.family} isn't supported; only 0.0 is. Name it in "
                "`ignore` to train without dropout"
            )
    sizes = hf_common.sizes(fields, kv_heads=8, head_dim=hf_common.head_dim(fields, 128))
    return {
        **sizes,
        "rope": hf_common.rope(fields, sizes["head_dim"]),
        "qkv_bias": fields.flag("attention_bias", True),
        "out_bias": fields.flag("attention_out_bias", False),
        "mlp_bias": fields.flag("mlp_bias", False),
    }


SEED_OSS = Family(model_type="seed_oss", architecture="SeedOssForCausalLM", read=_read)
