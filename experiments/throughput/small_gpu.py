"""Table: training on a small GPU, for which JAX is kept to 10 GiB of this one.

The GPU still computes and copies at its own rates: the table says what fits, and at what cost
in time, not what a cheaper GPU reaches.
"""

import shutil
import subprocess
import sys
from collections.abc import Mapping

from common import COMPACT, LINK_SHARE, STANDARD, Option, Row, add_shape, parser, run_table

_CLIP = 1.0


def fraction_of_device(gib: float) -> float:
    """Returns the fraction of the first GPU's memory that `gib` are.

    Raises:
        SystemExit: If there is no `nvidia-smi`, or the GPU is smaller.
    """
    if shutil.which("nvidia-smi") is None:
        sys.exit("nvidia-smi was not found: the limit is a fraction of an NVIDIA GPU's memory")
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"]
    total_mib = float(subprocess.run(query, capture_output=True, text=True, check=True).stdout)
    if gib * 1024 > total_mib:
        sys.exit(f"the GPU has {total_mib / 1024:.1f} GiB, less than the limit of {gib:g} GiB")
    return gib * 1024 / total_mib


def rows(
    shape: str, microbatches: int, gib: float, sizes: Mapping[str, Option], compact: bool
) -> list[Row]:
    """Returns the table's rows: two without the limit, as yardsticks, and the limited ones.

    Args:
        shape: Name of the shape.
        microbatches: Parts that a batch is split into.
        gib: Device memory that JAX may use.
        sizes: Sizes that differ from the shape's.
        compact: Whether the limited rows hold masters in bfloat16 and state in 8 bits.
    """
    limit = {"XLA_CLIENT_MEM_FRACTION": f"{fraction_of_device(gib):.6f}"}
    whole = "all state resident, no limit, 1 microbatch"
    parts = f"all state resident, no limit, {microbatches} microbatches"
    resident: dict[str, Option] = {"shape": shape, **sizes, "device-budget": "all"}
    # Fewer logits at once, as they and the head's gradient would be the largest temporaries.
    limited: dict[str, Option] = {
        "shape": shape,
        **sizes,
        "microbatches": microbatches,
        "loss-tokens": 256,
    }
    if compact:
        limited |= COMPACT
    found = [
        Row(name=whole, options=resident, yardstick=parts),
        Row(name=parts, options={**resident, "microbatches": microbatches}, yardstick=parts),
    ]
    for budget in ("least", "auto"):
        for clip in (None, _CLIP):
            options = {**limited, "device-budget": budget}
            name = f"{gib:g} GiB, {budget}" + (", compact" if compact else "")
            if clip is not None:
                options["clip"] = clip
                name += f", clip {clip:g}"
            found.append(Row(name=name, options=options, yardstick=parts, environment=limit))
    return found


def main() -> None:
    """Measures the rows and prints the table."""
    options = parser(__doc__, "small_gpu")
    add_shape(options)
    options.add_argument("--microbatches", type=int, default=4)
    options.add_argument("--gib", type=float, default=10.0, help="device memory JAX may use")
    for size in ("batch", "seq"):
        options.add_argument(f"--{size}", type=int, help="see measure.py")
    options.add_argument("--compact", action="store_true", help="bfloat16 masters, 8-bit state")
    args = options.parse_args()
    sizes = {name: getattr(args, name) for name in ("batch", "seq") if getattr(args, name)}
    found = rows(args.shape, args.microbatches, args.gib, sizes, args.compact)
    run_table(found, args, (*STANDARD, LINK_SHARE))


if __name__ == "__main__":
    main()
