"""Gemma 3n: several streams of hidden states; each layer computes one of them (AltUp).

The remaining streams are predicted from it (https://arxiv.org/abs/2301.13310). Layers also have
embeddings of their own and keys and values of an earlier layer, as in Gemma 4.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.activation_functions import ACTIVATIONS
from megatrain_jax._src.lm.models.families.gemma4 import shared_layers, unread_tensors
from megatrain_jax._src.lm.models.families.gemma4_layers import (
    Gemma4Attention,
    Gemma4Options,
    Memory,
    MemoryMaker,
    lender_of,
)
from megatrain_jax._src.lm.models.family import Family, multimodal_family
from megatrain_jax._src.lm.models.hf_fields import Fields
from megatrain_jax._src.lm.models.layers import MLP, HiddenStates, Linear, RMSNorm, Segments
from megatrain_jax._src.lm.models.parameter_maker import ParameterMaker
from megatrain_jax._src.lm.models.rotary import Rotation

if TYPE_CHECKING:
    from megatrain_jax._src.lm.models.config import DecoderConfig

Streams = Float[Array, "num rows length width"]


@dataclass(frozen=True, kw_only=True)
class Gemma3nOptions(Gemma4Options):
    """Options of Gemma 3n's layers, in addition to the ones it shares with Gemma 4.

    Attributes:
        streams: Number of streams.
        rank: Width between the two products beside attention.
        scaled: Whether the corrected stream is scaled before a layer's own embeddings.
        sizes: For each layer, the width inside its MLP.
        sparsity: For each layer, about the fraction of the MLP's gates that are zero.
    """

    streams: int
    rank: int
    scaled: bool
    sizes: tuple[int, ...]
    sparsity: tuple[float, ...]


def _root(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns square roots, whose derivative at 0 is 0 instead of infinite."""
    is_zero = x == 0
    return jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 1, x)))


def _resized(x: Float[Array, "... width"], like: Float[Array, "... width"]) -> Array:
    """Returns vectors scaled to the root mean squares of the vectors in `like`."""
    size = _root(jnp.mean(like * like, axis=-1, keepdims=True))
    own = jnp.sqrt(jnp.maximum(jnp.mean(x * x, axis=-1, keepdims=True), 1e-5))
    return x * size / own


class StreamsMaker(MemoryMaker):
    """Embeddings of each layer, and the streams beside the first one."""

    def __init__(self, config: "DecoderConfig", make: ParameterMaker):
        """Makes the parameters."""
        super().__init__(config, make)
        wide, options = config.hidden_size, config.options
        self.vocab, more = options.inputs_vocab, range(options.streams - 1)
        self.altup_projections = nnx.List([Linear(wide, wide, make) for _ in more])
        self.altup_unembed_projections = nnx.List([Linear(wide, wide, make) for _ in more])

    def __call__(self, tokens: Integer[Array, "rows length"], x: HiddenStates) -> Memory:
        """Returns the initial memory; tokens outside the layers' vocabulary count as token 0."""
        memory = super().__call__(jnp.where(tokens < self.vocab, tokens, 0), x)
        streams = [_resized(project(x), x) for project in self.altup_projections]
        return memory._replace(streams=jnp.stack(streams))

    def finish(self, x: HiddenStates, memory: Memory) -> HiddenStates:
        """Returns the mean of all streams, with projections of all but the first."""
        assert memory.streams is not None
        both = zip(self.altup_unembed_projections, memory.streams, strict=True)
        return jnp.mean(jnp.stack([x, *(_resized(project(s), x) for project, s in both)]), axis=0)


class AltUp(nnx.Module):
    """Predicts streams before a layer, and corrects them after it."""

    def __init__(self, config: "DecoderConfig", make: ParameterMaker):
        """Makes the parameters."""
        wide, num = config.hidden_size, config.options.streams
        self.correct_output_scale = make.constant(0.0, wide)
        self.correction_coefs = Linear(num, num, make)
        self.prediction_coefs = Linear(num, num * num, make)
        self.modality_router = Linear(wide, num, make)
        self.router_norm = RMSNorm(wide, config, make)

    def mixture(self, x: HiddenStates) -> Float[Array, "rows length num"]:
        """Returns numbers from -1 to 1 that the coefficients of a token depend on."""
        routed = self.modality_router(self.router_norm(x) * (1 / x.shape[-1]))
        return jnp.tanh(routed.astype(jnp.float32)).astype(x.dtype)

    def predict(self, streams: Streams) -> Streams:
        """Returns each stream plus a combination of all; coefficients depend on the first."""
        num, rows, length, _ = streams.shape
        coefs = self.prediction_coefs(self.mixture(streams[0])).reshape(rows, length, num, num)
        return jnp.einsum("rlij,jrlw->irlw", coefs, streams) + streams

    def correct(self, predicted: Streams, x: HiddenStates) -> Streams:
        """Returns predicted streams, moved by the layer's difference from its prediction."""
        coefs = jnp.moveaxis(self.correction_coefs(self.mixture(x)) + 1, -1, 0)
        return predicted + coefs[..., None] * (x - predicted[0])


