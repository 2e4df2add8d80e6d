"""Makes the tables of docs/what_fits.md, and of several hosts, by `megatrain_jax.plan`.

    python experiments/what_fits.py               # anew, in a quarter of an hour, without a GPU
    python experiments/what_fits.py --table H100  # one of them

A plan needs shapes only, so the models are built abstractly, from the sizes that the command line
knows. A row of docs/what_fits.md has the results of one model on one GPU: the host memory with fp32
Adam and in compact form, the forms that fit hosts of usual sizes, and planned tokens per second;
or, in the table of desktop computers, what each of them trains, and how fast.
A row of docs/several_gpus.md has planned tokens per second of one model on hosts of eight H100s.
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

_DOCS = Path(__file__).parents[1] / "docs"
GPUS = {"RTX 4090": mt.card("RTX 4090"), "H100": mt.card("H100")}
HOSTS = {f"{gib} GiB": gib * 2**30 for gib in (64, 128, 256, 512)} | {"1 TiB": 2**40}
FORMS = {"fp32": mt.Precision(), "compact": mt.Precision.compact()}
# Sequences of a step, each a microbatch of its own, and their tokens.
BATCH = (16, 2048)
# Desktop computers: a card, and the host's memory in GiB.
COMPUTERS = (
    ("RTX 3060", 32),
    ("RTX 4080", 64),
    ("RTX 4090", 64),
    ("RTX 4090", 96),
    ("RTX 5090", 96),
)
DESKTOPS = "desktop computers"
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
# Hosts of eight H100s, and the network of each host.
CLUSTERS = ((1, None), (2, "400Gb/s"), (2, "8x400Gb/s"), (8, "400Gb/s"), (8, "8x400Gb/s"))
SEVERAL = "several hosts"
_GPUS_PER_HOST = 8
# Sequences of a step and GPU in these plans, of one microbatch.
_ROWS_PER_GPU = 8
PAGES = dict.fromkeys((DESKTOPS, *GPUS), _DOCS / "what_fits.md")
PAGES |= {SEVERAL: _DOCS / "several_gpus.md"}
MODELS_OF = dict.fromkeys(GPUS, MODELS) | {
    DESKTOPS: (
        "Qwen3-1.7B",
        "Gemma-3-4B",
        "Qwen3-8B",
        "Gemma-3-12B",
        "Qwen3-14B",
        "Qwen3-32B",
        "Llama-3.3-70B",
        "Qwen3-30B-A3B",
    ),
    SEVERAL: ("Qwen3-14B", "Qwen3-32B", "Mistral-Large-123B"),
}


@functools.lru_cache(maxsize=1)
def planned(model: str) -> Callable[..., mt.Plan]:
    """Returns a function that plans a model: the same parts for all machines and forms."""
    return functools.partial(_of_rows(model), sample_batch=_tokens(BATCH), microbatches=BATCH[0])


def _config(model: str) -> models.DecoderConfig:
    return models.DecoderConfig.from_hf(known_models()[model].config)


def _of_rows(model: str) -> Callable[..., mt.Plan]:
    config = _config(model)
    return functools.partial(
        mt.plan,
        lambda: models.Decoder(config, rngs=nnx.Rngs(0)),
        models.next_token_loss,
        optax.adamw(1e-5),
    )


def _tokens(shape: tuple[int, int]) -> dict[str, jax.ShapeDtypeStruct]:
    return dict.fromkeys(("tokens", "labels"), jax.ShapeDtypeStruct(shape, jnp.int32))


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
    return _fits(smaller)


def row(name: str, model: str) -> str:
    """Returns a model's row in a table, as Markdown."""
    of_table = {SEVERAL: _row_of_hosts, DESKTOPS: _row_of_computers}
    cells = of_table.get(name, functools.partial(_row_of_gpu, name))(model)
    return f"| {' | '.join([model, *cells])} |"


