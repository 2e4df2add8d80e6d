"""Sizes of popular open-weights models, one line each, so that a plan needs no checkpoint.

Sizes come from the `config.json` beside the weights. Fields that affect neither parameters nor a
step's work, such as the base of rotary embeddings, are left out. `num_parameters` is the decoder's
published number, counting a tied embedding once; a test compares it with the model built from these
sizes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class KnownModel:
    """The sizes of a model, in the order of a line of the table.

    Attributes:
        family: Its `model_type`.
        num_parameters: The published number of parameters.
        hidden: Width of the hidden states between layers.
        inner: Width inside an MLP.
        layers: Number of layers.
        heads: Heads of the queries.
        kv_heads: Heads of keys and values.
        head_dim: Width of a head.
        vocab: Rows of the embedding.
        tied: Whether the embedding is also the head.
        more: Further fields of its `config.json`.
    """

    family: str
    num_parameters: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        """Returns the sizes in the form of a `config.json`."""
        return {
            "model_type": self.family,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            **self.more,
        }


def known_model(name: str) -> KnownModel | None:
    """The model with a name; None for an unknown name.

    Args:
        name: A name in the table, in any capitals, also with its publisher: "Qwen/Qwen3-8B".
    """
    short = name.rpartition("/")[2].lower()
    return {known.lower(): model for known, model in KNOWN_MODELS.items()}.get(short)


def _moe(num: int, per_token: int, width: int) -> dict[str, int]:
    return {"num_experts": num, "num_experts_per_tok": per_token, "moe_intermediate_size": width}


_GEMMA_4 = {
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "global_head_dim": 512,
    "sliding_window": 1024,
}
_FIFTH_FULL = (["sliding_attention"] * 4 + ["full_attention"]) * 7
_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}

# fmt: off
KNOWN_MODELS: dict[str, KnownModel] = {
    "DeepSeek-Coder-6.7B": KnownModel("llama", 6_740_512_768, 4096, 11008, 32, 32, 32, 128, 32256),
    "DeepSeek-Coder-33B": KnownModel("llama", 33_342_991_360, 7168, 19200, 62, 56, 8, 128, 32256),
    "DeepSeek-LLM-7B": KnownModel("llama", 6_910_365_696, 4096, 11008, 30, 32, 32, 128, 102400),
    "DeepSeek-R1-Distill-Qwen-1.5B": KnownModel("qwen2", 1_777_088_000, 1536, 8960, 28, 12, 2, 128, 151936),
    "Falcon3-1B": KnownModel("llama", 1_669_408_768, 2048, 8192, 18, 8, 4, 256, 131072),
    "Falcon3-3B": KnownModel("llama", 3_227_655_168, 3072, 9216, 22, 12, 4, 256, 131072),
    "Falcon3-7B": KnownModel("llama", 7_455_550_464, 3072, 23040, 28, 12, 4, 256, 131072),
    "Falcon3-10B": KnownModel("llama", 10_305_653_760, 3072, 23040, 40, 12, 4, 256, 131072),
    "Gemma-2-2B": KnownModel("gemma2", 2_614_341_888, 2304, 9216, 26, 8, 4, 256, 256000, True, {"query_pre_attn_scalar": 256}),
    "Gemma-2-9B": KnownModel("gemma2", 9_241_705_984, 3584, 14336, 42, 16, 8, 256, 256000, True, {"query_pre_attn_scalar": 256}),
    "Gemma-2-27B": KnownModel("gemma2", 27_227_128_320, 4608, 36864, 46, 32, 16, 128, 256000, True, {"query_pre_attn_scalar": 144}),
    "Gemma-3-1B": KnownModel("gemma3_text", 999_885_952, 1152, 6912, 26, 4, 1, 256, 262144, True, {"sliding_window": 512}),
    "Gemma-3-270M": KnownModel("gemma3_text", 268_098_176, 640, 2048, 18, 4, 1, 256, 262144, True, {"sliding_window": 512}),
    "Gemma-4-26B-A4B": KnownModel("gemma4_text", 25_233_141_760, 2816, 2112, 30, 16, 8, 256, 262144, True, _GEMMA_4 | {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704, "num_global_key_value_heads": 2}),
    "Gemma-4-31B": KnownModel("gemma4_text", 30_697_345_280, 5376, 21504, 60, 32, 16, 256, 262144, True, _GEMMA_4 | {"num_global_key_value_heads": 4}),
    "Gemma-4-E2B": KnownModel("gemma4_text", 4_628_569_344, 1536, 6144, 35, 8, 1, 256, 262144, True, {"num_kv_shared_layers": 20, "use_double_wide_mlp": True, "layer_types": _FIFTH_FULL}),
    "GLM-4-9B-0414": KnownModel("glm4", 9_400_279_040, 4096, 13696, 40, 32, 2, 128, 151552),
    "Granite-3.1-2B": KnownModel("granite", 2_533_531_648, 2048, 8192, 40, 32, 8, 64, 49155, True),
    "Granite-3.1-8B": KnownModel("granite", 8_170_848_256, 4096, 12800, 40, 32, 8, 128, 49155, True),
    "Llama-2-7B": KnownModel("llama", 6_738_415_616, 4096, 11008, 32, 32, 32, 128, 32000),
    "Llama-2-13B": KnownModel("llama", 13_015_864_320, 5120, 13824, 40, 40, 40, 128, 32000),
    "Llama-2-70B": KnownModel("llama", 68_976_648_192, 8192, 28672, 80, 64, 8, 128, 32000),
    "Llama-3-8B": KnownModel("llama", 8_030_261_248, 4096, 14336, 32, 32, 8, 128, 128256),
    "Llama-3-70B": KnownModel("llama", 70_553_706_496, 8192, 28672, 80, 64, 8, 128, 128256),
    "Llama-3.1-8B": KnownModel("llama", 8_030_261_248, 4096, 14336, 32, 32, 8, 128, 128256),
    "Llama-3.1-70B": KnownModel("llama", 70_553_706_496, 8192, 28672, 80, 64, 8, 128, 128256),
    "Llama-3.1-405B": KnownModel("llama", 405_853_388_800, 16384, 53248, 126, 128, 8, 128, 128256),
    "Llama-3.2-1B": KnownModel("llama", 1_235_814_400, 2048, 8192, 16, 32, 8, 64, 128256, True),
    "Llama-3.2-3B": KnownModel("llama", 3_212_749_824, 3072, 8192, 28, 24, 8, 128, 128256, True),
    "Llama-3.3-70B": KnownModel("llama", 70_553_706_496, 8192, 28672, 80, 64, 8, 128, 128256),
    "Ministral-8B": KnownModel("mistral", 8_019_808_256, 4096, 12288, 36, 32, 8, 128, 131072, False, {"sliding_window": 32768}),
    "Mistral-7B-v0.1": KnownModel("mistral", 7_241_732_096, 4096, 14336, 32, 32, 8, 128, 32000, False, {"sliding_window": 4096}),
    "Mistral-7B-v0.3": KnownModel("mistral", 7_248_023_552, 4096, 14336, 32, 32, 8, 128, 32768, False, {"sliding_window": None}),
    "Mistral-Large-123B": KnownModel("mistral", 122_610_069_504, 12288, 28672, 88, 96, 8, 128, 32768, False, {"sliding_window": None}),
    "Mistral-Nemo-12B": KnownModel("mistral", 12_247_782_400, 5120, 14336, 40, 32, 8, 128, 131072, False, {"sliding_window": None}),
    "Mistral-Small-22B": KnownModel("mistral", 22_247_282_688, 6144, 16384, 56, 48, 8, 128, 32768, False, {"sliding_window": None}),
    "Mistral-Small-24B": KnownModel("mistral", 23_572_403_200, 5120, 32768, 40, 32, 8, 128, 131072, False, {"sliding_window": None}),
    "Mixtral-8x7B": KnownModel("mixtral", 46_702_792_704, 4096, 14336, 32, 32, 8, 128, 32000, False, _MIXTRAL),
    "Mixtral-8x22B": KnownModel("mixtral", 140_620_634_112, 6144, 16384, 56, 48, 8, 128, 32000, False, _MIXTRAL),
    "OLMo-2-1B": KnownModel("olmo2", 1_484_916_736, 2048, 8192, 16, 16, 16, 128, 100352),
    "OLMo-2-7B": KnownModel("olmo2", 7_298_617_344, 4096, 11008, 32, 32, 32, 128, 100352),
    "OLMo-2-13B": KnownModel("olmo2", 13_716_198_400, 5120, 13824, 40, 40, 40, 128, 100352),
    "OLMo-2-32B": KnownModel("olmo2", 32_234_279_936, 5120, 27648, 64, 40, 8, 128, 100352),
    "Phi-2": KnownModel("phi", 2_779_683_840, 2560, 10240, 32, 32, 32, 80, 51200),
    "Phi-3-medium": KnownModel("phi3", 13_960_238_080, 5120, 17920, 40, 40, 10, 128, 32064, False, {"sliding_window": 2047}),
    "Phi-3-mini": KnownModel("phi3", 3_821_079_552, 3072, 8192, 32, 32, 32, 96, 32064, False, {"sliding_window": 2047}),
    "Phi-4": KnownModel("phi3", 14_659_507_200, 5120, 17920, 40, 40, 10, 128, 100352),
    "Phi-4-mini": KnownModel("phi3", 3_836_021_760, 3072, 8192, 32, 24, 8, 128, 200064, True, {"partial_rotary_factor": 0.75}),
    "Qwen1.5-MoE-A2.7B": KnownModel("qwen2_moe", 14_315_784_192, 2048, 5632, 24, 16, 16, 128, 151936, False, _moe(60, 4, 1408) | {"shared_expert_intermediate_size": 5632}),
    "Qwen2.5-0.5B": KnownModel("qwen2", 494_032_768, 896, 4864, 24, 14, 2, 64, 151936, True),
    "Qwen2.5-1.5B": KnownModel("qwen2", 1_543_714_304, 1536, 8960, 28, 12, 2, 128, 151936, True),
    "Qwen2.5-3B": KnownModel("qwen2", 3_085_938_688, 2048, 11008, 36, 16, 2, 128, 151936, True),
    "Qwen2.5-7B": KnownModel("qwen2", 7_615_616_512, 3584, 18944, 28, 28, 4, 128, 152064),
    "Qwen2.5-14B": KnownModel("qwen2", 14_770_033_664, 5120, 13824, 48, 40, 8, 128, 152064),
    "Qwen2.5-32B": KnownModel("qwen2", 32_763_876_352, 5120, 27648, 64, 40, 8, 128, 152064),
    "Qwen2.5-72B": KnownModel("qwen2", 72_706_203_648, 8192, 29568, 80, 64, 8, 128, 152064),
    "Qwen3-0.6B": KnownModel("qwen3", 596_049_920, 1024, 3072, 28, 16, 8, 128, 151936, True),
    "Qwen3-1.7B": KnownModel("qwen3", 1_720_574_976, 2048, 6144, 28, 16, 8, 128, 151936, True),
    "Qwen3-4B": KnownModel("qwen3", 4_022_468_096, 2560, 9728, 36, 32, 8, 128, 151936, True),
    "Qwen3-8B": KnownModel("qwen3", 8_190_735_360, 4096, 12288, 36, 32, 8, 128, 151936),
    "Qwen3-14B": KnownModel("qwen3", 14_768_307_200, 5120, 17408, 40, 40, 8, 128, 151936),
    "Qwen3-30B-A3B": KnownModel("qwen3_moe", 30_532_122_624, 2048, 6144, 48, 32, 4, 128, 151936, False, _moe(128, 8, 768)),
    "Qwen3-32B": KnownModel("qwen3", 32_762_123_264, 5120, 25600, 64, 64, 8, 128, 151936),
    "Qwen3-235B-A22B": KnownModel("qwen3_moe", 235_093_634_560, 4096, 12288, 94, 64, 4, 128, 151936, False, _moe(128, 8, 1536)),
    "Qwen3-Coder-480B-A35B": KnownModel("qwen3_moe", 480_154_875_392, 6144, 8192, 62, 96, 8, 128, 151936, False, _moe(160, 8, 2560)),
    "Qwen3-Next-80B-A3B": KnownModel("qwen3_next", 79_674_391_296, 2048, 5120, 48, 16, 2, 256, 151936, False, _moe(512, 10, 512)),
    "Qwen3.5-27B": KnownModel("qwen3_5_text", 26_895_998_464, 5120, 17408, 64, 24, 4, 256, 248320, False, {"linear_num_value_heads": 48}),
    "Qwen3.5-35B-A3B": KnownModel("qwen3_5_moe_text", 34_660_610_688, 2048, 512, 40, 16, 2, 256, 248320, False, _moe(256, 8, 512)),
    "QwQ-32B": KnownModel("qwen2", 32_763_876_352, 5120, 27648, 64, 40, 8, 128, 152064),
    "SmolLM2-1.7B": KnownModel("llama", 1_711_376_384, 2048, 8192, 24, 32, 32, 64, 49152, True),
    "SmolLM2-135M": KnownModel("llama", 134_515_008, 576, 1536, 30, 9, 3, 64, 49152, True),
    "SmolLM2-360M": KnownModel("llama", 361_821_120, 960, 2560, 32, 15, 5, 64, 49152, True),
    "SmolLM3-3B": KnownModel("smollm3", 3_075_098_624, 2048, 11008, 36, 16, 4, 128, 128256, True),
    "SOLAR-10.7B": KnownModel("llama", 10_731_524_096, 4096, 14336, 48, 32, 8, 128, 32000),
    "TinyLlama-1.1B": KnownModel("llama", 1_100_048_384, 2048, 5632, 22, 32, 4, 64, 32000),
    "Yi-1.5-6B": KnownModel("llama", 6_061_035_520, 4096, 11008, 32, 32, 4, 128, 64000),
    "Yi-1.5-9B": KnownModel("llama", 8_829_407_232, 4096, 11008, 48, 32, 4, 128, 64000),
    "Yi-1.5-34B": KnownModel("llama", 34_388_917_248, 7168, 20480, 60, 56, 8, 128, 64000),
}
# fmt: on
