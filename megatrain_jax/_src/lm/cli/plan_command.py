"""`megatrain-jax plan`: the needs of a run on a machine, or the largest runs that fit it."""

import math
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import get_context

import jax

import megatrain_jax as mt
from megatrain_jax._src.common.remembering import gc_paused, remembering
from megatrain_jax._src.lm.cli.advice import advice, advice_on_process
from megatrain_jax._src.lm.cli.catalogue import known_models
from megatrain_jax._src.lm.cli.errors import with_cli_options
from megatrain_jax._src.lm.cli.largest import fits, largest_size, least_host_bytes, with_few_layers
from megatrain_jax._src.lm.cli.plan_settings import PlanSettings
from megatrain_jax._src.lm.cli.planner import Planner, config_of
from megatrain_jax.models import DecoderConfig


def run(settings: PlanSettings) -> int:
    """Prints a plan, or the largest sizes that fit; returns 1 if nothing fits, else 0."""
    with _planning_cache():
        if settings.model is None or settings.tokens is None:
            return _print_largest(settings)
        return _print_plan(settings, settings.model, settings.tokens)


def _print_plan(settings: PlanSettings, model: str, tokens: int) -> int:
    planner, config = Planner(settings), config_of(model)
    plan = planner.plan(config, tokens // settings.length, settings.length)
    print(f"{model}, {settings.batch}, on {planner.where}\n")
    print(with_cli_options(str(plan)))
    rate = tokens / (plan.seconds_per_step or math.inf)
    print(f"\ntokens a second, estimate: {rate:,.0f}")
    if remark := planner.remark(config, plan):
        print(remark)
    if not fits(plan):

        def fits_with(changed: PlanSettings) -> bool:
            other = Planner(changed, planner.machine)

            def planned(config: DecoderConfig) -> mt.Plan:
                return other.plan(config, tokens // changed.length, changed.length, least=True)

            # Planning a whole model takes seconds. A few of its layers give lower bounds of its GPU
            # memory, and of the host memory of its state.
            small = with_few_layers(config)
            few = planned(small)
            host = few.host_process_limit or math.inf
            may_fit = bool(few.fits_device) and least_host_bytes(few, config) <= host
            return may_fit and fits(few if small == config else planned(config))

        print(f"It does not fit: {_advise(plan, settings, fits_with)}")
        return 1
    return 0


def _print_largest(settings: PlanSettings) -> int:
    planner = Planner(settings)
    if settings.model is not None:
        config_of(settings.model)  # reports a bad model here, in one line
    unmeasured = f" ({planner.machine.source})" if planner.machine.is_unmeasured else ""
    print(f"The largest on {planner.where}; rates are estimates{unmeasured}.\n", flush=True)
    found = []
    # Each size is printed as soon as it and the earlier ones are found.
    for line in _lines(settings, planner):
        found.append(line is not None)
        if line is not None:
            print(line, flush=True)
    if not any(found):
        print(f"Nothing fits: {_advise_smallest(planner)}")
    elif settings.model is not None and not any(found[:-1]):  # the last one is for any model
        print(f"{settings.model} doesn't fit: {_advise_smallest(planner)}")
    else:
        return 0
    return 1


def _advise(
    plan: mt.Plan, settings: PlanSettings, fits_with: Callable[[PlanSettings], bool]
) -> str:
    """The advice for a plan that doesn't fit; see `advice`."""
    if advised := advice_on_process(plan):
        return advised
    # Explains why there may be no output for a minute.
    print("Looking for options with which it fits ...", file=sys.stderr, flush=True)
    return advice(plan, settings, fits_with)


def _advise_smallest(planner: Planner) -> str:
    """The advice for the fewest rows of the settings' model, or of the smallest known one."""
    smallest = min(known_models(), key=lambda name: known_models()[name].num_parameters)
    config = config_of(planner.settings.model or smallest)

    def fits_with(changed: PlanSettings) -> bool:
        return fits(Planner(changed, planner.machine).smallest(config))

    return _advise(planner.smallest(config), planner.settings, fits_with)


def _lines(settings: PlanSettings, planner: Planner) -> Iterator[str | None]:
    """The lines of all sizes; searches take seconds, so they run in parallel if there are cores."""
    line = partial(_line, settings, planner.machine)
    kinds = ["model"] if settings.model is None else ["batch", "context", "model"]
    others = min(len(kinds), len(os.sched_getaffinity(0))) - 1
    # Searches in this process share the results that don't depend on the batch.
    here, elsewhere = kinds[: len(kinds) - others], kinds[len(kinds) - others :]
    with ExitStack() as stack:
        found: Iterator[str | None] = iter(())
        if elsewhere:
            # Not forked, because JAX has threads. And no plan needs the GPU, which this process may
            # hold exclusively.
            context = get_context("spawn")
            pool = ProcessPoolExecutor(others, mp_context=context, initializer=_use_cpu)
            found = stack.enter_context(pool).map(line, elsewhere)
        for kind in here:
            yield _found(planner, kind)
        yield from found


def _use_cpu() -> None:
    jax.config.update("jax_platforms", "cpu")


def _line(settings: PlanSettings, machine: mt.Hardware, kind: str) -> str | None:
    with _planning_cache():
        return _found(Planner(settings, machine), kind)


def _found(planner: Planner, kind: str) -> str | None:
    name = planner.settings.model
    size = largest_size(planner, kind, name, None if name is None else config_of(name))
    return size and str(size)


@contextmanager
def _planning_cache() -> Iterator[None]:
    """Lets plans share common results, and pauses cyclic garbage collection.

    The garbage is half a GiB at most, and collecting it would take a sixth of the time.
    """
    with gc_paused(), remembering():
        yield
