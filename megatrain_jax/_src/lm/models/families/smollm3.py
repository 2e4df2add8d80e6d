"""SmolLM 3: every fourth layer has no rotary embedding."""

from typing import Any

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields


def _rotated(fields: Fields, num_layers: int) -> list[int]:
    """Returns for each layer 1 if it rotates, despite the field's name."""
    step = fields.integer("no_rope_layer_interval", 4)
    rotated = fields.listed("no_rope_layers", int, "integers")
    if rotated is None:
        return [int((i + 1) % step != 0) for i in range(num_layers)]
    if len(rotated) != num_layers:
        allowed = f"a list of {num_layers} integers, one a layer"
        raise ValueError(checks.refused("no_rope_layers", allowed, rotated))
    return rotated


def _read(fields: Fields) -> dict[str, Any]:
    fields.take("pretraining_tp", None)  # not read by Transformers
    sizes = hf_common.sizes(fields, kv_heads=4, tied=True)
    rotated = _rotated(fields, sizes["num_layers"])
    size = hf_common.window(fields, None)
    used = size if fields.flag("use_sliding_window", False) else None
    types = [
        "sliding_attention" if used and not rotates else "full_attention" for rotates in rotated
    ]
    return {
        **sizes,
        **hf_common.attention_bias(fields),
        "rope": hf_common.rope(fields, sizes["head_dim"], theta=2_000_000.0),
        "unrotated": tuple(i for i, rotates in enumerate(rotated) if not rotates),
        "windows": hf_common.windows_by_type(fields, types, used),
        "mlp_bias": fields.flag("mlp_bias", False),
    }


SMOLLM3 = Family(model_type="smollm3", architecture="SmolLM3ForCausalLM", read=_read)
