"""Tokens per second of generation, with random weights of a known model's sizes.

    python experiments/generation_speed.py Qwen3-8B
    python experiments/generation_speed.py Qwen3-32B --layers 8 --texts 256 --prompt-tokens 32 \
        --tokens 24 --device-budget 9GiB
    python experiments/generation_speed.py --tiny

All texts are written at a time, and each has the maximum length. With a small `--device-budget` the
weights are streamed through the GPU. The first call compiles, and is left out. On a CPU only
`--tiny` is of use.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent / "throughput"))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from machine import GIB, hardware, link_gib_per_s, peak_device_gib, versions  # noqa: E402
from record import add_origin_options, find_origin, write  # noqa: E402

import megatrain_jax as mt  # noqa: E402
from megatrain_jax import models  # noqa: E402
from megatrain_jax._src.lm.cli.catalogue import known_models  # noqa: E402


class Counter:
    """A tokenizer that decodes to the number of tokens, so that `on_text` costs no time."""

    def encode(self, text: str) -> list[int]:
        """Returns no ids: all prompts are ids."""
        return []

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the number of tokens."""
        return str(len(ids))


def model_parser(description: str | None, model: str) -> argparse.ArgumentParser:
    """A parser of a known model's name, by default `model`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", nargs="?", default=model, choices=sorted(known_models()), metavar="MODEL"
    )
    return parser


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's options."""
    parser = model_parser(__doc__, "Qwen3-8B")
    parser.add_argument("--tiny", action="store_true", help="two small layers, short texts")
    parser.add_argument("--layers", type=int, help="the first layers only")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--calls", type=int, default=2, help="number of measured calls")
    parser.add_argument("--device-budget", help="as in models.generate, such as 9GiB")
    parser.add_argument("--out", type=Path, default=Path("runs/generation_speed.json"))
    add_origin_options(parser)
    options = parser.parse_args(argv)
    if options.tiny:
        options.texts, options.prompt_tokens, options.tokens = 4, 8, 32
        options.layers = options.layers or 2
    return options


def sizes(model: str, *, tiny: bool, layers: int | None = None) -> models.DecoderConfig:
    """A known model's configuration, or one with some of its layers, small if `tiny`."""
    values = dict(known_models()[model].config)
    if tiny:
        values |= {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
        values |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    if layers is not None:
        values["num_hidden_layers"] = layers
        if values.get("layer_types"):
            values["layer_types"] = values["layer_types"][:layers]
    return models.DecoderConfig.from_hf(values)


def random_model(config: models.DecoderConfig) -> tuple[Any, Any]:
    """A function that builds the decoder, and random parameters on the device, in bfloat16."""

    def build() -> models.Decoder:
        return models.Decoder(config, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)

    shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(build), nnx.Param))
    leaves, treedef = jax.tree.flatten(shapes)
    draw = jax.jit(
        lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(0.02),
        static_argnums=1,
    )
    made = [
        jnp.ones(x.shape, jnp.bfloat16) if len(x.shape) == 1 else draw(key, tuple(x.shape))
        for x, key in zip(leaves, jax.random.split(jax.random.key(0), len(leaves)), strict=True)
    ]
    return build, jax.tree.unflatten(treedef, made)


def timed_call(
    generator: models.Generator, prompts: Sequence[Sequence[int]], num_tokens: int
) -> dict[str, float]:
    """Writes all texts once.

    Returns:
        The seconds of the call, and the seconds of a decoded token of all texts, after the first
        tokens.
    """
    seen: list[tuple[int, float]] = []

    def on_text(prompt: int, sample: int, text: str) -> None:
        seen.append((int(text), time.perf_counter()))

    began = time.perf_counter()
    found = generator.generate(
        prompts,
        max_tokens=num_tokens,
        temperature=1.0,
        stop=(),
        max_batch=len(prompts),
        on_text=on_text,
    )
    seconds = time.perf_counter() - began
    assert all(len(one.ids) == num_tokens for one in found)
    (first, at_first), (last, at_last) = seen[0], seen[-1]
    return {"seconds": seconds, "seconds_per_token": (at_last - at_first) / (last - first)}


