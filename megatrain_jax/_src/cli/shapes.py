"""The shapes of a batch before there is one."""

import jax
import jax.numpy as jnp


def batch_shapes(
    rows: int, length: int, pairs: int = 0, *, has_reference: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a packed batch of `megatrain_jax.data`: rows of so many tokens.

    Args:
        rows: Number of rows.
        length: Tokens of a row.
        pairs: Pairs of answers that a row has at most, of preferences; 0 for other data.
        has_reference: Whether the logarithms of a reference come with them.
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
