"""Advice on a plan that doesn't fit, by the memory that lacks."""

import megatrain_jax as mt
from megatrain_jax._src.cli.plan_settings import PlanSettings


def advice(plan: mt.Plan, settings: PlanSettings) -> str:
    """The memory that lacks, and the options that would need less of it.

    Args:
        plan: A plan that doesn't fit the host, the device or both.
        settings: Its settings; what they say already is not advised.
    """
    of_host = {
        "--state compact": settings.state != "compact",
        "--optimizer lion": settings.optimizer != "lion",
        "--clip null": settings.clip is not None,
    }
    of_device = {
        "more --microbatches": True,
        "a smaller --length": True,
        "--device-budget least": settings.device_budget != "least",
    }
    parts = []
    if plan.fits_host is False:
        parts.append(_lacking("host memory", of_host, "a larger --host"))
    if not plan.fits_device:
        parts.append(_lacking("GPU memory", of_device, "a larger --gpu"))
    return " ".join([*parts, "docs/fitting.md has more."])


def _lacking(memory: str, options: dict[str, bool], larger: str) -> str:
    left = [option for option, is_left in options.items() if is_left]
    less = f"Less of it is needed with {' or '.join(left)}" if left else "All options say less"
    return f"{memory} is what lacks. {less}, and {larger} has more."
