"""`megatrain-jax plan`: the needs of a run on a machine, or the largest runs that fit it.

A plan that doesn't fit comes with advice: the missing memory, and options that would make it fit.
"""

import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import megatrain_jax as mt
from megatrain_jax._src.common import checks
from megatrain_jax._src.common.progress import told_if_slow
from megatrain_jax._src.common.remembering import gc_paused, remembering
from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.lm.cli.catalogue import known_models
from megatrain_jax._src.lm.cli.errors import as_command_errors, option, with_cli_options
from megatrain_jax._src.lm.cli.few_layers import with_few_layers
from megatrain_jax._src.lm.cli.largest import fits, largest_size, least_host_bytes
from megatrain_jax._src.lm.cli.plan_settings import PlanSettings
from megatrain_jax._src.lm.cli.planner import Planner, config_of
from megatrain_jax.models import DecoderConfig


def run(settings: PlanSettings) -> int:
    """Prints a plan, or the largest sizes that fit; returns 1 if nothing fits, else 0.

    Raises:
        CommandError: If the request is invalid.
    """
    # Plans share common results. The garbage of tracing is half a GiB at most, and collecting it
    # would take a sixth of the time.
    with as_command_errors(), gc_paused(), remembering():
        if settings.model is None or settings.tokens is None:
            return _print_largest(settings)
        return _print_plan(settings, settings.model, settings.tokens)


def _print_plan(settings: PlanSettings, model: str, tokens: int) -> int:
    planner, config = Planner(settings), config_of(model)
    with told_if_slow(f"Planning {model} ..."):
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
    planner, name = Planner(settings), settings.model
    config = None if name is None else config_of(name)
    unmeasured = f" ({planner.machine.source})" if planner.machine.is_unmeasured else ""
    print(f"The largest on {planner.where}; rates are estimates{unmeasured}.\n", flush=True)
    found = []
    # In one process, because the searches share most results.
    for kind in ["model"] if name is None else ["batch", "context", "model"]:
        with told_if_slow(f"Searching the largest {kind} ..."):
            size = largest_size(planner, kind, name, config)
        found.append(size is not None)
        if size is not None:
            print(size, flush=True)
    if not any(found):
        print(f"Nothing fits: {_advise_smallest(planner)}")
    elif name is not None and not any(found[:-1]):  # the last one is for any model
        print(f"{name} doesn't fit: {_advise_smallest(planner)}")
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


# Rank of the suggested adapters.
_RANK = 16


@dataclass(frozen=True)
class _Option:
    """An option that saves memory.

    Attributes:
        cost: Its disadvantage, as words that follow the option in a sentence.
        changes: The settings that it changes.
    """

    cost: str
    changes: dict[str, Any]

    @property
    def text(self) -> str:
        """The option as it is written in a command."""
        # These two go back to their defaults, which `precision` decides.
        shown = {name: x for name, x in self.changes.items() if name not in ("state", "master")}
        words = (f"{option(k)} {'null' if x is None else x}" for k, x in shown.items())
        return " ".join(words)


def advice(plan: mt.Plan, settings: PlanSettings, fits_with: Callable[[PlanSettings], bool]) -> str:
    """The missing memory, and the least intrusive options with which the run fits.

    Options are added in the order of `_options` until a plan fits; then unnecessary ones are left
    out. So training all parameters with rounded numbers or another optimizer is
    advised before adapters.

    Args:
        plan: A plan that doesn't fit the host, the device or both.
        settings: Its settings; options that they already have are not suggested.
        fits_with: Returns whether the same run fits with changed settings; it takes seconds.
    """
    lacking = ["host memory"] if plan.fits_host is False else []
    lacking += [] if plan.fits_device else ["GPU memory"]

    def is_enough(options: Sequence[_Option]) -> bool:
        return fits_with(_changed(settings, options))

    text = f"not enough {' and '.join(lacking)}."
    every = list(_options(settings, *lacking))
    try:
        chosen = _least_intrusive(every, settings, is_enough)
    except ValueError:  # some models can't have adapters
        others = [one for one in every if "lora_rank" not in one.changes]
        chosen = _least_intrusive(others, settings, is_enough)
    if not chosen:
        larger = {"host memory": _larger_host(plan), "GPU memory": "a --gpu with more memory"}
        needed = " and ".join(larger[memory] for memory in lacking)
        return f"{text} No option of this command is enough: it needs {needed}, or a smaller model."
    options = " ".join(one.text for one in chosen)
    costs = "; ".join(f"{one.text} {one.cost}" for one in chosen)
    return f"{text} It fits with {options}. The cost: {costs}. docs/fitting.md has more."


def advice_on_process(plan: mt.Plan) -> str | None:
    """The advice if the host is too small for a process without any state; None if it is not."""
    least, most = plan.host_fixed_bytes, plan.host_process_limit
    if least is None or most is None or least < most:
        return None
    return (
        f"not enough host memory. A process may take {sized(most)} and needs {sized(least)} for "
        f"itself, before it has any state. It needs {_larger_host(plan)}; no smaller model and no "
        "other option would help."
    )


