"""Small random models with a vision part, and batches of text and images for them."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.processing_utils import ProcessorMixin

from families import save
from family_options import GEMMA4, LINEAR, LLAMA4, MOE, SHARED, SWA
from megatrain_jax import data

torch: Any = pytest.importorskip(
    "torch", reason='makes a checkpoint with PyTorch: pip install -e ".[torch]"'
)

# In version 5.24, Transformers' class of Llama 4 reads it of its decoder's results, which lack it.
if not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):
    setattr(MoeCausalLMOutputWithPast, "image_outputs", None)  # noqa: B010

LENGTH = 64
# Special tokens after those of text, and the placeholders of an image.
IMAGE, BEGIN, END, VIDEO = 90, 91, 92, 93
VIDEO_ARRAYS = ("pixel_values_videos", "video_position_ids")
VECTORS, CHANNELS, SIZE, TILE = 4, 3, 24, 16
# Images and texts of the rows of a batch: an entry is a number of text tokens, or None for an
# image.
ROWS = ([2, None, 3, None, None], [20], [None, 14])
MOST = 3
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<start_of_image>{% elif part.type == 'video' %}<start_of_video>"
    "{% else %}{{ part.text | trim }}{% endif %}"
    "{% endfor %}{% endif %}<end_of_turn>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


_TEXT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
_TOWER = {"hidden_size": 24, "intermediate_size": 40, "patch_size": 4}
# In Qwen's names.
_QWEN = _TOWER | {"depth": 2, "num_heads": 3, "out_hidden_size": 32}
_PLACES = _QWEN | {"num_position_embeddings": 25}
_MROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]}
_HYBRID = LINEAR | {
    "rope_parameters": LINEAR["rope_parameters"] | {"mrope_section": [2, 1, 1]},
}
_TOKENS = {
    "image_token_id": IMAGE,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
    "video_token_id": VIDEO,
}
_GEMMA4 = _TOWER | {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "rms_norm_eps": 1e-3,
    "pooling_kernel_size": 2,
    "position_embedding_size": 80,
}
_TOKENS_GEMMA4 = {
    "image_token_id": IMAGE,
    "boi_token_id": BEGIN,
    "eoi_token_id": END,
    "video_token_id": VIDEO,
    "audio_token_id": END + 2,
}
# Name: class of Transformers, and options of its text, its tower and itself.
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 3,
            "query_pre_attn_scalar": 9,
            "sliding_window": 6,
            "sliding_window_pattern": 2,
        },
        _TOWER
        | {
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "image_size": SIZE,
            "layer_norm_eps": 1e-3,
            "vision_use_head": False,
        },
        {
            "mm_tokens_per_image": VECTORS,
            "image_token_index": IMAGE,
            "boi_token_index": BEGIN,
            "eoi_token_index": END,
        },
    ),
    "gemma4": (
        "Gemma4",
        GEMMA4
        | {
            "attention_k_eq_v": False,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": 99,
            "use_bidirectional_attention": "vision",
            "initializer_range": 0.05,
        },
        _GEMMA4
        | {
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 30.0},
            "use_clipped_linears": True,
            "standardize": True,
        },
        _TOKENS_GEMMA4,
    ),
    "gemma4-plain": ("Gemma4", GEMMA4 | {"initializer_range": 0.05}, _GEMMA4, _TOKENS_GEMMA4),
    "internvl": (
        "InternVL",
        {"model_type": "qwen3"},
        _TOWER
        | {
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "image_size": TILE,
            "layer_norm_eps": 1e-3,
            "norm_type": "rms_norm",
            "use_qk_norm": True,
        },
        {"image_token_id": IMAGE, "image_seq_length": VECTORS, "tie_word_embeddings": False},
    ),
    "llama4": (
        "Llama4",
        LLAMA4 | {"attention_chunk_size": 16},
        _TOWER
        | {
            "intermediate_size": 4 * _TOWER["hidden_size"],
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "image_size": TILE,
            "vision_output_dim": 40,
            "projector_input_dim": 40,
            "projector_output_dim": 40,
            "rope_parameters": {"rope_type": "default", "rope_theta": 30.0},
        },
        {"image_token_index": IMAGE, "boi_token_index": BEGIN, "eoi_token_index": END},
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        SWA | {"rms_norm_eps": 1e-3, "rope_parameters": _MROPE, "tie_word_embeddings": True},
        _QWEN | {"window_size": 16, "fullatt_block_indexes": [1]},
        _TOKENS | {"tie_word_embeddings": True},
    ),
    "qwen3-vl": (
        "Qwen3VL",
        {"rope_parameters": _MROPE},
        _PLACES | {"deepstack_visual_indexes": [0, 1]},
        _TOKENS,
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        MOE
        | {
            "rope_parameters": _MROPE,
            "output_router_logits": False,
            "moe_intermediate_size": 12,
        },
        _PLACES | {"deepstack_visual_indexes": [0, 1]},
        _TOKENS,
    ),
    "qwen3.5": ("Qwen3_5", _HYBRID, _PLACES, _TOKENS),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        MOE | _HYBRID | SHARED | {"output_router_logits": False},
        _PLACES,
        _TOKENS,
    ),
}
# The same with batches of images and videos.
VIDEOS = ("gemma4", "qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe", "qwen3.5", "qwen3.5-moe")
KINDS |= {f"{kind}-videos": KINDS[kind] for kind in VIDEOS}


def make_config(kind: str, **changes: Any) -> Any:
    """Returns a model's configuration of Transformers, whose text has these fields."""
    family, text, vision, own = KINDS[kind]
    return getattr(transformers, f"{family}Config")(
        text_config=_TEXT | text | changes, vision_config=vision, **own
    )


