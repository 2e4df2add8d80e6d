"""Plans with round figures, and a run spec of five layers."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import optax

import megatrain_jax as mt
from megatrain_jax._src.engine.adapt.adapters import adapt
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.report.plan import GroupRow
from megatrain_jax._src.engine.report.plan_table import ShownPlan
from megatrain_jax._src.engine.spec.make_spec import make_run_spec
from megatrain_jax._src.engine.spec.run_spec import RunSpec
from megatrain_jax._src.engine.state import hardware
from megatrain_jax._src.engine.state.hardware import Hardware

GIB = 2**30
SGD = optax.sgd(0.1)
BALANCED = Hardware(
    name="Balanced",
    host_bytes=50,
    device_bytes=100,
    device_share=1.0,
    link_bytes_per_s=10.0,
    flops_per_s=100.0,
    sustained=1.0,
)
SMALL = ShownPlan(
    num_parameters=6,
    num_frozen=0,
    frozen_bytes=0,
    groups=(
        GroupRow(name="embed", count=1, num_parameters=1, host_bytes=12, template=0),
        GroupRow(name="layers/0 … layers/2", count=3, num_parameters=1, host_bytes=12, template=1),
        GroupRow(name="head", count=1, num_parameters=2, host_bytes=24, template=2),
    ),
    host_bytes=72,
    host_peak_bytes=80,
    host_process_bytes=None,
    device_state_bytes=60,
    device_other_bytes=30,
    device_temporary_bytes=0,
    device_temporary_estimated=False,
    bytes_in=20,
    bytes_out=16,
    flops_per_step=184,
    seconds_per_step=None,
    microbatches=1,
    update_mode="immediate",
    num_stages=5,
    num_kept=0,
    num_templates=3,
)


def small_plan(**changes: Any) -> ShownPlan:
    """A plan of a few bytes, with changes."""
    return replace(SMALL, **changes)


def layers(x: Any, params: Any) -> Any:
    for layer in params:
        x = x @ layer["w"]
    return x


def layers_spec(optimizer: Any = SGD, **options: Any) -> RunSpec:
    """The spec of a run with five layers of different widths."""
    widths = (8, 8, 16, 16, 8, 8)
    params = [{"w": jnp.ones(shape)} for shape in zip(widths, widths[1:], strict=False)]
    batch = {"x": jnp.ones((12, 8))}

    def loss_fn(params: Any, batch: Any) -> Any:
        return (layers(batch["x"], params) ** 2).mean()

    adapted, _ = adapt(params, loss_fn, batch, 0)
    precision = mt.Precision(compute=jnp.float32)
    return make_run_spec(
        adapted, loss_fn, optimizer, batch, Options(precision=precision, **options)
    )


def row(name: str, template: int, count: int = 1) -> GroupRow:
    """A group of 3 GiB."""
    return GroupRow(
        name=name, count=count, num_parameters=GIB // 4, host_bytes=3 * GIB, template=template
    )


BIG = ShownPlan(
    # Roughly a 3.4B decoder, in round figures.
    num_parameters=38 * GIB // 4,
    num_frozen=0,
    frozen_bytes=0,
    groups=(row("embed", 0), row("layers/0 … layers/35", 1, count=36), row("head", 2)),
    host_bytes=114 * GIB,
    host_peak_bytes=114 * GIB,
    host_process_bytes=1169 * GIB // 10,
    device_state_bytes=12 * GIB,
    device_other_bytes=5 * GIB,
    device_temporary_bytes=0,
    device_temporary_estimated=False,
    bytes_in=38 * GIB,
    bytes_out=0,
    flops_per_step=588 * 10**12,
    seconds_per_step=1.25,
    microbatches=4,
    update_mode="deferred",
    num_stages=38,
    num_kept=0,
    num_templates=3,
    hardware=replace(hardware.card("H200"), host_bytes=125 * GIB),
    warnings=("`while` holds 3 blocks", "one large stage"),
)


def big_plan(**changes: Any) -> ShownPlan:
    """A plan of many GiB, with changes."""
    return replace(BIG, **changes)
