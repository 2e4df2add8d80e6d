"""Small decoders with their batches and losses."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax

from megatrain_jax.models import DecoderConfig, Experts, Rope
from zoo_case import cross_entropy

ROPE = Rope(dim=8)


SMALL = DecoderConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rope=ROPE,
    init_std=0.2,
)


EXPERTS = Experts(
    num=4,
    per_token=2,
    intermediate_size=8,
    normalize=True,
    layers=(0, 1, 2, 3),
    balance_weight=0.01,
)


GEMMA = dataclasses.replace(
    SMALL,
    windows=(3, 3, 3, None),
    local_rope=Rope(dim=8, base=100.0),
    norm_offset=1.0,
    sandwich_norms=True,
    qk_norm=True,
    scale_embedding=True,
    attention_softcap=5.0,
    final_softcap=5.0,
    tie_embeddings=True,
)


def batch(seed: int = 0, length: int = 12, rows: int = 4) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    row = np.minimum(np.arange(length) // 5 + 1, 9)
    row[-2:] = 0
    segments = np.tile(row.astype(np.int32), (rows, 1))
    tokens = rng.integers(0, 40, (rows, length + 1)).astype(np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "segments": segments}


def plain_loss(model, batch):
    return cross_entropy(model(batch["inputs"]), batch["targets"])


def packed_loss(model, batch):
    segments = batch["segments"]
    hidden, balance = model.hidden(batch["inputs"], None, segments)
    logits = (hidden @ model.head_weight().T).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    loss = jnp.sum(losses * (segments > 0)) / jnp.sum(segments > 0)
    experts = model.config.experts
    return loss if experts is None else loss + experts.balance_weight * balance


TINY = dataclasses.replace(SMALL, num_layers=2)
