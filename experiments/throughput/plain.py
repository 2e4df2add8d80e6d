"""Table: a plain `jax.jit` and Optax step with everything on the GPU, beside this library's.

For the decoder of the other tables and for a model of somebody else, a Vision Transformer, where
its package is installed (`pip install equimo`). All rows clip to 1.0 and split a batch into 4
microbatches, without which nothing could be kept for backward.
"""

import sys

from common import FOLDER, PEAK_DEVICE, PEAK_HOST, SECONDS, SPREAD, TOKENS, Row, parser, run_table
from peers import missing_modules
from shapes import SHAPES

_COLUMNS = (SECONDS, SPREAD, TOKENS, PEAK_DEVICE, PEAK_HOST)
_COMMAND = (sys.executable, str(FOLDER / "plain_measure.py"))
_BUDGETS = {"jax.jit and Optax": "plain", "least": "least", "automatic": "auto"}


def rows(shape: str, vit_shape: str) -> list[Row]:
    """Returns the rows of both models; the plain step is the yardstick of its model."""
    return [
        Row(
            name=f"{model}, {what}",
            options={
                **{"model": model, "shape": its_shape, "device-budget": budget},
                **{"clip": 1.0, "microbatches": 4},
            },
            yardstick=f"{model}, jax.jit and Optax",
            command=_COMMAND,
        )
        for model, its_shape in (("decoder", shape), ("vit", vit_shape))
        for what, budget in _BUDGETS.items()
    ]


def main() -> None:
    """Measures the rows whose model is there and prints the table."""
    options = parser(__doc__, "plain")
    options.add_argument("--shape", choices=SHAPES, default="qwen2.5-3b-untied")
    args = options.parse_args()
    found = rows(args.shape, "vit-tiny" if args.shape == "tiny" else "vit-g")
    if missing_modules(sys.executable, ("equimo",)):
        print("not installed: the Vision Transformer; pip install equimo", flush=True)
        found = [row for row in found if row.options["model"] != "vit"]
    run_table(found, args, _COLUMNS, "of plain")


if __name__ == "__main__":
    main()
