"""Qwen3.5: Qwen3-Next's layers with separate projections instead of fused ones.

Checkpoints have a vision tower beside the decoder. Positions in images have three numbers each; in
text all three are equal, so `mrope_section` has no effect.
"""

from typing import Any

from jaxtyping import Array

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.families import qwen3_next
from megatrain_jax._src.lm.models.family import Family, multimodal_family
from megatrain_jax._src.lm.models.hf_fields import Fields
from megatrain_jax._src.lm.models.layers import Linear
from megatrain_jax._src.lm.models.parameter_maker import ParameterMaker


class SeparateDeltaNet(qwen3_next.GatedDeltaNet):
    """Linear attention with separate projections for q/k/v, gates, rates and time steps."""

    def make_projections(self, wide: int, make: ParameterMaker) -> None:
        """Makes the matrices for `project`."""
        self.in_proj_qkv = Linear(wide, 2 * self.key_size + self.value_size, make)
        self.in_proj_z = Linear(wide, self.value_size, make)
        self.in_proj_b = Linear(wide, self.sizes.value_heads, make)
        self.in_proj_a = Linear(wide, self.sizes.value_heads, make)

    def project(self, x: qwen3_next.HiddenStates) -> tuple[Array, Array, Array, Array]:
        """Returns queries, keys and values side by side, gates, logits of rates, and time steps."""
        return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)


class Qwen35Layer(qwen3_next.HybridLayer):
    """A layer with this linear attention."""

    linear = SeparateDeltaNet


def _common(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    fields.neutral(attn_output_gate=True, output_gate_type="swish", mamba_ssm_dtype="float32")
    for name in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):
        fields.take(name, None)  # multi-token prediction layers are kept unchanged
    values = hf_common.rope_parameters_of_text(fields)
    return {
        **qwen3_next.common(fields, sizes),
        "rope": hf_common.rope(fields, sizes["head_dim"], share=0.25, parameters=values),
        "layer": Qwen35Layer,
    }


def _read(fields: Fields) -> dict[str, Any]:
    return _common(fields, hf_common.sizes(fields, kv_heads=4, head_dim=256))


def _read_moe(fields: Fields) -> dict[str, Any]:
    # Transformers has no fields for these: every layer has experts, and their shares sum to 1.
    fields.neutral(decoder_sparse_step=1, norm_topk_prob=True)
    inside = fields.integer("moe_intermediate_size", 512)
    sizes = hf_common.sizes(fields, kv_heads=2, head_dim=256, intermediate_size=inside)
    return {
        **_common(fields, sizes),
        "experts": hf_common.experts(
            fields,
            ("num_experts", "num_local_experts"),
            num=256,
            per_token=8,
            intermediate_size=inside,
            shared_size=fields.integer("shared_expert_intermediate_size", 512),
            normalize=True,
            layers=tuple(range(sizes["num_layers"])),
        ),
    }


def _multimodal(text: Family, model_type: str, architecture: str) -> Family:
    return multimodal_family(
        text,
        model_type=model_type,
        architecture=architecture,
        kept=("model.visual.", "mtp."),
        beside="image_token_id video_token_id vision_start_token_id vision_end_token_id "
        "language_model_only",
        tied=False,
        body="model.language_model",
        head="lm_head",
    )


QWEN3_5_TEXT = Family(
    model_type="qwen3_5_text", architecture="Qwen3_5ForCausalLM", read=_read, kept=("mtp.",)
)
QWEN3_5_MOE_TEXT = Family(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    read=_read_moe,
    kept=("mtp.",),
)
QWEN3_5 = _multimodal(QWEN3_5_TEXT, "qwen3_5", "Qwen3_5ForConditionalGeneration")
QWEN3_5_MOE = _multimodal(QWEN3_5_MOE_TEXT, "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration")
