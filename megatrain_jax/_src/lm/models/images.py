"""Images in a decoder's rows: their vectors in place of placeholders, and images of one size."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer

from megatrain_jax._src.lm.models.arrays import check_array
from megatrain_jax._src.lm.models.causal_attention import ImageRows
from megatrain_jax._src.lm.models.decoder_options import Placed, VisionConfig
from megatrain_jax._src.lm.models.families.patch_tower import TowerConfig
from megatrain_jax._src.lm.models.rotary import Integers

PIXELS = "(rows, images, channels, height, width)"


@dataclass(frozen=True, kw_only=True)
class FixedImages(VisionConfig):
    """A vision part for images of one size. Its module maps pixels to vectors.

    Attributes:
        tower: The sizes of its tower.
        tokens_per_image: Vectors of an image.
        pixels: Channels, height and width of an image.
        mutual: Whether the vectors of an image attend to each other in both directions.
    """

    tower: TowerConfig
    tokens_per_image: int
    pixels: tuple[int, int, int]
    mutual: bool

    @property
    def tower_widths(self) -> tuple[int, int]:
        """See `VisionConfig`."""
        return self.tower.hidden_size, self.tower.intermediate_size

    def num_patches(self, shape: tuple[int, ...]) -> int:
        """See `VisionConfig`."""
        return shape[0] * self.tower.patches_per_side**2

    def place(
        self, decoder: Any, tokens: Integers, rows: Placed, images: Mapping[str, Any]
    ) -> Placed:
        """Puts the vectors of images in their places; see `VisionConfig`."""
        pixels = images["pixel_values"]
        check_array("pixel_values", pixels, PIXELS, num_axes=5)
        if pixels.shape[0] != tokens.shape[0] or pixels.shape[2:] != self.pixels:
            raise ValueError(
                f"`pixel_values` must have the shape {PIXELS} with {tokens.shape[0]} rows and "
                f"images of {self.pixels}, but has {pixels.shape}"
            )
        vectors = decoder.vision(jnp.asarray(pixels).reshape(-1, *self.pixels))
        vectors = vectors.reshape(*pixels.shape[:2], *vectors.shape[1:])
        inside = self.is_placeholder(jnp.asarray(tokens))
        rows = rows._replace(x=with_images(rows.x, inside, vectors))
        if not self.mutual:
            return rows
        own = image_numbers(inside)
        return rows._replace(segments=ImageRows(rows.segments, own, self.tokens_per_image))

    def batch_shapes(self, rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the arrays of a batch whose rows are full of images, for plans."""
        images = max(1, length // (self.tokens_per_image + 4))
        return {"pixel_values": jax.ShapeDtypeStruct((rows, images, *self.pixels), jnp.float32)}

    def check_batch(self, batch: Mapping[str, Any]) -> None:
        """Checks that the rows of a batch have as many images as placeholders."""
        tokens, pixels = batch.get("tokens"), batch.get("pixel_values")
        if not isinstance(tokens, np.ndarray):
            return
        counts = self.is_placeholder(tokens).sum(axis=-1)
        images = pixels.shape[1] if isinstance(pixels, np.ndarray) and pixels.ndim == 5 else 0
        if isinstance(pixels, np.ndarray) and pixels.shape[2:] != self.pixels:
            raise ValueError(
                f"batch['pixel_values'] must have the shape {PIXELS} with images of {self.pixels}, "
                f"but has {pixels.shape}"
            )
        for row, count in enumerate(counts.reshape(-1).tolist()):
            if count % self.tokens_per_image or count > images * self.tokens_per_image:
                raise ValueError(
                    f"{self.placeholders(row, count)}, but an image takes "
                    f"{self.tokens_per_image:,}, and batch['pixel_values'] has {images:,} images "
                    "for each row"
                )


def image_numbers(inside: Bool[Array, "rows length"]) -> Integer[Array, "rows length"]:
    """Returns the image of each token, counted from 1 in each row; 0 for text.

    Neighbouring placeholders belong to the same image, as in Transformers.

    For example, [True, True, False, True, False] gives [1, 1, 0, 2, 0].

    Args:
        inside: Whether each token is a placeholder.
    """
    starts = inside & ~jnp.pad(inside[:, :-1], ((0, 0), (1, 0)))
    return jnp.where(inside, jnp.cumsum(starts, axis=1, dtype=jnp.int32), 0)


def with_images(
    x: Float[Array, "rows length width"],
    inside: Bool[Array, "rows length"],
    vectors: Float[Array, "rows ... width"],
    counts: Integer[Array, "rows images"] | None = None,
) -> Float[Array, "rows length width"]:
    """Returns embeddings with the images' vectors in place of the placeholders'.

    Args:
        x: The tokens' embeddings.
        inside: Whether each token is a placeholder.
        vectors: The vectors of each row's images, in order. Vectors without a placeholder are not
            used; a placeholder without a vector becomes NaN.
        counts: Number of vectors of each image that are used, if `vectors` has the shape (rows,
            images, vectors, width); None for all.
    """
    inside = inside[..., None]
    places = jnp.cumsum(inside, axis=1, dtype=jnp.int32) - 1
    if counts is not None:  # unused vectors of the images before are skipped
        unused = vectors.shape[2] - counts[:, None]
        before = places >= jnp.cumsum(counts, axis=1)[:, None]
        places = places + jnp.sum(jnp.where(before, unused, 0), axis=2, keepdims=True)
    flat = vectors.reshape(x.shape[0], -1, x.shape[-1]).astype(x.dtype)
    taken = jnp.take_along_axis(flat, jnp.maximum(places, 0), axis=1, mode="fill")
    return jnp.where(inside, taken, x)
