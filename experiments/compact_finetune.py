r"""Compares fine-tuning curves of compact masters and state with fp32 over several seeds.

    python experiments/compact_finetune.py

First, `throughput/disk_to_disk.py` writes conversations and a small checkpoint of random weights,
and `finetune.py` trains the checkpoint on half of the conversations, in fp32. The exported model is
then fine-tuned on the second half: once for each precision of masters and state and each seed of
the data's order. Compact curves should lie within the spread of the fp32 seeds. Needs PyTorch and
Transformers. Products in float8:

    python experiments/compact_finetune.py --held fp32 float8 compact "compact float8" \
        --run ID --commit "$(git rev-parse HEAD)" --out runs/float8_finetune.json
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path.append(str(FOLDER / "throughput"))

import numpy as np  # noqa: E402
from machine import hardware, versions  # noqa: E402
from record import add_origin_options, find_origin, write  # noqa: E402
from shapes import SHAPES  # noqa: E402
from side_by_side import run_commands  # noqa: E402

HELD = {
    "fp32": (),
    "compact": ("--master", "bfloat16", "--state", "int8"),
    "bf16": ("--master", "bfloat16", "--state", "bfloat16"),
    "int8": ("--master", "int8", "--state", "int8"),
    # All products of the blocks: the small model's are too small to be chosen.
    "float8": ("--products", "float8-all"),
    "compact float8": ("--master", "bfloat16", "--state", "int8", "--products", "float8-all"),
}
# Losses of single steps differ mostly because their batches differ.
_SMOOTHED_OVER = 20


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Makes the model, fine-tunes it in all precisions, and compares the losses."""
    disk_to_disk = FOLDER / "throughput" / "disk_to_disk.py"
    options = ["--conversations", str(args.conversations), "--shape", args.shape]
    _call(disk_to_disk, *options, "--folder", str(folder), "--part", "make")
    lines = (folder / "chats.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    for name, part in (("first", lines[::2]), ("second", lines[1::2])):
        (folder / f"{name}.jsonl").write_text("".join(part), encoding="utf-8")
    common = ["--length", str(args.length), "--batch", str(args.batch), "--too-long", "split"]
    common += ["--checkpoints", "false", "--epochs", "1000", "--train-on", "all"]
    base = ["--model", str(folder / "model"), "--data", str(folder / "first.jsonl")]
    base += ["--steps", str(args.base_steps), "--learning-rate", str(args.base_learning_rate)]
    _call(FOLDER / "finetune.py", *common, *base, "--out", str(folder / "base"))
    tuned = ["--model", str(folder / "base/model"), "--data", str(folder / "second.jsonl")]
    tuned += ["--steps", str(args.steps), "--learning-rate", str(args.learning_rate)]
    runs = [(name, seed) for seed in range(args.seeds) for name in args.held]
    words = [
        [*common, *tuned, *HELD[name], "--seed", str(seed), "--out", str(folder / f"{name}-{seed}")]
        for name, seed in runs
    ]
    _call_all(FOLDER / "finetune.py", words, args.workers)
    curves: dict[str, dict[int, list[float]]] = {name: {} for name in args.held}
    for name, seed in runs:
        report = json.loads((folder / f"{name}-{seed}" / "report.json").read_text())
        curves[name][seed] = [record["loss"] for record in report["history"]]
    return compared(curves)


def compared(curves: Mapping[str, Mapping[int, Sequence[float]]]) -> dict[str, Any]:
    """Returns smoothed curves, and the distance of each precision from fp32.

    Each precision except fp32 has three numbers: the largest difference of its mean over seeds from
    fp32's mean, in percent; the share of steps at which its mean lies between the smallest and the
    largest loss of the fp32 seeds; and the largest difference from the fp32 run of the same seed,
    in percent. For fp32 it is the mean width of the seeds' spread, in percent.

    Args:
        curves: The loss of every step, by precision and by seed; "fp32" must be among them.
    """
    smooth = {
        name: np.stack([_smoothed(curve) for _, curve in sorted(seeds.items())])
        for name, seeds in curves.items()
    }
    fp32 = smooth["fp32"]
    width = (fp32.max(0) - fp32.min(0)) / fp32.mean(0)
    found: dict[str, Any] = {"fp32": {"mean_width_percent": 100 * float(width.mean())}}
    for name, losses in smooth.items():
        if name == "fp32":
            continue
        mean = losses.mean(0)
        inside = (fp32.min(0) <= mean) & (mean <= fp32.max(0))
        found[name] = {
            "largest_percent_from_mean": 100 * float(np.abs(mean / fp32.mean(0) - 1).max()),
            "largest_percent_from_same_seed": 100 * float(np.abs(losses / fp32 - 1).max()),
            "share_of_steps_inside": float(inside.mean()),
        }
    lists = {name: np.round(losses, 5).tolist() for name, losses in smooth.items()}
    return {"compared": found, "smoothed_over": _SMOOTHED_OVER, "smoothed_losses": lists}


def _smoothed(curve: Sequence[float]) -> np.ndarray:
    width = min(_SMOOTHED_OVER, len(curve))
    return np.convolve(curve, np.ones(width) / width, "valid")


def _call(script: Path, *options: str) -> None:
    _call_all(script, [options])


def _call_all(script: Path, options: Sequence[Sequence[str]], workers: int = 1) -> None:
    run_commands([[sys.executable, str(script), *words] for words in options], workers)


def main() -> None:
    """Runs all parts and writes the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--held", nargs="+", choices=HELD, default=["fp32", "compact"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--base-steps", type=int, default=300)
    parser.add_argument("--base-learning-rate", type=float, default=1e-3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=1, help="runs that share a GPU")
    parser.add_argument("--out", type=Path, default=Path("runs/compact_finetune.json"))
    add_origin_options(parser)
    args = parser.parse_args()
    if "fp32" not in args.held:
        parser.error("--held must include fp32, because all precisions are compared with it")
    origin = find_origin(args)
    with tempfile.TemporaryDirectory() as scratch:
        found = run(args, Path(scratch))
    print(json.dumps(found["compared"], indent=1))
    named = {key: getattr(args, key) for key in ("shape", "seeds", "steps", "batch", "length")}
    command = shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])
    about = {"name": "compact fine-tuning", "command": command, "sizes": named}
    write(args.out, {**about, **found, "hardware": hardware(), "versions": versions()}, origin)


if __name__ == "__main__":
    main()
