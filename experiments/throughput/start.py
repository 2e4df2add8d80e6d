"""Table: from the start of the process to the end of the first step, twice.

The first run compiles all programs, the second one finds them in the compilation cache that the
first one has filled.
"""

import subprocess
import sys
import tempfile

from common import COMPACT, Row, add_shape, number, parser, run_row, table
from record import find_origin

_KEY = "seconds_from_process_start_to_first_step"


def rows(shape: str, budget: str, cache: str, *, compact: bool) -> list[Row]:
    """Returns the two rows, which share a cache folder that is empty at first."""
    environment = {
        "JAX_COMPILATION_CACHE_DIR": cache,
        # As the library sets it for its own folder: a step has many small programs.
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    options = {"shape": shape, "device-budget": budget, "loss": "library", "timed": "ends"}
    options = {**options, **(COMPACT if compact else {})}
    names = ("empty compilation cache", "full compilation cache")
    return [Row(name=name, options=options, environment=environment) for name in names]


def main() -> None:
    """Measures the rows and prints their table and ratio."""
    options = parser(__doc__, "start")
    add_shape(options, "small")
    options.set_defaults(steps=1)
    options.add_argument("--compact", action="store_true", help="with `Precision.compact()`")
    options.add_argument("--device-budget", default="auto", help="as of measure.py")
    args = options.parse_args()
    origin = find_origin(args)
    # Or the first row would also read Python's files from the disk for the second one.
    subprocess.run([sys.executable, "-c", "import flax, jax, optax, megatrain_jax"], check=True)
    with tempfile.TemporaryDirectory() as cache:
        both = rows(args.shape, args.device_budget, cache, compact=args.compact)
        results = {row.name: run_row(row, args, origin) for row in both}
    columns = [
        ("first step over", number(_KEY, ".2f", " s")),
        ("of which preparing", number("seconds_to_prepare", ".2f", " s")),
        ("of which the first step", number("seconds_of_first_step", ".2f", " s")),
        ("a later step", number("mean_seconds_per_step", ".4g", " s")),
    ]
    print(f"\n{table(both, results, columns)}")
    empty, full = results.values()
    if empty is None or full is None:
        sys.exit("a row failed")
    print(f"\nempty / full: {empty[_KEY] / full[_KEY]:.2f}")


if __name__ == "__main__":
    main()
