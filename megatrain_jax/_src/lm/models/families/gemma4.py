"""Gemma 4 and 3n: values that layers pass on beside hidden states.

In Gemma 4, layers without a window have heads of a different width, and experts stand beside an
MLP. The smaller models also have token embeddings for each layer, and their last layers attend to
keys and values of an earlier layer. Both are in a memory passed from layer to layer. Gemma 3n adds
several streams of hidden states; each layer computes one of them (AltUp), and the remaining streams
are predicted from it (https://arxiv.org/abs/2301.13310).
"""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.decoder_options import ACTIVATIONS, DecoderOptions, ParameterMaker
from megatrain_jax._src.lm.models.expert_blocks import mix
from megatrain_jax._src.lm.models.families.gemma4_vision import (
    Gemma4VisionConfig,
    read_gemma4_vision,
)
from megatrain_jax._src.lm.models.family import Family, multimodal_family
from megatrain_jax._src.lm.models.hf_common import KINDS, Fields, read_rope
from megatrain_jax._src.lm.models.layers import (
    MLP,
    Attention,
    Buffer,
    Embedding,
    ExpertMatrices,
    HiddenStates,
    Linear,
    RMSNorm,
    Segments,
    rms_normalized,
)
from megatrain_jax._src.lm.models.moe import Experts, gated, route
from megatrain_jax._src.lm.models.rotary import Rope, Rotation
from megatrain_jax._src.lm.models.tensors import some


@dataclass(frozen=True, kw_only=True)
class Gemma4Options:
    """Sizes that differ between Gemma 4's layers.

    Attributes:
        local_head_dim: Width of a head in layers with a window; `head_dim` is for layers without.
        local_kv_heads: Key and value heads in layers with a window; `num_kv_heads` is for layers
            without.
        keys_are_values: Whether values are keys before their norm in layers without a window.
        first_shared: Number of the first layer without its own keys and values.
        lenders: Numbers of the layers that lend their keys and values to such layers.
        inputs_dim: Width of a layer's own embeddings; 0 for none.
        inputs_vocab: Rows of these embeddings.
        shared_intermediate_size: Width inside an MLP from `first_shared` on.
    """

    local_head_dim: int
    local_kv_heads: int
    keys_are_values: bool
    first_shared: int
    lenders: tuple[int, ...]
    inputs_dim: int
    inputs_vocab: int
    shared_intermediate_size: int


class Memory(NamedTuple):
    """The values passed from layer to layer beside the hidden states.

    Attributes:
        inputs: For each layer, its own embeddings of the tokens (rows, length, inputs_dim).
        local: Keys and values of the last layer with a window that has its own.
        full: The same for the last layer without a window.
        streams: Hidden states beside the layers' own (num, rows, length, width), in Gemma 3n.
    """

    inputs: tuple[Array, ...] = ()
    local: tuple[Array, Array] | None = None
    full: tuple[Array, Array] | None = None
    streams: Array | None = None


class MemoryMaker(nnx.Module):
    """The token embeddings of each layer, if there are any."""

    def __init__(self, config: DecoderOptions, make: ParameterMaker):
        """Makes the parameters."""
        options: Gemma4Options = config.options
        self.num_layers, self.dim = config.num_layers, options.inputs_dim
        self.vision = config.vision if isinstance(config.vision, Gemma4VisionConfig) else None
        if self.dim:
            wide = self.num_layers * self.dim
            self.embed_tokens_per_layer = Embedding(options.inputs_vocab, wide, make)
            self.per_layer_model_projection = Linear(config.hidden_size, wide, make)
            self.per_layer_projection_norm = RMSNorm(self.dim, config, make)

    def __call__(self, tokens: Integer[Array, "rows length"], x: HiddenStates) -> Memory:
        """Returns the initial memory: for each layer, a sum of two embeddings of the tokens."""
        if not self.dim:
            return Memory()
        by_layer = (*x.shape[:2], self.num_layers, self.dim)
        if self.vision is None:
            own = self.embed_tokens_per_layer(tokens)
        else:  # placeholders of images count as padding, which isn't trained
            inside = self.vision.is_placeholder(jnp.asarray(tokens))
            own = self.embed_tokens_per_layer(jnp.where(inside, self.vision.pad, tokens))
            own = jnp.where(inside[..., None], jax.lax.stop_gradient(own), own)
        own = (own * jnp.asarray(self.dim**0.5, own.dtype)).reshape(by_layer)
        projected = self.per_layer_model_projection(x) * x.shape[-1] ** -0.5
        both = (self.per_layer_projection_norm(projected.reshape(by_layer)) + own) * 2**-0.5
        return Memory(inputs=tuple(both[:, :, i] for i in range(self.num_layers)))

    def finish(self, x: HiddenStates, memory: Memory) -> HiddenStates:
        """Returns the hidden states for the last norm; here those of the last layer."""
        return x


