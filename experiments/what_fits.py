"""Makes the tables of docs/what_fits.md: published models, hosts and GPUs, by `megatrain_jax.plan`.

    python experiments/what_fits.py --write   # the whole page anew, in some minutes, without a GPU
    python experiments/what_fits.py Qwen3-8B  # one model's rows, printed

A plan needs shapes only, so the models are built abstractly from the numbers in their published
`config.json`. A row is all that one GPU says of one model: how much host memory a process takes
with fp32 Adam and in compact form, which of the two fit hosts of usual sizes, and how many tokens a
second are expected of each.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import megatrain_jax as mt
from megatrain_jax import models

PAGE = Path(__file__).parents[1] / "docs" / "what_fits.md"
GPUS = {"RTX 4090": mt.RTX_4090}
HOSTS = {f"{gib} GiB": gib * 2**30 for gib in (64, 128, 256, 512)} | {"1 TiB": 2**40}
FORMS = {"fp32": mt.Precision(), "compact": mt.Precision.compact()}
# Sequences of a step, each a microbatch of its own, and their tokens.
BATCH = (16, 2048)


def _qwen3(hidden: int, inner: int, layers: int, heads: int, tied: bool = False) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1e6,
        "tie_word_embeddings": tied,
    }


# What their `config.json` on the Hugging Face Hub says of sizes.
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen3-4B": _qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen3-8B": _qwen3(4096, 12_288, 36, 32),
    "Qwen3-14B": _qwen3(5120, 17_408, 40, 40),
    "Qwen3-32B": _qwen3(5120, 25_600, 64, 64),
    "Llama-3.1-70B": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
    },
    "Mistral-Large-2407 (123B)": {
        "model_type": "mistral",
        "vocab_size": 32_768,
        "hidden_size": 12_288,
        "intermediate_size": 28_672,
        "num_hidden_layers": 88,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1e6,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "Qwen3-30B-A3B (experts)": _qwen3(2048, 6144, 48, 32)
    | {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
}


def plan(model: str, machine: mt.Hardware, form: str) -> mt.Plan:
    """Returns the plan of a model's training on a machine: AdamW, immediate updates."""
    config = models.DecoderConfig.from_hf(MODELS[model])
    tokens = jax.ShapeDtypeStruct(BATCH, jnp.int32)
    return mt.plan(
        lambda: models.Decoder(config, rngs=nnx.Rngs(0)),
        models.next_token_loss,
        optax.adamw(1e-5),
        {"tokens": tokens, "labels": tokens},
        hardware=machine,
        precision=FORMS[form],
        microbatches=BATCH[0],
    )


def fits(of: mt.Plan, host: str, model: str, gpu: mt.Hardware, form: str) -> bool:
    """Whether a run fits the GPU and a host, by its plan in the largest host."""
    size = HOSTS[host]
    if not of.fits_device or of.host_peak_bytes > size:
        return False
    if of.host_process_bytes is not None and of.host_process_bytes <= size:
        return True
    # The pool's pieces are others in a smaller host, and so is all that a process takes.
    return bool(plan(model, dataclasses.replace(gpu, host_bytes=size), form).fits_host)


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
    titles = ["model", "host GiB", *HOSTS, "expected tokens a second"]
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
    """Writes the page's tables, or prints the rows of one model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", choices=MODELS, help="print the rows of this model")
    parser.add_argument("--write", action="store_true", help="make the page's tables anew")
    args = parser.parse_args()
    if args.model:
        print(*(f"{gpu}: {row(gpu, args.model)}" for gpu in GPUS), sep="\n")
    if args.write:
        for gpu in GPUS:
            made, text = table(gpu), PAGE.read_text(encoding="utf-8")
            begin, end = tables_in(text)[gpu]
            PAGE.write_text(text[:begin] + made + text[end:], encoding="utf-8")


if __name__ == "__main__":
    main()
