"""Images in a decoder's rows: the vision part of a checkpoint, and the places of its results.

A row's images become vectors as wide as the decoder's hidden states, and replace the embeddings of
its placeholder tokens, in order.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Integer

from megatrain_jax._src.lm.models.arrays import check_array
from megatrain_jax._src.lm.models.parameter_maker import ParameterMaker

if TYPE_CHECKING:  # avoids a cycle: configurations contain vision parts
    from megatrain_jax._src.lm.models.config import DecoderConfig

PIXELS = "(rows, images, channels, height, width)"
Pixels = Float[Array | np.ndarray, "rows images channels height width"]


@dataclass(frozen=True, kw_only=True)
class VisionConfig(ABC):
    """The vision part of a checkpoint; each family that trains with images derives a class.

    Attributes:
        token: The placeholder of an image in `tokens`: one for each of its vectors.
        tokens_per_image: Vectors of an image.
        pixels: Channels, height and width of an image.
        mutual: Whether the vectors of an image attend to each other in both directions.
    """

    token: int
    tokens_per_image: int
    pixels: tuple[int, int, int]
    mutual: bool

    @abstractmethod
    def make(self, decoder: "DecoderConfig", make: ParameterMaker) -> nnx.Module:
        """Makes a module from pixels to vectors.

        Args:
            decoder: Sizes and options of the decoder.
            make: Makes the parameters.

        Returns:
            A module that maps pixels (images, channels, height, width) to vectors (images,
            tokens_per_image, hidden_size).
        """

    @abstractmethod
    def tensor_name(self, path: tuple[str, ...]) -> str:
        """Returns the name in a checkpoint of a parameter, from its path within the module."""

    def as_in(self, names: frozenset[str]) -> "VisionConfig":
        """Returns the configuration for a checkpoint with tensors of these names."""
        return self

    def check_batch(self, batch: Any) -> None:
        """Checks that the rows of a batch have as many images as placeholders.

        Args:
            batch: If a mapping has `tokens` and `pixel_values` as NumPy arrays, they are checked.

        Raises:
            ValueError: If a row has placeholders for more images than there are, or for a part of
                one; or the images have another size.
        """
        if not isinstance(batch, Mapping):
            return
        tokens, pixels = batch.get("tokens"), batch.get("pixel_values")
        if not isinstance(tokens, np.ndarray):
            return
        counts = (tokens == self.token).sum(axis=-1)
        images = pixels.shape[1] if isinstance(pixels, np.ndarray) and pixels.ndim == 5 else 0
        if isinstance(pixels, np.ndarray) and pixels.shape[2:] != self.pixels:
            raise ValueError(
                f"batch['pixel_values'] must have the shape {PIXELS} with images of {self.pixels}, "
                f"but has {pixels.shape}"
            )
        for row, count in enumerate(counts.reshape(-1).tolist()):
            if count % self.tokens_per_image or count > images * self.tokens_per_image:
                raise ValueError(
                    f"row {row} of batch['tokens'] has {count:,} placeholders of images (token "
                    f"{self.token}), but an image takes {self.tokens_per_image:,}, and "
                    f"batch['pixel_values'] has {images:,} images for each row"
                )


def check_pixels(pixels: Any, tokens: Any, vision: VisionConfig) -> None:
    """Checks the shape of a batch's images.

    Raises:
        TypeError: If `pixels` is not an array.
        ValueError: If its shape is not that of the rows' images.
    """
    check_array("pixel_values", pixels, PIXELS, num_axes=5)
    if pixels.shape[0] != tokens.shape[0] or pixels.shape[2:] != vision.pixels:
        raise ValueError(
            f"`pixel_values` must have the shape {PIXELS} with {tokens.shape[0]} rows and images "
            f"of {vision.pixels}, but has {pixels.shape}"
        )


def image_numbers(
    tokens: Integer[Array | np.ndarray, "rows length"], token: int
) -> Integer[Array, "rows length"]:
    """Returns the image of each token, counted from 1 in each row; 0 for text.

    Neighbouring placeholders belong to the same image, as in Transformers.

    For example, with the placeholder 9, tokens [9, 9, 5, 9, 6] give [1, 1, 0, 2, 0].
    """
    inside = jnp.asarray(tokens) == token
    starts = inside & ~jnp.pad(inside[:, :-1], ((0, 0), (1, 0)))
    return jnp.where(inside, jnp.cumsum(starts, axis=1, dtype=jnp.int32), 0)


def with_images(
    x: Float[Array, "rows length width"],
    tokens: Integer[Array | np.ndarray, "rows length"],
    vectors: Float[Array, "rows images vectors width"],
    token: int,
) -> Float[Array, "rows length width"]:
    """Returns embeddings with the images' vectors in place of the placeholders'.

    Args:
        x: The tokens' embeddings.
        tokens: The tokens.
        vectors: The vectors of each row's images, in order. Vectors without a placeholder are not
            used; a placeholder without a vector becomes NaN.
        token: The placeholder.
    """
    inside = (jnp.asarray(tokens) == token)[..., None]
    places = jnp.cumsum(inside, axis=1, dtype=jnp.int32) - 1
    flat = vectors.reshape(x.shape[0], -1, x.shape[-1]).astype(x.dtype)
    taken = jnp.take_along_axis(flat, jnp.maximum(places, 0), axis=1, mode="fill")
    return jnp.where(inside, taken, x)
