"""The cases of the zoo: a model with its loss and data; and the functions that all share.

Every kind of model (NNX, Linen, pytree) has its own file; this is what they have in common.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

DIM = 16
HEADS = 2
HIDDEN = 32
VOCAB = 32
SEQ = 8
NUM_EXAMPLES = 8


def token_batch(seed: int) -> dict[str, np.ndarray]:
    """Return 8 sequences of 9 tokens in which the next token mostly follows from the last."""
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(0, VOCAB, NUM_EXAMPLES)]
    for _ in range(SEQ):
        tokens.append((5 * tokens[-1] + 3 + rng.integers(0, 2, NUM_EXAMPLES)) % VOCAB)
    return {"tokens": np.stack(tokens, axis=1).astype(np.int32)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model with its loss and data, and what cutting it into stages has to give.

    The loss is a mean over examples, so the mean over microbatches is that of the whole batch,
    unless `random` or not `microbatches`.
    """

    name: str
    build: Callable[[], Any]  # the model as a user passes it, the same one at every call
    loss_fn: Callable[..., Any]
    # Stages that need a block's parameters; the same block used again right after itself counts
    # once. None of them is the embedding, the head or a projection without a number.
    blocks: int
    # Distinct templates among these stages; None where the rules leave it open.
    templates: int | None
    batch: Callable[[int], dict[str, np.ndarray]] = token_batch
    passes: int = 1  # how often in a row each block is applied
    microbatches: bool = True  # False: statistics depend on the batch
    random: bool = False  # the loss draws random numbers
    warns: bool = False  # has an equation that needs two blocks and can't be cut
    zero_gradients: bool = False  # some whole leaves have a gradient of exactly zero


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the mean cross entropy in nats, computed in fp32 whatever the logits are."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logprobs, targets[..., None], axis=-1))


def next_token_loss(model: Any, batch: dict[str, Any]) -> jax.Array:
    """Return the mean loss per token of a model that is called with tokens."""
    tokens = batch["tokens"]
    return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Return causal attention over (batch, time, DIM) arrays, split into HEADS heads."""
    q, k, v = (x.reshape(*x.shape[:-1], HEADS, -1) for x in (q, k, v))
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return out.reshape(*out.shape[:-2], -1)
