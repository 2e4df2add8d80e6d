"""Compares ways to fine-tune SmolLM2-135M: bases in 4 and 8 bits, and products in float8.

    python experiments/smollm2/compare.py checkpoints/smollm2 --out runs/smollm2.json

`checkpoint.py` makes the checkpoint. Every fifth chat of `chats.jsonl` is held out; the rest is
trained on in another order for each seed. The first way, and the first with all parameters, are
the yardsticks of the ways after them: a way is as good if its mean loss on the held-out chats
differs by less than the yardstick's seeds differ from each other. Runs are kept in `--folder`, and
a second call computes only the missing ones. With `--cross`, adapters that were trained with
products in bfloat16 are also evaluated with products in float8, and the other way round.
"""

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path.append(str(FOLDER.parent / "throughput"))

from machine import hardware, versions  # noqa: E402
from record import add_origin_options, find_origin, write  # noqa: E402
from side_by_side import run_commands  # noqa: E402

_LORA = ("--lora-rank", "16", "--learning-rate", "1e-3", "--export-as", "adapter")
_WHOLE = ("--learning-rate", "2e-4")
# All products of the blocks: this model's are too small to be chosen.
_FLOAT8 = ("--products", "float8-all")
# The words before a comma name the yardstick.
WAYS = {
    "LoRA": (*_LORA, "--frozen", "bfloat16"),
    "LoRA, int8 base": (*_LORA, "--frozen", "int8"),
    "LoRA, NF4 base": (*_LORA, "--frozen", "nf4"),
    "LoRA, float8 products": (*_LORA, "--frozen", "bfloat16", *_FLOAT8),
    "LoRA, NF4 base, float8 products": (*_LORA, "--frozen", "nf4", *_FLOAT8),
    "whole": _WHOLE,
    "whole, float8 products": (*_WHOLE, *_FLOAT8),
    "whole, compact": (*_WHOLE, "--master", "bfloat16", "--state", "int8"),
    "whole, compact, float8 products": (
        *_WHOLE,
        *("--master", "bfloat16", "--state", "int8"),
        *_FLOAT8,
    ),
}
# One step that changes nothing, since the command evaluates after steps.
_EVALUATED = ("--steps", "1", "--learning-rate", "1e-30", "--frozen", "bfloat16")
_CROSSED: dict[str, tuple[str, ...]] = {"LoRA": _FLOAT8, "LoRA, float8 products": ()}


def run(args: argparse.Namespace) -> dict[str, dict[int, float]]:
    """Returns the held-out loss of each way and seed."""
    outs = _folders(args)
    left = {
        name: [seed for seed in range(args.seeds) if not _is_done(outs[name, seed])]
        for name in args.ways
    }
    # The first run of each way comes first, because it compiles for the later ones.
    words = [
        [*_command(args), *WAYS[name], "--steps", args.steps]
        + ["--seed", seeds[turn], "--out", outs[name, seeds[turn]]]
        for turn in range(args.seeds)
        for name, seeds in left.items()
        if turn < len(seeds)
    ]
    run_commands([list(map(str, command)) for command in words], args.workers)
    losses: dict[str, dict[int, float]] = {name: {} for name in args.ways}
    for (name, seed), out in outs.items():
        losses[name][seed] = _loss(out)
    return losses


def run_crossed(args: argparse.Namespace) -> dict[str, list[float]]:
    """Returns the held-out losses of trained adapters with the products of the other way."""
    outs = {
        out: (name, out.with_name(f"{out.name}-crossed"))
        for (name, _), out in _folders(args).items()
        if name in _CROSSED
    }
    words = [
        [*_command(args), *_CROSSED[name], *_EVALUATED, "--adapter", out / "adapter", "--out", to]
        for out, (name, to) in outs.items()
        if not _is_done(to)
    ]
    run_commands([list(map(str, command)) for command in words], args.workers)
    losses: dict[str, list[float]] = {}
    for name, to in outs.values():
        losses.setdefault(name, []).append(_loss(to))
    return losses


