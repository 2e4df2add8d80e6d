"""LoRA: a decoder that has read code reads prose, by adapters beside its frozen matrices.

python experiments/examples/lora.py [STEPS]
"""

import sys
import sysconfig
from pathlib import Path

import numpy as np
import optax
from flax import nnx

import megatrain_jax as mt
from megatrain_jax import callbacks, models

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
library = Path(sysconfig.get_path("stdlib"))
code = b"".join(file.read_bytes() for file in sorted(library.glob("*.py")))
prose = (library / "pydoc_data" / "topics.py").read_text(encoding="utf-8").split("\n", 20)[-1]
prose = prose.replace("'\n", "").replace("\\n", "\n").replace("  ", "").encode()


def batches(text, seed, rows=8, length=64):
    rng, text = np.random.default_rng(seed), np.frombuffer(text, np.uint8).astype(np.int32)
    while True:
        starts = rng.integers(0, len(text) - length - 1, (rows, 1))
        tokens = text[starts + np.arange(length + 1)]
        yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


class Bytes:
    encode = staticmethod(lambda text: list(text.encode()))
    decode = staticmethod(lambda ids: bytes(ids).decode(errors="replace"))


sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 192, "num_layers": 3}
heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "rope": models.Rope(dim=16, base=1e4)}
config = models.DecoderConfig(**sizes, **heads)


def build():
    return models.Decoder(config, rngs=nnx.Rngs(0))


loss_fn, optimizer = models.next_token_loss, optax.adamw(3e-3)
first = mt.fit(build, loss_fn, batches(code, 0), optimizer, steps=steps, progress=False)

adapted = models.lora(build, targets=r"layers/.*_proj", rank=8, params=first.params)
samples = callbacks.Samples(["The "], Bytes(), num_tokens=40, temperatures=(0.0, 0.6))
held_out = [next(batches(prose, 1))]
arguments = adapted.model, loss_fn, batches(prose, 2), optimizer
options = {"params": adapted.params, "trainable": adapted.trainable, "progress": False}
options |= {"eval_data": held_out, "eval_every": max(1, steps // 4), "callbacks": [samples]}
result = mt.fit(*arguments, steps=steps, **options)
print(result.trainer.plan)
result.history.plot(smooth=10).savefig("lora.png", dpi=110)
