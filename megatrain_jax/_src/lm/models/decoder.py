"""The decoder shared by all families of open-weights language models, and additions to one.

Parameters have the names and layout of Hugging Face checkpoints, so reading and writing one only
moves bytes: `layers/0/self_attn/q_proj/weight` is a matrix (out, in). A row's images become vectors
as wide as the hidden states, and replace the embeddings of its placeholder tokens, in order.

For training, NEFTune adds noise to embeddings (https://arxiv.org/abs/2310.05914), and a frozen copy
is the reference of reinforcement learning.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Integer

from megatrain_jax import losses
from megatrain_jax._src.common import checks
from megatrain_jax._src.common.trees import finds
from megatrain_jax._src.lm.models.arrays import check_array, check_counts, check_floating, check_ids
from megatrain_jax._src.lm.models.config import DecoderConfig
from megatrain_jax._src.lm.models.decoder_options import ParameterMaker, Placed
from megatrain_jax._src.lm.models.layers import Embedding, HiddenStates, Layer, Linear, make_norm
from megatrain_jax._src.lm.models.moe import balancing_loss
from megatrain_jax._src.lm.models.rotary import Integers, positions_in, rotation

IMAGE_ARRAYS = ("pixel_values", "image_grid_thw", "image_position_ids", "second_per_grid_ts")
"""The arrays of a batch that hold images."""


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
        checks.instance("config", config, DecoderConfig, "a models.DecoderConfig")
        checks.instance("rngs", rngs, nnx.Rngs, "flax.nnx.Rngs")
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
            self.score = Linear(config.hidden_size, config.scores, make, bias=config.head_bias)
        elif not config.tie_embeddings:
            bias = config.head_bias
            self.lm_head = Linear(config.hidden_size, config.vocab_size, make, bias=bias)

    def __call__(
        self, tokens: Integers, positions: Integers | None = None, segments: Integers | None = None
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
        pixel_values: Float[Array | np.ndarray, "rows ..."] | None = None,
        image_grid_thw: Integer[Array | np.ndarray, "rows images 3"] | None = None,
        image_position_ids: Integer[Array | np.ndarray, "rows images patches 2"] | None = None,
        second_per_grid_ts: Float[Array | np.ndarray, "rows images"] | None = None,
    ) -> tuple[HiddenStates, Float[Array, ""]]:
        """Returns the hidden states that the head reads, and the experts' load-balancing loss.

        Args:
            tokens: See `__call__`.
            positions: See `__call__`.
            segments: See `__call__`.
            pixel_values: The images and videos of each row, in the order of their placeholders in
                `tokens`; None if there are none. As the checkpoint's processor makes them, (rows,
                images, channels, height, width), or, if sizes vary, the patches of all images of a
                row after each other, (rows, patches, numbers), or those of each image, (rows,
                images, patches, numbers). Unused places may have anything.
            image_grid_thw: For patches after each other, the patches of each image along time,
                height and width, (rows, images, 3); zeros for unused places.
            image_position_ids: For the patches of each image, their columns and rows in it, (rows,
                images, patches, 2); -1 for unused places.
            second_per_grid_ts: For Qwen2.5-VL, seconds from one patch of a video along time to the
                next, (rows, images); None for 1 second.

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
        rows = Placed(x, numbers, positions)
        if pixel_values is not None:
            if (vision := self.config.vision) is None:
                raise ValueError(
                    "`pixel_values` are given, but the decoder has no vision part: read the "
                    "checkpoint with load_pretrained(folder, images=True)"
                )
            images = (pixel_values, image_grid_thw, image_position_ids, second_per_grid_ts)
            named = zip(IMAGE_ARRAYS, images, strict=True)
            given = {name: array for name, array in named if array is not None}
            rows = vision.place(self, tokens, rows, given)
        x, numbers, places, added = rows
        ropes = [self.config.rope_of(i) for i in range(len(self.layers))]
        # Once for each rotary embedding, not for each layer: it depends only on positions.
        rotations = {rope: rope and rotation(rope, places) for rope in dict.fromkeys(ropes)}
        tallies = []
        # Values of a family's layers beside the hidden states: each layer returns them for the
        # next.
        handed = [] if self.config.memory is None else [self.memory(tokens, x)]
        for number, (layer, rope) in enumerate(zip(self.layers, ropes, strict=True)):
            x, tally, *handed = layer(x, rotations[rope], numbers, *handed)
            x = x + added[number] if number < len(added) else x
            tallies += [] if tally is None else [tally]
        x = self.finish(x, *handed)
        # Computed once after the norm, so that all layers stay alike.
        balance = balancing_loss(jnp.stack(tallies).sum(0)) if tallies else jnp.float32(0)
        return x, balance

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
        if self.config.vision is not None and isinstance(batch, Mapping):
            self.config.vision.check_batch(batch)
        check_counts(batch)

    def head_weight(self) -> Float[Array, "vocab_size width"]:
        """Returns the head's matrix; if the embeddings are tied, it is the embedding's.

        With scores it has a row for each. It is as wide as `hidden`: if the head has a bias, that
        is the last column.
        """
        if self.config.tie_embeddings and not self.config.scores:
            return self.embed_tokens.weight[...]
        head = self.score if self.config.scores else self.lm_head
        weight, bias = head.weight[...], head.bias
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


