"""The page of long sequences: its table is that of plans."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import megatrain_jax as mt
from megatrain_jax import models
from pages import blocks
from places import ROOT
from quantities import quantities


@pytest.mark.long
def test_the_page_s_lengths_are_those_of_plans():
    page = ROOT / "docs" / "long_sequences.md"
    namespace: dict[str, Any] = {"mt": mt, "nnx": nnx, "jnp": jnp, "optax": optax}
    exec(blocks(page)[0].code, namespace)
    lines = [line for line in page.read_text().splitlines() if re.match(r"[\d,]+ +\d+ GiB", line)]
    rows = [re.split(r"\s{2,}", line) for line in lines]
    assert len(rows) == 7
    for row in rows:
        num_tokens, (gib, *compact) = int(row[0].replace(",", "")), row[1].split(" GiB")
        tokens = jax.ShapeDtypeStruct((1, num_tokens), jnp.int32)
        plan = mt.plan(
            lambda: models.Decoder(namespace["config"], rngs=nnx.Rngs(0)),
            namespace["decoder_loss"],
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4)),
            {"tokens": tokens, "labels": tokens},
            hardware="H200",
            host_gib=int(gib),
            precision=mt.Precision.compact() if any(compact) else mt.Precision(),
        )
        assert plan.fits_host and plan.fits_device and plan.seconds_per_step
        tiles = {tiled.what: tiled.num_tiles for tiled in plan.tiles}
        printed = [quantities(cell) for cell in row[2:]]
        assert printed == [
            [round(num_tokens / plan.seconds_per_step)],
            [tiles[what] for what in ("forward", "backward") if what in tiles],
            [plan.num_kept] * bool(plan.num_kept),
        ]
        assert ("(*)" in row[-1]) == bool(plan.host_residual_bytes and plan.num_kept)
