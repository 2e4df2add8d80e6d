"""Makes the table of planned large steps in docs/performance.md, by `megatrain_jax.plan`.

    JAX_PLATFORMS=cpu python experiments/throughput/large_steps.py   # minutes, without a GPU

The plans are for one H100 in a host with 125 GiB, and for the runs that `measure.py` measures:
rows of 1,024 tokens, clipping, compact state.
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import decoder
import jax
import jax.numpy as jnp
from flax import nnx
from machine import GIB
from measure import chosen_optimizer
from shapes import SHAPES

import megatrain_jax as mt
from megatrain_jax import models

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
_START, _END = "<!-- planned: large steps -->\n\n", "\n\n<!-- end of planned -->"
_TITLES = (
    "model",
    "step of tokens",
    "microbatches",
    "waves",
    "stages with saved residuals",
    "link busy",
    "host memory",
    "seconds per step",
    "tokens per second",
)
_LENGTH = 1024


@dataclass(frozen=True, kw_only=True)
class LargeStep:
    """A planned run.

    Attributes:
        shape: Name of the model's sizes.
        name: Its name in the table.
        tokens: Tokens of a step.
        sums: Dtype of sums of gradients.
        microbatches: Number of microbatches; "auto" leaves it and the waves to the plan.
        waves: Number of waves, if it is not left to the plan.
        host_budget: Host memory of the process, if it is limited.
    """

    shape: str
    name: str
    tokens: int
    sums: str = "float32"
    microbatches: int | Literal["auto"] = "auto"
    waves: int | None = None
    host_budget: str | None = "120GiB"


STEPS = (
    LargeStep(
        shape="qwen2.5-14b",
        name="14.8B",
        tokens=524_288,
        microbatches=64,
        waves=1,
        host_budget=None,
    ),
    LargeStep(shape="qwen2.5-14b", name="14.8B", tokens=524_288),
    LargeStep(shape="qwen2.5-14b", name="14.8B, sums in bf16", tokens=524_288, sums="bfloat16"),
    LargeStep(shape="qwen2.5-14b", name="14.8B", tokens=131_072),
    LargeStep(shape="qwen2.5-7b-untied", name="7.6B", tokens=131_072),
    LargeStep(shape="qwen2.5-7b-untied", name="7.6B", tokens=524_288),
)


def planned(step: LargeStep) -> mt.Plan:
    """Returns the plan of a step."""
    shape = replace(SHAPES[step.shape], batch_size=step.tokens // _LENGTH, seq_len=_LENGTH)
    batch = decoder.random_batch(replace(shape, batch_size=1), 0)
    rows = {
        k: jax.ShapeDtypeStruct((shape.batch_size, *x.shape[1:]), x.dtype) for k, x in batch.items()
    }
    # On a GPU the decoder calls cuDNN; a plan counts this call as that kernel.
    decoder.causal_attention = models.attention
    return mt.plan(
        lambda: decoder.Decoder(shape, jnp.bfloat16, nnx.Rngs(0)),
        decoder.LOSSES["library"],
        chosen_optimizer(1.0),
        rows,
        microbatches=step.microbatches,
        waves=step.waves,
        precision=mt.Precision(
            compute=jnp.bfloat16, master="bfloat16", state="int8", sums=step.sums
        ),
        hardware="H100",
        host_gib=125,
        host_budget=step.host_budget,
    )


def row(step: LargeStep) -> str:
    """Returns the row of a step, as Markdown."""
    plan = planned(step)
    assert plan.seconds_per_step and plan.host_process_bytes and plan.link_share is not None
    kept = f"{plan.num_kept} of {plan.num_stages}" if plan.num_kept else "none"
    if plan.num_again:
        kept += f", {plan.num_again} of {plan.num_stages} recompute forward"
    cells = (
        step.name,
        f"{step.tokens:,}",
        plan.microbatches,
        plan.waves,
        kept,
        f"{plan.link_share:.0%}",
        f"{plan.host_process_bytes / GIB:.0f} GiB",
        f"{plan.seconds_per_step:.3g}",
        # As many digits as the seconds have.
        f"{float(f'{step.tokens / plan.seconds_per_step:.3g}'):,.0f}",
    )
    return f"| {' | '.join(map(str, cells))} |"


def table_in(text: str) -> tuple[int, int]:
    """Returns where a page's text has the table, as the positions of start and end."""
    begin = text.index(_START) + len(_START)
    return begin, text.index(_END, begin)


def main() -> None:
    """Makes the table anew and writes it into the page."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    lines = [f"| {' | '.join(_TITLES)} |", "|---" * len(_TITLES) + "|"]
    for step in STEPS:
        lines.append(row(step))
        print(lines[-1], flush=True)
    text = PAGE.read_text(encoding="utf-8")
    begin, end = table_in(text)
    PAGE.write_text(text[:begin] + "\n".join(lines) + text[end:], encoding="utf-8")


if __name__ == "__main__":
    main()
