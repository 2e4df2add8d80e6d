"""Tables of a history, a result and a trainer, from plain values."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatrain_jax._src.common.checks import is_number
from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.engine.adapt.loss_function import EVAL_PREFIX
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.report.curves import points
from megatrain_jax._src.engine.report.table import seconds as spelled
from megatrain_jax._src.engine.report.table import short

if TYPE_CHECKING:
    from megatrain_jax._src.engine.spec.run_spec import RunSpec

# Number of records shown from the start of a history, and from its end.
_SHOWN = 5


def record_cells(records: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The table of a history, with a header; if there are many records, the middle is left out."""
    # The row of dots takes as much space as one record, so at least two are hidden.
    hidden = len(records) - 2 * _SHOWN
    shown = [*records] if hidden <= 1 else [*records[:_SHOWN], *records[-_SHOWN:]]
    names = list(dict.fromkeys(name for record in shown for name in record))
    cells = [[_spelled(name, record.get(name)) for name in names] for record in shown]
    if hidden > 1:
        cells.insert(_SHOWN, ["…", *[""] * (len(names) - 1)])
    return [names, *cells]


def result_cells(
    num_steps: int, reason: str, records: Sequence[Mapping[str, Any]]
) -> list[list[str]]:
    """The table of a result: steps, reason of the end, and losses."""
    cells = [["steps", f"{num_steps}", reason]]
    for name in ("loss", EVAL_PREFIX + "loss"):
        numbers, values = points(records, name)
        if len(values):
            # NaN comes last, because nothing compares less than it.
            best = min(range(len(values)), key=lambda i: (values[i] != values[i], values[i]))
            first = f"{values[0]:.6g} at step {numbers[0]:.0f}"
            least = f"lowest {values[best]:.6g} at step {numbers[best]:.0f}"
            cells.append([name, f"{values[-1]:.6g}", f"{first}, {least}"])
    return cells


def trainer_cells(
    spec: "RunSpec", num_steps: int, records: Sequence[Mapping[str, Any]], devices: Sequence[Any]
) -> list[list[str]]:
    """The table of a trainer: its model, its progress, and its device budget."""
    parameters = sum(map(jx.num_elements, spec.leaves))
    groups = len(spec.layouts)
    budget, schedule = spec.budget_bytes, spec.first.schedule
    within = "the minimum" if budget is None else f"of a budget of {sized(budget)}"
    last = records[-1] if records else {}
    losses = (f"{n} {_spelled(n, last[n])}" for n in ("loss", EVAL_PREFIX + "loss") if n in last)
    names = ", ".join(str(device) for device in devices)
    return [
        ["parameters", short(parameters), f"in {groups} group{'' if groups == 1 else 's'}"],
        ["loss function", getattr(spec.loss_fn, "__name__", type(spec.loss_fn).__name__), ""],
        ["step", f"{num_steps}", ", ".join(losses)],
        ["device memory, state and activations", sized(schedule.peak_bytes), within],
        ["devices", f"{len(devices)}", names],
    ]


def _spelled(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "seconds" and is_number(value):
        return spelled(value)
    if isinstance(value, list):  # such as samples, which would each take a line of the table
        return f"{len(value)} of them"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
