"""Temporary memory of real functions: the GPU compiler's figure beside the estimate from equations.

    pip install --target /tmp/cuda jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2 \
        nvidia-cuda-nvcc-cu12 nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12 nvidia-cuda-cupti-cu12
    JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 \
        PYTHONPATH=$PWD:$PWD/tests/helpers:/tmp/cuda \
        python experiments/throughput/temporaries.py --cuda /tmp/cuda/nvidia/cuda_nvcc

XLA compiles for an H100 without having one, by the CUDA plugin of the installed JAX and its version
of CUDA; attention is a kernel that does nothing. Products are compiled by Triton and by cuBLAS,
because only a GPU can tell which is faster, and the larger figure counts. The figures go to
`tests/helpers/gpu_temporaries.json`; `test_gpu_temporaries.py` compares them with the estimates.
"""

import argparse
import ctypes
import dataclasses
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from optax import contrib

import megatrain_jax as mt
from megatrain_jax import models
from megatrain_jax._src.common import attention_kernel
from megatrain_jax._src.engine.adapt.adapters import adapt
from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.kernels.kernel import Kernel
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.program.trace_target import traced_for
from megatrain_jax._src.engine.spec.make_spec import make_run_spec
from megatrain_jax._src.engine.spec.step_kernels import step_kernels
from megatrain_jax._src.engine.state.placement import Placement, placed_on
from megatrain_jax._src.lm.cli.catalogue import known_models

FILE = Path(__file__).parents[2] / "tests" / "helpers" / "gpu_temporaries.json"
MIB = 2**20

_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84978434048 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
_NOTHING = """
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
static ffi::Error Nothing(ffi::RemainingArgs, ffi::RemainingRets) {
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(nothing, Nothing,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets());
"""
_PRECISIONS = {
    "fp32": mt.Precision(),
    "bf16": mt.Precision(master=jnp.bfloat16),
    "compact": mt.Precision.compact(),
    "sums": mt.Precision.compact(sums="bfloat16"),
    "int4": mt.Precision(master=jnp.bfloat16, state="int4"),
    "int8": mt.Precision(master="int8", state="int8"),
}
_OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-5),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-5)),
    "lion": lambda: optax.lion(1e-5),
    "adafactor": lambda: optax.adafactor(1e-3, multiply_by_parameter_scale=False),
    "muon": lambda: contrib.muon(1e-3),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """The functions of a step, of a known model with three layers.

    Attributes:
        model: Name of the model.
        rows: Sequences of a microbatch.
        length: Their tokens.
        microbatches: Number of microbatches; with several, backwards add to sums.
        optimizer: Name of the optimizer.
        precision: Name of the precision.
        waves: Number of waves.
        budget: The device budget.
        only: Names of the functions; empty for all.
    """

    model: str
    rows: int
    length: int
    microbatches: int = 1
    optimizer: str = "adamw"
    precision: str = "compact"
    waves: int = 1
    budget: int | str = "least"
    only: tuple[str, ...] = ()


_LLAMA, _QWEN = "Llama-3-70B", "Qwen3-14B"
_UPDATES, _BACKWARD = ("update", "reduce"), ("backward",)
CASES = {
    "Llama 1 x 1024": Case(_LLAMA, 1, 1024),
    "Llama 1 x 2048, summed": Case(_LLAMA, 1, 2048, 2),
    "Llama 4 x 2048, summed": Case(_LLAMA, 4, 2048, 2),
    "Llama 1 x 8192": Case(_LLAMA, 1, 8192),
    "Llama 1 x 2048, residuals": Case(_LLAMA, 1, 2048, 2, budget=200 * 2**30),
    "Llama adafactor": Case(_LLAMA, 1, 1024, 1, "adafactor", "bf16", only=_UPDATES),
    "Llama muon": Case(_LLAMA, 1, 1024, 1, "muon", only=_UPDATES),
    "Qwen 4 x 2048, clipped": Case(_QWEN, 4, 2048, 2, "clip"),
    "Qwen 4 x 2048, bf16 sums": Case(_QWEN, 4, 2048, 2, "clip", "sums", 2, only=_BACKWARD),
    "Qwen 4 x 2048, fp32": Case(_QWEN, 4, 2048, 1, "adamw", "fp32"),
    "Qwen int4": Case(_QWEN, 1, 1024, 1, "adamw", "int4", only=_UPDATES),
    "Qwen 1 x 1024, int8": Case(_QWEN, 1, 1024, 1, "lion", "int8"),
    "Qwen muon": Case(_QWEN, 1, 1024, 1, "muon", only=_UPDATES),
    "Small Qwen 8 x 2048": Case("Qwen3-0.6B", 8, 2048, 1, "adamw", "fp32"),
    "Gemma 2 x 2048": Case("Gemma-2-2B", 2, 2048, 1, "adamw", "fp32"),
}


