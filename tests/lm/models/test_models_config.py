"""Configurations as they are found: older forms, and options that nobody honours."""

import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from families_dense import DENSE
from families_experts import EXPERTS
from families_mixers import MIXERS
from megatrain_jax._src.lm.models.config import FAMILIES
from megatrain_jax._src.lm.models.decoder_options import ParameterMaker
from megatrain_jax._src.lm.models.layers import RMSNorm
from megatrain_jax._src.lm.models.rotary import cos_sin_tables
from megatrain_jax.models import DecoderConfig, Rope
from messages import refuses, warns
from published import PUBLISHED, num_parameters

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008],
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
}


def test_an_older_llama():
    config = DecoderConfig.from_hf(LLAMA)
    assert config.rope == Rope(
        dim=64,
        base=500000.0,
        kind="llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_length=8192,
    )
    assert config.tie_embeddings and config.head_dim == 64 and not config.windows
    newer = {k: v for k, v in LLAMA.items() if not k.startswith("rope_")}
    newer["rope_parameters"] = LLAMA["rope_scaling"] | {"rope_theta": 500000.0}
    assert DecoderConfig.from_hf(newer) == config


def test_an_older_gemma_3():
    config = DecoderConfig.from_hf(
        SIZES
        | {
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "rope_local_base_freq": 10000,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 2,
            "cache_implementation": "hybrid",
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        }
    )
    assert config.windows == (512, None, 512)
    assert config.rope_of(0) == Rope(dim=16, base=10000.0)
    assert config.rope_of(1) == Rope(dim=16, base=1e6, kind="linear", factor=8.0)
    assert config.tie_embeddings and config.attention_scale == 0.25


def test_an_older_qwen2_5_vl():
    scaling = {"type": "mrope", "mrope_section": [2, 3, 3]}
    flat = SIZES | {"rope_scaling": scaling, "vision_config": {"depth": 1}}
    flat = flat | {"model_type": "qwen2_5_vl", "tie_word_embeddings": True}
    text = SIZES | {"rope_parameters": {"rope_theta": 1e6}, "tie_word_embeddings": True}
    nested = {"model_type": "qwen2_5_vl", "text_config": text, "vision_config": {"depth": 1}}
    assert DecoderConfig.from_hf(flat) == DecoderConfig.from_hf(nested)
    assert DecoderConfig.from_hf(flat).tie_embeddings
    assert as_transformers(nested)["tie_word_embeddings"]
    # Only that family reads the field there.
    nested |= {"model_type": "qwen3_vl"}
    assert not DecoderConfig.from_hf(nested).tie_embeddings
    assert not as_transformers(nested)["tie_word_embeddings"]


def test_an_older_phi_3():
    scaling = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    values = SIZES | {"model_type": "phi3", "rope_scaling": scaling}
    config = DecoderConfig.from_hf(values | {"original_max_position_embeddings": 1024})
    assert config.rope.kind == "longrope" and config.rope.original_length == 1024
    assert config.rope.attention_factor == pytest.approx((1 + 2 / 10) ** 0.5)
    transformers = pytest.importorskip("transformers")
    left_out = DecoderConfig.from_hf(values | {"max_position_embeddings": 131072})
    original = transformers.Phi3Config().original_max_position_embeddings
    assert left_out.rope.original_length == original


def test_a_dynamic_embedding_stretches_beyond_the_length_of_the_configuration():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    values = {"model_type": "llama", "max_position_embeddings": 64, "rope_parameters": rope}
    for original in ({}, {"original_max_position_embeddings": 16}):
        assert DecoderConfig.from_hf(SIZES | values | original).rope.max_length == 64


def test_defaults_are_those_of_the_family():
    windows = DecoderConfig.from_hf(SIZES | {"model_type": "mistral"}).windows
    assert windows == (4096,) * 3
    assert DecoderConfig.from_hf(SIZES | {"model_type": "mixtral"}).rope.base == 1e6
    gemma = DecoderConfig.from_hf(SIZES | {"model_type": "gemma2"})
    assert gemma.attention_softcap == 50.0 and gemma.windows == (4096, None, 4096)
    assert DecoderConfig.from_hf(SIZES | {"model_type": "qwen3"}).head_dim == 128
    # Transformers gives the last layer no window, whatever its type.
    types = {"layer_types": ["sliding_attention"] * 3, "sliding_window": 7}
    gemma = DecoderConfig.from_hf(SIZES | {"model_type": "gemma4_text"} | types)
    assert gemma.windows == (7, 7, None)
    sparse = DecoderConfig.from_hf(SIZES | {"model_type": "qwen3_moe", "decoder_sparse_step": 2})
    assert sparse.experts is not None and sparse.experts.layers == (1,)


