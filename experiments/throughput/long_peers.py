"""Table: DeepSpeed on long sequences, beside this library: one sequence a step, clipped.

Both train the same blocks of a 7.6B decoder from host memory, a step timed from the end of the one
before it, or a single one from rest to rest (`--timed rest`). DeepSpeed keeps activation
checkpoints on the host and attends through PyTorch's SDPA; a second row of each length has MLPs in
tiles by its ALST. PyTorch may live in another environment (`--python`). Each length is that much
work that rows may be measured one by one (`--only`), on different GPUs of a machine.
"""

import sys

from common import (
    FOLDER,
    PEAK_DEVICE,
    PEAK_HOST,
    SECONDS,
    TOKENS,
    Row,
    add_shape,
    parser,
    run_table,
)

_TOKENS = (131_072, 262_144, 524_288)
_PEERS = {"ZeRO-3": "zero3-long", "ZeRO-3 with ALST": "zero3-long-tiled"}
_OURS = "megatrain_jax"


def rows(shape: str, layers: int, lengths: list[int], timed: str, python: str) -> list[Row]:
    """Returns the table's rows: for each length this library and DeepSpeed's two."""
    found = []
    for length in lengths:
        sizes = {"shape": shape, "layers": layers, "batch": 1, "seq": length}
        options = {**sizes, "clip": 1.0, "timed": timed}
        ours = f"{_OURS}, {length:,} tokens"
        own = {**options, "loss": "library", "device-budget": "auto"}
        found.append(Row(name=ours, options=own, yardstick=ours))
        for title, peer in _PEERS.items():
            found.append(
                Row(
                    name=f"{title}, {length:,} tokens",
                    options={**options, "peer": peer, "seconds": 3600},
                    yardstick=ours,
                    command=(python, str(FOLDER / "torch_measure.py")),
                )
            )
    return found


def main() -> None:
    """Measures the rows and prints the table."""
    options = parser(__doc__, "long_peers")
    add_shape(options, "qwen2.5-7b-untied")
    options.set_defaults(steps=1)
    options.add_argument("--layers", type=int, default=8, help="blocks")
    options.add_argument("--tokens", type=int, nargs="+", default=_TOKENS, help="lengths")
    options.add_argument("--timed", choices=("ends", "rest"), default="ends", help="see measure.py")
    options.add_argument("--python", default=sys.executable, help="the one that has PyTorch")
    args = options.parse_args()
    columns = (SECONDS, TOKENS, PEAK_DEVICE, PEAK_HOST)
    found = rows(args.shape, args.layers, args.tokens, args.timed, args.python)
    run_table(found, args, columns, "of this library")


if __name__ == "__main__":
    main()
