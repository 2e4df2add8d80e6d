"""Command R7B and Command A, Tiny Aya: attention beside the MLP, norms without a bias.

Layers with a window rotate neighbours; layers without one don't rotate.
"""

from typing import Any

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields
from megatrain_jax._src.lm.models.layers import ParallelLayer


def _read(fields: Fields) -> dict[str, Any]:
    # Fields that only the original code reads.
    fields.neutral(use_qk_norm=False, use_parallel_block=True, use_gated_activation=True)
    fields.neutral(position_embedding_type="rope_gptj", rotary_pct=1.0)
    fields.neutral(order_of_interleaved_layers="local_attn_first")
    for name in ("layer_switch", "use_embedding_sharing", "use_parallel_embedding"):
        fields.take(name, None)
    sizes = hf_common.sizes(fields, eps=1e-5, eps_name="layer_norm_eps", tied=True)
    step = fields.integer("sliding_window_pattern", 4)
    types = ["sliding_attention", "full_attention"]
    types = [types[(i + 1) % step == 0] for i in range(sizes["num_layers"])]
    windows = hf_common.windows_by_type(fields, types, hf_common.window(fields))
    return {
        **sizes,
        **hf_common.attention_bias(fields),
        "rope": hf_common.rope(fields, sizes["head_dim"], interleaved=True),
        "windows": windows,
        "unrotated": tuple(i for i, window in enumerate(windows) if window is None),
        "norm": "layer",
        "norm_bias": False,
        "logit_scale": fields.number("logit_scale", 0.0625, above=0),
        "layer": ParallelLayer,
    }


COHERE2 = Family(model_type="cohere2", architecture="Cohere2ForCausalLM", read=_read)