def read_gib_per_s(gib: float) -> float:
    """The rate at which plain sums read a large array in device memory, one after another."""
    x = jnp.ones(int(gib * GIB) // 2, jnp.bfloat16)
    total = jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32))
    total(x).block_until_ready()
    began = time.perf_counter()
    # Waiting for each sum would count the way from and to the host, which takes about as long.
    sums = [total(x) for _ in range(20)]
    jax.block_until_ready(sums)
    return len(sums) * x.nbytes / GIB / (time.perf_counter() - began)


def figures_of(
    plan: models.GenerationPlan,
    calls: Sequence[dict[str, float]],
    options: argparse.Namespace,
    embedding_bytes: int,
) -> dict[str, Any]:
    """The figures of measured calls.

    Args:
        plan: The plan of the decode.
        calls: Results of `timed_call`.
        options: The command's options.
        embedding_bytes: Bytes of an embedding that is not the head: it is not read as a whole.
    """
    seconds = {name: statistics.mean(call[name] for call in calls) for name in calls[0]}
    # Caches are read as far as texts have come: on average, half of what is written.
    part = (options.prompt_tokens + options.tokens / 2) / plan.length
    if plan.resident:
        moved = plan.weight_bytes - embedding_bytes + part * plan.cache_bytes
    else:
        moved = plan.weight_bytes + plan.paged_bytes
    return {
        "resident": plan.resident,
        "planned_tokens_per_second": plan.tokens_per_s,
        "num_measured_calls": len(calls),
        "seconds_of_calls": [call["seconds"] for call in calls],
        "generation": {
            "seconds": seconds["seconds"],
            "tokens_per_second": options.texts * options.tokens / seconds["seconds"],
        },
        "decode": {
            "seconds_per_token_of_all_texts": seconds["seconds_per_token"],
            "tokens_per_second": options.texts / seconds["seconds_per_token"],
            "gib_per_s": moved / GIB / seconds["seconds_per_token"],
        },
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures some calls, prints the figures and writes them."""
    options = parsed(argv)
    origin = find_origin(options)
    config = sizes(options.model, tiny=options.tiny, layers=options.layers)
    build, params = random_model(config)
    rng = np.random.default_rng(0)
    shape = options.texts, options.prompt_tokens
    prompts = rng.integers(0, config.vocab_size, shape).tolist()
    length = options.prompt_tokens + options.tokens
    given = {"tokenizer": Counter(), "device_budget": options.device_budget}
    with models.Generator((build, params), **given) as generator:
        plan = generator.plan(length, options.texts, mt.this_machine() or mt.card("H100"))
        print(plan, flush=True)
        if plan.num_texts < options.texts:
            sys.exit(f"only {plan.num_texts} texts fit at a time: give a smaller --texts")
        calls = [timed_call(generator, prompts, options.tokens) for _ in range(1 + options.calls)]
    peak = peak_device_gib()
    embedding = 0 if config.tie_embeddings else params["embed_tokens"]["weight"].nbytes
    figures = figures_of(plan, calls[1:], options, embedding)
    gib = 0.01 if options.tiny else 1.0
    plain = read_gib_per_s(gib) if plan.resident else (link_gib_per_s(gib) or {}).get("in")
    figures["plain_gib_per_s"] = plain
    figures["plain_over_decode"] = plain and plain / figures["decode"]["gib_per_s"]
    named = ("prompt_tokens", "tokens", "texts", "device_budget")
    about = {
        "name": f"generation, {options.model}",
        "command": shlex.join(["python", *sys.argv]),
        "model": "tiny" if options.tiny else options.model,
        "num_layers": config.num_layers,
        **{name: getattr(options, name) for name in named},
        "seconds_to_compile_and_call": calls[0]["seconds"],
        "peak_device_gib": peak,
        "hardware": hardware(),
        "versions": versions(),
    }
    result = write(options.out, about | figures, origin)
    print(json.dumps(result, indent=1))
    return result


if __name__ == "__main__":
    main()
