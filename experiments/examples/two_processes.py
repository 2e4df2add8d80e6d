"""Two processes share a run; its losses are those of one process that has the whole batch.

    for i in 0 1; do python experiments/examples/two_processes.py $i 12345 & done; wait

12345 is a free port; a third argument is the number of steps. See docs/several_gpus.md.
"""

import sys
import sysconfig

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

import megatrain_jax as mt
from megatrain_jax import callbacks

index, port, steps = map(int, [*sys.argv[1:], 150][:3])
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=index)
text = np.fromfile(f"{sysconfig.get_path('stdlib')}/argparse.py", np.uint8).astype(np.int32)


class Model(nnx.Module):  # it looks at the last seven bytes
    def __init__(self, rngs):
        self.embed = nnx.Embed(256, 64, rngs=rngs)
        self.layers = nnx.List([nnx.Conv(64, 64, 3, padding="CAUSAL", rngs=rngs) for _ in "123"])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + nnx.gelu(layer(x))
        return self.embed.attend(x)


def loss_fn(model, tokens):
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).mean()


def run(part, **options):
    starts = np.random.default_rng(0).integers(0, len(text) - 65, (steps, 16, 1))  # as the other
    batches = [text[rows[part] + np.arange(65)] for rows in starts]
    options |= {"precision": mt.Precision(compute="float32"), "progress": False}
    return mt.fit(lambda: Model(nnx.Rngs(0)), loss_fn, batches, optax.adamw(5e-3), **options)


ids, logits = [list(b"self.")], lambda model, batch: model(batch["tokens"])
samples = callbacks.Samples(ids, logits=logits, num_tokens=8, every=steps)
shared = run(slice(8 * index, 8 * index + 8), callbacks=[samples])  # its half of each batch
if index == 0:
    alone = run(slice(16), mesh=Mesh(jax.local_devices(), "data"))
    two, one = ([record["loss"] for record in r.history] for r in (shared, alone))
    print(f"largest difference: {np.abs(np.subtract(two, one)).max():.1e}")
    figure = shared.history.plot()
    figure.axes[0].plot(range(1, steps + 1), one, ":", label="loss of one process")
    figure.axes[0].legend()
    figure.savefig("two_processes.png", dpi=110)
