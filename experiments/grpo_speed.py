"""Tokens per second of GRPO's whole loop, with random weights of a known model's sizes.

    python experiments/grpo_speed.py Qwen2.5-7B --out grpo-7b.json
    python experiments/grpo_speed.py --tiny

All parameters are trained with AdamW. Each completion has the maximum length. The first step
compiles, and is left out. On a CPU only `--tiny` is of use.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from megatrain_jax import models
from megatrain_jax._src.cli.catalogue import known_models


def parsed() -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="Qwen2.5-7B")
    parser.add_argument("--tiny", action="store_true", help="two small layers, short completions")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--state", default="compact", help="a name of precisions")
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--out", help="file for the figures")
    return parser.parse_args()


def sizes(options: argparse.Namespace) -> models.DecoderConfig:
    """The model's configuration."""
    values = dict(known_models()[options.model].config)
    if options.tiny:
        values |= {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48}
        values |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return models.DecoderConfig.from_hf(values)


def main() -> None:
    """Runs some steps, and prints the figures."""
    options = parsed()
    if options.tiny:
        options.prompts, options.group, options.microbatches = 4, 2, 2
        options.prompt_tokens, options.tokens = 8, 16
    config = sizes(options)
    rng = np.random.default_rng(0)
    rows = [
        {"prompt": rng.integers(0, config.vocab_size, options.prompt_tokens).tolist()}
        for _ in range(options.prompts)
    ]

    def evenness(completion_ids: Any) -> list[float]:
        return [float(np.mean(np.array(ids) % 2)) for ids in completion_ids]

    result = models.grpo(
        lambda: models.Decoder(config, rngs=nnx.Rngs(0)),
        rows,
        evenness,
        optax.adamw(1e-6),
        steps=options.steps,
        tokenizer=None,
        options=models.GrpoOptions(
            num_generations=options.group,
            prompts_per_step=options.prompts,
            max_completion_length=options.tokens,
            beta=options.beta,
            stop=[],
        ),
        precision="float32" if options.tiny else options.state,
        microbatches=options.microbatches,
        progress=False,
    )
    steady = result.history[1:]
    written = options.prompts * options.group * options.tokens
    seconds = {
        name: statistics.mean(record[f"{name}/seconds"] for record in steady)
        for name in ("generation", "training")
    }
    difference = "sampling/sampling_logp_difference/mean"
    figures = {
        "model": "tiny" if options.tiny else options.model,
        "device": jax.devices()[0].device_kind,
        "num_measured_steps": len(steady),
        "completion_tokens_per_step": written,
        "generation_seconds": seconds["generation"],
        "training_seconds": seconds["training"],
        "tokens_per_second": written / sum(seconds.values()),
        "logp_difference": steady[-1][difference],
        "peak_device_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    }
    print(json.dumps(figures, indent=1))
    if options.out:
        Path(options.out).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
