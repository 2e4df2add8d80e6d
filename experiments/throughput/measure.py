"""Measures one configuration in this process: writes a JSON file and prints a row.

JAX tells the peak of a process's whole life only, hence one configuration a process; the scripts
beside this one start it once for each row of a table. The JSON file holds every step and what
the figures depend on.
"""

import argparse
import dataclasses
import gc
import os
import shlex
import sys
import time
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from decoder import LOSSES, Decoder, random_batch
from dispatch import dispatch_seconds
from flax import nnx
from machine import (
    GIB,
    hardware,
    link_gib_per_s,
    peak_device_gib,
    peak_host_gib,
    process_seconds,
    versions,
)
from record import add_origin_options, find_origin, write
from shapes import Shape, add_shape_options, chosen_shape
from timing import MIN_STEPS, Times, Work, time_from_rest, time_long_steps, time_steps

import megatrain_jax as mt
from megatrain_jax._src.common.sizes import bytes_of, rate_of
from megatrain_jax._src.engine.spec import bound_step as steps
from megatrain_jax._src.engine.state import pool
from megatrain_jax._src.engine.state.network import measured_rate
from megatrain_jax._src.engine.state.placement import default_mesh, placed_on

# The first step compiles and starts at rest, the second compiles what only a steady step does.
_WARM_UP_STEPS = 3
_BATCHES = 16
_EVERYTHING = 10**15


