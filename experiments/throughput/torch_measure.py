"""Measures one way of training in PyTorch in this process: writes a JSON file and prints a row.

Needs PyTorch, Transformers and what the peer is made of, but not JAX. `peers.py` runs it for each
peer, and says what is not installed.
"""

# PyTorch and what builds on it are no dependencies of this repository.
# pyright: reportMissingImports=false

import argparse
import multiprocessing
import os
import platform
import resource
import shlex
import sys
import threading
import traceback
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
from timing import MIN_STEPS, Work, time_from_rest, time_long_steps, time_steps  # noqa: E402
from torch_model import build_model  # noqa: E402
from torch_peers import BUILDERS, Peer, Setting  # noqa: E402

# RoundPipe fits its plan to the times of first steps. After four, the runs that are compared differ
# by eight steps of which two end with ZenFlow's update of every fourth.
_WARM_UP_STEPS = 4
_PACKAGES = ("torch", "transformers", "deepspeed", "roundpipe")
_GIB = 2**30
# Of as many tokens the logits are worth a pass over the head's gradient, and 2 GiB at most.
_LOSS_TOKENS = 2048


def measure(peer: Peer, num_steps: int, timed: str = "drained") -> dict[str, Any]:
    """Times steps as those of this library are timed; see `timing.py` and `measure.py`."""

    def finish(loss: Any) -> float:
        peer.finish()
        return float(loss)

    begun = []
    if timed == "drained":
        begun = [peer.step() for _ in range(_WARM_UP_STEPS)]
        peer.finish()
        torch.cuda.reset_peak_memory_stats()
        times = time_steps(Work(begin=peer.step, finish=float, drain=peer.finish), num_steps)
    else:
        torch.cuda.reset_peak_memory_stats()
        work = Work(begin=peer.step, finish=finish, drain=peer.finish)
        times = time_from_rest(work) if timed == "rest" else time_long_steps(work, num_steps)
    return {
        **times.figures(),
        "peak_device_gib": torch.cuda.max_memory_allocated() / _GIB,
        "peak_device_gib_reserved": torch.cuda.max_memory_reserved() / _GIB,
        "peak_host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "losses": [float(loss) for loss in begun] + times.losses,
    }


def describe() -> dict[str, Any]:
    """Returns the hardware and the versions that the figures depend on."""
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
    parser.set_defaults(loss_tokens=_LOSS_TOKENS)
    parser.add_argument("--microbatches", type=int, default=2, help="of RoundPipe")
    parser.add_argument("--seconds", type=float, default=300, help="give up after them")
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=MIN_STEPS, help="steps that the mean is of")
    parser.add_argument(
        "--timed", choices=("drained", "ends", "rest"), default="drained", help="see measure.py"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/throughput/torch.json"))
    add_origin_options(parser)
    return parser.parse_args()


def main() -> None:
    """Builds the peer, measures it, writes everything and prints the row."""
    args = parse_arguments()
    limit = threading.Timer(args.seconds, give_up, [f"not done after {args.seconds:g} s"])
    limit.daemon = True
    limit.start()
    shape, origin = chosen_shape(args), find_origin(args)
    torch.manual_seed(0)
    model = build_model(shape)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    tokens = torch.randint(0, shape.vocab_size, (shape.batch_size, shape.seq_len))
    setting = Setting(
        model=model,
        tokens=tokens,
        clip=args.clip,
        microbatches=args.microbatches,
        loss_tokens=shape.loss_tokens,
    )
    figures = measure(BUILDERS[args.peer](setting), args.steps, args.timed)
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
    leave(0)


def give_up(why: str) -> None:
    """Says why there is no row, and ends the process."""
    print(why, file=sys.stderr)
    leave(1)


def leave(status: int) -> None:
    """Ends the process at once: threads of NCCL, DeepSpeed and RoundPipe would hold the exit up."""
    # SuperOffload's process would wait for work for ever, with the host memory that it holds.
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    try:
        main()
    except Exception:
        give_up(traceback.format_exc())