def _row_of_hosts(model: str) -> list[str]:
    planned, cells = _of_rows(model), []
    for hosts, network in CLUSTERS:
        rows = _ROWS_PER_GPU * _GPUS_PER_HOST * hosts
        speeds = [
            planned(
                _tokens((rows, BATCH[1])),
                hardware="H100",
                precision="compact",
                num_gpus=_GPUS_PER_HOST,
                hosts=hosts,
                network=network,
                state_per_process=of_each,
            )
            for of_each in ((False,) if hosts == 1 else (False, True))
        ]
        cells.append(" / ".join(_speed(of, rows) for of in speeds))
    return cells


@remembering()
def _row_of_gpu(gpu: str, model: str) -> list[str]:
    largest = dataclasses.replace(GPUS[gpu], host_bytes=max(HOSTS.values()))
    plans = {form: plan(model, largest, form) for form in FORMS}
    hosts = []
    for host in HOSTS:
        # Where fp32 fits, compact does, too.
        fitting = (form for form, of in plans.items() if fits(of, host, model, GPUS[gpu], form))
        hosts.append(next(fitting, "–"))
    memory = [
        f"{of.host_peak_bytes / 2**30:,.0f}" if of.fits_device else "–" for of in plans.values()
    ]
    speed = [_speed(of) for of in plans.values()]
    return [" / ".join(memory), *hosts, " / ".join(speed)]


@remembering()
def _row_of_computers(model: str) -> list[str]:
    config, cells = _config(model), []
    adapted = models.lora(
        lambda: models.Decoder(config, rngs=nnx.Rngs(0)), targets=r"layers/.*_proj", rank=16
    )
    for gpu, host in COMPUTERS:
        machine = dataclasses.replace(mt.card(gpu), host_bytes=host * 2**30)
        plans = ((form, plan(model, machine, form)) for form in FORMS)
        full = next((f"{form} {_speed(of)}" for form, of in plans if _fits(of)), "–")
        adapters = mt.plan(
            adapted.model,
            models.next_token_loss,
            optax.adamw(1e-4),
            _tokens(BATCH),
            trainable=adapted.trainable,
            precision=mt.Precision(frozen="nf4"),
            microbatches=BATCH[0],
            hardware=machine,
        )
        cells.append(f"{full} / {_speed(adapters) if _fits(adapters) else '–'}")
    return cells


def _fits(of: mt.Plan) -> bool:
    return bool(of.fits_host and of.fits_device)


def _speed(of: mt.Plan, rows: int = BATCH[0]) -> str:
    if not of.fits_device or of.seconds_per_step is None:
        return "–"
    # Two digits, as the estimate is no better than that.
    return f"{float(f'{rows * BATCH[1] / of.seconds_per_step:.2g}'):,.0f}"


def table(name: str) -> str:
    """Returns a table, as Markdown."""
    titles = ["model", "host GiB", *HOSTS, "planned tokens/s"]
    if name == SEVERAL:
        titles = ["model", *(_cluster(hosts, network) for hosts, network in CLUSTERS)]
    if name == DESKTOPS:
        titles = ["model", *(f"{gpu}, {host} GiB" for gpu, host in COMPUTERS)]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for model in MODELS_OF[name]:
        lines.append(row(name, model))
        print(lines[-1], flush=True)
    return "\n".join(lines)


def _cluster(hosts: int, network: str | None) -> str:
    return "1 host" if network is None else f"{hosts} hosts, {network} each"


def place_of(name: str) -> tuple[str, int, int]:
    """Returns the text of a table's page, and the positions where the table starts and ends."""
    text, start = PAGES[name].read_text(encoding="utf-8"), f"<!-- planned: {name} -->\n\n"
    begin = text.index(start) + len(start)
    return text, begin, text.index("\n\n<!-- end of planned -->", begin)


def main() -> None:
    """Makes tables anew and writes them into their pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", choices=PAGES, help="make only this table")
    args = parser.parse_args()
    for name in PAGES if args.table is None else [args.table]:
        made = table(name)
        text, begin, end = place_of(name)
        PAGES[name].write_text(text[:begin] + made + text[end:], encoding="utf-8")


if __name__ == "__main__":
    main()
