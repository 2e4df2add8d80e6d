"""Table: a decoder of 7.6B parameters on one long sequence a step, clipped by the global norm.

Steps take minutes, so that each row is of two steps after the first one, each timed from the end of
one to the end of the next, or of a single one from rest to rest (`--timed rest`). With fewer layers
(`--layers`) a row needs less host memory and time, and its name says so.
"""

from typing import Any

from common import (
    COMPACT,
    PEAK_HOST,
    STANDARD,
    TFLOPS_WITH_ATTENTION,
    Row,
    add_shape,
    number,
    parser,
    run_table,
)
from shapes import SHAPES

_TOKENS = (131_072, 262_144, 524_288, 1_048_576)


def tiles(result: dict[str, Any]) -> str:
    """Returns the numbers of tiles of the kernels that have any."""
    found = [f"{row['what']} {row['num_tiles']}" for row in result["tiles"]]
    return ", ".join(found) or "whole"


def rows(shape: str, layers: int | None, lengths: list[int], budget: str, timed: str) -> list[Row]:
    """Returns the table's rows: each length with fp32 and with compact state."""
    some = layers is not None and layers != SHAPES[shape].num_layers
    found = []
    for length in lengths:
        options = {
            "shape": shape,
            "batch": 1,
            "seq": length,
            "clip": 1.0,
            "device-budget": budget,
            "loss": "library",
            "timed": timed,
        }
        if layers is not None:
            options["layers"] = layers
        name = f"{length:,} tokens" + (f", {layers} layers" if some else "")
        found.append(Row(name=name, options=options))
        found.append(Row(name=f"{name}, compact", options={**options, **COMPACT}))
    return found


def main() -> None:
    """Measures the rows and prints the table."""
    options = parser(__doc__, "long_sequences")
    add_shape(options, "qwen2.5-7b-untied")
    options.set_defaults(steps=2)
    options.add_argument("--layers", type=int, help="layers; the shape has a default")
    options.add_argument("--tokens", type=int, nargs="+", default=_TOKENS, help="lengths")
    options.add_argument("--device-budget", default="auto", help="see measure.py")
    options.add_argument("--timed", choices=("ends", "rest"), default="ends", help="see measure.py")
    args = options.parse_args()
    columns = (*STANDARD, TFLOPS_WITH_ATTENTION, PEAK_HOST, ("tiles", tiles))
    columns += (("stages computed again", number("stages_computed_again", "d")),)
    found = rows(args.shape, args.layers, args.tokens, args.device_budget, args.timed)
    run_table(found, args, columns)


if __name__ == "__main__":
    main()
