r"""Measures whether narrower optimizer state and masters cost quality: rows x seeds, side by side.

    python experiments/compact_quality --run ID --commit "$(git rev-parse HEAD)"
    python experiments/compact_quality --summarise runs/compact_quality

A decoder of 101M parameters is trained on the bytes of Python files, with each setting and seed.
With `--vocab 16384` it has 134M, and is trained on tokens of so many kinds, made of the same files.
Several runs share the device. Say the first line again, with the same id, until nothing is left:
finished runs stay, and those that the time cut off go on from their checkpoints.

Products in float8, beside the same runs in bfloat16, with fp32 and with compact state:

    python experiments/compact_quality --run ID --commit "$(git rev-parse HEAD)" \
        --out runs/float8_quality --rows fp32 "float8 products" "float8 products, the head too" \
        "float8 products but down" "bf16 masters, int8 state" \
        "float8 products, bf16 masters, int8 state"
    python experiments/compact_quality --summarise runs/float8_quality \
        --summary experiments/results/h100/float8_quality.json --picture runs/float8_quality.png
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path

EXPERIMENTS = Path(__file__).resolve().parents[1]
sys.path += [str(EXPERIMENTS), str(EXPERIMENTS / "throughput")]

import summary  # noqa: E402
import tokens  # noqa: E402
from record import add_origin_options, find_origin  # noqa: E402
from settings import BYTES, FULL, SETTINGS, TINY  # noqa: E402
from workers import check_folder, run_all  # noqa: E402

_SIZES = {"steps": int, "batch_size": int, "learning_rate": float, "eval_every": int}


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=SETTINGS, help="else all")
    parser.add_argument("--seeds", nargs="+", type=int, help="else 0, 1 and 2")
    parser.add_argument("--workers", type=int, default=5, help="runs side by side on a GPU")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs to use; a run has one of them")
    parser.add_argument("--seconds", type=float, default=540, help="of this call")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="small sizes and, unless given, two rows and one seed, to try it on a CPU",
    )
    for name, kind in _SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help="instead of the usual")
    parser.add_argument("--vocab", type=int, help="tokens of a BPE; 256 are bytes, the usual")
    parser.add_argument("--out", type=Path, default=Path("runs/compact_quality"))
    parser.add_argument(
        "--summarise",
        type=Path,
        nargs="+",
        metavar="FOLDER",
        help="train nothing: sum up the runs in these folders",
    )
    parser.add_argument(
        "--earlier",
        type=Path,
        help="with --summarise: summary of runs of other seeds to add; no picture is drawn then",
    )
    usual = "instead of the usual in experiments/results"
    parser.add_argument("--summary", type=Path, help=f"JSON file to write, {usual}")
    parser.add_argument("--picture", type=Path, help=f"picture to write, {usual}")
    add_origin_options(parser)
    args = parser.parse_args()
    if args.summarise is None and args.run is None:
        parser.error("--run is missing: a name for this run, the same for all its calls")
    if args.vocab is not None and not BYTES <= args.vocab <= tokens.MOST:
        parser.error(f"--vocab must be from {BYTES} to {tokens.MOST}, not {args.vocab}")
    return args


def main() -> None:
    """Trains what is left, or sums up."""
    args = parse_arguments()
    if args.summarise is not None:
        summary.main(args.summarise, args.summary, args.picture, args.earlier)
        return
    origin = find_origin(args)
    names = [name for name in (*_SIZES, "vocab") if getattr(args, name) is not None]
    given = {name: getattr(args, name) for name in names}
    sizes = dataclasses.replace(TINY if args.tiny else FULL, **given)
    rows = args.rows or (["fp32", "bf16 masters"] if args.tiny else list(SETTINGS))
    seeds = args.seeds or ([0] if args.tiny else [0, 1, 2])
    # Seed by seed, so that every row has a result early.
    jobs = [(name, seed) for seed in seeds for name in rows]
    check_folder(args.out, origin.run, sizes)
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.seconds
    if sizes.vocab != BYTES:
        tokens.prepare(sizes, args.out)
    seconds = end - time.monotonic()
    found = run_all(jobs, sizes, origin, args.out, args.workers, seconds, args.gpus)
    print("left for the next call:", *found["left"], sep="\n  ", flush=True)
    if found["failed"]:
        sys.exit(f"failed: {', '.join(found['failed'])}")


if __name__ == "__main__":
    main()
