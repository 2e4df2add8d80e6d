"""Attention with images: between all patches in a vision tower, and in a decoder's rows."""

import math

import jax
from jaxtyping import Array, Float, Integer

from megatrain_jax import trace_target
from megatrain_jax._src.common import attention_kernel
from megatrain_jax._src.lm.models import causal_attention
from megatrain_jax._src.lm.models.causal_attention import in_spans, piece_of, spans_of
from megatrain_jax._src.lm.models.past import Past
from megatrain_jax._src.lm.models.rotary import positions_in

Heads = Float[Array, "rows length heads head_dim"]


def full_attention(q: Heads, k: Heads, v: Heads) -> Heads:
    """Lets each token attend to all tokens of its row.

    Args:
        q: Queries.
        k: Keys, with as many heads.
        v: Values, as `k`.

    Returns:
        An array with the shape and dtype of `q`; softmax is computed in fp32.
    """
    scale = 1 / math.sqrt(q.shape[-1])
    if causal_attention.fits_cudnn(q, packed=False):
        if trace_target().card is not None:
            return attention_kernel.attend(q, k, v, None, causal=False)
        return jax.nn.dot_product_attention(q, k, v, scale=scale, implementation="cudnn")
    piece = piece_of(q.shape)
    # All tokens are one image.
    images = jax.numpy.ones(q.shape[:2], jax.numpy.int32)
    spans = ((0, q.shape[1]),)
    return in_spans(q, k, v, None, None, spans, piece, None, None, scale, images, q.shape[1])


class ImageRows(Past):
    """Rows of text and images: layers get it in place of `segments` in training.

    Tokens attend to earlier tokens, and the tokens of an image also to the later ones of the
    same image. In layers with a window, no token attends further back than the window.
    """

    def __init__(
        self,
        segments: Integer[Array, "rows length"] | None,
        images: Integer[Array, "rows length"],
        most: int,
    ):
        """Keeps the numbers of tokens.

        Args:
            segments: The document of each token, 0 for padding; None for one per row.
            images: The image of each token, counted from 1 in each row; 0 for text.
            most: The maximum number of tokens of an image.
        """
        self.segments, self.images, self.most = segments, images, most
        self.kind = "ImageRows"

    def positions(self, length: int) -> Integer[Array, "rows length"]:
        """Returns positions that count from 0 in every document."""
        return positions_in(length, self.segments)

    def attend(self, q, k, v, *, window, chunk, **options) -> Heads:
        """Computes `attention` within rows."""
        if chunk is not None or options.get("sinks") is not None:
            self.refuse()
        length, scale = q.shape[1], options["scale"]
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        piece = piece_of(q.shape)
        spans = tuple(spans_of(length, piece))
        window = None if window is not None and window >= length else window
        numbers = self.segments, None, spans, piece, window, options["softcap"], scale
        return in_spans(q, k, v, *numbers, self.images, self.most)
