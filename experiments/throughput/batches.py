"""Table: a batch that hides the link easily, and one so small that the link bounds the step.

Of the small one, the figure to read is the share of the rate of plain copies.
"""

from common import LINK_SHARE, STANDARD, Option, Row, add_shape, parser, run_table

# The large batch goes in parts, or its activations alone would fill a GPU.
_LARGE: dict[str, Option] = {"batch": 64, "microbatches": 4}
_SMALL: dict[str, Option] = {"batch": 2}
_RESIDENT = "64 sequences, all state resident"


def rows(shape: str) -> list[Row]:
    """Returns the table's rows."""
    found = []
    for clip in (None, 1.0):
        for budget in ("all", "least", "40"):
            options = {"shape": shape, **_LARGE, "device-budget": budget}
            name = {"all": "all state resident", "least": "least"}.get(budget, f"{budget} GiB")
            if clip is not None:
                options["clip"] = clip
                name += f", clip {clip:g}"
            found.append(Row(name=f"64 sequences, {name}", options=options, yardstick=_RESIDENT))
    small = {"shape": shape, **_SMALL, "device-budget": "least"}
    return [*found, Row(name="2 sequences, least (link bound)", options=small)]


def main() -> None:
    """Measures the rows and prints the table."""
    options = parser(__doc__, "batches")
    add_shape(options)
    args = options.parse_args()
    run_table(rows(args.shape), args, (*STANDARD, LINK_SHARE))


if __name__ == "__main__":
    main()