def make_torch(kind: str = "gemma3", **changes: Any) -> Any:
    """Returns a random model in eval mode, with vectors of images that matter."""
    torch.manual_seed(0)
    family = f"{KINDS[kind][0]}ForConditionalGeneration"
    model = getattr(transformers, family)._from_config(
        make_config(kind, **changes), attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif "visual" in name:
                parameter.mul_(8)
            elif name.startswith("model.vision_tower.embeddings."):
                parameter.normal_()
            elif kind.startswith(("gemma4", "llama4")) and re.search("vision|projector", name):
                parameter.normal_(0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith(("_min", "_max")):  # so that a few numbers are beyond
                buffer.fill_(1.5 if name.endswith("_max") else -1.5)
            elif "std_" in name:
                buffer.add_(0.2 * torch.randn_like(buffer))
        if kind == "gemma3":
            model.model.multi_modal_projector.mm_input_projection_weight.normal_(0, 0.3)
    return model.eval()


def checkpoint(folder: Path, kind: str = "gemma3", **changes: Any) -> tuple[Any, Path]:
    """Returns a random model, and the folder in which Transformers has saved it."""
    model = make_torch(kind, **changes)
    save(model, folder)
    return model, folder


# The tokens of an image, its placeholder first, and their names in the tokenizer.
_OF_IMAGE = {
    "gemma3": (
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
        ("image_token", "boi_token", "eoi_token"),
    ),
    "gemma4": (
        ("<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>", "<|audio>", "<audio|>"),
        ("image_token", "boi_token", "eoi_token", "", "audio_token", "boa_token", "eoa_token"),
    ),
    "internvl": (
        ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
        ("context_image_token", "start_image_token", "end_image_token", "video_token"),
    ),
    "llama4": (
        ("<|patch|>", "<|image_start|>", "<|image_end|>", "<|image|>")
        + ("<|tile_x_separator|>", "<|tile_y_separator|>"),
        ("", "", "", "", "", ""),
    ),
    "qwen": (
        ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"),
        ("image_token", "vision_start_token", "vision_end_token", "video_token"),
    ),
}


def make_processor(kind: str = "gemma3") -> Any:
    """Returns a processor with a tokenizer of words, and Gemma's template."""
    kind = kind.removesuffix("-videos")
    names = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "\n", "\n\n", " "]
    names += ["user", "model", "which", "digit", "is", "this", "and", "<unk>"]
    names += [str(number) for number in range(IMAGE - len(names))]
    special, named = _OF_IMAGE["qwen" if "qwen" in kind else kind]
    tokens = Tokenizer(models.WordLevel({n: i for i, n in enumerate([*names, *special])}, "<unk>"))
    pieces = Regex(r"\n\n|\n| |[^\s]+")
    tokens.pre_tokenizer = pre_tokenizers.Split(pieces, "isolated")
    tokens.add_special_tokens([AddedToken(n, special=True) for n in [*names[:5], *special]])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        bos_token="<bos>",
        eos_token="<end_of_turn>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens={n: x for n, x in zip(named, special, strict=True) if n},
    )
    if kind == "gemma3":
        images = Gemma3ImageProcessorPil(size={"height": SIZE, "width": SIZE})
        processor = transformers.Gemma3Processor(images, tokenizer, image_seq_length=VECTORS)
        processor.chat_template = tokenizer.chat_template = TEMPLATE
        return processor
    written, video, options, more = special[0], special[3], {}, ()
    if kind == "gemma4":
        family, more = "Gemma4", (None,)
        images = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    elif kind == "llama4":
        pytest.importorskip("torchvision", reason="which the processor of Llama 4 needs")
        size = {"height": TILE, "width": TILE}
        images = transformers.Llama4ImageProcessor(size=size, max_patches=4)
        processor = transformers.Llama4Processor(images, tokenizer, patch_size=4)
        template = TEMPLATE.replace("<start_of_image>", "<|image|>")
        processor.chat_template = tokenizer.chat_template = template
        return processor
    elif kind == "internvl":
        family, options["image_seq_length"] = "InternVL", VECTORS
        images = GotOcr2ImageProcessorPil(size={"height": TILE, "width": TILE}, max_patches=4)
    else:
        size = {"shortest_edge": 64, "longest_edge": 640}
        images = Qwen2VLImageProcessorPil(size=size, patch_size=4)
        family = "Qwen2_5_VL" if kind == "qwen2.5-vl" else "Qwen3VL"
        written, video = (f"{special[1]}{name}{special[2]}" for name in (special[0], special[3]))
    with pytest.MonkeyPatch.context() as patch:
        # The processors of videos and sound need further packages, and nothing here calls them.
        patch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: type(None))
        make = getattr(transformers, f"{family}Processor")
        processor = make(*more, images, tokenizer, None, **options)
    template = TEMPLATE.replace("<start_of_image>", written).replace("<start_of_video>", video)
    processor.chat_template = tokenizer.chat_template = template
    return processor


