"""A decoder of a measured shape in PyTorch."""

# PyTorch and Transformers are no dependencies of this repository.
# pyright: reportMissingImports=false

from typing import Any

import torch
from shapes import Shape
from transformers import Qwen2Config, Qwen2ForCausalLM


def build_model(shape: Shape) -> Any:
    """Returns Transformers' Qwen2 in bf16 on the host, with random weights of deviation 0.02."""
    config = Qwen2Config(
        hidden_size=shape.dim,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        intermediate_size=shape.mlp_dim,
        vocab_size=shape.vocab_size,
        max_position_embeddings=max(shape.seq_len, 4096),
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]  (it is not declared)
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    torch.set_default_dtype(default)
    model.to_empty(device="cpu")
    # Initialising billions of weights on a host takes minutes: one block of noise serves all.
    noise = 0.02 * torch.randn(2**24, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                for part in parameter.view(-1).split(noise.numel()):
                    part.copy_(noise[: part.numel()])
    # `to_empty` has emptied the frequencies too, which are no parameters.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    return model.train()
