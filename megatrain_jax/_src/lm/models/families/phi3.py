"""Phi 3 and 4: fused projections, and rotary embeddings of a part of each head."""

from typing import Any

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields

# Early checkpoints call it `su` or `yarn`.
_KINDS = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}


def _read(fields: Fields) -> dict[str, Any]:
    fields.neutral(resid_pdrop=0.0, embd_pdrop=0.0, attention_bias=False, mlp_bias=False)
    # Fields of Phi-4-mini that only its original code reads.
    fields.neutral(lm_head_bias=False, interpolate_factor=1, full_attn_mod=1)
    sizes = hf_common.sizes(fields, eps=1e-5)
    rope = hf_common.rope(fields, sizes["head_dim"], original_length=4096, kinds=_KINDS, share=1.0)
    return {
        **sizes,
        "rope": rope,
        "windows": hf_common.windows_everywhere(fields, None),
        "fused": True,
    }


PHI3 = Family(model_type="phi3", architecture="Phi3ForCausalLM", read=_read)
