"""A small random Gemma 3 with its vision part, and batches of text and images for it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

torch: Any = pytest.importorskip(
    "torch", reason='makes a checkpoint with PyTorch: pip install -e ".[torch]"'
)

# Special tokens after those of text, and the placeholders of an image.
IMAGE, BEGIN, END = 90, 91, 92
VECTORS, CHANNELS, SIZE = 4, 3, 24
# Images and texts of the rows of a batch: an entry is a number of text tokens, or None for an
# image.
ROWS = ([2, None, 3, None, None], [20], [None, 14])
MOST = 3
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<start_of_image>{% else %}{{ part.text | trim }}{% endif %}"
    "{% endfor %}{% endif %}<end_of_turn>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def make_torch(**changes: Any) -> Any:
    """Returns a random model in eval mode, with vectors of images that matter."""
    text = {
        "vocab_size": 99,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 9,
        "sliding_window": 6,
        "sliding_window_pattern": 2,
        "pad_token_id": 0,
    }
    vision = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": SIZE,
        "patch_size": 4,
        "layer_norm_eps": 1e-3,
        "vision_use_head": False,
    }
    tokens: dict[str, Any] = {
        "image_token_index": IMAGE,
        "boi_token_index": BEGIN,
        "eoi_token_index": END,
    }
    config = transformers.Gemma3Config(
        text_config=text | changes, vision_config=vision, mm_tokens_per_image=VECTORS, **tokens
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration._from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
        model.model.multi_modal_projector.mm_input_projection_weight.normal_(0, 0.3)
    return model.eval()


def checkpoint(folder: Path, **changes: Any) -> tuple[Any, Path]:
    """Returns a random model, and the folder in which Transformers has saved it."""
    model = make_torch(**changes)
    model.save_pretrained(folder)
    return model, folder


def make_processor() -> Any:
    """Returns a processor with a tokenizer of words, and Gemma's template."""
    names = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "\n", "\n\n", " "]
    names += ["user", "model", "which", "digit", "is", "this", "and", "<unk>"]
    names += [str(number) for number in range(IMAGE - len(names))]
    special = ["<image_soft_token>", "<start_of_image>", "<end_of_image>"]
    tokens = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names + special)}, "<unk>"))
    pieces = Regex(r"\n\n|\n| |[^\s]+")
    tokens.pre_tokenizer = pre_tokenizers.Split(pieces, "isolated")
    tokens.add_special_tokens([AddedToken(n, special=True) for n in names[:5] + special])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        bos_token="<bos>",
        eos_token="<end_of_turn>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens=dict(
            zip(("image_token", "boi_token", "eoi_token"), special, strict=True)
        ),
    )
    images = Gemma3ImageProcessorPil(size={"height": SIZE, "width": SIZE})
    processor = transformers.Gemma3Processor(images, tokenizer, image_seq_length=VECTORS)
    processor.chat_template = tokenizer.chat_template = TEMPLATE
    return processor


def picture(seed: int, height: int = 20, width: int = 30) -> Image.Image:
    """Returns an image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def batch(seed: int = 0, length: int = 25) -> dict[str, np.ndarray]:
    """Returns rows with three images, none, and one; the images' tokens are no labels."""
    rng = np.random.default_rng(seed)
    image = [BEGIN, *[IMAGE] * VECTORS, END]
    rows = []
    for parts in ROWS:
        row = [token for n in parts for token in (image if n is None else text(rng, n))]
        rows.append((row + text(rng, length))[:length])
    tokens = np.array(rows, np.int32)
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "mask": tokens[:, 1:] < IMAGE,
        "pixel_values": rng.normal(size=(len(rows), MOST, CHANNELS, SIZE, SIZE)).astype(np.float32),
    }


def text(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(3, IMAGE, count).tolist()


def inputs(given: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns Transformers' arguments for a batch: all images in one array, without padding."""
    tokens = torch.tensor(given["tokens"]).long()
    counts = (given["tokens"] == IMAGE).sum(1) // VECTORS
    images = [row[:n] for row, n in zip(given["pixel_values"], counts, strict=True)]
    kinds = (tokens == IMAGE).long()
    return {
        "input_ids": tokens,
        "token_type_ids": kinds,
        "pixel_values": torch.tensor(np.concatenate(images)),
    }


def loss_of(model: Any, given: dict[str, np.ndarray]) -> Any:
    """Returns Transformers' loss of a batch."""
    labels = torch.tensor(np.where(given["mask"], given["labels"], -100)).long()
    logits = model(**inputs(given)).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
