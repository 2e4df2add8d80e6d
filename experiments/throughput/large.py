"""Table: a 7.6B decoder, and the largest one of its width that this machine's memory holds."""

import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
from common import (
    PEAK_HOST,
    PLANNED_HOST,
    STANDARD,
    TFLOPS_WITH_ATTENTION,
    Row,
    add_shape,
    number,
    parser,
    run_table,
)
from decoder import Decoder, loss_fn, random_batch
from flax import nnx
from shapes import SHAPES, Shape

import megatrain_jax as mt
from megatrain_jax._src.common import host_memory

_GIB = 2**30


def host_peak_bytes(shape: Shape) -> int:
    """Returns the host memory that training a shape needs; allocates next to nothing."""
    return mt.plan(
        lambda: Decoder(shape, jnp.bfloat16, nnx.Rngs(0)),
        loss_fn,
        optax.adamw(1e-4),
        jax.eval_shape(lambda: jax.tree.map(jnp.asarray, random_batch(shape, 0))),
        precision=mt.Precision(compute=jnp.bfloat16),
        device_budget="least",
    ).host_peak_bytes


def most_layers(shape: Shape, limit: int) -> int:
    """Returns how many layers of a shape's width fit into `limit` bytes of host memory.

    A layer more adds the same bytes every time once there are more layers than arrays in flight,
    so two plans are enough.

    Raises:
        SystemExit: If not even a few layers fit.
    """
    few, more = 8, 9
    base = host_peak_bytes(replace(shape, num_layers=few))
    layer = host_peak_bytes(replace(shape, num_layers=more)) - base
    count = few + (limit - base) // layer
    if count < few:
        sys.exit(f"{limit / _GIB:.1f} GiB of host memory don't hold {few} layers: give --layers")
    return count


def rows(shape: str, layers: int) -> list[Row]:
    """Returns the table's rows."""
    largest = {"shape": shape, "layers": layers}
    return [
        Row(name=f"{shape}, least", options={"shape": shape, "device-budget": "least"}),
        Row(name=f"{shape}, auto", options={"shape": shape, "device-budget": "auto"}),
        Row(
            name=f"{shape}, auto, clip 1",
            options={"shape": shape, "device-budget": "auto", "clip": 1.0},
        ),
        Row(name=f"{layers} layers, least", options={**largest, "device-budget": "least"}),
        Row(name=f"{layers} layers, auto", options={**largest, "device-budget": "auto"}),
    ]


def main() -> None:
    """Measures the rows and prints the table."""
    options = parser(__doc__, "large")
    add_shape(options, "qwen2.5-7b-untied")
    options.add_argument("--layers", type=int, help="layers of the largest; else as many as fit")
    options.add_argument(
        "--reserve", type=float, default=8.0, help="GiB of host memory to leave to all else"
    )
    args = options.parse_args()
    layers = args.layers
    if layers is None:
        # This process only plans, and leaves the GPU's memory to the processes that measure.
        jax.config.update("jax_platforms", "cpu")
        total = host_memory.total_bytes()
        if total is None:
            sys.exit("this system does not tell how much memory it has: give --layers")
        layers = most_layers(SHAPES[args.shape], total - int(args.reserve * _GIB))
        print(f"{layers} layers fit into {total / _GIB:.1f} GiB", flush=True)
    parameters = ("parameters", number("num_parameters", ",d"))
    columns = (parameters, *STANDARD, TFLOPS_WITH_ATTENTION, PLANNED_HOST, PEAK_HOST)
    run_table(rows(args.shape, layers), args, columns)


if __name__ == "__main__":
    main()
