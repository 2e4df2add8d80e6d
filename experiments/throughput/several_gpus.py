"""Table: one GPU beside several of its host, with as many examples each and with one's batch."""

from common import PEAK_HOST, STANDARD, Row, add_shape, parser, run_table
from shapes import SHAPES

_KINDS = {
    "immediate, least": {"device-budget": "least"},
    "clip 1, least": {"device-budget": "least", "clip": 1.0},
    "clip 1, auto": {"device-budget": "auto", "clip": 1.0},
}


def rows(shape: str, counts: list[int]) -> list[Row]:
    """Returns the table's rows: for each kind of update one GPU, then each number of several.

    Args:
        shape: Name of the decoder's shape, whose batch is that of one GPU.
        counts: Numbers of GPUs, besides one.
    """
    found, batch = [], SHAPES[shape].batch_size
    for kind, options in _KINDS.items():
        one = f"1 GPU, {kind}"
        cases = [(one, 1, batch)]
        for count in counts:
            cases.append((f"{count} GPUs, {kind}", count, count * batch))
            cases.append((f"{count} GPUs, {kind}, the batch of one", count, batch))
        for name, count, sequences in cases:
            sizes = {"shape": shape, "devices": count, "batch": sequences, "loss": "library"}
            found.append(Row(name=name, options={**sizes, **options}, yardstick=one))
    return found


def main() -> None:
    """Measures the rows and prints the table."""
    options = parser(__doc__, "several_gpus")
    add_shape(options)
    options.add_argument("--gpus", type=int, nargs="+", default=[2], help="numbers of GPUs")
    args = options.parse_args()
    run_table(rows(args.shape, args.gpus), args, (*STANDARD, PEAK_HOST), "of one GPU")


if __name__ == "__main__":
    main()