def _lender_of(config: DecoderOptions, layer: int) -> int | None:
    """Returns the earlier layer with the keys and values that a layer uses; None for its own."""
    options: Gemma4Options = config.options
    if layer < options.first_shared:
        return None
    local = config.window(layer) is not None
    return next(i for i in options.lenders if (config.window(i) is not None) == local)


class Gemma4Attention(Attention):
    """Attention with normalised queries, keys and values."""

    def __init__(self, config: DecoderOptions, layer: int, make: ParameterMaker):
        """Makes the parameters of one layer's attention."""
        options: Gemma4Options = config.options
        self.window, self.eps = config.window(layer), config.norm_eps
        local = self.window is not None
        self.head_dim = options.local_head_dim if local else config.head_dim
        kv_heads = options.local_kv_heads if local else config.num_kv_heads
        self.interleaved, self.softcap, self.scale = False, None, config.attention_scale
        self.chunk = None
        wide, bias = config.hidden_size, config.qkv_bias
        query_size, key_size = config.num_heads * self.head_dim, kv_heads * self.head_dim
        self.q_proj = Linear(wide, query_size, make, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, config, make)
        self.o_proj = Linear(query_size, wide, make, bias=config.out_bias)
        self.lent = layer >= options.first_shared
        if self.lent:
            return
        self.k_proj = Linear(wide, key_size, make, bias=bias)
        own_values = local or not options.keys_are_values
        self.v_proj = Linear(wide, key_size, make, bias=bias) if own_values else None
        self.k_norm = RMSNorm(self.head_dim, config, make)

    def __call__(
        self,
        x: HiddenStates,
        rotation: Rotation,
        segments: Segments,
        lent: tuple[Array, Array] | None = None,
    ) -> tuple[HiddenStates, tuple[Array, Array]]:
        """Computes attention within rows, or within documents if `segments` numbers them.

        Args:
            x: The tokens.
            rotation: Their rotary embedding.
            segments: Their documents.
            lent: Keys and values of an earlier layer, used if this one has none.

        Returns:
            The result, and the keys and values.
        """

        def heads(y: Array) -> Array:
            return y.reshape(*x.shape[:2], -1, self.head_dim)

        q = self.q_norm(heads(self.q_proj(x)))
        if self.lent:
            assert lent is not None
            # Lent keys are already rotated.
            (q, _), (k, v) = self.rotate(q, q, rotation), lent
        else:
            k = heads(self.k_proj(x))
            v = k if self.v_proj is None else heads(self.v_proj(x))
            v = rms_normalized(v, self.eps).astype(v.dtype)
            q, k = self.rotate(q, self.k_norm(k), rotation)
        mixed = self.attend(q, k, v, segments)
        return self.o_proj(mixed.reshape(*x.shape[:2], -1)), (k, v)


class Gemma4Router(nnx.Module):
    """A router that normalises its input, and scales each expert's result."""

    def __init__(self, config: DecoderOptions, experts: Experts, make: ParameterMaker):
        """Makes the parameters."""
        self.eps, self.settings = config.norm_eps, experts
        self.proj = Linear(config.hidden_size, experts.num, make)
        self.scale = make.constant(1.0, config.hidden_size)
        self.per_expert_scale = make.constant(1.0, experts.num)

    def __call__(
        self, tokens: Float[Array, "tokens width"]
    ) -> tuple[Integer[Array, "tokens per_token"], Float[Array, "tokens per_token"]]:
        """Returns each token's experts, and their shares in fp32."""
        x = rms_normalized(tokens, self.eps).astype(tokens.dtype) * self.scale[...]
        x = x * tokens.shape[-1] ** -0.5
        chosen, shares, _ = route(self.proj(x), self.settings)
        return chosen, shares * self.per_expert_scale[...].astype(jnp.float32)[chosen]


