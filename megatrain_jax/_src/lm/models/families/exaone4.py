"""EXAONE 4: norms at the end of attention and MLP, and of each head's queries and keys.

If some layers have a window, only these rotate.
"""

from typing import Any

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.families.olmo2 import Olmo2Layer
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields
from megatrain_jax._src.lm.models.layers import Attention


class Exaone4Layer(Olmo2Layer):
    """A layer with norms at its outputs, and attention that normalises each head."""

    attention = Attention


def _read(fields: Fields) -> dict[str, Any]:
    sizes = hf_common.sizes(fields, kv_heads=32, eps=1e-5)
    size = fields.integer("sliding_window", 4096, null=True)
    fields.take("sliding_window_pattern", None)  # "LLLG" in files that have `layer_types`, too
    types: list[str] = []
    if fields.take("layer_types", None) is None:
        if size is None:
            raise ValueError("an exaone4 with `sliding_window` = None needs `layer_types`")
        step = fields.integer("sliding_window_pattern", 4)
        kinds = ["sliding_attention", "full_attention"]
        types = [kinds[(i + 1) % step == 0] for i in range(sizes["num_layers"])]
    windows = hf_common.windows_by_type(fields, types, size)
    plain = () if size is None else (i for i, window in enumerate(windows) if window is None)
    return {
        **sizes,
        "rope": hf_common.rope(fields, sizes["head_dim"]),
        "windows": windows,
        "unrotated": tuple(plain),
        "qk_norm": True,
        "layer": Exaone4Layer,
    }


EXAONE4 = Family(model_type="exaone4", architecture="Exaone4ForCausalLM", read=_read)
