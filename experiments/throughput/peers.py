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
        peer: Its name in `torch_peers.BUILDERS`.
        microbatches: Into how many parts it splits a batch, if it does.
        tried: How `torch_peers.py` configures it, and what its makers offer that was not tried.
        modules: What has to be importable.
    """

    title: str
    peer: str
    tried: str
    microbatches: int = 1
    modules: tuple[str, ...] = ("torch", "transformers")

    @property
    def install(self) -> str:
        """The command that installs it."""
        words = ("roundpipe==0.1.1" if module == "roundpipe" else module for module in self.modules)
        return f"pip install {' '.join(words)}"


_DEEPSPEED = ("torch", "transformers", "deepspeed")
_ROUNDPIPE = ("torch", "transformers", "roundpipe")
PEERS = (
    PeerFacts(
        title="DeepSpeed ZeRO-3 offload",
        peer="zero3",
        tried="parameters and optimizer state offloaded, buckets of 500M elements",
        modules=_DEEPSPEED,
    ),
    PeerFacts(
        title="DeepSpeed ZeRO-3, parameters on the GPU",
        peer="zero3-parameters-on-gpu",
        tried="only the optimizer's state offloaded, buckets of 500M elements",
        modules=_DEEPSPEED,
    ),
    PeerFacts(
        title="DeepSpeed ZeRO-3, Twin-Flow",
        peer="zero3-twin-flow",
        tried="parameters on the GPU, which updates 60% of them (ratio 0.4), in sub-groups of 100M",
        modules=_DEEPSPEED,
    ),
    PeerFacts(
        title="DeepSpeed SuperOffload",
        peer="superoffload",
        tried="parameters on the GPU, sub-groups of 400M, 80% of the cores for the process of "
        "updates; with clipping it makes them after backward; not tried: a ratio, NUMA binding",
        modules=_DEEPSPEED,
    ),
    PeerFacts(
        title="DeepSpeed ZenFlow, updates every 4th step",
        peer="zenflow",
        tried="ZeRO-2, topk_ratio 0.05, update_interval 4; not tried: overlap_step, which holds 32 "
        "bytes a parameter on the host; an automatic interval; ZeRO-3",
        modules=_DEEPSPEED,
    ),
    PeerFacts(
        title="PyTorch FSDP2 CPUOffloadPolicy",
        peer="fsdp2",
        tried="a unit for each block and for the head, each prefetching its neighbour, pinned "
        "memory, fused AdamW on the host",
    ),
    *(
        PeerFacts(
            title=f"RoundPipe, {updates}, {parts} microbatches",
            peer=peer,
            microbatches=parts,
            tried=f"its own loss in chunks{waits}; not tried: more than 4 microbatches",
            modules=_ROUNDPIPE,
        )
        for peer, updates, waits in (
            ("roundpipe", "updates one step old", ""),
            ("roundpipe-exact", "exact updates", ", each step waiting for its own update"),
        )
        for parts in (2, 4)
    ),
    PeerFacts(
        title="PyTorch, all on the GPU in bf16",
        peer="resident",
        tried="activations recomputed, fused AdamW, no fp32 masters; not tried: fp32 masters, "
        "torch.compile, keeping activations",
    ),
)


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
    for facts in PEERS:
        if missing := missing_modules(args.python, facts.modules):
            absent.append(f"{facts.title}: no {', '.join(missing)}; {facts.install}")
            continue
        found.append(
            Row(
                name=facts.title,
                options={**sizes, "peer": facts.peer, "microbatches": facts.microbatches},
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
        for facts in PEERS:
            print(f"{facts.title}: {facts.tried}", flush=True)
        for line in absent:
            print(f"not installed: {line}", flush=True)


if __name__ == "__main__":
    main()