class Laurel(nnx.Module):
    """Two products of low rank, added to their input (https://arxiv.org/abs/2411.07501)."""

    def __init__(self, config: "DecoderConfig", make: ParameterMaker):
        """Makes the parameters."""
        wide, rank = config.hidden_size, config.options.rank
        self.linear_left, self.linear_right = Linear(wide, rank, make), Linear(rank, wide, make)
        self.post_laurel_norm = RMSNorm(wide, config, make)

    def __call__(self, x: HiddenStates) -> HiddenStates:
        """Adds the normalised products."""
        return x + self.post_laurel_norm(self.linear_right(self.linear_left(x)))


class SparseMLP(MLP):
    """A gated MLP with a share of the gates, the smallest ones, set to zero before the activation.

    The bound is that of a normal distribution with the gates' mean and deviation.
    """

    def __init__(self, config: "DecoderConfig", layer: int, make: ParameterMaker):
        """Makes the parameters."""
        super().__init__(config, make, config.options.sizes[layer])
        sparsity = config.options.sparsity[layer]
        self.bound = NormalDist().inv_cdf(sparsity) if sparsity > 0 else None

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """Maps each row separately."""
        gate = self.gate_proj(x)
        if self.bound is not None:
            mean = jnp.mean(gate, axis=-1, keepdims=True)
            # Padding has equal gates: deviations of 0.
            deviation = _root(jnp.var(gate, axis=-1, keepdims=True, dtype=jnp.float32))
            gate = jax.nn.relu(gate - (mean + deviation.astype(gate.dtype) * self.bound))
        return self.down_proj(self.activation(gate) * self.up_proj(x))


class Gemma3nLayer(nnx.Module):
    """Attention beside low-rank products, then an MLP, on one of several streams."""

    def __init__(self, config: "DecoderConfig", layer: int, make: ParameterMaker):
        """Makes the parameters of one layer."""

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config, make)

        wide, options = config.hidden_size, config.options
        self.number, self.local = layer, config.window(layer) is not None
        self.lends, self.scaled = layer in options.lenders, options.scaled
        self.borrows = lender_of(config, layer)
        self.activation = ACTIVATIONS[config.activation]
        self.altup, self.laurel = AltUp(config, make), Laurel(config, make)
        self.input_layernorm = norm()
        self.self_attn = Gemma4Attention(config, layer, make)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = SparseMLP(config, layer, make)
        self.post_feedforward_layernorm = norm()
        self.per_layer_input_gate = Linear(wide, options.inputs_dim, make)
        self.per_layer_projection = Linear(options.inputs_dim, wide, make)
        self.post_per_layer_input_norm = norm()

    def __call__(
        self, x: HiddenStates, rotation: Rotation, segments: Segments, memory: Memory
    ) -> tuple[Any, ...]:
        """Returns the first stream, None for the tally (there are no experts), and the memory."""
        assert memory.streams is not None
        predicted = self.altup.predict(jnp.concatenate([x[None], memory.streams]))
        kind = "local" if self.local else "full"
        y = self.input_layernorm(predicted[0])
        attended, kept = self.self_attn(y, rotation, segments, getattr(memory, kind))
        memory = memory._replace(**{kind: kept}) if self.lends else memory
        attended = predicted[0] + self.post_attention_layernorm(attended)
        x = (attended + self.laurel(y)) / math.sqrt(2)
        y = self.mlp(self.pre_feedforward_layernorm(x))
        corrected = self.altup.correct(predicted, x + self.post_feedforward_layernorm(y))
        first = corrected[0]
        y = first * self.altup.correct_output_scale[...] if self.scaled else first
        y = self.activation(self.per_layer_input_gate(y)) * memory.inputs[self.number]
        y = self.post_per_layer_input_norm(self.per_layer_projection(y))
        return first, None, memory._replace(streams=corrected[1:] + y)


