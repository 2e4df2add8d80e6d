"""Gemma 4: wider heads in layers without a window, and experts beside an MLP.

Its layers are in `gemma4_layers`; this file reads its configurations.
"""

from typing import Any

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.families.gemma4_layers import (
    Gemma4Layer,
    Gemma4Options,
    MemoryMaker,
)
from megatrain_jax._src.lm.models.family import Family, multimodal_family
from megatrain_jax._src.lm.models.hf_fields import Fields
from megatrain_jax._src.lm.models.hf_rope import KINDS, read_rope
from megatrain_jax._src.lm.models.moe import Experts
from megatrain_jax._src.lm.models.rotary import Rope
from megatrain_jax._src.lm.models.tensors import some

_ROPES: dict[str, dict[str, Any]] = {
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def _read(fields: Fields) -> dict[str, Any]:
    activation = hf_common.read_activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    local = hf_common.sizes(fields, kv_heads=4, head_dim=256, tied=True, activation=activation)
    num_layers = local["num_layers"]
    types = [
        "full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(num_layers)
    ]
    types = fields.listed("layer_types", str, "names") or types
    windows = hf_common.windows_by_type(fields, types, hf_common.window(fields, 512))
    windows = (*windows[:-1], None)  # for any `layer_types`, as in Transformers
    options = _options(fields, windows, local)
    full = _full_heads(fields, windows, local, shared=options.keys_are_values)
    return {
        **local,
        **hf_common.attention_bias(fields),
        **_ropes(fields, full["head_dim"], local["head_dim"]),
        **full,
        "windows": windows,
        "norm_in_fp32": True,
        "scale_embedding": True,
        "attention_scale": 1.0,
        "final_softcap": fields.number("final_logit_softcapping", None, above=0),
        "experts": _experts(fields, num_layers),
        "layer": Gemma4Layer,
        "memory": MemoryMaker,
        "unread": unread_tensors(options.first_shared, num_layers),
        "options": options,
    }


def shared_layers(
    fields: Fields, windows: hf_common.Windows, default: int
) -> tuple[int, tuple[int, ...]]:
    """Returns the first layer without its own keys and values, and the layers that lend theirs.

    Args:
        fields: The configuration.
        windows: The layers' windows.
        default: Default of `num_kv_shared_layers`.
    """
    shared = fields.integer("num_kv_shared_layers", default, least=0)
    first = len(windows) - shared
    # The last layer of each kind with its own keys and values.
    lenders = {windows[i] is None: i for i in range(max(first, 0))} if shared else {}
    if shared and set(lenders) != {window is None for window in windows}:
        raise ValueError(
            f"`num_kv_shared_layers` = {shared} of {len(windows)} layers leaves none of some kind "
            "in `layer_types` that has keys and values of its own"
        )
    return first, tuple(sorted(lenders.values()))


def unread_tensors(first: int, num_layers: int) -> tuple[str, ...]:
    """Returns prefixes of the tensors of keys and values that layers with shared ones don't read.

    Args:
        first: Number of the first such layer.
        num_layers: Number of layers.
    """
    names = ("k_proj", "v_proj", "k_norm", "v_norm")
    layers = range(first, num_layers)
    return tuple(f"layers.{i}.self_attn.{name}." for i in layers for name in names)


def _options(fields: Fields, windows: hf_common.Windows, local: dict[str, Any]) -> Gemma4Options:
    first, lenders = shared_layers(fields, windows, 0)
    wide = 2 if fields.flag("use_double_wide_mlp", False) else 1
    return Gemma4Options(
        local_head_dim=local["head_dim"],
        local_kv_heads=local["num_kv_heads"],
        keys_are_values=fields.flag("attention_k_eq_v", False),
        first_shared=first,
        lenders=lenders,
        inputs_dim=fields.integer("hidden_size_per_layer_input", 256, least=0),
        inputs_vocab=fields.integer("vocab_size_per_layer_input", 262_144),
        shared_intermediate_size=wide * local["intermediate_size"],
    )


def _full_heads(
    fields: Fields, windows: hf_common.Windows, local: dict[str, Any], *, shared: bool
) -> dict[str, int]:
    """Returns the sizes of heads in layers without a window.

    Released checkpoints have fields for them; Transformers writes an object per layer.
    """
    head_dim = fields.integer("global_head_dim", 512)
    kv_heads = fields.integer("num_global_key_value_heads", None)
    given = fields.mapping("per_layer_config")
    given = {str(key).lstrip("0") or "0": value for key, value in given.items()}  # "05" is 5
    if not given:
        kv_heads = (kv_heads if shared else None) or local["num_kv_heads"]
        return {"head_dim": head_dim, "num_kv_heads": kv_heads}
    names = {"head_dim", "num_key_value_heads"}
    ours = [str(i) for i, window in enumerate(windows) if window is None]
    first = given.get(ours[0])
    alike = isinstance(first, dict) and all(given.get(i) == first for i in ours)
    if first is None or not alike or set(given) != set(ours) or set(first) - names:
        raise ValueError(
            "`per_layer_config` must have one and the same object for each layer without a window, "
            f"{some(ours)}, with no other fields than {some(sorted(names))}"
        )
    values = {"head_dim": local["head_dim"], "num_key_value_heads": local["num_kv_heads"]} | first
    head_dim, kv_heads = (checks.integer(name, values[name]) for name in sorted(names))
    return {"head_dim": head_dim, "num_kv_heads": kv_heads}


def _ropes(fields: Fields, full_dim: int, local_dim: int) -> dict[str, Rope]:
    parameters = fields.mapping("rope_parameters") or _ROPES
    if set(parameters) != set(_ROPES) or not all(isinstance(v, dict) for v in parameters.values()):
        raise ValueError(f"`rope_parameters` must have objects {' and '.join(_ROPES)}")
    shared = {
        "family": fields.family,
        "max_length": fields.integer("max_position_embeddings", 131_072),
        "original_length": None,
        "kinds": KINDS | {"proportional": "proportional"},
        "ignore": fields.ignore,
    }
    full, local = (parameters[name] for name in _ROPES)
    return {
        "rope": read_rope(full, head_dim=full_dim, **shared),
        "local_rope": read_rope(local, head_dim=local_dim, **shared),
    }


def _experts(fields: Fields, num_layers: int) -> Experts | None:
    names = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if not fields.flag("enable_moe_block", False):
        for name in names:
            fields.integer(name, None)
        return None
    num, per_token, inside = (fields.integer(name) for name in names)
    return Experts(
        num=num,
        per_token=per_token,
        intermediate_size=inside,
        normalize=True,
        layers=tuple(range(num_layers)),
    )


GEMMA4 = Family(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    read=_read,
    renames={"memory": ""},
    joined_experts=True,
)
GEMMA4_MULTIMODAL = multimodal_family(
    GEMMA4,
    model_type="gemma4",
    architecture="Gemma4ForConditionalGeneration",
    kept=(
        "model.vision_tower.",
        "model.embed_vision.",
        "model.audio_tower.",
        "model.embed_audio.",
    ),
    beside="audio_config audio_token_id boa_token_id boi_token_id eoa_token_id eoa_token_index "
    "eoi_token_id image_token_id video_token_id vision_soft_tokens_per_image",
    tied=True,
    body="model.language_model",
    head="lm_head",
)
