"""OLMo 3: OLMo 2 with a window in most layers; only the rest stretch wavelengths for long texts."""

from typing import Any

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.families import olmo2
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields

_THETA = 500_000.0


def _read(fields: Fields) -> dict[str, Any]:
    arguments = olmo2.common(fields)
    layers = range(arguments["num_layers"])
    types = ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in layers]
    full = {"rope_theta": fields.take("rope_theta", _THETA)}
    # `rope_theta` belongs to the layers without a window, as in Transformers.
    local = {"rope_theta": _THETA}
    return {
        **arguments,
        **hf_common.two_ropes(fields, arguments["head_dim"], full, local, max_length=2048),
        "windows": hf_common.windows_by_type(fields, types, hf_common.window(fields)),
    }


OLMO3 = Family(model_type="olmo3", architecture="Olmo3ForCausalLM", read=_read)