def _larger_host(plan: mt.Plan) -> str:
    """The option that limits a plan's host memory, for a sentence on what it needs."""
    limit = "--host-budget" if plan.host_budget == plan.host_process_limit else "--host"
    return f"a larger {limit}"


def _least_intrusive(
    options: list[_Option], settings: PlanSettings, is_enough: Callable[[Sequence[_Option]], bool]
) -> list[_Option]:
    """As `_chosen`, but sums in bfloat16 are left out if less intrusive options suffice then.

    A backward that rounds sums has further numbers in fp32 beside it, so a run may fit only
    without.
    """
    chosen = _chosen(options, settings, is_enough)
    others = [one for one in options if "sums" not in one.changes]
    if len(others) == len(options) or chosen and "lora_rank" not in chosen[-1].changes:
        return chosen
    both = filter(None, (chosen, _chosen(others, settings, is_enough)))
    return min(both, key=lambda those: options.index(those[-1]), default=[])


def _chosen(
    options: list[_Option], settings: PlanSettings, is_enough: Callable[[Sequence[_Option]], bool]
) -> list[_Option]:
    """The least intrusive options that together make the run fit; empty if all together do not.

    Args:
        options: The options, from the least to the most intrusive.
        settings: The settings without them.
        is_enough: Whether the run fits with some options; more of them need less memory.
    """
    if not options or not is_enough(options):
        return []
    fewer = range(1, len(options))
    number = 1 + bisect_left(fewer, True, key=lambda n: is_enough(options[:n]))
    chosen, last = options[:number], options[number - 1]
    # Most often the last one is enough by itself.
    if number > 1 and is_enough([last]):
        return [last]
    # The most intrusive ones first, so that the mildest remain.
    for one in reversed(chosen[:-1]):
        rest = [kept for kept in chosen if kept is not one]
        # A later option may replace an earlier one: two_bytes stores less than compact.
        same = _changed(settings, rest) == _changed(settings, chosen)
        if same or (len(rest) > 1 and is_enough(rest)):
            chosen = rest
    return chosen


def _changed(settings: PlanSettings, options: Sequence[_Option]) -> PlanSettings:
    changes = {name: value for one in options for name, value in one.changes.items()}
    return replace(settings, **changes)


def _options(settings: PlanSettings, *lacking: str) -> Iterator[_Option]:
    """The options that need less of the missing memory, from the least to the most intrusive.

    Options that only cost time come first, then rounded numbers, another optimizer, a drive,
    shorter rows, and at last fewer trained parameters.
    """
    if "GPU memory" in lacking:
        budget = checks.device_budget(settings.device_budget)
        if budget is not None and budget != "minimum":
            cost = "copies more in each step, which may take longer"
            yield _option(cost, device_budget="minimum")
    # Smaller microbatches need less GPU memory and, in waves, keep fewer bytes in the host.
    parts = settings.microbatches
    rows = (settings.tokens or 0) // settings.length
    if parts != "auto" and rows // settings.num_gpus > parts:
        cost = "computes a batch in more parts, which may take longer"
        yield _option(cost, microbatches="auto")
    if settings.sums != "bfloat16" and settings.tokens is not None:
        cost = "rounds the sums of gradients to 16 bits"
        yield _option(cost, sums="bfloat16")
    is_known = settings.optimizer_options is None
    if settings.precision not in ("compact", "two_bytes"):
        cost = "rounds parameters to bfloat16 and the optimizer's moments to 8 bits"
        yield _option(cost, precision="compact", state=None, master=None)
    # Of the known optimizers, only AdamW has more state than Lion.
    if settings.optimizer == "adamw" and is_known:
        cost = "needs a learning rate of its own, 3 to 10 times lower than AdamW's"
        yield _option(cost, optimizer="lion")
    if "host memory" in lacking and settings.clip is not None:
        yield _option("leaves gradients unclipped", clip=None)
    if settings.optimizer in ("adamw", "lion", "muon") and is_known:
        cost = "has no momentum and needs a learning rate of its own"
        yield _option(cost, optimizer="adafactor")
    if "host memory" in lacking and settings.disk is None:
        cost = "keeps a part of the state on a drive, a `disk_dir`, which takes longer and wears it"
        yield _option(cost, disk="2GB/s")
    if settings.precision != "two_bytes":
        cost = "rounds parameters to 8 bits and moments to 4 bits, which is experimental"
        yield _option(cost, precision="two_bytes", state=None, master=None)
    if "GPU memory" in lacking and settings.length % 2 == 0 and settings.length >= 1024:
        half, cut = settings.length // 2, {}
        if parts != "auto" and rows // settings.num_gpus <= parts < 2 * rows // settings.num_gpus:
            cut = {"microbatches": "auto"}  # there are twice as many rows then
        yield _option(f"cuts texts at {half:,} tokens", length=half, **cut)
    if settings.lora_rank is None and settings.trainable is None:
        cost = "trains adapters instead of the parameters"
        yield _option(cost, lora_rank=_RANK)
        if settings.frozen is None:
            cost = f"{cost}, which are stored in 4 bits"
            yield _option(cost, lora_rank=_RANK, frozen="nf4")


def _option(cost: str, **changes: Any) -> _Option:
    return _Option(cost, changes)
