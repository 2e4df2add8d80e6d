"""Open-weights language models as Flax modules: built, loaded, saved.

    pretrained = models.load_pretrained("folder/of/a/checkpoint")
    result = mt.fit(
        pretrained.model, models.next_token_loss, data, optimizer, params=pretrained.params
    )
    models.save_pretrained(result.trainer, "folder/of/the/result")

It uses only the core's public names. Loading needs `pip install "megatrain-jax[finetune]"`.
"""

from megatrain_jax._src.common.suggestions import explain as _explain
from megatrain_jax._src.lm.grpo.grpo_options import GrpoOptions
from megatrain_jax._src.lm.grpo.grpo_run import train_grpo
from megatrain_jax._src.lm.models.causal_attention import attention
from megatrain_jax._src.lm.models.config import DecoderConfig
from megatrain_jax._src.lm.models.decoder import Decoder
from megatrain_jax._src.lm.models.export import save_pretrained
from megatrain_jax._src.lm.models.generation.generate import Completion, Generator, generate
from megatrain_jax._src.lm.models.generation.generation_plan import GenerationPlan
from megatrain_jax._src.lm.models.lora import Lora, lora, merge_lora, without_lora
from megatrain_jax._src.lm.models.loss import next_token_loss
from megatrain_jax._src.lm.models.merged_folder import merge_adapter
from megatrain_jax._src.lm.models.moe import Experts
from megatrain_jax._src.lm.models.neftune import neftune
from megatrain_jax._src.lm.models.peft import save_lora
from megatrain_jax._src.lm.models.peft_reading import load_lora
from megatrain_jax._src.lm.models.pretrained import Pretrained, load_pretrained
from megatrain_jax._src.lm.models.resized import resize_vocabulary
from megatrain_jax._src.lm.models.rotary import Rope
from megatrain_jax._src.lm.models.score_head import conversation_scores, reward_model

__all__ = [
    "Completion",
    "Decoder",
    "DecoderConfig",
    "Experts",
    "GenerationPlan",
    "Generator",
    "GrpoOptions",
    "Lora",
    "Pretrained",
    "Rope",
    "attention",
    "conversation_scores",
    "generate",
    "load_lora",
    "load_pretrained",
    "lora",
    "merge_adapter",
    "merge_lora",
    "neftune",
    "next_token_loss",
    "resize_vocabulary",
    "reward_model",
    "save_lora",
    "save_pretrained",
    "train_grpo",
    "without_lora",
]

_explain(globals())
