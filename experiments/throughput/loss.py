"""Cross-entropy in chunks beside that of full logits: time and memory of loss and gradients.

Memory is what XLA says a compiled function needs beside its arguments. Full logits that can't fit
are not compiled, since XLA spends minutes on trying how to multiply them; of those only their own
bytes are known.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from machine import GIB, hardware, versions
from record import add_origin_options, find_origin, write
from timing import MIN_STEPS, Work, time_steps

from megatrain_jax import losses


def full_logits(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss that is measured, with the logits of all tokens at once."""
    logits = jnp.einsum("td,vd->tv", hidden, head, preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def full_logits_rounded(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss with logits rounded to the dtype of the hidden states before the softmax."""
    logits = jnp.einsum("td,vd->tv", hidden, head).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def main() -> None:
    """Measures, prints and writes the figures."""
    args = parse_arguments()
    origin = find_origin(args)
    rows: list[tuple[str, Callable[..., jax.Array], int]] = []
    for tokens in args.tokens:
        rows += [("full logits", full_logits, tokens), ("rounded", full_logits_rounded, tokens)]
        for chunk in args.chunks:
            rows.append((f"chunks of {chunk}", chunked(chunk), tokens))
    figures: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "hardware": hardware(),
        "versions": versions(),
        "vocabulary": args.vocabulary,
        "width": args.width,
        "rows": [],
    }
    for name, function, tokens in rows:
        row = {"name": name, "tokens": tokens, **measured(function, tokens, args)}
        print(json.dumps({k: v for k, v in row.items() if k != "seconds_of_steps"}), flush=True)
        figures["rows"].append(row)
        write(args.out, figures, origin)


def chunked(chunk: int) -> Callable[..., jax.Array]:
    """The library's loss with chunks of so many tokens."""
    return lambda hidden, head, labels: losses.next_token(hidden, head, labels, chunk=chunk)


def measured(function: Callable[..., jax.Array], tokens: int, args: Any) -> dict[str, Any]:
    """Compiles and times a loss with its gradients by hidden states and head."""
    shapes = (
        jax.ShapeDtypeStruct((tokens, args.width), jnp.bfloat16),
        jax.ShapeDtypeStruct((args.vocabulary, args.width), jnp.bfloat16),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
    )
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    logits = 4 * tokens * args.vocabulary
    row: dict[str, Any] = {"full_logits_gib": logits / GIB, "temporary_gib": None}
    if function in (full_logits, full_logits_rounded) and limit and 2 * logits > limit:
        return row  # there is their gradient, too
    run = jax.jit(jax.value_and_grad(function, (0, 1))).lower(*shapes).compile()
    needs = run.memory_analysis()
    assert needs is not None, "this backend does not tell a function's memory"
    row["temporary_gib"] = needs.temp_size_in_bytes / GIB
    inputs = needs.argument_size_in_bytes + needs.output_size_in_bytes
    if limit and needs.temp_size_in_bytes + inputs > limit:
        return row
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], shapes[0].shape, jnp.bfloat16)
    head = jax.random.normal(keys[1], shapes[1].shape, jnp.bfloat16) * args.width**-0.5
    labels = jax.random.randint(keys[2], (tokens,), 0, args.vocabulary)

    def call() -> float:
        loss, _ = jax.block_until_ready(run(hidden, head, labels))
        return float(loss)

    loss = call()
    times = time_steps(Work(begin=call, finish=float, drain=lambda: None), args.repeats)
    return {**row, **times.figures(), "loss": loss}


def parse_arguments() -> argparse.Namespace:
    """Reads the command line; the default sizes are Qwen2.5-7B's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--chunks", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--vocabulary", type=int, default=152064)
    parser.add_argument("--width", type=int, default=3584)
    parser.add_argument("--repeats", type=int, default=MIN_STEPS)
    parser.add_argument("--out", type=Path, default=Path("runs/throughput/loss.json"))
    add_origin_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