def test_layers_of_nemotron_h_by_letters_and_older_names():
    values = SIZES | {"model_type": "nemotron_h", "num_hidden_layers": 4}
    letters = values | {"hybrid_override_pattern": "M*-E"}
    older = values | {"layers_block_type": ["mamba", "attention", "mlp", "moe"]}
    config = DecoderConfig.from_hf(letters)
    assert config == DecoderConfig.from_hf(older) == DecoderConfig.from_hf(as_transformers(letters))
    assert config.experts is not None and config.experts.layers == (3,)
    with refuses(ValueError, "`hybrid_override_pattern`", "MXXX"):
        DecoderConfig.from_hf(values | {"hybrid_override_pattern": "MXXX"})


def test_an_olmo_hybrid_rotates_where_it_has_wavelengths():
    values = SIZES | {"model_type": "olmo_hybrid", "num_hidden_layers": 4}
    for rope, unrotated in (
        ({}, (0, 1, 2)),
        ({"rope_parameters": None, "rope_theta": None}, (0, 1, 2, 3)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, (0, 1, 2, 3)),
        ({"rope_theta": 500.0}, (0, 1, 2)),
    ):
        config = DecoderConfig.from_hf(values | rope)
        assert config.unrotated == unrotated
        assert config == DecoderConfig.from_hf(as_transformers(values | rope))


@pytest.mark.filterwarnings("ignore")
def test_a_kimi_linear_has_layers_and_sizes_under_names_of_its_own():
    values = PUBLISHED["moonshotai/Kimi-Linear-48B-A3B-Instruct"].config
    usual = {"num_experts_per_tok": 3, "norm_topk_prob": False}
    for given in (values, values | usual):
        assert DecoderConfig.from_hf(given) == DecoderConfig.from_hf(as_transformers(given))
    missing = {"kda_layers": [1, 2, 3], "full_attn_layers": [4]}
    with refuses(ValueError, "`full_attn_layers`", "`kda_layers`", 27):
        DecoderConfig.from_hf(values | {"linear_attn_config": missing})
    with refuses(ValueError, "use_full_rank_gate"):
        DecoderConfig.from_hf(values | {"linear_attn_config": {"use_full_rank_gate": True}})


@pytest.mark.filterwarnings("ignore")
def test_indexers_are_in_the_layers_in_which_transformers_has_them():
    released, four = PUBLISHED["zai-org/GLM-5.3"].config, {"num_hidden_layers": 4}
    values = {k: v for k, v in released.items() if not k.endswith("_types")} | four
    for given, indexed in (
        ({}, (0, 1, 2)),
        ({"index_topk_freq": None}, (0, 1, 2, 3)),
        ({"index_skip_topk_offset": 1, "index_topk_freq": 2}, (0, 2)),
        ({"index_topk_pattern": "FSSF"}, (0, 3)),
        ({"index_topk_pattern": ["full", "shared"] * 2}, (0, 2)),
    ):
        given = {k: v for k, v in (values | given).items() if v is not None}
        config: Any = DecoderConfig.from_hf(given)
        assert config.options.indexed == indexed
        assert config == DecoderConfig.from_hf(as_transformers(given))
    by_lists: Any = DecoderConfig.from_hf(released)
    assert by_lists.options.indexed == (0, 1, *range(2, 78, 4))
    shared = {"indexer_types": ["shared", "full"] * 2}
    for changes, named in (
        (shared, "`indexer_types`"),
        ({"index_topk_pattern": "FXSF"}, "'X'"),
        ({"indexer_rope_interleave": False}, "`indexer_rope_interleave`"),
        ({"index_head_dim": 32}, "`index_head_dim` .*64"),
    ):
        with pytest.raises(ValueError, match=named):
            DecoderConfig.from_hf(values | changes)
    for name, value in (("q_lora_rank", None), ("index_topk_pattern", 3)):
        with refuses(TypeError, f"`{name}`", value):
            DecoderConfig.from_hf(values | {name: value})


def test_contradicting_numbers_of_experts_are_refused():
    values = SIZES | {"model_type": "qwen3_moe", "num_experts": 8}
    assert DecoderConfig.from_hf(values | {"num_local_experts": 8}) == DecoderConfig.from_hf(values)
    with refuses(ValueError, "`num_experts` = 8", "`num_local_experts` = 6"):
        DecoderConfig.from_hf(values | {"num_local_experts": 6})


