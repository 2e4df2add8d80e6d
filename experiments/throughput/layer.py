"""One layer of a published model by itself: time and memory of forward, and with its gradient.

With the extra `kernels` on an H100 or H200, kernels compute its experts and its delta rule; without
it JAX's operations do. Both are measured by the same command, in two environments.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from machine import GIB, hardware, versions
from record import add_origin_options, find_origin, write
from timing import MIN_STEPS, Work, time_steps

from megatrain_jax import models

_VOCABULARY = 1024
# Sizes of https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct and
# https://huggingface.co/Qwen/Qwen3-30B-A3B; the first layer of Qwen3-Next has linear attention.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-next": {
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "tiny": {
        "model_type": "qwen3_next",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
}


def main() -> None:
    """Measures, prints and writes the figures."""
    args = parse_arguments()
    origin = find_origin(args)
    figures = {
        "command": shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
        "hardware": hardware(),
        "versions": versions(),
        "rows": args.rows,
        "tokens": args.rows * args.length,
        **measured(args),
    }
    write(args.out, figures, origin)


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Compiles and times the layer and its gradient; prints a row for each."""
    sizes = {"vocab_size": _VOCABULARY, "num_hidden_layers": 1, **SHAPES[args.shape]}
    config = models.DecoderConfig.from_hf(sizes)
    model = nnx.eval_shape(
        lambda: models.Decoder(config, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    )
    graphdef, shapes = nnx.split(model)
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    params = tree.unflatten(
        0.02 * jax.random.normal(key, leaf.shape, leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    )
    shape = args.rows, args.length
    tokens = jax.random.randint(keys[0], shape, 0, _VOCABULARY)
    # Documents of equal length, packed into rows.
    segments = 1 + np.arange(args.length) * args.documents // args.length
    segments = jnp.broadcast_to(jnp.asarray(segments, jnp.int32), shape)
    weights = jax.random.normal(keys[1], (*shape, config.hidden_size), jnp.bfloat16)

    def forward(params: Any, tokens: Any, segments: Any, weights: Any) -> jax.Array:
        hidden, balance = nnx.merge(graphdef, params).hidden(tokens, None, segments)
        return jnp.sum((hidden * weights).astype(jnp.float32)) + balance

    found: dict[str, Any] = {}
    for name, function in (("forward", forward), ("both", jax.value_and_grad(forward))):
        run = jax.jit(function).lower(params, tokens, segments, weights).compile()
        needs = run.memory_analysis()

        def call(run: Any = run) -> float:
            out = jax.block_until_ready(run(params, tokens, segments, weights))
            return float(jax.tree.leaves(out)[0])

        loss = call()
        times = time_steps(Work(begin=call, finish=float, drain=lambda: None), args.repeats)
        found[name] = {
            **times.figures(),
            "temporary_gib": needs and needs.temp_size_in_bytes / GIB,
            "loss": loss,
        }
        print(args.shape, name, json.dumps(found[name]), flush=True)
    return found


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-next")
    parser.add_argument("--rows", type=int, default=1, help="rows of the batch")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a row")
    parser.add_argument("--documents", type=int, default=4, help="documents packed in a row")
    parser.add_argument("--repeats", type=int, default=MIN_STEPS)
    parser.add_argument("--out", type=Path, default=Path("runs/throughput/layer.json"))
    add_origin_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
