"""Open-weights language models as Flax modules: built, loaded, saved.

    pretrained = models.load_pretrained("folder/of/a/checkpoint")
    result = mt.fit(
        pretrained.model, models.next_token_loss, data, optimizer, params=pretrained.params
    )
    models.save_pretrained(result.trainer, "folder/of/the/result")

It uses only the core's public names. Loading needs `pip install "megatrain-jax[finetune]"`.
"""

from typing import TYPE_CHECKING

from megatrain_jax._src.common.suggestions import explain as _explain

if TYPE_CHECKING:
    from megatrain_jax._src.lm.grpo.grpo_run import train_grpo
    from megatrain_jax._src.lm.grpo.inference_server import InferenceServer
    from megatrain_jax._src.lm.grpo.policy_batch import GrpoOptions
    from megatrain_jax._src.lm.models.causal_attention import attention
    from megatrain_jax._src.lm.models.config import DecoderConfig
    from megatrain_jax._src.lm.models.decoder import Decoder, neftune, next_token_loss
    from megatrain_jax._src.lm.models.export import save_pretrained
    from megatrain_jax._src.lm.models.generation.generate import Completion, Generator, generate
    from megatrain_jax._src.lm.models.generation.generation_memory import GenerationPlan
    from megatrain_jax._src.lm.models.harness import lm_eval_model
    from megatrain_jax._src.lm.models.lora import Lora, lora, merge_lora, without_lora
    from megatrain_jax._src.lm.models.moe import Experts
    from megatrain_jax._src.lm.models.peft import load_lora, merge_adapter, save_lora
    from megatrain_jax._src.lm.models.pretrained import (
        Pretrained,
        classifier,
        conversation_scores,
        load_pretrained,
        resize_vocabulary,
        reward_model,
    )
    from megatrain_jax._src.lm.models.rotary import Rope

__all__ = [
    "Completion",
    "Decoder",
    "DecoderConfig",
    "Experts",
    "GenerationPlan",
    "Generator",
    "GrpoOptions",
    "InferenceServer",
    "Lora",
    "Pretrained",
    "Rope",
    "attention",
    "classifier",
    "conversation_scores",
    "generate",
    "lm_eval_model",
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

# Imported on first use, because training, checkpoints and generation need many packages.
_NAMES = {
    "lm.grpo.grpo_run": "train_grpo",
    "lm.grpo.inference_server": "InferenceServer",
    "lm.grpo.policy_batch": "GrpoOptions",
    "lm.models.causal_attention": "attention",
    "lm.models.config": "DecoderConfig",
    "lm.models.decoder": "Decoder neftune next_token_loss",
    "lm.models.export": "save_pretrained",
    "lm.models.generation.generate": "Completion Generator generate",
    "lm.models.generation.generation_memory": "GenerationPlan",
    "lm.models.harness": "lm_eval_model",
    "lm.models.lora": "Lora lora merge_lora without_lora",
    "lm.models.moe": "Experts",
    "lm.models.peft": "load_lora merge_adapter save_lora",
    "lm.models.pretrained": (
        "Pretrained classifier conversation_scores load_pretrained resize_vocabulary reward_model"
    ),
    "lm.models.rotary": "Rope",
}
_explain(globals(), later=_NAMES)
