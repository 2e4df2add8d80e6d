"""Measures one way of training in PyTorch in this process: writes a JSON file and prints a row.

Needs PyTorch, Transformers and what the peer is made of, but not JAX. `peers.py` runs it for each
peer, and says what is not installed.
"""

# PyTorch and what builds on it are no dependencies of this repository.
# pyright: reportMissingImports=false

import argparse
import os
import platform
import resource
import shlex
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# What PyTorch and DeepSpeed read when they start: one process, as a launcher would describe it,
# and an allocator that does not fragment. A build for another CUDA than PyTorch's only warns.
for _name, _value in {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29511",
    "DS_SKIP_CUDA_CHECK": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}.items():
    os.environ.setdefault(_name, _value)

import torch  # noqa: E402
from record import add_origin_options, find_origin, write  # noqa: E402
from shapes import add_shape_options, chosen_shape  # noqa: E402
from timing import MIN_STEPS, Work, time_steps  # noqa: E402
from torch_model import build_model  # noqa: E402
from torch_peers import BUILDERS, Peer, Setting  # noqa: E402

# DeepSpeed builds its CPU Adam first, and RoundPipe fits its plan to the times of first steps.
_WARM_UP_STEPS = 5
_PACKAGES = ("torch", "transformers", "deepspeed", "roundpipe")
_GIB = 2**30


def measure(peer: Peer, num_steps: int) -> dict[str, Any]:
    """Warms up and times steps as those of this library are timed."""
    losses = [peer.step() for _ in range(_WARM_UP_STEPS)]
    peer.finish()
    torch.cuda.reset_peak_memory_stats()
    # A step has its loss when it returns; what is still to be done then waits for `finish`.
    times = time_steps(Work(begin=peer.step, finish=float, drain=peer.finish), num_steps)
    return {
        **times.figures(),
        "peak_device_gib": torch.cuda.max_memory_allocated() / _GIB,
        "peak_device_gib_reserved": torch.cuda.max_memory_reserved() / _GIB,
        "peak_host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "losses": losses + times.losses,
    }


def describe() -> dict[str, Any]:
    """Returns what the figures depend on: the hardware and versions of what is installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    device = torch.cuda.get_device_properties(0)
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    hardware = {
        "device": device.name,
        "device_limit_gib": device.total_memory / _GIB,
        "host_gib": host / _GIB,
        "num_cores": len(os.sched_getaffinity(0)),
    }
    return {"hardware": hardware, "versions": found}


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", choices=BUILDERS, required=True)
    add_shape_options(parser)
    parser.add_argument("--microbatches", type=int, default=2, help="of RoundPipe")
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=MIN_STEPS, help="steps that the mean is of")
    parser.add_argument("--out", type=Path, default=Path("runs/throughput/torch.json"))
    add_origin_options(parser)
    return parser.parse_args()


def main() -> None:
    """Builds the peer, measures it, writes everything and prints the row."""
    args = parse_arguments()
    shape, origin = chosen_shape(args), find_origin(args)
    torch.manual_seed(0)
    model = build_model(shape)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    tokens = torch.randint(0, shape.vocab_size, (shape.batch_size, shape.seq_len))
    setting = Setting(model=model, tokens=tokens, clip=args.clip, microbatches=args.microbatches)
    figures = measure(BUILDERS[args.peer](setting), args.steps)
    rate = shape.num_tokens / figures["mean_seconds_per_step"]
    result = {
        "command": shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
        "peer": args.peer,
        "shape": args.shape,
        "sizes": asdict(shape),
        "clip": args.clip,
        "microbatches": args.microbatches if args.peer.startswith("roundpipe") else 1,
        **describe(),
        "num_parameters": num_parameters,
        "tokens_per_step": shape.num_tokens,
        "tokens_per_second": rate,
        "tflops_per_second": 6 * num_parameters * rate / 1e12,
        **figures,
    }
    write(args.out, result, origin)
    print(
        f"{result['mean_seconds_per_step']:.4g} s/step, {rate:,.0f} tokens/s, peak device memory "
        f"{result['peak_device_gib']:.1f} GiB, last loss {result['losses'][-1]:.4f}",
        flush=True,
    )
    # Threads of NCCL, DeepSpeed and RoundPipe would hold the exit up.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
