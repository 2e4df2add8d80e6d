"""Measures every row that the pages show, as one run, in calls of ten minutes.

    python experiments/throughput/all_rows.py --run ID --commit "$(git rev-parse HEAD)"

Say it again, with the same id and on the same machine, until it says that nothing is left: what the
run has measured stays. What matters most comes first, and a part begins only if its time is likely
to suffice. Peers need PyTorch (`--python`); their rows of this library are those of `updates.py`.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from common import FOLDER
from record import add_origin_options, find_origin, host_id
from shapes import SHAPES


@dataclass(frozen=True, kw_only=True)
class Part:
    """A row of a table, or a script that writes one file.

    Attributes:
        script: The script, without its ending.
        row: The row's name; None if the script has no table.
        options: More options.
        seconds: About how long it takes on an H200.
        has_shape: Whether the script takes `--shape`.
    """

    script: str
    row: str | None = None
    options: tuple[str, ...] = ()
    seconds: float = 90
    has_shape: bool = True

    @property
    def name(self) -> str:
        """What it is called where it is chosen or reported."""
        return self.script if self.row is None else f"{self.script}: {self.row}"


def _table(script: str, *rows: str, seconds: float, options: tuple[str, ...] = ()) -> list[Part]:
    return [Part(script=script, row=row, options=options, seconds=seconds) for row in rows]


_UPDATES = (
    *("all state resident", "immediate, least", "clip 1, least", "clip 1, auto"),
    *("clip 1, 24 GiB", "immediate, auto", "immediate, 16 GiB", "immediate, 64 GiB"),
    "clip 1, 60 GiB",
)
_PEERS = (
    "DeepSpeed ZeRO-3, Twin-Flow",
    "RoundPipe, updates one step old, 4 microbatches",
    "PyTorch FSDP2 CPUOffloadPolicy",
    "DeepSpeed ZeRO-3, parameters on the GPU",
    "RoundPipe, exact updates, 4 microbatches",
    "DeepSpeed ZeRO-3 offload",
    "RoundPipe, updates one step old, 2 microbatches",
    "RoundPipe, exact updates, 2 microbatches",
    "DeepSpeed SuperOffload",
    "DeepSpeed ZenFlow, updates every 4th step",
    "PyTorch, all on the GPU in bf16",
)
_PLAIN = (
    *("decoder, jax.jit and Optax", "vit, jax.jit and Optax", "vit, least", "vit, automatic"),
    *("decoder, automatic", "decoder, least"),
)
_LARGE = ("qwen2.5-7b-untied, auto", "32 layers, auto")
_LARGE_BATCHES = (
    *("64 sequences, all state resident", "64 sequences, 40 GiB"),
    *("64 sequences, all state resident, clip 1", "64 sequences, 40 GiB, clip 1"),
)
PARTS = [
    *_table("updates", *_UPDATES, seconds=90),
    *_table("peers", *_PEERS, seconds=180),
    *_table("plain", *_PLAIN, seconds=120),
    *_table("large", *_LARGE, seconds=240, options=("--layers", "32")),
    *_table(
        "small_gpu",
        *("all state resident, no limit, 4 microbatches", "10 GiB, auto", "10 GiB, auto, clip 1"),
        seconds=100,
    ),
    *_table("batches", "2 sequences, least (link bound)", seconds=75),
    *_table("batches", *_LARGE_BATCHES, seconds=180),
    Part(script="start", seconds=60),
    Part(script="loss", seconds=90, has_shape=False),
    Part(script="checkpoint", options=("--layers", "13"), seconds=240),
    Part(script="checksums", options=("--layers", "2", "--pairs", "5"), seconds=360),
    Part(script="disk_to_disk", seconds=420),
    Part(script="data", seconds=60, has_shape=False),
]
_TABLES = {"updates", "peers", "plain", "large", "small_gpu", "batches", "start"}


def command(part: Part, args: argparse.Namespace) -> list[str]:
    """Returns what measures a part."""
    folder = args.out / part.script
    words = [sys.executable, str(FOLDER / f"{part.script}.py"), *part.options]
    if part.script in _TABLES:
        words += ["--resume", "--out", str(folder)]
    else:
        words += ["--out", str(folder / f"{part.script}.json")]
    if part.row is not None:
        words += ["--only", part.row]
    if part.script == "peers":
        words += ["--python", args.python]
    if part.has_shape and args.shape is not None:
        words += ["--shape", args.shape]
    return words


def chosen_parts(texts: list[str] | None) -> list[Part]:
    """Returns the parts whose name contains one of these, or all."""
    return [part for part in PARTS if not texts or any(text in part.name for text in texts)]


def check_machine(out: Path, run: str) -> None:
    """Refuses to go on with a run on another machine than the one that it began on.

    Raises:
        SystemExit: If a file of the run is another machine's.
    """
    for path in sorted(out.rglob("*.json")):
        record = json.loads(path.read_text()).get("record", {})
        if (record.get("run"), record.get("host")) != (run, host_id()):
            sys.exit(f"{path} is of another run or machine: give another --out, and --run with it")


def main() -> None:
    """Measures what is left, as far as the time goes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", metavar="TEXT", help="only those with this in them")
    parser.add_argument("--list", action="store_true", help="print the parts and their seconds")
    parser.add_argument("--seconds", type=float, default=570, help="of this call")
    parser.add_argument("--out", type=Path, default=Path("runs/throughput/all"))
    parser.add_argument("--python", default=sys.executable, help="the one that has PyTorch")
    parser.add_argument("--shape", choices=SHAPES, help="of all parts, to try them")
    add_origin_options(parser)
    args = parser.parse_args()
    parts = chosen_parts(args.parts)
    if args.list:
        print(*(f"{part.seconds:5.0f} s  {part.name}" for part in parts), sep="\n")
        return
    if args.run is None:
        parser.error("--run is missing: a name for this run, the same for all its calls")
    origin = find_origin(args)
    check_machine(args.out, origin.run)
    start, failed, done = time.monotonic(), [], args.out / "done.txt"
    args.out.mkdir(parents=True, exist_ok=True)
    over = done.read_text().splitlines() if done.exists() else []
    left = [part for part in parts if part.name not in over]
    words = [word for name, value in origin.options().items() for word in (f"--{name}", value)]
    for part in list(left):
        if time.monotonic() - start + part.seconds > args.seconds:
            break
        left.remove(part)
        print(f"##### {part.name}", flush=True)
        if subprocess.run([*command(part, args), *words], check=False).returncode:
            failed.append(part.name)
        else:
            over.append(part.name)
            done.write_text("\n".join(over) + "\n")
    print("left for the next call:", *(part.name for part in left), sep="\n  ", flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
