"""The decoders that are measured, as plain numbers.

Apart from `decoder.py` so that the peers' script can read them where JAX isn't installed.
"""

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder's sizes, and the batch it is measured with unless the command line says otherwise.

    Attributes:
        dim: Width of the residual stream.
        num_layers: Blocks.
        num_heads: Query heads.
        num_kv_heads: Heads of keys and values; they divide `num_heads`.
        head_dim: Width of a head.
        mlp_dim: Width inside an MLP.
        vocab_size: Tokens; embedding and head are separate parameters.
        batch_size: Sequences in a step.
        seq_len: Tokens in a sequence.
        loss_tokens: Number of tokens whose logits the loss holds at once.
    """

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    vocab_size: int
    batch_size: int
    seq_len: int
    loss_tokens: int = 1024

    @property
    def num_tokens(self) -> int:
        """Tokens in a step."""
        return self.batch_size * self.seq_len


SHAPES = {
    # https://huggingface.co/Qwen/Qwen2.5-3B, but with a head of its own.
    "qwen2.5-3b-untied": Shape(
        dim=2048,
        num_layers=36,
        num_heads=16,
        num_kv_heads=2,
        head_dim=128,
        mlp_dim=11008,
        vocab_size=151936,
        batch_size=16,
        seq_len=2048,
    ),
    # https://huggingface.co/Qwen/Qwen2.5-7B, which has a head of its own.
    "qwen2.5-7b-untied": Shape(
        dim=3584,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        mlp_dim=18944,
        vocab_size=152064,
        batch_size=16,
        seq_len=2048,
    ),
    # https://huggingface.co/meta-llama/Meta-Llama-3-8B: 8.0B parameters, a head of its own.
    "llama-3-8b": Shape(
        dim=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=14336,
        vocab_size=128256,
        batch_size=16,
        seq_len=2048,
    ),
    # https://huggingface.co/Qwen/Qwen2.5-14B: 14.8B parameters, a head of its own.
    "qwen2.5-14b": Shape(
        dim=5120,
        num_layers=48,
        num_heads=40,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=13824,
        vocab_size=152064,
        batch_size=16,
        seq_len=2048,
    ),
    # https://huggingface.co/Qwen/Qwen2.5-32B: 32.8B parameters, a head of its own.
    "qwen2.5-32b": Shape(
        dim=5120,
        num_layers=64,
        num_heads=40,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=27648,
        vocab_size=152064,
        batch_size=16,
        seq_len=2048,
    ),
    # Llama 3 with 70B parameters (https://arxiv.org/abs/2407.21783, table 3), a head of its own.
    "llama-3-70b": Shape(
        dim=8192,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=28672,
        vocab_size=128256,
        batch_size=8,
        seq_len=2048,
    ),
    # https://huggingface.co/mistralai/Mistral-Large-Instruct-2407: 122.6B parameters in 88 layers,
    # a head of its own.
    "mistral-large": Shape(
        dim=12288,
        num_layers=88,
        num_heads=96,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=28672,
        vocab_size=32768,
        batch_size=4,
        seq_len=2048,
    ),
    # ViT-G/14 (https://arxiv.org/abs/2106.04560): 256 patches of an image, 1,000 classes.
    "vit-g": Shape(
        dim=1664,
        num_layers=48,
        num_heads=16,
        num_kv_heads=16,
        head_dim=104,
        mlp_dim=8192,
        vocab_size=1000,
        batch_size=128,
        seq_len=256,
    ),
    "vit-tiny": Shape(
        dim=64,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        mlp_dim=128,
        vocab_size=10,
        batch_size=4,
        seq_len=4,
    ),
    # About 10M parameters: starting costs more than training.
    "small": Shape(
        dim=256,
        num_layers=8,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        mlp_dim=704,
        vocab_size=8192,
        batch_size=4,
        seq_len=128,
    ),
    # For trying the scripts themselves on a CPU.
    "tiny": Shape(
        dim=64,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        mlp_dim=128,
        vocab_size=512,
        batch_size=4,
        seq_len=32,
    ),
}


def add_shape_options(parser: ArgumentParser, default: str = "qwen2.5-3b-untied") -> None:
    """Adds the options that choose a shape and change its sizes."""
    parser.add_argument("--shape", choices=SHAPES, default=default)
    parser.add_argument("--layers", type=int, help="blocks; the shape has a default")
    parser.add_argument("--batch", type=int, help="sequences in a step; the shape has a default")
    parser.add_argument("--seq", type=int, help="tokens in a sequence; the shape has a default")
    parser.add_argument("--loss-tokens", type=int, help="tokens whose logits exist at once")


def chosen_shape(args: Namespace) -> Shape:
    """Returns the shape that the options of `add_shape_options` ask for.

    Raises:
        ValueError: If a size is not positive.
    """
    shape = SHAPES[args.shape]
    options = {
        "num_layers": "layers",
        "batch_size": "batch",
        "seq_len": "seq",
        "loss_tokens": "loss_tokens",
    }
    given = {field: getattr(args, name) for field, name in options.items()}
    changes = {field: value for field, value in given.items() if value is not None}
    for field, value in changes.items():
        if value < 1:
            raise ValueError(
                f"--{options[field].replace('_', '-')} must be at least 1, not {value}"
            )
    return replace(shape, **changes)
