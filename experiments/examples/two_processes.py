"""Two processes share a run; its losses are those of one process that has the whole batch.

    for i in 0 1; do python experiments/examples/two_processes.py $i 12345 & done; wait

12345 is a free port; a third argument is the number of steps. See docs/several_gpus.md.
"""

import sys
import sysconfig
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

import megatrain_jax as mt
from megatrain_jax import callbacks

index, port, *others = map(int, sys.argv[1:])
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=index)
steps = others[0] if others else 150
text = Path(sysconfig.get_path("stdlib"), "pydoc_data", "topics.py").read_bytes()
text = np.frombuffer(text, np.uint8).astype(np.int32)


class Model(nnx.Module):  # a convolution sees the last three bytes, a second one the last nine
    def __init__(self, rngs, dim=64):
        self.embed = nnx.Embed(256, dim, rngs=rngs)
        causal = {"kernel_size": 3, "padding": "CAUSAL", "rngs": rngs}
        self.layers = nnx.List([nnx.Conv(dim, dim, kernel_dilation=3**i, **causal) for i in (0, 1)])
        self.head = nnx.Linear(dim, 256, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + nnx.gelu(layer(x))
        return self.head(x)


def loss_fn(model, tokens):
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).mean()


def run(part, **options):
    starts = np.random.default_rng(0).integers(0, len(text) - 65, (steps, 16, 1))  # as the other
    batches = [text[rows[part] + np.arange(65)] for rows in starts]
    options |= {"precision": mt.Precision(compute="float32"), "progress": False}
    return mt.fit(lambda: Model(nnx.Rngs(0)), loss_fn, batches, optax.adamw(5e-3), **options)


ids = [list(b"the ")]
samples = callbacks.Samples(ids, logits=lambda m, b: m(b["tokens"]), num_tokens=8, every=steps)
shared = run(slice(8 * index, 8 * index + 8), callbacks=[samples]).history  # its half of a batch
if index == 0:
    alone = run(slice(16), mesh=Mesh(jax.local_devices(), "data")).history
    for record, other in zip(shared, alone, strict=True):
        record |= {"alone": other["loss"], "gap": abs(record["loss"] - other["loss"])}
    print(f"largest difference: {max(record['gap'] for record in shared):.1e}")
    shared.plot(["loss", "alone"]).savefig("two_processes.png", dpi=110)
