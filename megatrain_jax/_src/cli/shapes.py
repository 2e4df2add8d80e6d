"""The shapes of a batch, before any batch exists."""

import jax
import jax.numpy as jnp


def batch_shapes(
    rows: int, length: int, pairs: int = 0, *, has_reference: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a packed batch of `megatrain_jax.data`.

    Args:
        rows: Number of rows.
        length: Tokens of a row.
        pairs: Maximum pairs of answers per row, for preferences; 0 for all remaining data.
        has_reference: Whether the batch includes a reference's log-probabilities.
    """
    kinds = dict.fromkeys(("tokens", "labels", "segments", "positions"), jnp.int32)
    shapes: dict[str, jax.ShapeDtypeStruct] = {
        name: jax.ShapeDtypeStruct((rows, length), dtype)
        for name, dtype in (kinds | {"mask": jnp.bool_}).items()
    }
    if pairs:
        shapes["pairs"] = jax.ShapeDtypeStruct((rows, pairs), jnp.bool_)
        shapes["pairs_per_row"] = jax.ShapeDtypeStruct((rows,), jnp.float32)
    if has_reference:
        shapes["reference"] = jax.ShapeDtypeStruct((rows, 2 * pairs), jnp.float32)
    return shapes | {"learned_per_row": jax.ShapeDtypeStruct((rows,), jnp.float32)}
