"""Plans a fixed list of runs, and compares them with the plans of an earlier version.

    python experiments/plans/choices.py --before   # with the earlier version: the first columns
    python experiments/plans/choices.py            # with this one: the other columns, and a verdict
    python experiments/plans/choices.py --only Mamba2,UNet

Whoever changes how a plan is found runs this, without a GPU, in some minutes. It writes
`choices.csv` beside it, and fails if a step is planned to be slower by more than 1%, if a run no
longer fits, or if one that never did is planned with more host memory. Both versions need the same
estimate; after a change of the estimate, `--before` has to be run with the earlier search and the
new estimate.

`--openpi` names a copy of openpi's `src` folder (https://github.com/Physical-Intelligence/openpi);
without one, π0 is left out.
"""

import argparse
import csv
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
sys.path[:0] = [str(_HERE.parent / "throughput")]

import large_steps  # noqa: E402
import t5_model  # noqa: E402
import unet_model  # noqa: E402

import megatrain_jax as mt  # noqa: E402
from megatrain_jax import models  # noqa: E402
from megatrain_jax._src.common.remembering import gc_paused, remembering  # noqa: E402
from megatrain_jax._src.lm.cli.plan_settings import PlanSettings  # noqa: E402
from megatrain_jax._src.lm.cli.planner import Planner, config_of  # noqa: E402

_TABLE = _HERE / "choices.csv"
# The largest part by which a step may be planned slower than before.
_SLOWER = 0.01
_COLUMNS = ("seconds", "device_gib", "host_gib", "copied_gib", "fits", "cpu_seconds")
_CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))
_Row = tuple[str, Callable[[], mt.Plan]]


def decoders() -> Iterator[_Row]:
    """Rows of the command `megatrain-jax plan`: model, card, tokens and its other settings."""
    compact: dict[str, Any] = {"precision": "compact"}
    batches: list[dict[str, Any]] = [{}, {"tokens": 131072, "microbatches": 4, **compact}]
    hosts = ("RTX 4090", "64GiB"), ("RTX 4090", "128GiB"), ("L40S", "256GiB"), ("H100", "256GiB")
    for gpu, host in (*hosts, ("H200", "1TiB")):
        for model in ("Qwen3-1.7B", "Qwen3-8B"):
            for batch in batches:
                yield _decoder(model, gpu, host=host, **batch)
    for model, gpu in ("Qwen3-14B", "H100"), ("Qwen3-32B", "H200"), ("Mistral-Large-123B", "H200"):
        eight: dict[str, Any] = {"clip": None, "gpus": 8, **compact}
        yield _decoder(model, gpu, host="1TiB", **compact)
        yield _decoder(model, gpu, tokens=65536, host="1TiB", **eight)
    for budget in ("minimum", "20GiB", "40GiB"):
        yield _decoder("Qwen3-4B", "H100", host="256GiB", device_budget=budget)
        float8: dict[str, Any] = {"clip": None, "products": "float8"}
        yield _decoder("Qwen3-4B", "H100", host="256GiB", device_budget=budget, **float8)
    yield _decoder("Qwen3-30B-A3B", "H200", host="512GiB", **compact)
    yield _decoder("Qwen3-30B-A3B", "H100", host="256GiB", clip=None, **compact)
    yield _decoder("Qwen3-Next-80B-A3B", "H200", tokens=16384, host="1TiB", **compact)
    yield _decoder("Qwen3-Next-80B-A3B", "H100", tokens=16384, host="2TiB", gpus=2, **compact)
    auto: dict[str, Any] = {"microbatches": "auto", "length": 1024, **compact}
    yield _decoder("Qwen3-8B", "RTX 4090", tokens=131072, host="64GiB", **auto)
    yield _decoder("Qwen3-8B", "H100", tokens=524288, host="256GiB", sums="bfloat16", **auto)
    yield _decoder("Qwen3-4B", "L40S", tokens=131072, host="128GiB", **auto)
    adapters: dict[str, Any] = {"lora_rank": 16, "frozen": "nf4", "tokens": 16384}
    yield _decoder("Qwen3-8B", "RTX 4090", host="64GiB", **adapters)
    yield _decoder("Qwen3-32B", "RTX 4090", host="64GiB", **adapters)
    yield _decoder("Llama-3.1-70B", "L40S", host="128GiB", **adapters)
    yield _decoder("Qwen3-8B", "H100", tokens=65536, host="256GiB", gpus=2, clip=None)
    yield _decoder("Qwen3-8B", "H100", tokens=65536, host="1TiB", gpus=8)
    yield _decoder("Qwen3-8B", "L40S", tokens=65536, host="512GiB", gpus=4, optimizer="lion")
    yield _decoder("Qwen3-4B", "RTX 4090", tokens=65536, host="48GiB", length=16384, **compact)
    yield _decoder("Qwen3-4B", "H100", tokens=524288, host="128GiB", length=524288, **compact)
    yield _decoder("Gemma-2-9B", "L40S", host="256GiB")
    yield _decoder("Llama-3-8B", "RTX 4090", tokens=8192, host="256GiB", clip=None)