class EmbeddingNoise(nnx.Module):
    """Uniform noise within alpha / sqrt(length * width); `.eval()` turns it off.

    Attributes:
        alpha: Bound of the noise before the division by sqrt(length * width).
        deterministic: Whether the noise is off.
    """

    def __init__(self, alpha: float, rngs: nnx.Rngs):
        """Keeps the options."""
        self.alpha, self.rngs = alpha, rngs
        self.deterministic = False

    def __call__(self, x: Float[Array, "rows length width"]) -> Float[Array, "rows length width"]:
        """Adds fresh noise, drawn in fp32, in the dtype of the embeddings."""
        if self.deterministic:
            return x
        most = self.alpha / (x.shape[1] * x.shape[2]) ** 0.5
        noise = jax.random.uniform(self.rngs.noise(), x.shape, jnp.float32, -most, most)
        return x + noise.astype(x.dtype)


@overload
def neftune(model: Decoder, *, alpha: float = ..., seed: int = ...) -> Decoder: ...


@overload
def neftune(
    model: Callable[[], nnx.Module], *, alpha: float = ..., seed: int = ...
) -> Callable[[], Decoder]: ...


def neftune(model: Any, *, alpha: float = 5.0, seed: int = 0) -> Any:
    """Adds noise to a decoder's embeddings in training (NEFTune), as Transformers does.

    In each step, each number of the embeddings gets noise that is uniform within
    `alpha / sqrt(length * hidden_size)`, where `length` is the length of the batch's rows with
    padding, also if documents are packed. Each microbatch draws its own noise. There is none in
    evaluations, in generation, and in a model after `.eval()`.

    Args:
        model: A `Decoder`, also one with adapters; it is not modified. Or a function that builds
            one.
        alpha: Size of the noise, such as 5, 10 or 15.
        seed: Seed of the noise. Checkpoints save its place, so a resumed run draws the same.

    Returns:
        The decoder, or a function that builds it. Its parameters keep their paths.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If a number is out of range, or the model has noise already.
    """
    alpha = checks.number("alpha", alpha, above=0)
    seed = checks.integer("seed", seed, least=0)

    def noisy(made: Any) -> Decoder:
        checks.instance("model", made, Decoder, "a models.Decoder")
        if made.noise is not None:
            raise ValueError("`model` has noise on its embeddings already")
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(b"neftune"))
        made.noise = EmbeddingNoise(alpha, nnx.Rngs(noise=key))
        return made

    if isinstance(model, nnx.Module):
        return noisy(nnx.merge(*nnx.split(model), copy=True))
    if not callable(model) or isinstance(model, type):
        allowed = "a models.Decoder or a function that builds one"
        raise TypeError(checks.refused("model", allowed, model))
    return lambda: noisy(model())


_POLICY, _REFERENCE = "policy", "reference"


class WithReference(nnx.Module):
    """Two decoders of one run: the policy is trained, and the reference stays as it is.

    Attributes:
        policy: The decoder that is trained, and that generates completions.
        reference: The decoder as it was before training.
    """

    def __init__(self, policy: Decoder, reference: Decoder):
        """Holds both decoders, which share nothing."""
        self.policy = policy
        self.reference = reference


