"""Blocks of a PyTorch decoder for long sequences: inputs kept on the host, MLPs in tiles.

Imported by `torch_peers.py` for the rows of DeepSpeed on long sequences.
"""

# PyTorch and what builds on it are no dependencies of this repository.
# pyright: reportMissingImports=false

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def keep_inputs_on_host(model: Any) -> None:
    """Has each block recompute its activations in backward from an input that the host held.

    Args:
        model: A decoder of Transformers, changed in place.
    """
    # Only what a reentrant checkpoint saves goes through hooks of saved tensors, which move it.
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    for block in model.model.layers:
        block._gradient_checkpointing_func = _checkpoint_on_host


def _checkpoint_on_host(block: Callable[..., Any], *inputs: Any) -> Any:
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint(block, *inputs, use_reentrant=True)


def tile_mlps(model: Any) -> None:
    """Has each MLP computed in tiles by DeepSpeed's ALST (https://arxiv.org/abs/2506.13996).

    A tile has as many tokens as the model is wide, as DeepSpeed's documentation divides them.

    Args:
        model: A decoder of Transformers, changed in place.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    def tiled(mlp: Any, hidden: torch.Tensor) -> torch.Tensor:
        num_tiles = math.ceil(hidden.shape[1] / hidden.shape[2])
        return TiledMLP.apply(type(mlp).forward, mlp, hidden, num_tiles, list(mlp.parameters()))

    for block in model.model.layers:
        block.mlp.forward = functools.partial(tiled, block.mlp)