def _decoder(model: str, gpu: str, **options: Any) -> _Row:
    options = {"length": 4096, "tokens": 32768, **options}

    def planned() -> mt.Plan:
        settings = PlanSettings(model=model, gpu=gpu, **options)
        rows = options["tokens"] // settings.length
        return Planner(settings).plan(config_of(model), rows, settings.length)

    return " ".join((model, gpu, *(f"{k}={v}" for k, v in options.items()))), planned


def pages() -> Iterator[_Row]:
    """Rows of docs/performance.md and docs/what_fits.md."""
    for step in large_steps.STEPS:
        given = f"microbatches={step.microbatches}, sums={step.sums}"
        name = f"large step {step.name} {step.tokens} {given}"
        yield name, functools.partial(large_steps.planned, step)
    for model, gpu, host in (
        ("Qwen3-4B", "RTX 4090", "128GiB"),
        ("Qwen3-14B", "RTX 4090", "256GiB"),
        ("Qwen3-32B", "H100", "512GiB"),
        ("Llama-3.1-70B", "H100", "1TiB"),
    ):
        batch = {"length": 2048, "microbatches": 16, "clip": None, "precision": "compact"}
        yield _decoder(model, gpu, host=host, **batch)


def others() -> Iterator[_Row]:
    """Models that are no decoders of the library, or have layers without attention."""
    t5, unet = t5_model.Sizes(layers=24), unet_model.Sizes()
    cases = (
        ("T5", lambda: t5_model.T5(t5, nnx.Rngs(0)), t5_model, t5_model.random_batch(t5, 32, 512)),
        (
            "UNet",
            lambda: unet_model.UNet(unet, nnx.Rngs(0)),
            unet_model,
            unet_model.random_batch(unet, 64, 64),
        ),
    )
    for name, build, module, batch in cases:
        yield from _on_cards(name, build, module.loss_fn, batch)
    config = models.DecoderConfig.from_hf(
        json.loads((_ROOT / "tests" / "helpers" / "published.json").read_text(encoding="utf-8"))[
            "ibm-granite/granite-4.0-h-micro"
        ]["config"]
    )
    tokens = dict.fromkeys(("tokens", "labels"), np.zeros((8, 4096), np.int32))
    build = lambda: models.Decoder(config, rngs=nnx.Rngs(0))  # noqa: E731
    yield from _on_cards("Mamba2", build, models.next_token_loss, tokens)
    rng = np.random.default_rng(0)
    images = {
        "images": rng.standard_normal((64, 224, 224, 3), np.float32),
        "classes": np.zeros(64, np.int32),
    }
    yield from _on_cards("ViT", lambda: _ViT(nnx.Rngs(0)), _classified, images)


