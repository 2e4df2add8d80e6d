"""Table: immediate and clipped updates over device budgets, against all state resident."""

from common import LINK_SHARE, STANDARD, Row, add_shape, parser, run_table

_RESIDENT = "all state resident"
# Clipping by the global norm defers updates to the next forward, which wants more room.
_BUDGETS = {
    None: ("least", "8", "16", "32", "64", "auto"),
    1.0: ("least", "24", "40", "60", "auto"),
}


def rows(shape: str) -> list[Row]:
    """Returns the table's rows; the resident step without clipping is everybody's yardstick."""
    found = [
        Row(
            name=_RESIDENT,
            options={"shape": shape, "device-budget": "all"},
            yardstick=_RESIDENT,
        )
    ]
    for clip, budgets in _BUDGETS.items():
        kind = "immediate" if clip is None else f"clip {clip:g}"
        for budget in budgets:
            options = {"shape": shape, "device-budget": budget}
            if clip is not None:
                options["clip"] = str(clip)
            state = f"{budget} GiB" if budget.isdigit() else budget
            found.append(Row(name=f"{kind}, {state}", options=options, yardstick=_RESIDENT))
    return found


def main() -> None:
    """Measures the rows and prints the table."""
    options = parser(__doc__, "updates")
    add_shape(options)
    args = options.parse_args()
    run_table(rows(args.shape), args, (*STANDARD, LINK_SHARE))


if __name__ == "__main__":
    main()