def with_reference(
    model: Decoder | Callable[[], Decoder], params: Any, trainable: Any
) -> tuple[Callable[[], WithReference], Any, Callable[[str], bool]]:
    """A decoder with a frozen copy of itself, as arguments of a run.

    Args:
        model: The decoder, or a function that builds one; each call has to build the same.
        params: Its parameters; None for the ones that it is built with.
        trainable: Paths of its trained parameters, as `fit` takes them.

    Returns:
        A function that builds both; their parameters, the same arrays for each; and a predicate of
        the paths of trained parameters.
    """

    def built() -> WithReference:
        if isinstance(model, Decoder):
            return WithReference(nnx.clone(model), nnx.clone(model))
        return WithReference(model(), model())

    def is_trained(path: str) -> bool:
        whose, _, rest = path.partition("/")
        if whose != _POLICY or trainable is None:
            return whose == _POLICY
        if callable(trainable):
            return bool(trainable(rest))
        patterns: Sequence[str] = [trainable] if isinstance(trainable, str) else trainable
        return any(finds(pattern, rest) for pattern in patterns)

    both = (
        None
        if params is None
        else {_POLICY: params, _REFERENCE: jax.tree.map(lambda leaf: leaf, params)}
    )
    return built, both, is_trained


def policy_of(model: Any) -> Any:
    """The decoder that is trained."""
    return model.policy if isinstance(model, WithReference) else model


def next_token_loss(
    model: Decoder, batch: Mapping[str, Any], *, z_loss: float = 0.0, chunk: int = 4096
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Mean cross-entropy of the next tokens, plus the experts' balancing loss if it has a weight.

    A `loss_fn` for `megatrain_jax.fit`; set options with `functools.partial`.

    Args:
        model: The decoder.
        batch: `tokens` and `labels`, integers (rows, length); optionally `mask`, `positions` and
            `segments` of the same shape and `learned_per_row` (rows,), as made by
            `megatrain_jax.data`. The last has the same number in all rows: the batch's counted
            labels divided by its number of rows. With it, microbatches are weighted by their
            counted labels; without it, each microbatch's loss is the mean over its own labels.
            `pixel_values`, `image_grid_thw`, `image_position_ids` and `second_per_grid_ts`: the
            images and videos of each row; see `Decoder.hidden`.
        z_loss: See `losses.next_token`.
        chunk: See `losses.next_token`.

    Returns:
        The loss in fp32, and the metric `weight`: the number of labels in its mean. An evaluation
            weighs batches by it, so its loss is the mean over all labels.

    Raises:
        TypeError: If `model` is not a decoder, `batch` not a mapping or an option not a number.
        ValueError: If `batch` lacks `tokens` or `labels`, shapes don't match, or the model has a
            score head.
    """
    check_arguments(model, batch, ("tokens", "labels"))
    checks.number("z_loss", z_loss, least=0)
    checks.integer("chunk", chunk)
    images = {name: batch[name] for name in IMAGE_ARRAYS if name in batch}
    hidden, balance = model.hidden(
        batch["tokens"], batch.get("positions"), batch.get("segments"), **images
    )
    labels, mask, per_row = batch["labels"], batch.get("mask"), batch.get("learned_per_row")
    # Summed over a microbatch's rows, `learned_per_row` is that part's fraction of the whole
    # batch's labels, so parts with few labels don't count for more.
    count = losses.num_labels(labels, mask) if per_row is None else per_row.sum()
    loss = losses.next_token(
        hidden,
        model.head_weight(),
        labels,
        mask=mask,
        count=count,
        z_loss=z_loss,
        softcap=model.config.final_softcap,
        chunk=chunk,
    )
    experts = model.config.experts
    loss = loss if experts is None else loss + experts.balance_weight * balance
    return loss, {"weight": count}


def token_log_probs(
    model: Decoder, batch: Mapping[str, Any], temperature: float = 1.0
) -> Float[Array, "rows length"]:
    """The log-probability of each position's label, at a temperature."""
    hidden, _ = model.hidden(batch["tokens"], batch["positions"], batch["segments"])
    cap, head = model.config.final_softcap, model.head_weight()
    return losses.log_probabilities(
        hidden, head, batch["labels"], softcap=cap, temperature=temperature
    )


def check_arguments(
    model: Decoder, batch: Mapping[str, Any], names: tuple[str, ...], *, scores: bool = False
) -> None:
    """Checks the arguments of a loss: a decoder, and a batch that has the columns `names`.

    Raises:
        TypeError: If `model` is not a decoder, or `batch` not a mapping.
        ValueError: If `batch` lacks one of them, or the model has a score head, unless `scores`.
    """
    if not (hasattr(model, "hidden") and hasattr(model, "head_weight")):
        raise TypeError(checks.refused("model", "a models.Decoder", model))
    if not scores and getattr(getattr(model, "config", None), "scores", False):
        raise ValueError("`model` has a score head, without logits of next tokens")
    checks.instance("batch", batch, Mapping, "a mapping of names to arrays")
    missing = [name for name in names if name not in batch]
    if missing:
        raise ValueError(f"`batch` has no {' and no '.join(map(repr, missing))}, but {list(batch)}")