_WINDOWS = {"use_sliding_window": True}
_LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
_FULL: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": _WINDOWS,
    "qwen3": _WINDOWS,
    "qwen3_moe": _WINDOWS,
    "mixtral": {},
    "gemma2": {},
    "gemma3_text": {},
    "gemma4_text": {},
    "olmo2": {},
    "ministral3": {},
    "gpt_oss": {},
    "glm4_moe": {},
    "deepseek_v3": {"num_key_value_heads": 32},
    "qwen2_moe": _WINDOWS,
    "qwen3_next": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "glm4": {},
    "phi": {},
    "olmo3": {},
    "smollm3": {},
    "granite": {},
    "gemma": {},
    "cohere2": {},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "exaone4": {},
    "olmoe": {},
    "ernie4_5": {},
    "hunyuan_v1_dense": {},
    "apertus": {},
    "nemotron": {},
    "minimax_m2": {},
    "gemma3n_text": {},
    "llama4_text": {},
    "falcon_h1": {},
    "granitemoehybrid": {"mamba_n_heads": 16},
    "lfm2": {},
    "ernie4_5_moe": {},
    "arcee": {},
    "starcoder2": {},
    "cwm": {},
    "glm": {},
    "cohere": {},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "exaone_moe": {},
    "afmoe": {},
    "olmo_hybrid": {},
    "kimi_linear": {"num_key_value_heads": 32},
    "deepseek_v32": {"num_key_value_heads": 32},
    "glm_moe_dsa": {"num_key_value_heads": 32},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention"] * 10},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 15},
    "deepseek_v2": {"num_experts_per_tok": 2, "num_key_value_heads": 32},
    "glm4_moe_lite": {"num_key_value_heads": 32},
    "phi3": {"rope_parameters": _LONG | {"rope_theta": 1e4}, "max_position_embeddings": 131072},
}


def as_transformers(values):
    """A configuration with all that it leaves out filled in by Transformers."""
    transformers = pytest.importorskip("transformers")
    options = {k: v for k, v in values.items() if k not in ("model_type", "transformers_version")}
    return transformers.AutoConfig.for_model(values["model_type"], **options).to_dict()


def check_fields_left_out(full, kept):
    """Checks that a field that is left out, but for the kept ones, has Transformers' default."""
    left_out = 0
    for name in set(full) - {"model_type", "vocab_size", *kept}:
        values = {k: v for k, v in full.items() if k != name}
        try:
            ours = DecoderConfig.from_hf(values)
        except ValueError:  # what no default stands for, or what contradicts it
            continue
        assert ours == DecoderConfig.from_hf(as_transformers(values)), name
        left_out += 1
    assert left_out > 20


@pytest.mark.parametrize("family", _FULL)
@pytest.mark.filterwarnings("ignore")
def test_each_field_that_is_left_out_is_what_transformers_takes_for_it(family):
    # As many layers and heads as the defaults of others of their numbers need.
    sizes = {"num_hidden_layers": 30, "num_attention_heads": 32, "hidden_size": 512}
    least = SIZES | sizes | {"model_type": family} | _FULL[family]
    full = as_transformers(least)
    assert DecoderConfig.from_hf(least) == DecoderConfig.from_hf(full)
    check_fields_left_out(full, {"intermediate_size", *sizes})


def full_config(name):
    """A configuration with options at values besides their defaults, as Transformers writes it."""
    transformers = pytest.importorskip("transformers")
    family, options, _ = (DENSE | EXPERTS | MIXERS)[name]
    sizes = SIZES | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"max_position_embeddings": 64, "tie_word_embeddings": False}
    return getattr(transformers, f"{family}Config")(**sizes | options).to_dict()


@pytest.mark.parametrize("name", DENSE | EXPERTS | MIXERS)
@pytest.mark.filterwarnings("ignore")
def test_a_field_that_is_left_out_has_its_default_beside_others_that_have_not(name):
    check_fields_left_out(full_config(name), set())


