"""Measures a plain JAX training step, or this library's of the same model, in this process.

The plain step is what a user writes without this library: `jax.jit` around `jax.value_and_grad` and
Optax, fp32 parameters cast to bf16 in the loss, everything on the GPU, nothing computed again in
backward but what the loss itself wants so (the decoder's makes its logits in chunks). Without
recomputation, activations of a whole batch need more room than the GPU has: gradients of
microbatches are added up in a `jax.lax.scan`. `plain.py` runs it for each row.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import decoder
import jax
import jax.numpy as jnp
import optax
import vit
from flax import nnx
from machine import hardware, peak_device_gib, peak_host_gib, versions
from measure import budget, chosen_optimizer, compute_dtype, figures_of_plan, row
from record import add_origin_options, find_origin, write
from shapes import Shape, add_shape_options, chosen_shape
from timing import MIN_STEPS, Work, time_steps

import megatrain_jax as mt

_WARM_UP_STEPS = 3
_BATCHES = 4
Params = Any


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model to train, with its loss and data.

    Attributes:
        build: Builds it, as the library and a user take it.
        loss_fn: The loss of a model and a batch, a scalar in fp32.
        batch: Random batches by a seed.
    """

    build: Callable[[], Any]
    loss_fn: Callable[[Any, Any], jax.Array]
    batch: Callable[[int], dict[str, Any]]


def chosen_model(name: str, shape: Shape, compute: Any) -> Model:
    """Returns a model by the name that `--model` gives it."""
    if name == "vit":
        return Model(
            build=vit.builder(shape),
            loss_fn=vit.loss_fn,
            batch=partial(vit.random_batch, shape),
        )
    return Model(
        build=lambda: decoder.Decoder(shape, compute, nnx.Rngs(0)),
        loss_fn=decoder.loss_fn,
        batch=partial(decoder.random_batch, shape),
    )


def split(model: Any) -> tuple[Params, Callable[[Params], Any]]:
    """Returns a model's parameters, and the function that puts parameters back into it."""
    if isinstance(model, nnx.Module):
        graph, params = nnx.split(model)
        return params, lambda new: nnx.merge(graph, new)
    leaves, tree = jax.tree.flatten(model)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

    def join(new: list[jax.Array]) -> Any:
        changed = dict(zip(places, new, strict=True))
        return jax.tree.unflatten(tree, [changed.get(i, leaf) for i, leaf in enumerate(leaves)])

    return [leaves[i] for i in places], join


def make_step(
    loss_of: Callable[[Params, Any], jax.Array],
    optimizer: optax.GradientTransformation,
    microbatches: int,
) -> Callable[[Params, Any, Any], tuple[Params, Any, jax.Array]]:
    """Returns the plain step: (parameters, optimizer state, batch) to both, renewed, and the loss.

    Args:
        loss_of: The loss by parameters and batch.
        optimizer: Updates the parameters.
        microbatches: Number of parts that the batch is split into.
    """

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, state: Any, batch: Any) -> tuple[Params, Any, jax.Array]:
        def add(total: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_of)(params, part)), None

        if microbatches == 1:
            loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        else:
            parts = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)
            zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
            sums, _ = jax.lax.scan(add, zeros, parts)
            loss, gradients = jax.tree.map(lambda x: x / microbatches, sums)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def plain_work(
    model: Model, optimizer: optax.GradientTransformation, compute: Any, args: argparse.Namespace
) -> tuple[Work, dict[str, Any]]:
    """Returns the plain steps to time, and how many parameters they train."""
    params, join = split(model.build())

    def loss_of(params: Params, batch: Any) -> jax.Array:
        return model.loss_fn(join(jax.tree.map(lambda x: x.astype(compute), params)), batch)

    step = make_step(loss_of, optimizer, args.microbatches)
    num_parameters = sum(x.size for x in jax.tree.leaves(params))
    held = {"params": params, "state": optimizer.init(params)}
    batches = cycle([model.batch(seed) for seed in range(_BATCHES)])

    def begin() -> jax.Array:
        held["params"], held["state"], loss = step(held["params"], held["state"], next(batches))
        return loss

    work = Work(begin=begin, finish=float, drain=lambda: jax.block_until_ready(held))
    return work, {"num_parameters": num_parameters}


def library_work(
    model: Model, optimizer: optax.GradientTransformation, compute: Any, args: argparse.Namespace
) -> tuple[Work, dict[str, Any]]:
    """Returns this library's steps to time, and the figures of its plan."""
    batches = cycle([model.batch(seed) for seed in range(_BATCHES)])
    trainer = mt.Trainer(
        model.build,
        model.loss_fn,
        optimizer,
        model.batch(0),
        microbatches=args.microbatches,
        precision=mt.Precision(compute=compute),
        device_budget=budget(args.device_budget),
    )
    print(trainer.plan, flush=True)
    work = Work(
        begin=lambda: trainer.step(next(batches)),
        finish=lambda metrics: trainer.read(metrics)["loss"],
        drain=trainer.flush,
    )
    return work, figures_of_plan(trainer.plan)


def measure(args: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """Trains some steps and returns their figures."""
    compute, optimizer = compute_dtype(), chosen_optimizer(args.clip)
    make = plain_work if args.device_budget == "plain" else library_work
    model = chosen_model(args.model, shape, compute)
    work, about = make(model, optimizer, compute, args)
    losses = [work.finish(work.begin()) for _ in range(_WARM_UP_STEPS)]
    times = time_steps(work, args.steps)
    rate = shape.num_tokens / times.mean
    return {
        **about,
        **times.figures(),
        "tokens_per_step": shape.num_tokens,
        "tokens_per_second": rate,
        "tflops_per_second": 6 * about["num_parameters"] * rate / 1e12,
        "peak_device_gib": peak_device_gib(),
        "peak_host_gib": peak_host_gib(),
        "losses": losses + times.losses,
    }


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("decoder", "vit"), default="decoder")
    add_shape_options(parser)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--clip", type=float, help="clip the gradients' global norm to this")
    parser.add_argument(
        "--device-budget",
        default="plain",
        metavar="BUDGET",
        help="plain: the step without this library; else as of measure.py",
    )
    parser.add_argument("--steps", type=int, default=MIN_STEPS, help="steps that the mean is of")
    parser.add_argument("--out", type=Path, default=Path("runs/throughput/plain.json"))
    add_origin_options(parser)
    return parser.parse_args()


def describe(args: argparse.Namespace, shape: Shape) -> Mapping[str, Any]:
    """Returns the options, the machine and the versions that the figures depend on."""
    return {
        "command": shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
        "model": args.model,
        "shape": args.shape,
        "sizes": asdict(shape),
        "device_budget": args.device_budget,
        "clip": args.clip,
        "microbatches": args.microbatches,
        "hardware": hardware(),
        "versions": versions(),
    }


def main() -> None:
    """Measures, prints the row and writes everything."""
    args = parse_arguments()
    shape, origin = chosen_shape(args), find_origin(args)
    result = {**describe(args, shape), **measure(args, shape)}
    print(row(write(args.out, result, origin)), flush=True)


if __name__ == "__main__":
    main()