def _on_cards(name: str, build: Any, loss_fn: Any, batch: Any, gpus: int = 2) -> Iterator[_Row]:
    """One row with one card each of 24, 48 and 80 GB, and one with several."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    for gpu, number in ("RTX 4090", 1), ("L40S", 1), ("H100", gpus):
        options = {"hardware": gpu, "num_gpus": number, "host_gib": 128}
        planned = functools.partial(mt.plan, build, loss_fn, _CLIPPED, shapes, **options)
        yield f"{name} {number} {gpu}", planned


class _Encoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, width: int):
        dtype: Any = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.before, self.between = (nnx.LayerNorm(width, **dtype) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(16, width, decode=False, **dtype)
        self.up, self.down = (
            nnx.Linear(width, 4 * width, **dtype),
            nnx.Linear(4 * width, width, **dtype),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        x += self.attention(self.before(x))
        return x + self.down(nnx.gelu(self.up(self.between(x))))


class _ViT(nnx.Module):
    """The sizes of ViT-g, 1.0B parameters."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Conv(3, 1408, (14, 14), (14, 14), dtype=jnp.bfloat16, rngs=rngs)
        self.layers = nnx.List([_Encoder(rngs, 1408) for _ in range(40)])
        self.head = nnx.Linear(1408, 1000, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.embed(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def _classified(model: _ViT, batch: dict[str, jax.Array]) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(batch["images"]), batch["classes"]
    )
    return losses.mean()


def openpi(source: str) -> Iterator[_Row]:
    """π0 of openpi, from a copy of its sources; only what its JAX model needs is imported."""
    sys.path[:0] = [source]

    def without(name: str, **names: Any) -> ModuleType:
        sys.modules[name] = module = ModuleType(name)
        module.__dict__.update(names)
        return module

    functional = without("torch.nn.functional")
    nn = without("torch.nn", functional=functional)
    without("torch", Tensor=type("Tensor", (), {}), nn=nn, uint8="uint8", float32="float32")
    without("safetensors")
    own = without("openpi.models_pytorch.pi0_pytorch", PI0Pytorch=object)
    without("openpi.models_pytorch", pi0_pytorch=own)
    from openpi.models import model as of_pi  # pyright: ignore[reportMissingImports]
    from openpi.models import pi0_config  # pyright: ignore[reportMissingImports]

    config, rows = pi0_config.Pi0Config(), 32

    def loss_fn(model: Any, batch: Any, rng: jax.Array) -> jax.Array:
        model.train()
        seen = of_pi.Observation.from_dict(batch["obs"])
        return jnp.mean(model.compute_loss(rng, seen, batch["actions"], train=True))

    seen = config.fake_obs(rows)
    names = {"image": "images", "image_mask": "image_masks"}
    kinds = (*names, "state", "tokenized_prompt", "tokenized_prompt_mask")
    batch = {
        "obs": {kind: getattr(seen, names.get(kind, kind)) for kind in kinds},
        "actions": config.fake_act(rows),
    }
    yield from _on_cards("pi0", lambda: config.create(jax.random.key(0)), loss_fn, batch)


def planned(plan: Callable[[], mt.Plan]) -> dict[str, Any]:
    """Plans a run, and returns a row's figures by column."""
    start = time.process_time()
    try:
        with gc_paused(), remembering():
            of = plan()
    except (ValueError, MemoryError) as error:
        figures = dict.fromkeys(_COLUMNS, "") | {"fits": f"no: {str(error)[:60]}"}
        return figures | {"cpu_seconds": round(time.process_time() - start, 1)}
    assert of.seconds_per_step is not None and of.host_process_bytes is not None
    return {
        "seconds": round(of.seconds_per_step, 5),
        "device_gib": round((of.device_bytes or 0) / 2**30, 2),
        "host_gib": round(of.host_process_bytes / 2**30, 2),
        "copied_gib": round((of.bytes_in + of.bytes_out) / 2**30, 2),
        "fits": "yes" if of.fits_device and of.fits_host else "no",
        "cpu_seconds": round(time.process_time() - start, 1),
    }


def faults(row: dict[str, Any]) -> str:
    """What is worse than before in a row of the table; empty if nothing is."""
    before, now = row["fits before"], row["fits now"]
    if before == "yes" != now:
        return "no longer fits"
    if not row["seconds before"] or not row["seconds now"] or before != now:
        return ""
    # A run that doesn't fit is planned in the least memory, in whatever time that takes.
    what = ("seconds", "slower") if now == "yes" else ("host_gib", "more host memory")
    more = float(row[f"{what[0]} now"]) / float(row[f"{what[0]} before"]) - 1
    return f"{more:.1%} {what[1]}" if more > _SLOWER else ""


def main() -> None:
    """Makes the table's columns of this version, and judges them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", action="store_true", help="write the first columns")
    parser.add_argument("--only", default="", help="parts of rows' names, with commas")
    parser.add_argument("--openpi", help="folder `src` of a copy of openpi")
    args = parser.parse_args()
    table: dict[str, dict[str, Any]] = {}
    if _TABLE.exists():
        with _TABLE.open(encoding="utf-8", newline="") as file:
            table = {row["run"]: row for row in csv.DictReader(file)}
    when, bad = "before" if args.before else "now", []
    every = (*decoders(), *pages(), *others(), *(openpi(args.openpi) if args.openpi else ()))
    for name, plan in every:
        if not any(part in name for part in args.only.split(",")):
            continue
        row = table.setdefault(name, {"run": name})
        row.update({f"{column} {when}": figure for column, figure in planned(plan).items()})
        if fault := not args.before and faults(row):
            bad.append(f"{name}: {fault}")
        print(name, *(row[f"{column} {when}"] for column in _COLUMNS), fault or "", flush=True)
    with _TABLE.open("w", encoding="utf-8", newline="") as file:
        columns = [f"{column} {when}" for column in _COLUMNS for when in ("before", "now")]
        writer = csv.DictWriter(file, ["run", *columns], restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(table.values())
    sys.exit("\n".join(bad))


if __name__ == "__main__":
    main()