def _sizes(fields: Fields) -> tuple[int, ...]:
    """Returns the width inside each layer's MLP, from one number or a list."""
    num = fields.integer("num_hidden_layers")
    given = fields.take("intermediate_size", 16_384)
    given = list(given) if isinstance(given, list | tuple) else [given] * num
    if len(given) != num:
        raise ValueError(checks.refused("intermediate_size", f"{num} integers", given))
    return tuple(checks.integer("intermediate_size", size, most=2**22) for size in given)


def _sparsity(fields: Fields, num: int) -> tuple[float, ...]:
    given = fields.take("activation_sparsity_pattern", None)
    if given is None:
        sparse = 10 if num > 10 else 0
        given = [0.95] * sparse + [0.0] * (num - sparse)
    given = list(given) if isinstance(given, list | tuple) else [given] * num
    if len(given) != num:
        raise ValueError(checks.refused("activation_sparsity_pattern", f"{num} numbers", given))
    found = tuple(checks.number("activation_sparsity_pattern", x, least=0) for x in given)
    if any(x >= 1 for x in found):
        raise ValueError(checks.refused("activation_sparsity_pattern", "numbers below 1", given))
    return found


def _read(fields: Fields) -> dict[str, Any]:
    for name in ("query_pre_attn_scalar", "altup_lr_multiplier"):
        fields.take(name, None)  # not read by Transformers
    fields.integer("altup_active_idx", 0, least=0)
    fields.neutral(altup_active_idx=0)
    # In training, Transformers bounds the coefficients; checkpoints have far smaller ones.
    fields.number("altup_coef_clip", 120.0, above=0, null=True)
    inside = _sizes(fields)
    activation = hf_common.read_activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    sizes = hf_common.sizes(
        fields, kv_heads=2, head_dim=256, tied=True, activation=activation, inside=max(inside)
    )
    num = sizes["num_layers"]
    types = ["sliding_attention" if (i + 1) % 5 else "full_attention" for i in range(num)]
    windows = hf_common.windows_by_type(fields, types, fields.integer("sliding_window", 512))
    first, lenders = shared_layers(fields, windows, 15)
    options = Gemma3nOptions(
        local_head_dim=sizes["head_dim"],
        local_kv_heads=sizes["num_kv_heads"],
        keys_are_values=False,
        first_shared=first,
        lenders=lenders,
        inputs_dim=fields.integer("hidden_size_per_layer_input", 256),
        inputs_vocab=fields.integer("vocab_size_per_layer_input", 262_144),
        shared_intermediate_size=max(inside),
        streams=fields.integer("altup_num_inputs", 4, least=2),
        rank=fields.integer("laurel_rank", 64),
        scaled=fields.flag("altup_correct_scale", True),
        sizes=inside,
        sparsity=_sparsity(fields, num),
    )
    full = {"rope_theta": fields.take("rope_theta", 1e6)}
    local = {"rope_theta": fields.take("rope_local_base_freq", 1e4)}
    return {
        **sizes,
        **hf_common.attention_bias(fields),
        **hf_common.two_ropes(fields, sizes["head_dim"], full, local, max_length=32_768),
        "windows": windows,
        "norm_in_fp32": True,
        "scale_embedding": True,
        "attention_scale": 1.0,
        "final_softcap": fields.number("final_logit_softcapping", 30.0, above=0),
        "layer": Gemma3nLayer,
        "memory": StreamsMaker,
        "unread": unread_tensors(first, num),
        "options": options,
    }


GEMMA3N = Family(
    model_type="gemma3n_text",
    architecture="Gemma3nForCausalLM",
    read=_read,
    renames={"memory": ""},
)
GEMMA3N_MULTIMODAL = multimodal_family(
    GEMMA3N,
    model_type="gemma3n",
    architecture="Gemma3nForConditionalGeneration",
    kept=(
        "model.vision_tower.",
        "model.embed_vision.",
        "model.audio_tower.",
        "model.embed_audio.",
    ),
    beside="audio_config audio_soft_tokens_per_image audio_token_id boa_token_id boi_token_id "
    "eoa_token_id eoi_token_id image_token_id vision_soft_tokens_per_image",
    tied=True,
    body="model.language_model",
    head="lm_head",
)
