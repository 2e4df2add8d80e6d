"""Makes the tables of docs/what_fits.md: published models, hosts and GPUs, by `megatrain_jax.plan`.

    python experiments/what_fits.py             # anew, in a quarter of an hour, without a GPU
    python experiments/what_fits.py --gpu H100  # one of them

A plan needs shapes only, so the models are built abstractly, from the sizes that the command line
knows. A row has the results of one model on one GPU: the host memory with fp32 Adam
and in compact form, the forms that fit hosts of usual sizes, and planned tokens per second.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import megatrain_jax as mt
from megatrain_jax import models
from megatrain_jax._src.common.remembering import remembering
from megatrain_jax._src.lm.cli.catalogue import known_models

PAGE = Path(__file__).parents[1] / "docs" / "what_fits.md"
GPUS = {"RTX 4090": mt.card("RTX 4090"), "H100": mt.card("H100")}
HOSTS = {f"{gib} GiB": gib * 2**30 for gib in (64, 128, 256, 512)} | {"1 TiB": 2**40}
FORMS = {"fp32": mt.Precision(), "compact": mt.Precision.compact()}
# Sequences of a step, each a microbatch of its own, and their tokens.
BATCH = (16, 2048)
MODELS = (
    "Qwen3-0.6B",
    "Qwen3-1.7B",
    "Qwen3-4B",
    "Qwen3-8B",
    "Qwen3-14B",
    "Qwen3-32B",
    "Llama-3.1-70B",
    "Mistral-Large-123B",
    "Qwen3-30B-A3B",
)


@functools.lru_cache(maxsize=1)
def planned(model: str) -> Callable[..., mt.Plan]:
    """Returns a function that plans a model: the same parts for all machines and forms."""
    config = models.DecoderConfig.from_hf(known_models()[model].config)
    tokens = jax.ShapeDtypeStruct(BATCH, jnp.int32)
    return functools.partial(
        mt.plan,
        lambda: models.Decoder(config, rngs=nnx.Rngs(0)),
        models.next_token_loss,
        optax.adamw(1e-5),
        {"tokens": tokens, "labels": tokens},
        microbatches=BATCH[0],
    )


def plan(model: str, machine: mt.Hardware, form: str) -> mt.Plan:
    """Returns the plan of a model's training on a machine: AdamW, immediate updates."""
    return planned(model)(hardware=machine, precision=FORMS[form])


def fits(of: mt.Plan, host: str, model: str, gpu: mt.Hardware, form: str) -> bool:
    """Whether a run fits the GPU and a host, by its plan in the largest host."""
    size = HOSTS[host]
    if not of.fits_device or of.host_bytes > size:
        return False
    there = dataclasses.replace(gpu, host_bytes=size)
    if dataclasses.replace(of, hardware=there).fits_host:
        return True
    # In a smaller host a run holds fewer activations, and its pool is divided differently.
    smaller = plan(model, there, form)
    return bool(smaller.fits_host and smaller.fits_device)


@remembering()
def row(gpu: str, model: str) -> str:
    """Returns a model's row in the table of a GPU, as Markdown."""
    largest = dataclasses.replace(GPUS[gpu], host_bytes=max(HOSTS.values()))
    plans = {form: plan(model, largest, form) for form in FORMS}
    hosts = []
    for host in HOSTS:
        # Where fp32 fits, compact does, too.
        fitting = (form for form, of in plans.items() if fits(of, host, model, GPUS[gpu], form))
        hosts.append(next(fitting, "–"))
    memory = [f"{of.host_peak_bytes / 2**30:,.0f}" for of in plans.values()]
    speed = [_tokens_per_second(of) for of in plans.values()]
    cells = [model, " / ".join(memory), *hosts, " / ".join(speed)]
    return f"| {' | '.join(cells)} |"


def _tokens_per_second(of: mt.Plan) -> str:
    if not of.fits_device or of.seconds_per_step is None:
        return "–"
    # Two digits, as the estimate is no better than that.
    return f"{float(f'{BATCH[0] * BATCH[1] / of.seconds_per_step:.2g}'):,.0f}"


def table(gpu: str) -> str:
    """Returns the table of a GPU, as Markdown."""
    titles = ["model", "host GiB", *HOSTS, "planned tokens/s"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for model in MODELS:
        lines.append(row(gpu, model))
        print(lines[-1], flush=True)
    return "\n".join(lines)


def tables_in(text: str) -> dict[str, tuple[int, int]]:
    """Returns where a page has the table of each GPU, as the positions of start and end."""
    found = {}
    for gpu in GPUS:
        start = f"<!-- planned: {gpu} -->\n\n"
        begin = text.index(start) + len(start)
        found[gpu] = (begin, text.index("\n\n<!-- end of planned -->", begin))
    return found


def main() -> None:
    """Makes tables anew and writes them into the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", choices=GPUS, help="make only the table of this GPU")
    args = parser.parse_args()
    for gpu in GPUS if args.gpu is None else [args.gpu]:
        made, text = table(gpu), PAGE.read_text(encoding="utf-8")
        begin, end = tables_in(text)[gpu]
        PAGE.write_text(text[:begin] + made + text[end:], encoding="utf-8")


if __name__ == "__main__":
    main()
