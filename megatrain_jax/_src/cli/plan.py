"""`megatrain-jax plan`: what a run needs on a machine, or the largest runs that fit it."""

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager

from megatrain_jax._src.cli.largest import fits, largest_sizes
from megatrain_jax._src.cli.planner import Planner, PlanSettings, config_of

_LESS = (
    "Less is needed with --state compact, --optimizer lion, --clip null, more "
    "--microbatches, a smaller --length or --device-budget least; docs/fitting.md has more."
)


def run(settings: PlanSettings) -> int:
    """Prints a plan, or the largest sizes that fit; returns 1 if nothing does, and else 0."""
    with _no_collections():
        return _run(settings)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Leaves cyclic garbage, half a GiB at most: to look for it takes a sixth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _run(settings: PlanSettings) -> int:
    planner = Planner(settings)
    config = None if settings.model is None else config_of(settings.model)
    if config is None or settings.tokens is None:
        print(f"The largest on {planner.where}; rates are estimates.\n", flush=True)
        # Each size is printed as soon as it is found: the next one may take a minute.
        found = 0
        for size in largest_sizes(planner, settings.model, config):
            print(size, flush=True)
            found += 1
        if not found:
            print(f"Nothing fits. {_LESS}")
        return 0 if found else 1
    plan = planner.plan(config, settings.tokens // settings.length, settings.length)
    print(f"{settings.model}, {settings.batch}, on {planner.where}\n")
    print(plan)
    rate = settings.tokens / (plan.seconds_per_step or math.inf)
    print(f"\ntokens a second, estimate: {rate:,.0f}")
    if not fits(plan):
        print(f"It does not fit. {_LESS}")
        return 1
    return 0