# Numbers and flags that change nothing in training: of generation, of files, of other kernels, and
# those that another field overrules.
_UNREAD = """
bos_token_id eos_token_id pad_token_id eod_token_id output_attentions output_hidden_states
output_router_logits return_dict use_cache chunk_size_feed_forward max_position_embeddings
num_logits_to_keep num_nextn_predict_layers pretraining_tp max_window_layers mamba_chunk_size
sliding_window_pattern _sliding_window_pattern no_rope_layer_interval qk_head_dim rotary_dim
"""
_UNREAD_BY = {
    "gemma3n": "altup_coef_clip",
    "lfm2": "block_auto_adjust_ff_dim intermediate_size",
    "nemotron-h": "chunk_size expand mamba_proj_bias moe_shared_expert_overlap n_shared_experts "
    "rescale_prenorm_residual time_step_floor time_step_max use_mamba_kernels",
    "olmo-hybrid": "linear_a_log_max linear_a_log_min linear_dt_init_floor linear_dt_max "
    "linear_dt_min",
    "deepseek-v2": "head_dim",
    "deepseek-v3": "head_dim",
    "deepseek-v3.2": "first_k_dense_replace head_dim mlp_bias",
    "glm-moe-dsa": "first_k_dense_replace head_dim mlp_bias",
    "deepseek-v3-plain": "first_k_dense_replace head_dim moe_intermediate_size n_routed_experts "
    "n_shared_experts norm_topk_prob num_experts_per_tok",
    "exaone-moe": "first_k_dense_replace",
    "kimi-linear": "head_dim model_max_length",
    "afmoe": "global_attn_every_n_layers",
    "llama4": "interleave_moe_layer_step router_aux_loss_coef",
    "granite4-dense": "intermediate_size num_experts_per_tok router_aux_loss_coef",
    "falcon-h1": "mamba_expand",
    "falcon-h1-plain": "mamba_expand",
    "ernie4.5-moe": "moe_layer_end_index",
    "mixtral": "router_aux_loss_coef",
    "qwen2-moe": "decoder_sparse_step sliding_window use_sliding_window",
    "qwen3-moe": "use_sliding_window",
    "qwen3-moe-mixed": "decoder_sparse_step use_sliding_window",
    "smollm3": "use_sliding_window",
}


@pytest.mark.parametrize("name", DENSE | EXPERTS | MIXERS)
@pytest.mark.filterwarnings("ignore")
def test_a_field_with_another_value_changes_the_model_or_is_refused(name):
    full, unread = full_config(name), {*_UNREAD.split(), *_UNREAD_BY.get(name, "").split()}
    config = DecoderConfig.from_hf(full)
    ignored = set()
    for field, value in full.items():
        if isinstance(value, int | float):
            other = not value if isinstance(value, bool) else 2 * value + 3
            try:
                found = DecoderConfig.from_hf(full | {field: other})
            except (TypeError, ValueError):
                continue
            ignored |= {field} if found == config else set()
    assert ignored <= unread