def save_processor(processor: Any, folder: Path) -> None:
    """Writes the files of a processor, in the format of released checkpoints."""
    if isinstance(processor, transformers.Gemma3Processor | transformers.Llama4Processor):
        processor.save_pretrained(folder)
        return
    processor.tokenizer.save_pretrained(folder)
    values: dict[str, Any] = {"processor_class": type(processor).__name__}
    if isinstance(processor, transformers.Gemma4Processor):
        values["image_processor"] = processor.image_processor.to_dict()
    else:
        processor.image_processor.save_pretrained(folder)
    if (length := getattr(processor, "image_seq_length", None)) is not None:
        values["image_seq_length"] = length
    (folder / "processor_config.json").write_text(json.dumps(values))


def picture(seed: int, height: int = 20, width: int = 30) -> Image.Image:
    """Returns an image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def is_sized(kind: str) -> bool:
    """Whether the number of an image's vectors depends on its size, by patches and not by tiles."""
    return "qwen" in kind or "gemma4" in kind


# Patches of the images in each row along time, height and width, where sizes vary; and those of
# images and videos.
GRIDS = ([(1, 6, 10), (1, 8, 4), (1, 4, 4)], [], [(1, 4, 10)])
VIDEO_GRIDS = ([(3, 4, 6), (1, 4, 4), (2, 4, 4)], [], [(2, 6, 4)])


def batch(seed: int = 0, kind: str = "gemma3") -> dict[str, np.ndarray]:
    """Returns rows with three images or videos, none, and one; their tokens are no labels."""
    rng, videos = np.random.default_rng(seed), kind.endswith("-videos")
    sized, side = is_sized(kind), SIZE if kind == "gemma3" else TILE
    length = 64 if videos else 42 if sized else 25
    given = VIDEO_GRIDS if videos else GRIDS
    sizes = [rng.permutation(np.array(row, int)).reshape(-1, 3) for row in given]
    rows = []
    for parts, grids in zip(ROWS, sizes, strict=True):
        images = iter(grids.tolist())
        row = []
        for n in parts:
            row += text(rng, n) if n else of_image(kind, rng, *next(images))
        rows.append((row + text(rng, length))[:length])
    tokens = np.array(rows, np.int32)
    most = MOST * (1 + videos)
    shape = (
        (128 if videos else 112, 2 * CHANNELS * 4 * 4) if sized else (MOST, CHANNELS, side, side)
    )
    shape = (most, 64, CHANNELS * 4 * 4) if "gemma4" in kind else shape
    found = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "mask": tokens[:, 1:] < IMAGE,
        # Also where there is no image.
        "pixel_values": rng.normal(size=(len(rows), *shape)).astype(np.float32),
    }
    if "gemma4" in kind:
        places = found["image_position_ids"] = np.full((len(rows), most, 64, 2), -1, np.int32)
        for row, grids in zip(places, sizes, strict=True):
            frames = np.repeat(grids[:, 1:], grids[:, 0], axis=0)
            for image, (height, width) in zip(row, frames, strict=False):
                image[: height * width] = np.indices((height, width))[::-1].reshape(2, -1).T
    elif sized:
        found["image_grid_thw"] = np.zeros((len(rows), MOST, 3), np.int32)
        for row, grids in zip(found["image_grid_thw"], sizes, strict=True):
            row[: len(grids)] = grids
    if kind == "qwen2.5-vl-videos":
        found["second_per_grid_ts"] = np.array([[0.4, 0.7, 1.1]] * len(rows), np.float32)
    return found


