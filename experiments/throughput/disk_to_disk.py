"""Fine-tunes a model of random weights from one folder of safetensors to another.

    python experiments/throughput/disk_to_disk.py

writes a checkpoint of Qwen2.5-7B's shape and conversations, runs `experiments/finetune.py` on them
for 20 steps, has Transformers load what that exported, and compares the loss on the conversations
held out. Each part is a process of its own, so that its memory is its own. Needs 32 GB on disk.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import MARKED, conversations, sources, train_tokenizer
from machine import hardware, versions
from record import add_origin_options, find_origin, write
from shapes import SHAPES
from torch_model import build_model
from transformers import AutoModelForCausalLM

from megatrain_jax import data

FINETUNE = Path(__file__).parents[1] / "finetune.py"
CHATS = "chats.jsonl"
THEIRS = "transformers.json"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make(args: argparse.Namespace) -> None:
    """Writes the checkpoint with its tokenizer, and the conversations."""
    shape = SHAPES[args.shape]
    build_model(shape).save_pretrained(args.folder / "model")
    texts = sources()
    size = min(32_000, shape.vocab_size)
    tokenizer = train_tokenizer(texts[:: max(1, len(texts) // 300)], size)
    tokenizer.chat_template = MARKED
    tokenizer.save_pretrained(args.folder / "model")
    with (args.folder / CHATS).open("w", encoding="utf-8") as stream:
        for row in conversations(texts, args.conversations):
            stream.write(json.dumps(row) + "\n")


def compare(args: argparse.Namespace) -> None:
    """Writes the loss of the export on what was held out, one conversation at a time."""
    exported = args.folder / "out" / "model"
    chats = data.chat(
        args.folder / CHATS,
        str(exported),
        length=args.length,
        batch_size=args.batch,
        too_long="cut",
        progress=False,
    )
    _, held_out = chats.split(args.held_out)
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.bfloat16)
    model.to(DEVICE)  # type: ignore
    seconds = time.perf_counter() - start
    losses = [batch_loss(model, batch) for batch in held_out]
    report = {"seconds_to_load": seconds, "eval_loss": float(np.mean(losses))}
    (args.folder / THEIRS).write_text(json.dumps(report))


@torch.no_grad()
def batch_loss(model: Any, batch: dict[str, np.ndarray]) -> float:
    """The mean loss of a packed batch, each conversation on its own."""
    total = 0.0
    for row in range(len(batch["tokens"])):
        line = {name: batch[name][row] for name in ("tokens", "labels", "mask", "segments")}
        for number in range(1, line["segments"].max() + 1):
            own = line["segments"] == number
            tokens = torch.tensor(line["tokens"][own], device=DEVICE).long()
            labels = torch.tensor(np.where(line["mask"], line["labels"], -100)[own]).long()
            logits = model(tokens[None]).logits[0].float()
            total += float(
                torch.nn.functional.cross_entropy(logits, labels.to(DEVICE), reduction="sum")
            )
    return total / int(batch["mask"].sum())


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the parts one after the other."""
    seconds = {}

    def part(name: str, command: list[str]) -> None:
        start = time.perf_counter()
        subprocess.run(command, check=True)
        seconds[name] = time.perf_counter() - start
        print(f"{name}: {seconds[name]:.1f} s", flush=True)

    again = [sys.executable, __file__, *sys.argv[1:], "--folder", str(args.folder), "--part"]
    part("make", [*again, "make"])
    out = args.folder / "out"
    part(
        "finetune",
        [
            sys.executable,
            str(FINETUNE),
            *("--model", str(args.folder / "model"), "--data", str(args.folder / CHATS)),
            *("--out", str(out), "--steps", str(args.steps), "--batch", str(args.batch)),
            *("--length", str(args.length), "--too-long", "cut", "--checkpoints", "false"),
            *("--held-out", str(args.held_out), "--microbatches", str(args.microbatches)),
        ],
    )
    part("compare", [*again, "compare"])
    theirs = json.loads((args.folder / THEIRS).read_text())
    report = json.loads((out / "report.json").read_text())
    return {
        "name": "disk to disk",
        "command": shlex.join(["python", *sys.argv]),
        "shape": args.shape,
        **report,
        "seconds_of_processes": seconds,
        "transformers": theirs,
        "hardware": hardware(),
        "versions": versions(),
    }


def main() -> None:
    """Runs a part, or all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-7b-untied")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--held-out", type=float, default=0.02)
    parser.add_argument("--folder", type=Path, help="where the checkpoints go; a temporary one")
    parser.add_argument("--part", choices=("make", "compare"))
    parser.add_argument("--out", type=Path, default=Path("runs/throughput/disk_to_disk.json"))
    add_origin_options(parser)
    args = parser.parse_args()
    if args.part is not None:
        {"make": make, "compare": compare}[args.part](args)
        return
    origin = find_origin(args)
    with tempfile.TemporaryDirectory() as scratch:
        args.folder = args.folder or Path(scratch)
        result = run(args)
    shown = ("num_parameters", "mean_seconds_per_step", "tokens_per_second", "peak_device_gib")
    print(json.dumps({name: result[name] for name in shown}, indent=1))
    ours, theirs = result["eval_loss"], result["transformers"]["eval_loss"]
    print(f"loss on what was held out: {ours:.6g} here, {theirs:.6g} in Transformers")
    write(args.out, result, origin)


if __name__ == "__main__":
    main()
