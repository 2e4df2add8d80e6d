"""A run of the library's own decoder, for scripts of one configuration: options, steps, file."""

import argparse
import shlex
import sys
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from decoder import Batch
from machine import hardware, peak_device_gib, peak_host_gib, process_seconds, versions
from measure import figures_of_plan
from record import add_origin_options, find_origin, write
from timing import Times, Work

import megatrain_jax as mt

_BATCHES = 8


class DecoderRun:
    """A trainer with random tokens of its own, whose steps are timed as `work`.

    Attributes:
        trainer: The trainer.
        batches: Random batches, over and over.
        work: Its steps.
    """

    def __init__(
        self, make: Callable[[Batch], mt.Trainer], args: argparse.Namespace, vocab_size: int
    ):
        """Starts the trainer and prints its plan.

        Args:
            make: Makes the trainer for a batch like the one given.
            args: Has `batch`, sequences in a step, and `seq`, tokens in a sequence.
            vocab_size: Number of different tokens.
        """

        def random_batch(seed: int) -> Batch:
            size = (args.batch, args.seq + 1)
            tokens = np.random.default_rng(seed).integers(0, vocab_size, size, dtype=np.int32)
            return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}

        start = time.perf_counter()
        self.trainer = make(random_batch(0))
        self._prepared = time.perf_counter()
        self._seconds_to_prepare = self._prepared - start
        print(self.trainer.plan, flush=True)
        self._num_tokens = args.batch * args.seq
        self._ends: list[tuple[float, float]] = []
        self.batches = cycle([random_batch(seed) for seed in range(_BATCHES)])
        self.work = Work(
            begin=lambda: self.trainer.step(next(self.batches)),
            finish=self._finish,
            drain=self.trainer.flush,
        )

    def _finish(self, metrics: Any) -> float:
        loss = self.trainer.read(metrics)["loss"]
        self._ends.append((time.perf_counter(), process_seconds()))
        return loss

    def figures(self, times: Times) -> dict[str, Any]:
        """Returns the figures that every run has."""
        first_over, since_process_start = self._ends[0]
        return {
            **figures_of_plan(self.trainer.plan),
            **times.figures(),
            "tokens_per_step": self._num_tokens,
            "tokens_per_second": self._num_tokens / times.mean,
            "bound": str(self.trainer.plan.bound),
            "driver_cpu_seconds_per_step": times.driver_cpu,
            "peak_device_gib": peak_device_gib(),
            "peak_host_gib": peak_host_gib(),
            "seconds_to_prepare": self._seconds_to_prepare,
            "seconds_of_start": self.trainer.startup,
            "seconds_of_first_step": first_over - self._prepared,
            "seconds_from_process_start_to_first_step": since_process_start,
        }


def run_options(doc: str | None, name: str, *, layers: int, steps: int) -> argparse.ArgumentParser:
    """Returns the options that every script has.

    Args:
        doc: The script's docstring.
        name: Name of the file to write.
        layers: Usual number of layers.
        steps: Usual number of steps that the mean is of.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--batch", type=int, default=16, help="sequences in a step")
    parser.add_argument("--seq", type=int, default=2048, help="tokens in a sequence")
    parser.add_argument("--device-budget", default="auto", help="least, auto, or GiB")
    parser.add_argument("--steps", type=int, default=steps, help="steps that the mean is of")
    parser.add_argument("--tiny", action="store_true", help="a small shape, to try this script")
    parser.add_argument("--out", type=Path, default=Path(f"runs/throughput/{name}.json"))
    add_origin_options(parser)
    return parser


def record_run(
    args: argparse.Namespace, measure: Callable[[argparse.Namespace], dict[str, Any]]
) -> dict[str, Any]:
    """Measures, writes everything and returns it."""
    origin = find_origin(args)
    result = {
        "command": shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
        "device_budget": args.device_budget,
        "hardware": hardware(),
        "versions": versions(),
        **measure(args),
    }
    write(args.out, result, origin)
    return result