def of_image(kind: str, rng: np.random.Generator, times: int, height: int, width: int) -> list[int]:
    """Returns the tokens of an image or a video; with texts between frames, but for Qwen2.5-VL."""
    vectors = height * width // 4 if is_sized(kind) else VECTORS
    if times == 1:
        return [BEGIN, *[IMAGE] * vectors, END]
    if "qwen2.5-vl" in kind:
        return [BEGIN, *[VIDEO] * vectors * times, END]
    return [x for _ in range(times) for x in (*text(rng, 2), BEGIN, *[VIDEO] * vectors, END)]


def text(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(3, IMAGE, count).tolist()


def inputs(given: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns Transformers' arguments for a batch: images apart from videos, without padding."""
    tokens = torch.tensor(given["tokens"]).long()
    kinds = (tokens == IMAGE).long() + 2 * (tokens == VIDEO).long()
    found: dict[str, Any] = {"input_ids": tokens, "mm_token_type_ids": kinds}
    pixels, grids = given["pixel_values"], given.get("image_grid_thw")
    if (places := given.get("image_position_ids")) is not None:
        # Each run of placeholders is an image or a frame.
        before = torch.nn.functional.pad(kinds[:, :-1], (1, 0))
        runs = [row[row > 0].numpy() for row in kinds * (kinds != before)]
        for kind, names in ((1, ("pixel_values", "image_position_ids")), (2, VIDEO_ARRAYS)):
            for name, array in zip(names, (pixels, places), strict=True):
                images = [x[: len(run)][run == kind] for x, run in zip(array, runs, strict=True)]
                found[name] = torch.tensor(np.concatenate(images))
        found["num_frames_per_video"] = torch.ones(len(found["pixel_values_videos"])).long()
    elif grids is None:
        del found["mm_token_type_ids"]
        found |= {"token_type_ids": kinds} if pixels.shape[-1] == SIZE else {}
        counts = (given["tokens"] == IMAGE).sum(1) // VECTORS
        images = [row[:n] for row, n in zip(pixels, counts, strict=True)]
        found["pixel_values"] = torch.tensor(np.concatenate(images))
    else:
        seconds = given.get("second_per_grid_ts")
        ends = grids.prod(axis=-1).cumsum(axis=-1)
        for name, chosen in (("", grids[..., 0] == 1), ("_videos", grids[..., 0] > 1)):
            patches = [
                pixels[row, : ends[row, n]][-grids[row, n].prod() :]
                for row, n in np.argwhere(chosen)
            ]
            if patches:
                kind = "video" if name else "image"
                found[f"pixel_values{name}"] = torch.tensor(np.concatenate(patches))
                found[f"{kind}_grid_thw"] = torch.tensor(grids[chosen]).long()
                if name and seconds is not None:
                    found["second_per_grid_ts"] = torch.tensor(seconds[chosen])
    empty = [name for name, x in found.items() if not len(x)]
    return {name: x for name, x in found.items() if name not in empty}


def loss_of(model: Any, given: dict[str, np.ndarray]) -> Any:
    """Returns Transformers' loss of a batch."""
    labels = torch.tensor(np.where(given["mask"], given["labels"], -100)).long()
    logits = model(**inputs(given)).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def conversation(parts: list[Any], answer: str = "7") -> dict[str, Any]:
    """A question of texts and images, and an answer."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", **part}
        for part in parts
    ]
    answered = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
    return {"messages": [{"role": "user", "content": content}, answered]}


def own(*images: Any) -> list[dict[str, Any]]:
    return [{"image": image} for image in images]


def made(rows: Any, processor: Any, **options: Any) -> data.Dataset:
    given = {"length": LENGTH, "batch_size": 1, "shuffle": False, "progress": False, "workers": 0}
    return data.image_chat(rows, processor, **{**given, **options})


def arrays_of(found: Any) -> dict[str, np.ndarray]:
    """The results of Transformers, whose pixels for Llama 4 have a type that NumPy lacks."""
    tensors = {name: x for name, x in found.items() if torch.is_tensor(x)}
    return {n: (x.float() if x.is_floating_point() else x).numpy() for n, x in tensors.items()}
