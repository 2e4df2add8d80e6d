"""Ways of training the same decoder in PyTorch, each a function that builds what makes a step.

Imported by `torch_measure.py`, which times them. What a peer needs besides PyTorch and
Transformers is imported where it is built, so that each can be measured without the others.
"""

# PyTorch and what builds on it are no dependencies of this repository.
# pyright: reportMissingImports=false

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch_long import keep_inputs_on_host, tile_mlps
from torch_loss import Decoder

_LEARNING_RATE = 1e-5
_WEIGHT_DECAY = 0.01
_ON_HOST = {"device": "cpu", "pin_memory": True}
# What the configuration of each row of DeepSpeed says of ZeRO.
_ZERO = {
    "zero3": {"offload_param": _ON_HOST},
    "zero3-parameters-on-gpu": {},
    # 60% of the sub-groups are updated on the GPU, where each parameter takes 16 bytes for it; they
    # are small ones, so that the share is about that of parameters.
    "zero3-twin-flow": {
        "offload_optimizer": {**_ON_HOST, "ratio": 0.4},
        "sub_group_size": 100_000_000,
    },
    "superoffload": {
        "offload_optimizer": {**_ON_HOST, "super_offload": True},
        "sub_group_size": 400_000_000,
    },
    # On one GPU there is nothing to partition: stage 3 would only copy.
    "zenflow": {
        "stage": 2,
        "zenflow": {"topk_ratio": 0.05, "update_interval": 4, "overlap_step": False},
    },
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The setting of a peer: model, data and options that it is built from.

    Attributes:
        model: The decoder in bf16 on the host, ready to train.
        tokens: Random tokens, [batch, length], on the host; also the labels.
        clip: The most that the gradients' global norm may be.
        microbatches: Number of parts that a batch is split into, where a peer does that.
        loss_tokens: Number of tokens whose logits the loss holds at once.
    """

    model: Any
    tokens: torch.Tensor
    clip: float
    microbatches: int
    loss_tokens: int


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A peer that was built: how it steps, and how it ends.

    Attributes:
        step: Trains one step and returns its loss, which may still be on its way on the device.
        finish: Waits until all that steps have begun is done.
    """

    step: Callable[[], torch.Tensor]
    finish: Callable[[], None] = torch.cuda.synchronize


def decoder(setting: Setting) -> Decoder:
    """Returns the model with its loss; each block recomputes its activations in backward."""
    options = {"use_reentrant": False}
    setting.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return Decoder(setting.model, setting.loss_tokens)


def long_decoder(setting: Setting, *, tiled: bool) -> Decoder:
    """Returns the model with its loss; the host keeps each block's input for the recomputation.

    Args:
        setting: The setting that has the model.
        tiled: Whether MLPs are computed in tiles.
    """
    keep_inputs_on_host(setting.model)
    if tiled:
        tile_mlps(setting.model)
    return Decoder(setting.model, setting.loss_tokens)


def deepspeed_engine(
    setting: Setting, zero: Mapping[str, Any], built: Callable[[Setting], Decoder] = decoder
) -> Peer:
    """DeepSpeed ZeRO: bf16 parameters, fp32 masters and moments on the host, CPU Adam.

    Args:
        setting: What to train.
        zero: The configuration of ZeRO beside that of all rows of DeepSpeed.
        built: Makes the decoder that is trained.
    """
    import deepspeed

    optimizer = {"lr": _LEARNING_RATE, "weight_decay": _WEIGHT_DECAY}
    config = {
        "train_micro_batch_size_per_gpu": setting.tokens.shape[0],
        "gradient_accumulation_steps": 1,
        "gradient_clipping": setting.clip,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": optimizer},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": _ON_HOST,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 500_000_000,
            "stage3_prefetch_bucket_size": 500_000_000,
            "stage3_param_persistence_threshold": 100_000,
            "sub_group_size": 1_000_000_000,
            **zero,
        },
        "steps_per_print": 10**9,
    }
    model = built(setting)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    tokens = setting.tokens.cuda()

    def step() -> torch.Tensor:
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Peer(step=step)


def fsdp2(setting: Setting) -> Peer:
    """PyTorch FSDP2 with CPUOffloadPolicy: fp32 parameters and moments on the host."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=1)
    model: Any = decoder(setting).float()
    mesh = init_device_mesh("cuda", (1,))
    offload = CPUOffloadPolicy(pin_memory=True)
    dtypes = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    units = [*model.model.layers, model.head]
    for module in (*units, model):
        fully_shard(module, mesh=mesh, offload_policy=offload, mp_policy=dtypes)
    # The root's own parameters, the embedding and the last norm, come first and stay.
    model.set_modules_to_forward_prefetch([units[0]])
    for before, after in itertools.pairwise(units):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    # Buffers stay where they are, and the frequencies are needed on the GPU.
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.cuda()
    return Peer(step=eager_step(model, setting))


def resident(setting: Setting) -> Peer:
    """PyTorch with all on the GPU: bf16 parameters and moments, without fp32 masters."""
    model = decoder(setting).cuda()
    return Peer(step=eager_step(model, setting))


def eager_step(model: Any, setting: Setting) -> Callable[[], torch.Tensor]:
    """Returns a step of plain PyTorch: fused AdamW after clipping."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY, fused=True
    )
    tokens = setting.tokens.cuda()

    def step() -> torch.Tensor:
        loss = model(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), setting.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

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

    def step() -> torch.Tensor:
        # Without logits, the loss is computed a few thousand tokens at a time.
        inputs = {"input_ids": setting.tokens, "labels": setting.tokens, "return_logits": False}
        loss = model.forward_backward(
            input_kwargs=inputs, loss_fn=lambda outputs, _: outputs.loss / parts
        )
        model.step(update, is_async=not exact)
        return loss.detach()

    def finish() -> None:
        synchronize_optim()
        torch.cuda.synchronize()

    return Peer(step=step, finish=finish)


BUILDERS: dict[str, Callable[[Setting], Peer]] = {
    **{name: partial(deepspeed_engine, zero=zero) for name, zero in _ZERO.items()},
    **{
        name: partial(
            deepspeed_engine, zero=_ZERO["zero3"], built=partial(long_decoder, tiled=tiled)
        )
        for name, tiled in (("zero3-long", False), ("zero3-long-tiled", True))
    },
    "fsdp2": fsdp2,
    "resident": resident,
    "roundpipe": partial(roundpipe, exact=False),
    "roundpipe-exact": partial(roundpipe, exact=True),
}