def kernels(case: Case, placement: Placement | None = None) -> Iterator[Kernel]:
    """The different kernels of a case; without a placement, for a plan."""
    config = models.DecoderConfig.from_hf(known_models()[case.model].config)
    windows = {"windows": config.windows[:3]} if config.windows else {}
    config = dataclasses.replace(config, num_layers=3, **windows)
    tokens = jax.ShapeDtypeStruct((case.rows * case.microbatches, case.length), jnp.int32)
    batch, loss_fn = {"tokens": tokens, "labels": tokens}, models.next_token_loss
    options = Options(
        precision=_PRECISIONS[case.precision],
        hardware="H100",
        microbatches=case.microbatches,
        waves=case.waves,
        device_budget=case.budget,
    )
    with traced_for(card="H100", widest_heads=128):
        model = adapt(lambda: models.Decoder(config, rngs=nnx.Rngs(0)), loss_fn, batch, 0)[0]
        optimizer = _OPTIMIZERS[case.optimizer]()
        spec = make_run_spec(model, loss_fn, optimizer, batch, options)
        placement = placement or placed_on(AbstractMesh((1,), ("data",)))
        found = {}
        for kernel in step_kernels(spec.first, spec.layouts, spec.optimizer, placement):
            if not case.only or kernel.name in case.only:
                found.setdefault((kernel.name, kernel.key), kernel)
    yield from found.values()


def estimated(kernel: Kernel) -> int:
    """The estimate of a kernel's temporaries in bytes."""
    with traced_for(card="H100", widest_heads=128):
        return KernelCache(platform="gpu").estimate([kernel]) - kernel.beside_bytes


def compiled(kernel: Kernel) -> int:
    """The compiler's figure of a kernel's temporaries in bytes."""
    with traced_for(card="H100", widest_heads=128):
        lowered = KernelCache().get(kernel).lower(*kernel.takes or ())
    found = [
        lowered.compile({"xla_gpu_enable_triton_gemm": by_triton}).memory_analysis()
        for by_triton in (True, False)
    ]
    return max(stats.temp_size_in_bytes for stats in found)


def _register_attention() -> None:
    """Registers kernels that do nothing under the names of a plan's attention."""
    folder = Path(tempfile.mkdtemp())
    source, library = folder / "nothing.cc", folder / "nothing.so"
    source.write_text(_NOTHING)
    flags = ["-std=c++17", "-fPIC", "-shared", "-w", f"-I{jax.ffi.include_dir()}"]
    subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True)
    handler = jax.ffi.pycapsule(ctypes.CDLL(str(library)).nothing)
    for name in (attention_kernel.FORWARD, attention_kernel.BACKWARD):
        jax.ffi.register_ffi_target(name, handler, platform="CUDA")


def main() -> None:
    """Compiles the functions of all cases, and writes the figures and the estimates."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cuda", required=True, help="the folder of nvcc")
    args = parser.parse_args()
    os.environ["PATH"] += f":{args.cuda}/bin"
    os.environ["XLA_FLAGS"] = f"--xla_gpu_cuda_data_dir={args.cuda}"
    from jax.experimental import topologies

    there = topologies.get_topology_desc("h100", "cuda", target_config=_H100, topology="1x1x1")
    _register_attention()
    placement = placed_on(Mesh(np.array(there.devices), "data"))
    rows: dict[str, list[dict]] = {}
    for name, case in CASES.items():
        rows[name] = []
        for kernel, planned in zip(kernels(case, placement), kernels(case), strict=True):
            figures = compiled(kernel) / MIB, estimated(planned) / MIB
            rows[name].append({"function": kernel.name, "mib": round(figures[0], 1)})
            print(
                f"{name:28s} {kernel.name:24s} {figures[0]:8.0f} MiB, {figures[1]:8.0f} estimated"
            )
    command = "python experiments/throughput/temporaries.py --cuda ..."
    text = json.dumps({"command": command, "jax": jax.__version__, "cases": rows}, indent=1)
    FILE.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