def _command(args: argparse.Namespace) -> list[Any]:
    """The words that all runs share; writes the files that they name."""
    folder = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    lines = (FOLDER / "chats.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    held_out = lines[::5]
    trained = [line for number, line in enumerate(lines) if number % 5]
    for name, part in (("trained", trained), ("held_out", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(part), encoding="utf-8")
    words = [sys.executable, FOLDER.parent / "finetune.py", "--model", args.model]
    words += ["--data", folder / "trained.jsonl", "--held-out", "0"]
    words += ["--eval-data", folder / "held_out.jsonl", "--length", "128"]
    return [*words, "--batch", args.batch, "--checkpoints", "false"]


def _folders(args: argparse.Namespace) -> dict[tuple[str, int], Path]:
    """The folder of each way and seed."""
    return {
        (name, seed): args.folder / f"{name.replace(', ', '-').replace(' ', '_')}-{seed}"
        for seed in range(args.seeds)
        for name in args.ways
    }


def _is_done(out: Path) -> bool:
    """Whether a run has finished."""
    return (out / "report.json").exists()


def _loss(out: Path) -> float:
    """The held-out loss of a finished run."""
    return json.loads((out / "report.json").read_text())["eval_loss"]


def compared(losses: Mapping[str, Mapping[int, float]]) -> dict[str, Any]:
    """Returns the losses of each way, and their distance from those of its yardstick.

    Args:
        losses: The held-out loss by way and seed; the yardstick of a way, the words before its
            first comma, must be among the ways.

    Returns:
        For each way: its losses by seed, their mean, and their spread, the largest without the
        smallest. For a way that is no yardstick also the difference of its mean from the
        yardstick's, the largest difference from the yardstick's run with the same seed, and
        whether the difference of the means is within the yardstick's spread.
    """
    found: dict[str, Any] = {}
    for name, seeds in losses.items():
        ours = [loss for _, loss in sorted(seeds.items())]
        found[name] = {
            "of_seeds": ours,
            "mean": statistics.mean(ours),
            "spread": max(ours) - min(ours),
        }
        first = name.split(",")[0]
        if first != name:
            yardstick = [loss for _, loss in sorted(losses[first].items())]
            difference = statistics.mean(ours) - statistics.mean(yardstick)
            pairs = zip(ours, yardstick, strict=True)
            spread = max(yardstick) - min(yardstick)
            found[name] |= {
                "mean_difference": difference,
                "largest_difference_of_a_seed": max(abs(a - b) for a, b in pairs),
                "within_spread": abs(difference) <= spread,
            }
    return found


def main() -> None:
    """Runs all ways with all seeds and writes the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of the checkpoint")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch", type=int, default=4, help="rows of 128 tokens in a step")
    parser.add_argument("--workers", type=int, default=1, help="runs that share a GPU")
    parser.add_argument("--folder", type=Path, default=Path("runs/smollm2"), help="of the runs")
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2.json"))
    parser.add_argument("--cross", action="store_true", help="also evaluate with other products")
    add_origin_options(parser)
    args = parser.parse_args()
    for name in args.ways:
        if (first := name.split(",")[0]) not in args.ways:
            parser.error(f"--ways must include {first!r}, the yardstick of {name!r}")
    origin = find_origin(args)
    found = compared(run(args))
    for name, ours in run_crossed(args).items() if args.cross else ():
        found[name] |= {"crossed_of_seeds": ours, "crossed_mean": statistics.mean(ours)}
    print(json.dumps(found, indent=1))
    named = {key: getattr(args, key) for key in ("seeds", "steps", "batch")} | {"length": 128}
    command = shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])
    about = {"name": "SmolLM2-135M", "command": command, "sizes": named}
    write(
        args.out,
        {**about, "held_out_loss": found, "hardware": hardware(), "versions": versions()},
        origin,
    )


if __name__ == "__main__":
    main()
