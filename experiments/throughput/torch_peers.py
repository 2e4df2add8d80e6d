"""Ways of training the same decoder in PyTorch, each a function that builds what makes a step.

Imported by `torch_measure.py`, which times them. What a peer needs besides PyTorch and
Transformers is imported where it is built, so that each can be measured without the others.
"""

# PyTorch and what builds on it are no dependencies of this repository.
# pyright: reportMissingImports=false

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_LEARNING_RATE = 1e-5
_WEIGHT_DECAY = 0.01


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a peer is built from.

    Attributes:
        model: The decoder in bf16 on the host, ready to train.
        tokens: Random tokens, [batch, length], on the host; also the labels.
        clip: The most that the gradients' global norm may be.
        microbatches: Into how many parts a batch is split, where a peer does that.
    """

    model: Any
    tokens: torch.Tensor
    clip: float
    microbatches: int


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A way of training, built.

    Attributes:
        step: Trains one step and returns its loss.
        finish: Waits until all that steps have begun is done.
    """

    step: Callable[[], float]
    finish: Callable[[], None] = torch.cuda.synchronize


def recompute(model: Any) -> None:
    """Makes each block recompute its activations in backward, as the library does."""
    options = {"use_reentrant": False}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def zero3(setting: Setting) -> Peer:
    """DeepSpeed ZeRO-3: bf16 parameters, fp32 masters and moments on the host, CPU Adam."""
    import deepspeed

    recompute(setting.model)
    on_host = {"device": "cpu", "pin_memory": True}
    optimizer = {"lr": _LEARNING_RATE, "weight_decay": _WEIGHT_DECAY}
    config = {
        "train_micro_batch_size_per_gpu": setting.tokens.shape[0],
        "gradient_accumulation_steps": 1,
        "gradient_clipping": setting.clip,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": optimizer},
        "zero_optimization": {
            "stage": 3,
            "offload_param": on_host,
            "offload_optimizer": on_host,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 500_000_000,
            "stage3_prefetch_bucket_size": 500_000_000,
            "stage3_param_persistence_threshold": 100_000,
            "sub_group_size": 1_000_000_000,
        },
        "steps_per_print": 10**9,
    }
    parameters = list(setting.model.parameters())
    engine, *_ = deepspeed.initialize(
        model=setting.model, model_parameters=parameters, config=config
    )
    tokens = setting.tokens.cuda()

    def step() -> float:
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return loss.item()

    return Peer(step=step)


def fsdp2(setting: Setting) -> Peer:
    """PyTorch FSDP2 with CPUOffloadPolicy: fp32 parameters and moments on the host."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=1)
    model = setting.model.float()
    recompute(model)
    mesh = init_device_mesh("cuda", (1,))
    offload = CPUOffloadPolicy(pin_memory=True)
    dtypes = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, offload_policy=offload, mp_policy=dtypes)
    # Buffers stay where they are, and the frequencies are needed on the GPU.
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.cuda()
    return Peer(step=eager_step(model, setting))


def resident(setting: Setting) -> Peer:
    """PyTorch with all on the GPU: bf16 parameters and moments, without fp32 masters."""
    model = setting.model.cuda()
    recompute(model)
    return Peer(step=eager_step(model, setting))


def eager_step(model: Any, setting: Setting) -> Callable[[], float]:
    """Returns a step of plain PyTorch: fused AdamW after clipping."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY, fused=True
    )
    tokens = setting.tokens.cuda()

    def step() -> float:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), setting.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def roundpipe(setting: Setting, *, exact: bool) -> Peer:
    """RoundPipe: bf16 parameters, fp32 masters and moments on the host, its own CPU Adam.

    Args:
        setting: What to train.
        exact: Whether a step waits for its own update. By default, RoundPipe trains on parameters
            that are one step old.
    """
    from roundpipe import RoundPipeRunConfig
    from roundpipe.models import llama
    from roundpipe.optim import Adam
    from roundpipe.optim_stream import synchronize_optim

    # RoundPipe 0.1.1 has no preset for Qwen2, but the one for Llama only takes a model apart to
    # embedding, blocks and head, which Qwen2 calls the same. The preset makes the mask with an
    # argument that Transformers 5 has renamed; without a mask, SDPA is causal on its own.
    llama.create_causal_mask = lambda **_: None
    parts = setting.microbatches
    model = llama.wrap_model(
        setting.model,
        optim_dtype=torch.float32,
        name="decoder",
        model_run_config=RoundPipeRunConfig(num_microbatch=parts),
    )
    optimizer = Adam(
        model.optim_parameters(),
        lr=_LEARNING_RATE,
        weight_decay=_WEIGHT_DECAY,
        decoupled_weight_decay=True,
    )

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.optim_parameters(), setting.clip)
        optimizer.step()
        optimizer.zero_grad()

    def step() -> float:
        # Without logits, the loss is computed a few thousand tokens at a time.
        inputs = {"input_ids": setting.tokens, "labels": setting.tokens, "return_logits": False}
        loss = model.forward_backward(
            input_kwargs=inputs, loss_fn=lambda outputs, _: outputs.loss / parts
        )
        model.step(update, is_async=not exact)
        return float(loss)

    def finish() -> None:
        synchronize_optim()
        torch.cuda.synchronize()

    return Peer(step=step, finish=finish)


BUILDERS: dict[str, Callable[[Setting], Peer]] = {
    "zero3": zero3,
    "fsdp2": fsdp2,
    "resident": resident,
    "roundpipe": lambda setting: roundpipe(setting, exact=False),
    "roundpipe-exact": lambda setting: roundpipe(setting, exact=True),
}
