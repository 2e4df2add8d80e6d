"""The decoder shared by all families of open-weights language models.

Parameters have the names and layout of Hugging Face checkpoints, so reading and writing one only
moves bytes: `layers/0/self_attn/q_proj/weight` is a matrix (out, in).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Integer

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models.arrays import check_array, check_floating
from megatrain_jax._src.lm.models.config import DecoderConfig
from megatrain_jax._src.lm.models.ids import check_counts, check_ids
from megatrain_jax._src.lm.models.image_attention import ImageRows
from megatrain_jax._src.lm.models.layers import Embedding, HiddenStates, Layer, Linear, make_norm
from megatrain_jax._src.lm.models.moe import balancing_loss
from megatrain_jax._src.lm.models.parameter_maker import ParameterMaker
from megatrain_jax._src.lm.models.rotary import positions_in, rotation
from megatrain_jax._src.lm.models.vision import (
    Pixels,
    check_pixels,
    image_numbers,
    with_images,
)

Integers = Integer[Array | np.ndarray, "rows length"]


class Decoder(nnx.Module):
    """A causal language model with the sizes and options of a `DecoderConfig`.

    Everything is computed in the parameters' dtype, except norms, rotary embeddings, softmax and
    routing, which use fp32. Attributes are named as in Hugging Face checkpoints.

    Attributes:
        noise: Function that adds noise to embeddings in training, or None; see `neftune`.
    """

    noise: Callable[[Array], Array] | None = None

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
    ):
        """Makes fresh parameters.

        Args:
            config: The decoder's sizes and options.
            rngs: Provides the key "params".
            param_dtype: The dtype of all parameters.

        Raises:
            TypeError: If an argument has a wrong type.
        """
        if not isinstance(config, DecoderConfig):
            raise TypeError(checks.refused("config", "a models.DecoderConfig", config))
        if not isinstance(rngs, nnx.Rngs):
            raise TypeError(checks.refused("rngs", "flax.nnx.Rngs", rngs))
        check_floating("param_dtype", param_dtype)
        make = ParameterMaker(rngs, param_dtype, config.init_std)
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, make)
        if config.vision is not None:
            self.vision = config.vision.make(config, make)
        if config.memory is not None:
            self.memory = config.memory(config, make)
        layer = config.layer or Layer
        self.layers = nnx.List([layer(config, i, make) for i in range(config.num_layers)])
        self.norm = make_norm(config.hidden_size, config, make)
        if config.scores:
            self.score = Linear(config.hidden_size, 1, make)
        elif not config.tie_embeddings:
            bias = config.head_bias
            self.lm_head = Linear(config.hidden_size, config.vocab_size, make, bias=bias)

    def __call__(
        self,
        tokens: Integers,
        positions: Integers | None = None,
        segments: Integers | None = None,
    ) -> Float[Array, "rows length vocab_size"]:
        """Returns logits in the parameters' dtype.

        A loss can use `hidden` with `head_weight` instead, to avoid this largest of all arrays.

        Args:
            tokens: The tokens' ids.
            positions: The position of each token in its document; one row serves all. None to count
                from 0 in every row and every document.
            segments: The document of each token, 0 for padding; documents follow each other. None
                if each row is one document.
        """
        hidden, _ = self.hidden(tokens, positions, segments)
        return self.logits_of(hidden)

    def logits_at(
        self, tokens: Integers, places: Integer[Array | np.ndarray, " rows"]
    ) -> Float[Array, "rows vocab_size"]:
        """Returns the logits at one place of each row, without computing the rest.

        Args:
            tokens: The tokens' ids; each row is one document.
            places: The place in each row, from 0.

        Raises:
            TypeError: If an argument is not an array of integers.
            ValueError: If shapes don't match.
        """
        check_array("places", places, "(rows,)", num_axes=1, of_integers=True)
        if places.shape != tokens.shape[:1]:
            raise ValueError(f"`places` has shape {places.shape}, not {tokens.shape[:1]} of rows")
        hidden, _ = self.hidden(tokens)
        at = jnp.asarray(places)[:, None, None]
        return self.logits_of(jnp.take_along_axis(hidden, at, axis=1))[:, 0]

    def logits_of(self, hidden: HiddenStates) -> Float[Array, "rows length vocab_size"]:
        """Returns the logits for hidden states from `hidden`."""
        logits = jnp.einsum("rld,vd->rlv", hidden, self.head_weight())
        softcap = self.config.final_softcap
        return logits if softcap is None else softcap * jnp.tanh(logits / softcap)

    def hidden(
        self,
        tokens: Integers,
        positions: Integers | None = None,
        segments: Integers | None = None,
        *,
        pixel_values: Pixels | None = None,
    ) -> tuple[HiddenStates, Float[Array, ""]]:
        """Returns the hidden states that the head reads, and the experts' load-balancing loss.

        Args:
            tokens: See `__call__`.
            positions: See `__call__`.
            segments: See `__call__`.
            pixel_values: The images of each row, (rows, images, channels, height, width), in the
                order of their placeholders in `tokens`. Rows with fewer images have anything in
                their last places. None if there are no images.

        Returns:
            The last layer's normalised result, `hidden_size` wide, plus a column of ones if the
            head has a bias; and the load-balancing loss in fp32, to be multiplied by
            `config.experts.balance_weight` and added to a loss. It is 0 without experts.

        Raises:
            TypeError: If an argument is not an array of integers.
            ValueError: If shapes don't match.
        """
        _check_rows(tokens, positions, segments)
        numbers: Any = None if segments is None else jnp.asarray(segments)
        if positions is None:
            positions = positions_in(tokens.shape[1], numbers)
        x = self.embed(tokens)
        if pixel_values is not None:
            x, numbers = self._with_images(x, tokens, numbers, pixel_values)
        ropes = [self.config.rope_of(i) for i in range(len(self.layers))]
        # Once for each rotary embedding, not for each layer: it depends only on positions.
        rotations = {rope: rope and rotation(rope, positions) for rope in dict.fromkeys(ropes)}
        tallies = []
        # Values of a family's layers beside the hidden states: each layer returns them for the
        # next.
        handed = [] if self.config.memory is None else [self.memory(tokens, x)]
        for layer, rope in zip(self.layers, ropes, strict=True):
            x, tally, *handed = layer(x, rotations[rope], numbers, *handed)
            tallies += [] if tally is None else [tally]
        x = self.finish(x, *handed)
        # Computed once after the norm, so that all layers stay alike.
        balance = balancing_loss(jnp.stack(tallies).sum(0)) if tallies else jnp.float32(0)
        return x, balance

    def _with_images(
        self, x: HiddenStates, tokens: Integers, segments: Any, pixels: Pixels
    ) -> tuple[HiddenStates, Any]:
        """Returns embeddings with the images' vectors, and the argument `segments` of layers."""
        vision = self.config.vision
        if vision is None:
            raise ValueError(
                "`pixel_values` are given, but the decoder has no vision part: read the checkpoint "
                "with load_pretrained(folder, images=True)"
            )
        check_pixels(pixels, tokens, vision)
        vectors = self.vision(jnp.asarray(pixels).reshape(-1, *vision.pixels))
        vectors = vectors.reshape(*pixels.shape[:2], *vectors.shape[1:])
        x = with_images(x, tokens, vectors, vision.token)
        if vision.mutual:
            numbers = image_numbers(tokens, vision.token)
            segments = ImageRows(segments, numbers, vision.tokens_per_image)
        return x, segments

    def embed(self, tokens: Integers) -> HiddenStates:
        """Returns the hidden states that the first layer reads."""
        x = self.embed_tokens(tokens)
        scale = self.config.scale_embedding
        if scale is True:  # in Transformers, a part of the embedding, to which noise is added
            x = x * jnp.asarray(self.config.hidden_size**0.5, x.dtype)
        if self.noise is not None:
            x = self.noise(x)
        if scale and scale is not True:
            x = x * jnp.asarray(scale, x.dtype)
        return x

    def finish(self, x: HiddenStates, *handed: Any) -> HiddenStates:
        """Returns the hidden states that the head reads; see `hidden`.

        Args:
            x: The last layer's hidden states.
            *handed: The further values that it returned, in families with such values.
        """
        if self.config.memory is not None:
            x = self.memory.finish(x, *handed)
        x = self.norm(x)
        if self.config.logit_scale != 1.0:
            x = (x.astype(jnp.float32) * self.config.logit_scale).astype(x.dtype)
        if self.config.head_bias:
            x = jnp.concatenate([x, jnp.ones_like(x[..., :1])], axis=-1)
        return x

    def check_batch(self, batch: Any) -> None:
        """Checks token ids before a batch is sent to the device; needs no parameters.

        Args:
            batch: A batch of `next_token_loss`; unknown names are ignored.

        Raises:
            ValueError: If NumPy arrays contain ids outside the vocabulary.
        """
        check_ids(batch, self.config.vocab_size)
        if self.config.vision is not None:
            self.config.vision.check_batch(batch)
        check_counts(batch)

    def head_weight(self) -> Float[Array, "vocab_size width"]:
        """Returns the head's matrix; if the embeddings are tied, it is the embedding's.

        With scores it has one row. It is as wide as `hidden`: if the head has a bias, that is the
        last column.
        """
        if self.config.scores:
            return self.score.weight[...]
        if self.config.tie_embeddings:
            return self.embed_tokens.weight[...]
        weight, bias = self.lm_head.weight[...], self.lm_head.bias
        return weight if bias is None else jnp.concatenate([weight, bias[...][:, None]], axis=1)


def _check_rows(tokens: Integers, positions: Integers | None, segments: Integers | None) -> None:
    check_array("tokens", tokens, "(rows, length)", num_axes=2, of_integers=True)
    rows, length = tokens.shape
    for name, array, allowed in (
        ("positions", positions, ((rows, length), (1, length))),
        ("segments", segments, ((rows, length),)),
    ):
        if array is None:
            continue
        check_array(name, array, "(rows, length)", num_axes=2, of_integers=True)
        if array.shape not in allowed:
            raise ValueError(
                f"`{name}` must have the shape of `tokens`, {tokens.shape}, but has {array.shape}"
            )
