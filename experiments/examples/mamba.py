"""A model of another library, unchanged: Mamba 2 of `mamba2-jax`, on Python's own sources.

pip install mamba2-jax
python experiments/examples/mamba.py [STEPS]
"""

import sys
import sysconfig
from pathlib import Path

import numpy as np
import optax
from flax import nnx
from mamba2_jax import Mamba2Config, Mamba2ForCausalLM

import megatrain_jax as mt
from megatrain_jax import callbacks

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 300
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = np.frombuffer(b"".join(f.read_bytes() for f in files), np.uint8).astype(np.int32)


def batches(seed, rows=8, length=64):
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(text) - length - 1, (rows, 1))
        tokens = text[starts + np.arange(length + 1)]
        yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def build():
    config = Mamba2Config(256, hidden_size=64, state_size=16, head_dim=16, num_hidden_layers=3)
    return Mamba2ForCausalLM(config, rngs=nnx.Rngs(0))


def logits(model, batch):
    return model(batch["tokens"])["logits"]


def loss_fn(model, batch):
    found, labels = logits(model, batch), batch["labels"]
    return optax.softmax_cross_entropy_with_integer_labels(found, labels).mean()


class Bytes:
    encode = staticmethod(lambda text: list(text.encode()))
    decode = staticmethod(lambda ids: bytes(ids).decode(errors="replace"))


prompts = {"prompts": ["    def __init__(self"], "temperatures": (0.5,), "num_tokens": 40}
samples = callbacks.Samples(**prompts, tokenizer=Bytes(), logits=logits, every=max(1, steps // 2))
optimizer = optax.adamw(optax.cosine_decay_schedule(5e-3, steps))
options = {"steps": steps, "callbacks": [samples], "progress": False}
options |= {"precision": mt.Precision(compute="float32")}  # as its embedding wants it
result = mt.fit(build, loss_fn, batches(0), optimizer, **options)
print(result.trainer.plan)
result.history.plot(smooth=10).savefig("mamba.png", dpi=110)
