"""Plans side by side: one row per combination of arguments; refused ones show the reason."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.engine.report import table
from megatrain_jax._src.engine.report.plan import Plan
from megatrain_jax._src.engine.report.plan_table import bound_of

_MEASURES = ("fits", "a step", "bound by", "host", "device", "in, a step", "out, a step", "")


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One combination of arguments, with its plan or the reason why there is none.

    Attributes:
        names: For each axis of the comparison, the name of the row's value.
        plan: The plan; None if the combination is refused.
        refused: The reason, in words; None if it is not refused.
    """

    names: tuple[str, ...]
    plan: Plan | None
    refused: str | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class PlanComparison(Sequence[PlanRow]):
    """Plans side by side; a sequence of rows that prints as a table.

    Attributes:
        axes: The names of the arguments that differ.
        rows: One for each combination; the last argument changes first.
    """

    axes: tuple[str, ...]
    rows: tuple[PlanRow, ...]

    def __getitem__(self, index):
        """Returns a row by its number, or several by a slice."""
        return self.rows[index]

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self.rows)

    def __iter__(self) -> Iterator[PlanRow]:
        """Iterates over the rows."""
        return iter(self.rows)

    def __repr__(self) -> str:
        """Returns the comparison as a plain text table, and the machines with unmeasured rates."""
        return "\n".join([table.aligned(self._cells()), *self._remarks()])

    def _repr_html_(self) -> str:
        remarks = (table.html_line(remark) for remark in self._remarks())
        return table.html_box(table.html_table(self._cells(), header=True), *remarks)

    def _remarks(self) -> list[str]:
        """A line for each machine with rates that nobody has measured."""
        machines = [row.plan.hardware for row in self.rows if row.plan and row.plan.hardware]
        unmeasured = {m.name: m.source for m in machines if m.is_unmeasured}
        return [f"rates of {name}: {source}" for name, source in unmeasured.items()]

    def _cells(self) -> list[list[str]]:
        return [[*self.axes, *_MEASURES], *([*row.names, *_measured(row)] for row in self.rows)]


def _measured(row: PlanRow) -> list[str]:
    """The cells of a row after its names: whether it fits, the time of a step, its bytes."""
    plan = row.plan
    if plan is None:
        return ["refused", *[""] * (len(_MEASURES) - 2), row.refused or ""]
    timed = plan.hardware is not None
    host = plan.host_process_bytes or plan.host_peak_bytes
    return [
        _fits(plan),
        table.seconds(plan.seconds_per_step),
        bound_of(plan) if timed else "",
        sized(host),
        sized(plan.device_bytes),
        sized(plan.bytes_in),
        sized(plan.bytes_out),
        "; ".join(plan.warnings),
    ]


def _fits(plan: Plan) -> str:
    """Whether host and device suffice, and the name of each that does not."""
    known = {"host": plan.fits_host, "device": plan.fits_device}
    # If one is known not to fit, that decides, even if the second is unknown.
    if unfit := [name for name, fits in known.items() if fits is False]:
        return f"{table.UNFIT} the {' or the '.join(unfit)}"
    return "unknown" if None in known.values() else "yes"


def compare(axes: dict[str, dict[str, object]], make: Callable[..., Plan]) -> PlanComparison:
    """Makes the plan of each combination of some arguments' values.

    Args:
        axes: The arguments' names, with their values by name.
        make: Function that makes a plan from one value of each.
    """
    rows = []
    for row in product(*(values.items() for values in axes.values())):
        given = dict(zip(axes, (value for _, value in row), strict=True))
        rows.append(_row(tuple(name for name, _ in row), given, make))
    return PlanComparison(axes=tuple(axes), rows=tuple(rows))


def _row(names: tuple[str, ...], given: dict[str, object], make: Callable[..., Plan]) -> PlanRow:
    try:
        return PlanRow(names=names, plan=make(**given))
    # Refusals are `ValueError`s with a message for users; any different error is a bug.
    except ValueError as error:
        return PlanRow(names=names, plan=None, refused=str(error))
