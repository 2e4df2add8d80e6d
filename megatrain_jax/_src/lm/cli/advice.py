"""Advice for a plan that doesn't fit: the missing memory, and options that would make it fit."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import megatrain_jax as mt
from megatrain_jax._src.common import checks
from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.lm.cli.plan_settings import PlanSettings

# Rank of the suggested adapters.
_RANK = 16


@dataclass(frozen=True, kw_only=True)
class _Option:
    """An option that saves memory.

    Attributes:
        text: The option as it is written in a command.
        changes: The settings that it changes.
        cost: Its disadvantage, as words that follow the option in a sentence.
    """

    text: str
    changes: dict[str, Any]
    cost: str


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
    chosen = _chosen(list(_options(settings, *lacking)), settings, is_enough)
    if not chosen:
        larger = {"host memory": _larger_host(plan), "GPU memory": "a --gpu with more memory"}
        needed = " and ".join(larger[memory] for memory in lacking)
        return f"{text} No option of this command is enough: it needs {needed}, or a smaller model."
    options = " ".join(option.text for option in chosen)
    costs = "; ".join(f"{option.text} {option.cost}" for option in chosen)
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


def _chosen(
    options: list[_Option],
    settings: PlanSettings,
    is_enough: Callable[[Sequence[_Option]], bool],
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
    for option in reversed(chosen[:-1]):
        rest = [kept for kept in chosen if kept is not option]
        # A later option may replace an earlier one: two_bytes stores less than compact.
        same = _changed(settings, rest) == _changed(settings, chosen)
        if same or (len(rest) > 1 and is_enough(rest)):
            chosen = rest
    return chosen


def _changed(settings: PlanSettings, options: Sequence[_Option]) -> PlanSettings:
    changes = {name: value for option in options for name, value in option.changes.items()}
    return replace(settings, **changes)


def _options(settings: PlanSettings, *lacking: str) -> Iterator[_Option]:
    """The options that need less of the missing memory, from the least to the most intrusive.

    Options that only cost time come first, then rounded numbers, another optimizer, shorter rows,
    and at last fewer trained parameters.
    """
    if "GPU memory" in lacking:
        budget = checks.device_budget(settings.device_budget)
        if budget is not None and budget != "minimum":
            cost = "copies more in each step, which may take longer"
            yield _option("--device-budget minimum", cost, device_budget="minimum")
    # Smaller microbatches need less GPU memory and, in waves, keep fewer bytes in the host.
    if settings.tokens is not None and settings.microbatches != "auto":
        rows = settings.tokens // settings.length
        if rows // settings.gpus > settings.microbatches:
            cost = "computes a batch in more parts, which may take longer"
            yield _option("--microbatches auto", cost, microbatches="auto")
    if settings.sums != "bfloat16" and settings.tokens is not None:
        cost = "rounds the sums of gradients to 16 bits"
        yield _option("--sums bfloat16", cost, sums="bfloat16")
    is_known = settings.optimizer_options is None
    if settings.precision not in ("compact", "two_bytes"):
        cost = "rounds parameters to bfloat16 and the optimizer's moments to 8 bits"
        yield _option("--precision compact", cost, precision="compact", state=None, master=None)
    # Of the known optimizers, only AdamW has more state than Lion.
    if settings.optimizer == "adamw" and is_known:
        cost = "needs a learning rate of its own, 3 to 10 times lower than AdamW's"
        yield _option("--optimizer lion", cost, optimizer="lion")
    if "host memory" in lacking and settings.clip is not None:
        yield _option("--clip null", "leaves gradients unclipped", clip=None)
    if settings.optimizer in ("adamw", "lion", "muon") and is_known:
        cost = "has no momentum and needs a learning rate of its own"
        yield _option("--optimizer adafactor", cost, optimizer="adafactor")
    if settings.precision != "two_bytes":
        cost = "rounds parameters to 8 bits and moments to 4 bits, which is experimental"
        yield _option("--precision two_bytes", cost, precision="two_bytes", state=None, master=None)
    if "GPU memory" in lacking and settings.length % 2 == 0 and settings.length >= 1024:
        half = settings.length // 2
        yield _option(f"--length {half}", f"cuts texts at {half:,} tokens", length=half)
    if settings.lora_rank is None and settings.trainable is None:
        rank, trains = f"--lora-rank {_RANK}", "trains adapters instead of the parameters"
        yield _option(rank, trains, lora_rank=_RANK)
        if settings.frozen is None:
            cost = f"{trains}, which are stored in 4 bits"
            yield _option(f"{rank} --frozen nf4", cost, lora_rank=_RANK, frozen="nf4")


def _option(text: str, cost: str, **changes: Any) -> _Option:
    return _Option(text=text, changes=changes, cost=cost)
