"""Table: other ways of training from host memory on one GPU, beside this library's.

The same shape, batch and clipping for all, each in a process of its own. A peer whose packages
are missing is named with the command that installs them. PyTorch is never imported here, since
it may live in another environment (`--python`).
"""

import argparse
import subprocess
import sys
from dataclasses import dataclass

from common import (
    FOLDER,
    PEAK_DEVICE,
    PEAK_HOST,
    SECONDS,
    SPREAD,
    TOKENS,
    Row,
    parser,
    run_table,
)
from shapes import SHAPES

_CLIP = 1.0
_OURS = "megatrain_jax"
_COLUMNS = (SECONDS, SPREAD, TOKENS, PEAK_DEVICE, PEAK_HOST)


@dataclass(frozen=True, kw_only=True)
class PeerFacts:
    """What a peer is called, how it is configured, and what it needs.

    Attributes:
        title: Its name in the table.
        tried: How `torch_peers.py` configures it, and what its makers offer that was not tried.
        modules: What has to be importable.
        install: The command that installs it.
    """

    title: str
    tried: str
    modules: tuple[str, ...] = ("torch", "transformers")
    install: str = "pip install torch transformers"


# The keys are those of `torch_peers.BUILDERS`.
PEERS = {
    "zero3": PeerFacts(
        title="DeepSpeed ZeRO-3 offload",
        tried="parameters and optimizer state offloaded, buckets of 500M elements; not tried: "
        "parameters on the GPU, Twin-Flow's ratio, SuperOffload, ZenFlow, a loss in chunks",
        modules=("torch", "transformers", "deepspeed"),
        install="pip install torch transformers deepspeed",
    ),
    "fsdp2": PeerFacts(
        title="PyTorch FSDP2 CPUOffloadPolicy",
        tried="a unit for each block, pinned memory, fused AdamW on the host; not tried: explicit "
        "prefetching, a loss in chunks",
    ),
    "roundpipe": PeerFacts(
        title="RoundPipe, updates one step old",
        tried="2 microbatches, its own loss in chunks; not tried: other numbers of microbatches",
        modules=("torch", "transformers", "roundpipe"),
        install="pip install torch transformers roundpipe==0.1.1",
    ),
    "roundpipe-exact": PeerFacts(
        title="RoundPipe, exact updates",
        tried="the same, each step waiting for its own update",
        modules=("torch", "transformers", "roundpipe"),
        install="pip install torch transformers roundpipe==0.1.1",
    ),
    "resident": PeerFacts(
        title="PyTorch, all on the GPU in bf16",
        tried="activations recomputed, fused AdamW, no fp32 masters; not tried: fp32 masters, "
        "torch.compile, keeping activations",
    ),
}


def missing_modules(python: str, modules: tuple[str, ...]) -> list[str]:
    """Returns which modules an interpreter doesn't find; finding does not import them."""
    code = (
        "import importlib.util as u, sys\n"
        "print(*[m for m in sys.argv[1:] if u.find_spec(m) is None])"
    )
    command = [python, "-c", code, *modules]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def rows(args: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """Returns the rows that can be measured, and a line for each peer that can't."""
    sizes = {"shape": args.shape, "clip": _CLIP}
    sizes |= {} if args.batch is None else {"batch": args.batch}
    found = [
        Row(name=_OURS, options={**sizes, "device-budget": "auto"}, yardstick=_OURS),
        Row(
            name=f"{_OURS}, 24 GiB",
            options={**sizes, "device-budget": "24"},
            yardstick=_OURS,
        ),
    ]
    absent = []
    for peer, facts in PEERS.items():
        if missing := missing_modules(args.python, facts.modules):
            absent.append(f"{facts.title}: no {', '.join(missing)}; {facts.install}")
            continue
        found.append(
            Row(
                name=facts.title,
                options={**sizes, "peer": peer, "microbatches": 2},
                yardstick=_OURS,
                command=(args.python, str(FOLDER / "torch_measure.py")),
            )
        )
    return found, absent


def main() -> None:
    """Measures what is installed, prints the table and what is not."""
    options = parser(__doc__, "peers")
    options.add_argument("--shape", choices=SHAPES, default="qwen2.5-3b-untied")
    options.add_argument("--batch", type=int, help="sequences in a step")
    options.add_argument("--python", default=sys.executable, help="the one that has PyTorch")
    args = options.parse_args()
    found, absent = rows(args)
    for line in absent:
        print(f"not installed: {line}", flush=True)
    try:
        run_table(found, args, _COLUMNS, "of the first")
    finally:
        for facts in PEERS.values():
            print(f"{facts.title}: {facts.tried}", flush=True)
        for line in absent:
            print(f"not installed: {line}", flush=True)


if __name__ == "__main__":
    main()