def measure(args: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """Trains a few steps with one configuration and returns its figures."""
    if args.device_budget == "all":
        # The yardstick of streaming: the same arithmetic, every stage computed again in backward.
        steps.find_residuals = lambda stage: None
    if args.pinned is not None:
        pin_at_most(bytes_of("pinned", args.pinned))
    batches = cycle([own_part(random_batch(shape, seed)) for seed in range(_BATCHES)])
    start = time.perf_counter()
    trainer = make_trainer(args, shape)
    prepared, peak_of_start = time.perf_counter(), peak_device_gib()
    print(trainer.plan, flush=True)
    ends: list[tuple[float, float]] = []

    def finish(metrics: Any) -> float:
        loss = trainer.read(metrics)["loss"]
        ends.append((time.perf_counter(), process_seconds()))
        return loss

    work = Work(begin=lambda: trainer.step(next(batches)), finish=finish, drain=trainer.flush)
    losses, dispatch = [], None
    if args.timed == "ends":
        times = time_long_steps(work, args.steps)
    elif args.timed == "rest":
        times = time_from_rest(work)
    else:
        losses = [finish(work.begin()) for _ in range(_WARM_UP_STEPS)]
        times = time_steps(work, args.steps)
        dispatch = dispatch_seconds(trainer, [next(batches) for _ in range(3)])
        trainer.flush()
    if args.profile is not None:
        with jax.profiler.trace(args.profile):
            work.finish([work.begin() for _ in range(2)][-1])
        trainer.flush()
    return {
        **figures_of_plan(trainer.plan),
        **figures_of_steps(shape, trainer.plan, times),
        "dispatch_seconds_per_step": dispatch,
        "driver_cpu_seconds_per_step": times.driver_cpu,
        "peak_device_gib": peak_device_gib(),
        "peak_device_gib_of_start": peak_of_start,
        "peak_host_gib": peak_host_gib(),
        "seconds_to_prepare": prepared - start,
        "seconds_of_start": trainer.startup,
        "seconds_of_first_step": ends[0][0] - prepared,
        "seconds_from_process_start_to_first_step": ends[0][1],
        "losses": losses + times.losses,
    }


def pin_at_most(num_bytes: int) -> None:
    """Lets the pool refuse to reserve more pinned memory than this."""
    reserve = pool.reserve

    def limited(placement: Any, needed: int, *rest: Any) -> None:
        print(f"pinning {needed / GIB:.2f} of {num_bytes / GIB:.2f} GiB", flush=True)
        if needed > num_bytes:
            raise pool.PinningRefusedError(f"{needed} bytes are too many", num_bytes)
        reserve(placement, needed, *rest)

    pool.reserve = limited


def make_trainer(args: argparse.Namespace, shape: Shape) -> mt.Trainer:
    """Returns a trainer of the decoder as the options say."""
    compute = compute_dtype()
    return mt.Trainer(
        lambda: Decoder(shape, compute, nnx.Rngs(0)),
        LOSSES[args.loss],
        chosen_optimizer(args.clip, args.optimizer),
        own_part(random_batch(shape, 0)),
        microbatches=args.microbatches,
        waves=args.waves,
        precision=mt.Precision(
            compute=compute,
            master=args.master,
            state=args.state,
            sums=args.sums,
            products=args.products,
        ),
        device_budget=budget(args.device_budget),
        host_budget=args.host_budget,
        disk_dir=args.disk_dir,
        hardware=chosen_hardware(args.network),
        # `jax.make_mesh` refuses devices of several hosts.
        mesh=jax.sharding.Mesh(np.array(jax.devices()[: args.devices]), ("data",)),
        state_per_process=args.state_per_process,
    )


def chosen_hardware(network: float | None) -> mt.Hardware | None:
    """Returns this machine with a rate between hosts, or None for the machine as it is."""
    if network is None:
        return None
    machine = mt.this_machine()
    assert machine is not None, "--network needs a GPU"
    return dataclasses.replace(machine, network_bytes_per_s=network)


def chosen_network(network: str | None) -> float | None:
    """Returns the rate between hosts in bytes per second, as given or measured."""
    if network == "measured":
        return measured_rate(placed_on(default_mesh()))
    return None if network is None else rate_of("network", network)


def own_part(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns the examples of a batch that this process passes."""
    count, index = jax.process_count(), jax.process_index()
    return {name: rows[index::count] for name, rows in batch.items()}


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-4),
    # The factored second moments alone: no momentum, and rates that do not grow with parameters.
    "adafactor": lambda: optax.adafactor(1e-4, multiply_by_parameter_scale=False),
}


def chosen_optimizer(clip: float | None, name: str = "adamw") -> optax.GradientTransformation:
    """Returns an optimizer, after clipping by the global norm if `clip` is given."""
    optimizer = OPTIMIZERS[name]()
    return optimizer if clip is None else optax.chain(optax.clip_by_global_norm(clip), optimizer)


def compute_dtype() -> Any:
    """Returns the dtype to compute in: bf16, or fp32 where there is no GPU."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def figures_of_plan(plan: mt.Plan) -> dict[str, Any]:
    """Returns the figures of a plan: memory, transfers, arithmetic and the estimate of a step."""
    return {
        "update_mode": plan.update_mode,
        "num_parameters": plan.num_parameters,
        "predicted_seconds_per_step": plan.seconds_per_step,
        "planned_device_gib": plan.device_bytes / GIB,
        "planned_state_gib": plan.device_state_bytes / GIB,
        "planned_gib_in_and_out": [plan.bytes_in / GIB, plan.bytes_out / GIB],
        "planned_host_gib": plan.host_bytes / GIB,
        "planned_host_peak_gib": plan.host_peak_bytes / GIB,
        "planned_process_gib": plan.host_process_bytes and plan.host_process_bytes / GIB,
        "host_bytes_per_parameter": plan.host_bytes / plan.num_parameters,
        "stages_that_keep_residuals": plan.num_kept,
        "num_stages": plan.num_stages,
        "planned_tflop_per_step": plan.flops_per_step / 1e12,
        "planned_share_in_float8": plan.float8_flops_per_step / plan.flops_per_step,
        "num_devices": plan.num_devices,
        "tiles": [dataclasses.asdict(row) for row in plan.tiles],
        "keeps_costliest": plan.keeps_costliest,
        "stages_computed_again": plan.num_again,
        "planned_microbatches": plan.microbatches,
        "waves": plan.waves,
        "planned_disk_gib": plan.disk_bytes / GIB,
        "planned_link_share": plan.link_share,
    }


def figures_of_steps(shape: Shape, plan: mt.Plan, times: Times) -> dict[str, Any]:
    """Returns times and rates."""
    seconds = times.mean
    operations = {
        "": 6 * plan.num_parameters * shape.num_tokens,
        "_with_attention": 6 * plan.num_parameters * shape.num_tokens + attention_flops(shape),
    }
    return {
        "tokens_per_step": shape.num_tokens,
        **times.figures(),
        "tokens_per_second": shape.num_tokens / seconds,
        **{f"tflops_per_second{k}": flops / seconds / 1e12 for k, flops in operations.items()},
    }


def attention_flops(shape: Shape) -> int:
    """Returns the operations of causal attention in a forward and a backward.

    Two products, queries with keys and weights with values, of 2 · seq² · head_dim operations for
    each head and sequence; twice as many again in backward: 12 · batch · seq² · heads · head_dim ·
    layers. A causal mask leaves half of it: 6 · batch · seq² · heads · head_dim · layers. As with
    6 · parameters · tokens for the rest, recomputation does not count.
    """
    pairs = shape.batch_size * shape.seq_len**2
    return 6 * pairs * shape.num_heads * shape.head_dim * shape.num_layers


def link_share(figures: Mapping[str, Any], rates: Mapping[str, float] | None) -> float | None:
    """Returns the share of a plain copy's rate that a step reaches in its busier direction."""
    moved = dict(zip(("in", "out"), figures["planned_gib_in_and_out"], strict=True))
    busier = max(moved, key=moved.__getitem__)
    if rates is None:
        return None
    return moved[busier] / figures["mean_seconds_per_step"] / rates[busier]


def budget(text: str) -> int | Literal["least"] | None:
    """Reads a device budget: "all", "least", "auto" or GiB.

    Raises:
        ValueError: If it is none of these.
    """
    if text == "least":
        return "least"
    if text == "auto":
        return None
    return _EVERYTHING if text == "all" else int(float(text) * GIB)


def number_or_auto(text: str) -> int | Literal["auto"]:
    """Reads a number, or the word "auto"."""
    return "auto" if text == "auto" else int(text)


def row(result: Mapping[str, Any]) -> str:
    """Returns the main figures in one line."""
    peak, seconds = result["peak_device_gib"], result["mean_seconds_per_step"]
    return (
        f"{seconds:.4g} s/step, {result['tokens_per_second']:,.0f} tokens/s, "
        f"{result['tflops_per_second']:.4g} TFLOP/s, peak device memory "
        f"{'unknown' if peak is None else f'{peak:.1f} GiB'}, last loss {result['losses'][-1]:.6f}"
    )


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_shape_options(parser)
    parser.add_argument(
        "--microbatches",
        type=number_or_auto,
        default=1,
        help="equal parts of a batch, or auto: the plan chooses them, and waves",
    )
    parser.add_argument(
        "--waves",
        type=lambda text: None if text == "auto" else int(text),
        help="groups of microbatches that are trained on one after another; the plan chooses if "
        "this is auto or left out",
    )
    parser.add_argument("--clip", type=float, help="clip the gradients' global norm to this")
    parser.add_argument(
        "--device-budget",
        default="auto",
        metavar="BUDGET",
        help="device memory for state and activations: least, auto, GiB, or all (everything "
        "resident, and every stage computed again in backward as with least)",
    )
    parser.add_argument(
        "--host-budget", help="host memory for the whole process, as in 62GiB; else what is there"
    )
    parser.add_argument(
        "--disk-dir", help="folder for state that the host budget leaves no room for"
    )
    parser.add_argument(
        "--pinned", help="as if the system refused to pin more host memory than this, as in 24GiB"
    )
    parser.add_argument(
        "--network", help="rate between hosts, for the plan, as in 10GB/s, or measured"
    )
    parser.add_argument(
        "--state-per-process", action="store_true", help="each process holds all state"
    )
    parser.add_argument("--loss", choices=LOSSES, default="own", help="see decoder.py")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    for held in ("master", "state", "sums"):
        parser.add_argument(f"--{held}", default="float32", help="dtype that the host holds it in")
    parser.add_argument("--products", choices=["float8"], help="dtype of products with parameters")
    parser.add_argument("--devices", type=int, default=1, help="GPUs that share step and state")
    parser.add_argument(
        "--join",
        type=int,
        nargs=3,
        metavar=("INDEX", "COUNT", "PORT"),
        help="be one of so many processes that share the GPUs; the first one writes the result",
    )
    parser.add_argument("--steps", type=int, default=MIN_STEPS, help="steps that the mean is of")
    parser.add_argument(
        "--timed",
        choices=("drained", "ends", "rest"),
        default="drained",
        help="by runs from a drained state to one; or, for steps of minutes, from end to end, with "
        "no warm-up; or a single step from rest to rest",
    )
    parser.add_argument("--profile", type=Path, help="write a trace of two more steps here")
    parser.add_argument("--out", type=Path, default=Path("runs/throughput/measure.json"))
    add_origin_options(parser)
    args = parser.parse_args()
    try:
        budget(args.device_budget)
    except ValueError:
        parser.error(f"--device-budget is all, least, auto or GiB, not {args.device_budget!r}")
    return args


def main() -> None:
    """Measures, prints the row and writes everything."""
    args = parse_arguments()
    if args.join is not None:
        index, count, port = args.join
        each = max(1, args.devices // count)
        own = list(range(index * each, (index + 1) * each))
        only = None if os.environ.get("JAX_PLATFORMS") == "cpu" else own
        jax.distributed.initialize(f"localhost:{port}", count, index, local_device_ids=only)
    shape, origin = chosen_shape(args), find_origin(args)
    args.network = chosen_network(args.network)
    if args.network is not None:
        print(f"network in bytes per second: {args.network}", flush=True)
    figures = measure(args, shape)
    gc.collect()  # the state makes room for what measures the link
    rates = link_gib_per_s()
    result = {
        "command": shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
        "shape": args.shape,
        "sizes": dataclasses.asdict(shape),
        "device_budget": args.device_budget,
        "host_budget": args.host_budget,
        "disk_dir": args.disk_dir,
        "pinned_bytes": args.pinned and bytes_of("pinned", args.pinned),
        "network_bytes_per_s": args.network,
        "state_per_process": args.state_per_process,
        "clip": args.clip,
        "optimizer": args.optimizer,
        "microbatches": args.microbatches,
        "held": {"master": args.master, "state": args.state}
        | ({} if args.sums == "float32" else {"sums": args.sums})
        | ({} if args.products is None else {"products": args.products}),
        "hardware": hardware(),
        "versions": versions(),
        **figures,
        "link_gib_per_s": rates,
        "link_share": link_share(figures, rates),
    }
    if jax.process_index() == 0:
        print(row(write(args.out, result, origin)), flush=True)


if __name__ == "__main__":
    main()
