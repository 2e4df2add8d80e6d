"""Tokens per second of GRPO's whole loop, with random weights of a known model's sizes.

    python experiments/grpo_speed.py Qwen2.5-7B
    python experiments/grpo_speed.py --tiny

All parameters are trained with AdamW. Each completion has the maximum length. The first step
compiles, and is left out. On a CPU only `--tiny` is of use.
"""

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent / "throughput"))

import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from generation_speed import model_parser, sizes  # noqa: E402
from machine import hardware, peak_device_gib, peak_host_gib, versions  # noqa: E402
from record import add_origin_options, find_origin, write  # noqa: E402

from megatrain_jax import models  # noqa: E402

_DIFFERENCE = "sampling/sampling_logp_difference/mean"


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's options."""
    parser = model_parser(__doc__, "Qwen2.5-7B")
    parser.add_argument("--tiny", action="store_true", help="two small layers, short completions")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3, help="the first one is left out")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--state", default="compact", help="a name of precisions")
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--out", type=Path, default=Path("runs/grpo_speed.json"))
    add_origin_options(parser)
    options = parser.parse_args(argv)
    if options.steps < 2:
        parser.error("--steps must be 2 at least, because the first step compiles")
    if options.tiny:
        options.prompts, options.group, options.microbatches = 4, 2, 2
        options.prompt_tokens, options.tokens, options.state = 8, 16, "float32"
    return options


def trained(options: argparse.Namespace) -> Any:
    """The result of some steps."""
    config = sizes(options.model, tiny=options.tiny, layers=2 if options.tiny else None)
    rng = np.random.default_rng(0)
    rows = [
        {"prompt": rng.integers(0, config.vocab_size, options.prompt_tokens).tolist()}
        for _ in range(options.prompts)
    ]

    def evenness(completion_ids: Any) -> list[float]:
        return [float(np.mean(np.array(ids) % 2)) for ids in completion_ids]

    return models.train_grpo(
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
        precision=options.state,
        microbatches=options.microbatches,
        progress=False,
    )


def figures_of(history: Sequence[Mapping[str, float]], tokens: int) -> dict[str, Any]:
    """The figures of all steps after the first.

    Args:
        history: The records of a run.
        tokens: Number of tokens of completions in a step.
    """
    steady = history[1:]
    parts: dict[str, Any] = {}
    for name in ("generation", "training"):
        each = [record[f"{name}/seconds"] for record in steady]
        seconds = statistics.mean(each)
        parts[name] = {
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "seconds_of_steps": each,
        }
    return {
        "num_measured_steps": len(steady),
        "tokens_per_step": tokens,
        "mean_seconds_per_step": sum(part["seconds"] for part in parts.values()),
        **parts,
        "mean_logp_difference": statistics.mean(record[_DIFFERENCE] for record in steady),
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs some steps, prints the figures and writes them."""
    options = parsed(argv)
    origin = find_origin(options)
    result = trained(options)
    named = ("prompts", "group", "prompt_tokens", "tokens", "microbatches", "state", "beta")
    about = {
        "name": f"GRPO, {options.model}",
        "command": shlex.join(["python", *sys.argv]),
        "model": "tiny" if options.tiny else options.model,
        "num_parameters": result.trainer.plan.num_parameters,
        **{name: getattr(options, name) for name in named},
        "peak_device_gib": peak_device_gib(),
        "peak_host_gib": peak_host_gib(),
        "hardware": hardware(),
        "versions": versions(),
    }
    tokens = options.prompts * options.group * options.tokens
    found = write(options.out, about | figures_of(result.history, tokens), origin)
    print(json.dumps(found, indent=1))
    return found


if __name__ == "__main__":
    main()