class MemoryLayer(nnx.Module):
    """What both families' layers have: attention, an MLP, and embeddings of the layer's own."""

    def __init__(self, config: DecoderOptions, layer: int, make: ParameterMaker):
        """Makes the parameters of one layer."""

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config, make)

        options: Gemma4Options = config.options
        self.number, self.local = layer, config.window(layer) is not None
        self.lends, self.borrows = layer in options.lenders, _lender_of(config, layer)
        self.input_layernorm = norm()
        self.self_attn = Gemma4Attention(config, layer, make)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = self.make_mlp(config, layer, make)
        self.post_feedforward_layernorm = norm()
        self.has_inputs = options.inputs_dim > 0
        if self.has_inputs:
            self.activation = ACTIVATIONS[config.activation]
            self.per_layer_input_gate = Linear(config.hidden_size, options.inputs_dim, make)
            self.per_layer_projection = Linear(options.inputs_dim, config.hidden_size, make)
            self.post_per_layer_input_norm = norm()

    def make_mlp(self, config: DecoderOptions, layer: int, make: ParameterMaker) -> MLP:
        """Makes the MLP, which is wider in layers with another layer's keys and values."""
        inside = config.options.shared_intermediate_size
        return MLP(config, make, None if self.borrows is None else inside)

    def mix(
        self, x: HiddenStates, rotation: Rotation, segments: Segments, memory: Memory
    ) -> tuple[HiddenStates, Memory]:
        """Returns the result of attention, and the memory with keys and values that are lent."""
        kind = "local" if self.local else "full"
        y, kept = self.self_attn(x, rotation, segments, getattr(memory, kind))
        return y, memory._replace(**{kind: kept}) if self.lends else memory

    def of_inputs(self, x: HiddenStates, memory: Memory) -> HiddenStates:
        """Returns the term of the layer's own embeddings of the tokens."""
        y = self.activation(self.per_layer_input_gate(x)) * memory.inputs[self.number]
        return self.post_per_layer_input_norm(self.per_layer_projection(y))


class Gemma4Layer(MemoryLayer):
    """Attention, then an MLP and experts side by side, with norms around each."""

    def __init__(self, config: DecoderOptions, layer: int, make: ParameterMaker):
        """Makes the parameters of one layer."""
        super().__init__(config, layer, make)
        # Saved in files but not trained: no gradient and no optimizer state.
        self.layer_scalar = Buffer(jnp.ones(1))
        self.sparse = config.experts is not None
        if config.experts is not None:
            self.expert = gated(ACTIVATIONS[config.activation])
            self.router = Gemma4Router(config, config.experts, make)
            self.experts = ExpertMatrices(config.experts, config.hidden_size, make)
            self.post_feedforward_layernorm_1 = RMSNorm(config.hidden_size, config, make)
            self.pre_feedforward_layernorm_2 = RMSNorm(config.hidden_size, config, make)
            self.post_feedforward_layernorm_2 = RMSNorm(config.hidden_size, config, make)

    def __call__(
        self, x: HiddenStates, rotation: Rotation, segments: Segments, memory: Memory
    ) -> tuple[Any, ...]:
        """Returns the result, None for the tally (no loss balances experts), and the memory."""
        y, memory = self.mix(self.input_layernorm(x), rotation, segments, memory)
        x = x + self.post_attention_layernorm(y)
        y = self.mlp(self.pre_feedforward_layernorm(x))
        if self.sparse:
            # In parallel with the MLP: both read the result of attention.
            y = self.post_feedforward_layernorm_1(y) + self._mixture(x)
        x = x + self.post_feedforward_layernorm(y)
        if self.has_inputs:
            x = x + self.of_inputs(x, memory)
        return x * self.layer_scalar[...].astype(x.dtype), None, memory

    def _mixture(self, x: HiddenStates) -> HiddenStates:
        tokens, e = x.reshape(-1, x.shape[-1]), self.experts
        chosen, shares = self.router(tokens)
        weights = e.gate_proj(), e.up_proj(), e.down_proj()
        y = self.pre_feedforward_layernorm_2(tokens)
        y = mix(y, chosen, shares, weights, self.expert)
        return self.post_feedforward_layernorm_2(y).reshape(x.shape)