@pytest.mark.filterwarnings("ignore")
def test_stretched_wavelengths_are_those_of_transformers():
    pytest.importorskip("torch")
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    transformers, rng = pytest.importorskip("transformers"), random.Random(0)
    for _ in range(60):
        rope = {
            "rope_type": "yarn",
            "rope_theta": rng.choice([100.0, 1e4, 1e6]),
            "factor": rng.choice([1.5, 4.0, 32.0]),
            "original_max_position_embeddings": rng.choice([16, 512, 4096, 2**20]),
            "beta_fast": rng.choice([8.0, 32.0]),
            # With 8, the ramp's ends may be one.
            "beta_slow": rng.choice([1.0, 2.5, 8.0]),
            "truncate": rng.random() < 0.5,
        }
        if rng.random() < 0.3:
            rope["attn_factor"] = 0.9  # which Transformers does not read
        values = SIZES | {"head_dim": rng.choice([8, 64, 128]), "rope_parameters": rope}
        config = transformers.LlamaConfig(**values)
        expected, scale = rope_utils.ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
        rope = DecoderConfig.from_hf(config.to_dict()).rope
        _, sines = cos_sin_tables(rope, np.ones((1, 1), np.int32))
        np.testing.assert_allclose(sines[0, 0], scale * np.sin(expected.numpy()), rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": None}, "`model_type` = None"),
        ({"model_type": ["llama"]}, "`model_type` = .*llama"),
        ({"architectures": ["LlamaForQuestionAnswering"]}, "LlamaForQuestionAnswering"),
        ({"attention_dropout": 0.1}, "`attention_dropout` = 0.1"),
        ({"quantization_config": {"bits": 4}}, "`quantization_config`"),
        ({"pretraining_tp": 2}, "`pretraining_tp` = 2"),
        ({"hidden_act": "xielu"}, "'xielu'"),
        ({"new_kind_of_norm": "yes"}, "`new_kind_of_norm` = 'yes'"),
        ({"rope_scaling": {"rope_type": "axial"}}, "'axial'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "`factor`"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "attn_factor": 0.9}},
            "'linear' .*attn_factor",
        ),
        ({"model_type": "qwen3", "use_qk_norm": False}, "`use_qk_norm` = False"),
        ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor` = 0.5"),
        ({"hidden_size": None}, "no `hidden_size`"),
        ({"vocab_size": 0}, "`vocab_size` .*1.*0"),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "`router_jitter_noise` = 0.1"),
        ({"model_type": "phi3", "resid_pdrop": 0.1}, "`resid_pdrop` = 0.1"),
        ({"model_type": "qwen2", "use_mrope": True}, "`use_mrope` = True"),
        ({"model_type": "qwen2", "layer_types": ["chunked_attention"]}, "'chunked_attention'"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "bidirectional"),
        ({"num_key_value_heads": 3}, "`num_kv_heads` .*3"),
    ],
)
def test_what_is_not_supported_is_named(changes, named):
    with pytest.raises(ValueError, match=named):
        DecoderConfig.from_hf(SIZES | {"model_type": "llama"} | changes)


def test_labels_of_a_wrong_type_are_named():
    scorer = SIZES | {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}
    assert DecoderConfig.from_hf(scorer | {"id2label": None}).scores == 2
    with refuses(TypeError, "`id2label`", 3):
        DecoderConfig.from_hf(scorer | {"id2label": 3})


@pytest.mark.filterwarnings("ignore:attn_factor of rotary embeddings:UserWarning")
@pytest.mark.parametrize("name", PUBLISHED)
def test_configurations_of_released_checkpoints(name):
    released = PUBLISHED[name]
    if released.ignore:
        with pytest.raises(ValueError, match=f"`{released.ignore[0]}` = 0.1"):
            DecoderConfig.from_hf(released.config)
    config = DecoderConfig.from_hf(released.config, ignore=released.ignore)
    assert round(num_parameters(config) / 1e6) == released.millions


def test_scores_of_deepseek_grow_twice_with_stretched_wavelengths():
    """By `mscale_all_dim` 1 and `factor` 40, as in DeepSeek's own `softmax_scale`."""
    released = PUBLISHED["unsloth/DeepSeek-V3-bf16"]
    config = DecoderConfig.from_hf(released.config, ignore=released.ignore)
    growth = 0.1 * np.log(40) + 1
    assert config.attention_scale == pytest.approx((128 + 64) ** -0.5 * growth**2)


@pytest.mark.parametrize("limit", [0.5, 30.0])
def test_a_limit_of_logits_may_be_any_positive_number(limit):
    for family in ("gemma2", "gemma3_text"):
        values = SIZES | {"model_type": family, "head_dim": 16}
        config = DecoderConfig.from_hf(values | {"final_logit_softcapping": limit})
        assert config.final_softcap == limit
        with refuses(ValueError, "`final_logit_softcapping`", "0.0"):
            DecoderConfig.from_hf(values | {"final_logit_softcapping": 0.0})


def test_no_layer_of_llama4_has_chunks_where_these_have_no_size():
    values = SIZES | {"model_type": "llama4_text", "num_local_experts": 2, "head_dim": 16}
    for size, expected in ((None, ()), (32, (0, 1, 2))):
        options: Any = DecoderConfig.from_hf(values | {"attention_chunk_size": size}).options
        assert options.chunked == expected


@pytest.mark.parametrize("limits", [[0.1], [-1.0, 2.0], 0.1])
def test_limits_of_time_steps_are_two_numbers(limits):
    values = SIZES | {"model_type": "falcon_h1", "mamba_d_ssm": 64, "mamba_n_heads": 4}
    with refuses(TypeError, "`time_step_limit`", str(limits)):
        DecoderConfig.from_hf(values | {"time_step_limit": limits})


def test_unknown_fields_may_be_ignored_by_name():
    values = SIZES | {"model_type": "llama", "comment": "mine", "_private": 1, "off": False}
    with refuses(ValueError, "`comment` = 'mine'", "`ignore`"):
        DecoderConfig.from_hf(values)
    assert DecoderConfig.from_hf(values, ignore=["comment"]).num_layers == 3


def test_options_of_rotary_embeddings_may_be_ignored_by_name():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    values = SIZES | {"model_type": "llama"}
    without = DecoderConfig.from_hf(values | {"rope_scaling": yarn})
    named = values | {"rope_scaling": yarn | {"attn_factor": 0.9}}
    with warns(UserWarning, "attn_factor", "Transformers"):
        assert DecoderConfig.from_hf(named).rope == without.rope
    assert DecoderConfig.from_hf(named, ignore=["attn_factor"]).rope == without.rope
    named = values | {"rope_scaling": yarn | {"mine": 1}}
    with refuses(ValueError, "mine", "`ignore`"):
        DecoderConfig.from_hf(named)
    assert DecoderConfig.from_hf(named, ignore=["mine"]).rope == without.rope


def test_missing_fields_are_named():
    values = {k: v for k, v in SIZES.items() if k != "intermediate_size"}
    with pytest.raises(ValueError, match="no `intermediate_size`"):
        DecoderConfig.from_hf(values | {"model_type": "llama"})


def test_configurations_are_checked_and_hashable():
    config = DecoderConfig.from_hf(LLAMA)
    assert hash(config) == hash(DecoderConfig.from_hf(LLAMA))
    for changes, named in (
        ({"windows": (1, 2)}, "`windows` .*16"),
        ({"windows": (0,) * 16}, "`windows` .*1.*0"),
        ({"activation": "tanh"}, "`activation`"),
        ({"rope": Rope(dim=128)}, "128 .*64"),
        ({"fused": True, "qkv_bias": True}, "`fused`"),
    ):
        with pytest.raises(ValueError, match=named):
            dataclasses.replace(config, **changes)


# No configuration of the last ones has only the fields of a family.
NEAREST = {
    "olmo": "olmo2",
    "exaone": "exaone4",
    "vaultgemma": "gemma2",
    "flex_olmo": "olmoe",
    "helium": "llama",
    "ministral": "cwm",
    "sarvam_moe": "glm4_moe",
    "gpt2": None,
    "mamba": None,
    "bert": None,
    "deepseek_v4": None,
}


@pytest.mark.parametrize("name", NEAREST)
def test_types_without_a_family_name_the_nearest_one(name):
    values = pytest.importorskip("transformers").CONFIG_MAPPING[name]().to_dict()
    with pytest.raises(ValueError, match=f"'{name}'.*your_model.md") as caught:
        DecoderConfig.from_hf(values)
    if (near := NEAREST[name]) is None:
        assert "architectures" not in str(caught.value)
        return
    architecture = f"'{FAMILIES[near].architecture}'"
    for word in (f"set `model_type` to '{near}'", f"`architectures` to [{architecture}]"):
        assert word in str(caught.value)
    # What the message advises is read, at least.
    DecoderConfig.from_hf(values | {"model_type": near, "architectures": [architecture[1:-1]]})


def test_a_model_without_experts_is_near_no_family_with_experts():
    values = pytest.importorskip("transformers").CONFIG_MAPPING["olmo"]().to_dict()
    with pytest.raises(ValueError, match="'llama'") as caught:
        DecoderConfig.from_hf(values | {"model_type": "mixtral_without_experts"})
    assert "'mixtral'" not in str(caught.value)


@pytest.mark.long
def test_every_type_of_transformers_is_read_or_learns_the_way_without_a_family():
    transformers = pytest.importorskip("transformers")
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    count = 0
    for name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - FAMILIES.keys():
        if name == "gemma4_assistant":  # has no default
            continue
        with pytest.raises(ValueError, match="your_model.md"):
            DecoderConfig.from_hf(transformers.CONFIG_MAPPING[name]().to_dict())
        count += 1
    assert count > 100


@pytest.mark.parametrize(
    ("options", "rounds"),
    [({}, True), ({"norm_in_fp32": True}, False), ({"norm_offset": 1.0}, False)],
    ids=["bf16", "fp32", "offset"],
)
def test_norms_in_bf16_multiply_in_the_dtype_of_the_configuration(options, rounds):
    given = {"norm_eps": 1e-6, "norm_offset": 0.0, "norm_in_fp32": False} | options
    config: Any = SimpleNamespace(**given)
    norm = RMSNorm(64, config, ParameterMaker(nnx.Rngs(0), jnp.bfloat16, 0.0))
    x, weight = np.random.default_rng(0).normal(size=(2, 8, 64)).astype(jnp.bfloat16)
    norm.weight[...] = jnp.asarray(weight[0])
    wide = x.astype(np.float32)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + np.float32(1e-6))
    expected = expected.astype(jnp.bfloat16).astype(np.float32) if rounds else expected
    expected *= config.norm_offset + weight[0].astype(np.float32)
    np.testing.assert_array_equal(norm(jnp.asarray(x)), expected.astype(jnp.bfloat16))