_ROPES: dict[str, dict[str, Any]] = {
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def _shared_layers(
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


def _unread_tensors(first: int, num_layers: int) -> tuple[str, ...]:
    """Returns prefixes of the tensors of keys and values that layers with shared ones don't read.

    Args:
        first: Number of the first such layer.
        num_layers: Number of layers.
    """
    names = ("k_proj", "v_proj", "k_norm", "v_norm")
    layers = range(first, num_layers)
    return tuple(f"layers.{i}.self_attn.{name}." for i in layers for name in names)


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
    full, local = (parameters[name] for name in _ROPES)
    options: dict[str, Any] = {"max_length": 131_072}
    options["kinds"] = KINDS | {"proportional": "proportional"}
    return {
        "rope": read_rope(fields, full, full_dim, **options),
        "local_rope": read_rope(fields, local, local_dim, **options),
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


def _gemma4(fields: Fields, local: dict[str, Any]) -> dict[str, Any]:
    num_layers = local["num_layers"]
    windows = hf_common.windows_by_step(fields, 6, hf_common.window(fields, 512))
    windows = (*windows[:-1], None)  # for any `layer_types`, as in Transformers
    first, lenders = _shared_layers(fields, windows, 0)
    wide = 2 if fields.flag("use_double_wide_mlp", False) else 1
    options = Gemma4Options(
        local_head_dim=local["head_dim"],
        local_kv_heads=local["num_kv_heads"],
        keys_are_values=fields.flag("attention_k_eq_v", False),
        first_shared=first,
        lenders=lenders,
        inputs_dim=fields.integer("hidden_size_per_layer_input", 256, least=0),
        inputs_vocab=fields.integer("vocab_size_per_layer_input", 262_144),
        shared_intermediate_size=wide * local["intermediate_size"],
    )
    full = _full_heads(fields, windows, local, shared=options.keys_are_values)
    return {
        **_ropes(fields, full["head_dim"], local["head_dim"]),
        **full,
        "windows": windows,
        "final_softcap": fields.number("final_logit_softcapping", None, above=0),
        "experts": _experts(fields, num_layers),
        "unread": _unread_tensors(first, num_layers),
        "options": options,
    }


_SIZES: dict[str, Any] = {
    "kv_heads": 4,
    "head_dim": 256,
    "tied": True,
    "hidden_act": "gelu_pytorch_tanh",
    "act_name": "hidden_activation",
}
_ALWAYS: dict[str, Any] = {"norm_in_fp32": True, "scale_embedding": True, "attention_scale": 1.0}
# Gemma 4: wider heads in layers without a window, and experts beside an MLP.
GEMMA4 = Family(
    model_type="gemma4_text",
    scorer=None,
    sizes=_SIZES,
    rope=None,
    always={**_ALWAYS, "layer": Gemma4Layer, "memory": MemoryMaker},
    more=_gemma4,
    renames={"memory": ""},
    joined_experts=True,
)
GEMMA4_MULTIMODAL = multimodal_family(
    GEMMA4,
    model_type="gemma4",
    kept=("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio."),
    beside="audio_config audio_token_id boa_token_id boi_token_id eoa_token_id eoa_token_index "
    "eoi_token_id image_token_id video_token_id vision_soft_tokens_per_image",
    tied=True,
    body="model.language_model",
    head="lm_head",
    vision=read_gemma4_vision,
)

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

    def __init__(self, config: DecoderOptions, make: ParameterMaker):
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

    def __init__(self, config: DecoderOptions, make: ParameterMaker):
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

    def __init__(self, config: DecoderOptions, make: ParameterMaker):
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

    def __init__(self, config: DecoderOptions, layer: int, make: ParameterMaker):
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


class Gemma3nLayer(MemoryLayer):
    """Attention beside low-rank products, then an MLP, on one of several streams."""

    def __init__(self, config: DecoderOptions, layer: int, make: ParameterMaker):
        """Makes the parameters of one layer."""
        self.altup, self.laurel = AltUp(config, make), Laurel(config, make)
        self.scaled = config.options.scaled
        super().__init__(config, layer, make)

    def make_mlp(self, config: DecoderOptions, layer: int, make: ParameterMaker) -> MLP:
        """Makes the MLP, with a width of its own."""
        return SparseMLP(config, layer, make)

    def __call__(
        self, x: HiddenStates, rotation: Rotation, segments: Segments, memory: Memory
    ) -> tuple[Any, ...]:
        """Returns the first stream, None for the tally (there are no experts), and the memory."""
        assert memory.streams is not None
        predicted = self.altup.predict(jnp.concatenate([x[None], memory.streams]))
        y = self.input_layernorm(predicted[0])
        attended, memory = self.mix(y, rotation, segments, memory)
        attended = predicted[0] + self.post_attention_layernorm(attended)
        x = (attended + self.laurel(y)) / math.sqrt(2)
        y = self.mlp(self.pre_feedforward_layernorm(x))
        corrected = self.altup.correct(predicted, x + self.post_feedforward_layernorm(y))
        first = corrected[0]
        y = first * self.altup.correct_output_scale[...] if self.scaled else first
        y = self.of_inputs(y, memory)
        return first, None, memory._replace(streams=corrected[1:] + y)


def _numbers(fields: Fields, name: str, given: Any, what: str) -> list[Any]:
    """Returns a number for each layer, from a list or one number for all."""
    num = fields.integer("num_hidden_layers")
    given = list(given) if isinstance(given, list | tuple) else [given] * num
    if len(given) != num:
        raise ValueError(checks.refused(name, f"{num} {what}", given))
    return given


def _inside(fields: Fields) -> tuple[int, ...]:
    """Returns the width inside each layer's MLP."""
    name = "intermediate_size"
    given = _numbers(fields, name, fields.take(name, 16_384), "integers")
    return tuple(checks.integer(name, size, most=2**22) for size in given)


def _sparsity(fields: Fields, num: int) -> tuple[float, ...]:
    name = "activation_sparsity_pattern"
    given = fields.take(name, None)
    if given is None:
        sparse = 10 if num > 10 else 0
        given = [0.95] * sparse + [0.0] * (num - sparse)
    given = _numbers(fields, name, given, "numbers")
    return tuple(checks.number(name, x, least=0, below=1) for x in given)


def _gemma3n(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    fields.integer("altup_active_idx", 0, least=0)
    fields.neutral(altup_active_idx=0)
    # In training, Transformers bounds the coefficients; checkpoints have far smaller ones.
    fields.number("altup_coef_clip", 120.0, above=0, null=True)
    num = sizes["num_layers"]
    windows = hf_common.windows_by_step(fields, 5, fields.integer("sliding_window", 512))
    first, lenders = _shared_layers(fields, windows, 15)
    options = Gemma3nOptions(
        local_head_dim=sizes["head_dim"],
        local_kv_heads=sizes["num_kv_heads"],
        keys_are_values=False,
        first_shared=first,
        lenders=lenders,
        inputs_dim=fields.integer("hidden_size_per_layer_input", 256),
        inputs_vocab=fields.integer("vocab_size_per_layer_input", 262_144),
        shared_intermediate_size=sizes["intermediate_size"],
        streams=fields.integer("altup_num_inputs", 4, least=2),
        rank=fields.integer("laurel_rank", 64),
        scaled=fields.flag("altup_correct_scale", True),
        sizes=_inside(fields),
        sparsity=_sparsity(fields, num),
    )
    full = {"rope_theta": fields.take("rope_theta", 1e6)}
    local = {"rope_theta": fields.take("rope_local_base_freq", 1e4)}
    return {
        **hf_common.two_ropes(fields, sizes["head_dim"], full, local, max_length=32_768),
        "windows": windows,
        "final_softcap": fields.number("final_logit_softcapping", 30.0, above=0),
        "unread": _unread_tensors(first, num),
        "options": options,
    }


# Gemma 3n: several streams of hidden states. Transformers doesn't read the unread fields.
GEMMA3N = Family(
    model_type="gemma3n_text",
    scorer=None,
    unread="query_pre_attn_scalar altup_lr_multiplier",
    sizes=lambda fields: {**_SIZES, "kv_heads": 2, "inside": max(_inside(fields))},
    rope=None,
    always={**_ALWAYS, "layer": Gemma3nLayer, "memory": StreamsMaker},
    more=_gemma3n,
    renames={"memory": ""},
)
GEMMA3N_MULTIMODAL = multimodal_family(
    GEMMA3N,
    model_type="gemma3n",
    kept=GEMMA4_MULTIMODAL.kept,
    beside="audio_config audio_soft_tokens_per_image audio_token_id boa_token_id boi_token_id "
    "eoa_token_id eoi_token_id image_token_id vision_soft_tokens_per_image",
    tied=True,
    body="model.language_model",
    head="lm_head",
)
