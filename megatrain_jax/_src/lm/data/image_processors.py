"""Processors of images and videos: their tokens, and their pixels as arrays of a batch."""

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from megatrain_jax._src.common.outside import as_value_errors
from megatrain_jax._src.lm.common.hf_folder import PROCESSOR_FILES, read_json
from megatrain_jax._src.lm.common.hub import TOKENIZER_FILES, folder_or_download
from megatrain_jax._src.lm.data.image_files import ImageForm, ImageRoom, Media
from megatrain_jax._src.lm.data.report import InvalidRow


class ImageProcessor(ABC):
    """A processor of Transformers: its tokenizer, the tokens of an image, and its pixels.

    Attributes:
        tokenizer: The tokenizer.
        chat_template: The chat template; None if there is none.
        begin: The token that a chat template writes for an image.
        begin_video: The one that it writes for a video; None if there are no videos.
        tokens: Ids of the image tokens, which are never labels.
    """

    begin: str
    begin_video: str | None = None
    # What the whole processor passes to that of images, and for the frames of videos.
    _options: ClassVar[dict[str, Any]] = {}
    _of_frames: dict[str, Any] = {}

    def __init__(self, processor: Any, names: Sequence[str]):
        """Takes a processor, and the names of the image tokens."""
        self._images = processor.image_processor
        self.tokenizer = processor.tokenizer
        self.chat_template: str | None = processor.chat_template
        names = [name for name in (*names, self.begin_video) if name is not None]
        self.tokens = frozenset(self.tokenizer.convert_tokens_to_ids(names))

    def form(self, height: int, width: int, frames: int = 0) -> ImageForm:
        """Returns the form of an image of this size, in pixels, or of a video of such frames.

        Raises:
            InvalidRow: If it is a video, and the models have none.
            ValueError: If the processor refuses this size.
        """
        if frames and self.begin_video is None:
            raise InvalidRow("a video", "models of Gemma 3 and Llama 4 read only text and images")
        return self._form(height, width, frames)

    @abstractmethod
    def _form(self, height: int, width: int, frames: int) -> ImageForm: ...

    @abstractmethod
    def expanded(self, form: ImageForm) -> str:
        """Returns the tokens of an image or a video as text, in place of `begin`."""

    @abstractmethod
    def arrays(self, rows: Sequence[Sequence[Media]], room: ImageRoom) -> dict[str, np.ndarray]:
        """Opens the images of some rows of a batch.

        Args:
            rows: The images and videos of each row.
            room: Number of places of each row; those behind its images are filled with zeros.

        Returns:
            The arrays of a batch that hold images.

        Raises:
            ValueError: If an image can't be read.
        """

    def _opened(
        self, rows: Sequence[Sequence[Media]], count_of: Callable[[Any], int]
    ) -> Iterator[tuple[int, int, slice, Any]]:
        """Opens images: yields the row and number of each, its places in the row, and its arrays.

        Args:
            rows: The images and videos of each row.
            count_of: Returns the number of vectors of an image's arrays.
        """
        for row, images in enumerate(rows):
            at = 0
            for number, image in enumerate(images):
                found = self._read(image)
                if (count := count_of(found)) != image.form.vectors:
                    raise ValueError(
                        f"an image of {image.origin} now has {count:,} vectors instead of "
                        f"{image.form.vectors:,}: don't change images while a dataset is used"
                    )
                own = len(found["pixel_values"])
                yield row, number, slice(at, at + own), found
                at += own

    def _read(self, image: Media) -> Any:
        """The arrays of an image, or of the frames of a video."""
        return self._processed(image.open(), **(self._of_frames if image.form.frames else {}))

    def _processed(self, images: Sequence[Any], **more: Any) -> Any:
        # As the whole processor passes it: released preprocessor files don't set this option.
        options = {"do_convert_rgb": True, "return_tensors": "np", **self._options, **more}
        return self._images(images=list(images), **options)


class _OneSize(ImageProcessor):
    """Images, or tiles of images, of one size, each with the same number of vectors."""

    def __init__(
        self, processor: Any, placeholder: str, around: tuple[str, ...], sequence: str, count: int
    ):
        """Takes a processor.

        Args:
            processor: The processor, or its parts.
            placeholder: The token that stands for a vector.
            around: The other tokens of an image.
            sequence: The tokens of an image as text; `count` placeholders stand for all its own.
            count: Vectors of an image or a tile.
        """
        super().__init__(processor, [placeholder, *around])
        self._placeholders, self._sequence, self._count = placeholder * count, sequence, count
        self._shape = self._processed([Image.new("RGB", (32, 32))])["pixel_values"][0].shape

    def _form(self, height: int, width: int, frames: int) -> ImageForm:
        """Returns the form of an image."""
        return ImageForm(self._count)

    def expanded(self, form: ImageForm) -> str:
        """Returns the tokens of an image as text."""
        tiles = form.vectors // self._count
        return self._sequence.replace(self._placeholders, self._placeholders * tiles)

    def arrays(self, rows: Sequence[Sequence[Media]], room: ImageRoom) -> dict[str, np.ndarray]:
        """Opens images: `pixel_values`, (rows, images, channels, height, width)."""
        shape = (len(rows), room.vectors // self._count, *self._shape)
        result = np.zeros((shape[0], max(1, shape[1]), *self._shape), np.float32)
        for row, _, at, found in self._opened(rows, lambda x: self._count * len(x["pixel_values"])):
            result[row, at] = found["pixel_values"]
        return {"pixel_values": result}


class _Gemma(_OneSize):
    """Images resized to one size."""

    def __init__(self, processor: Any):
        """Takes the processor.

        Raises:
            ValueError: If it divides images into crops.
        """
        if getattr(processor.image_processor, "do_pan_and_scan", None):
            raise ValueError(
                "`processor` divides images into crops (`do_pan_and_scan`), which isn't supported: "
                "set it to false in preprocessor_config.json"
            )
        tokenizer, sequence = processor.tokenizer, processor.full_image_sequence
        placeholder, self.begin = tokenizer.image_token, processor.boi_token
        around = tokenizer.boi_token, tokenizer.eoi_token
        super().__init__(processor, placeholder, around, sequence, sequence.count(placeholder))


class _InternVL(_OneSize):
    """Images divided into tiles of one size, with a tile that shows the whole image.

    A frame of a video is one tile.
    """

    _options: ClassVar[dict[str, Any]] = {"crop_to_patches": True}
    _of_frames: ClassVar[dict[str, Any]] = {"crop_to_patches": False}

    def __init__(self, processor: Any):
        """Takes the processor, or its parts."""
        tokenizer = processor.tokenizer
        self.begin_video = getattr(tokenizer, "video_token", None)
        self.begin, count = tokenizer.context_image_token, processor.image_seq_length
        around = start, end = tokenizer.start_image_token, tokenizer.end_image_token
        super().__init__(processor, self.begin, around, start + self.begin * count + end, count)

    def _form(self, height: int, width: int, frames: int) -> ImageForm:
        """Returns the form of an image or a video."""
        tiles = frames or self._images.get_number_of_image_patches(height, width, self._options)
        return ImageForm(self._count * tiles)

    def expanded(self, form: ImageForm) -> str:
        """Returns the tokens of an image or a video as text."""
        if not form.frames:
            return super().expanded(form)
        return "\n".join(f"Frame{i + 1}: {self._sequence}" for i in range(form.frames))


class _Llama4(_OneSize):
    """Images divided into tiles with tokens between them, and a tile that shows the whole image."""

    # Of type bfloat16, which NumPy doesn't have.
    _options: ClassVar[dict[str, Any]] = {"return_tensors": "pt"}

    def __init__(self, processor: Any):
        """Takes the processor."""
        self.begin, patch = processor.image_token, processor.img_patch_token
        self._start, self._end = processor.start_of_img_token, processor.end_of_img_token
        self._between, self._below = processor.tile_token, processor.tile_global_token
        size = processor.image_processor.size
        sides = size["height"] // processor.patch_size, size["width"] // processor.patch_size
        count = sides[0] * sides[1] // processor.downsample_ratio
        around = self._start, self._end, self.begin, self._between, self._below
        super().__init__(processor, patch, around, patch * count, count)

    def _form(self, height: int, width: int, frames: int) -> ImageForm:
        """Returns the form of an image."""
        images, torch = self._images, importlib.import_module("torch")
        module = importlib.import_module(type(images).__module__)
        sizes = torch.tensor(module.find_supported_resolutions(images.max_patches, images.size))
        chosen = module.get_best_fit((height, width), sizes, images.resize_to_max_canvas)
        rows, columns = (int(x) // images.size["height"] for x in chosen)
        return ImageForm(self._count * _with_whole(rows * columns), rows, columns)

    def expanded(self, form: ImageForm) -> str:
        """Returns the tokens of an image as text."""
        tile, rows = self._placeholders, form.rows if form.rows * form.columns > 1 else 0
        tiles = (self._between.join([tile] * form.columns) + self._below) * rows
        return f"{self._start}{tiles}{self.begin}{tile}{self._end}"

    def _processed(self, images: Sequence[Any], **more: Any) -> Any:
        found = super()._processed(images, **more)
        return {"pixel_values": found["pixel_values"].float().numpy()}


def _with_whole(tiles: int) -> int:
    """The number of tiles, and the one that shows the whole image if there are several."""
    return tiles + (tiles > 1)


class _Qwen(ImageProcessor):
    """Images and videos of any size as patches, of which squares become a vector each.

    A patch of a video reaches over two frames, one of an image has the same pixels twice.
    """

    # Least and most pixels of a video, without an entry in the files.
    _sizes: ClassVar[tuple[int, int]]

    def __init__(self, processor: Any):
        """Takes a processor of Qwen's models, or its parts."""
        tokenizer = processor.tokenizer
        self.begin = getattr(tokenizer, "image_token", None) or "<|image_pad|>"
        self._video = getattr(tokenizer, "video_token", None) or "<|video_pad|>"
        self.begin_video = self._video
        names = ("<|vision_start|>", "<|vision_end|>")
        self._around = [name for name in names if name in tokenizer.get_vocab()]
        super().__init__(processor, [self.begin, *self._around])
        self._each, self._frames = self._images.merge_size**2, self._images.temporal_patch_size
        self._factor = self._images.patch_size * self._images.merge_size
        patches = self._processed([Image.new("RGB", (32, 32))])["pixel_values"]
        self._numbers = patches.shape[1]
        videos = _options_of_videos(processor)
        if videos.get("cap_pixels_per_frame"):
            raise ValueError(
                "`processor` caps the pixels of a frame (`cap_pixels_per_frame`), which isn't "
                "supported: set it to false in video_preprocessor_config.json"
            )
        own = {name: videos[name] for name in ("image_mean", "image_std") if name in videos}
        self._of_frames = {"do_resize": False, "input_data_format": "channels_first", **own}
        size = videos.get("size") or {}
        names = (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
        self._least, self._most = (
            videos.get(name) or size.get(other) or default
            for (name, other), default in zip(names, self._sizes, strict=True)
        )

    @abstractmethod
    def resized(self, height: int, width: int, frames: int) -> tuple[int, int]:
        """Returns the height and the width that the frames of a video are resized to."""

    def _form(self, height: int, width: int, frames: int) -> ImageForm:
        """Returns the form of an image or a video; it is the same for a turned image."""
        if not frames:
            return ImageForm(self._images.get_number_of_image_patches(height, width) // self._each)
        height, width = self.resized(height, width, frames)
        return ImageForm(-(-frames // self._frames) * height * width // self._factor**2)

    def expanded(self, form: ImageForm) -> str:
        """Returns the tokens of an image or a video as text."""
        return (self._video if form.frames else self.begin) * form.vectors

    def arrays(self, rows: Sequence[Sequence[Media]], room: ImageRoom) -> dict[str, np.ndarray]:
        """Opens images: `pixel_values`, (rows, patches, numbers), and `image_grid_thw`."""
        patches = np.zeros((len(rows), room.vectors * self._each, self._numbers), np.float32)
        grids = np.zeros((len(rows), room.images, 3), np.int32)
        opened = self._opened(rows, lambda x: len(x["pixel_values"]) // self._each)
        for row, number, at, found in opened:
            patches[row, at], grids[row, number] = found["pixel_values"], found["image_grid_thw"][0]
        return {"pixel_values": patches, "image_grid_thw": grids}

    def _read(self, image: Media) -> Any:
        frames = image.form.frames
        if not frames:
            return super()._read(image)
        images, opened = self._images, image.open()
        height, width = self.resized(opened[0].height, opened[0].width, frames)
        utilities = importlib.import_module("transformers.image_utils")
        size = utilities.SizeDict(height=height, width=width)
        # The method of the processor itself would choose the size of an image.
        backend: Any = super(type(images), images)
        read = (images.process_image(frame, do_convert_rgb=True) for frame in opened)
        resized = [backend.resize(frame, size=size, resample=images.resample) for frame in read]
        resized += resized[-1:] * (-frames % self._frames)
        found = self._processed(resized, **self._of_frames)
        times, (_, *sides) = len(resized) // self._frames, found["image_grid_thw"][0]
        # The pixels of each frame, which the processor has repeated, become a part of a patch.
        parts = found["pixel_values"].reshape(len(resized), -1, self._frames, images.patch_size**2)
        parts = parts[:, :, 0].reshape(times, self._frames, math.prod(sides), -1, parts.shape[-1])
        patches = parts.transpose(0, 2, 3, 1, 4).reshape(-1, self._numbers)
        return {"pixel_values": patches, "image_grid_thw": [[times, *sides]]}


class _Qwen2_5(_Qwen):
    """Videos have times in their positions, and their own sizes like images."""

    _sizes: ClassVar[tuple[int, int]] = (128 * 28**2, 768 * 28**2)

    def resized(self, height: int, width: int, frames: int) -> tuple[int, int]:
        """Returns the height and the width that the frames of a video are resized to."""
        module = importlib.import_module(type(self._images).__module__)
        return module.smart_resize(height, width, self._factor, self._least, self._most)

    def arrays(self, rows: Sequence[Sequence[Media]], room: ImageRoom) -> dict[str, np.ndarray]:
        """Opens images; see `_Qwen`. `second_per_grid_ts` is the time that a patch reaches over."""
        arrays = super().arrays(rows, room)
        seconds = np.zeros(arrays["image_grid_thw"].shape[:2], np.float32)
        for row, images in enumerate(rows):
            for number, image in enumerate(images):
                seconds[row, number] = self._frames / image.form.fps if image.form.frames else 0
        return arrays | {"second_per_grid_ts": seconds}


class _Qwen3(_Qwen):
    """Videos have times as text before their frames, and sizes for all frames together."""

    _sizes: ClassVar[tuple[int, int]] = (128 * 32**2, 768 * 32**2)

    def resized(self, height: int, width: int, frames: int) -> tuple[int, int]:
        """Returns the height and the width that the frames of a video are resized to."""
        factor, each = self._factor, self._frames
        if frames < each:
            raise ValueError(f"a video has {each} frames at least, but this one has {frames}")
        if min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) > 200 * min(height, width):
            raise ValueError("a side of a frame is at most 200 times as long as the other")
        down, right = (round(side / factor) * factor for side in (height, width))
        pixels = round(frames / each) * each * down * right
        if pixels > self._most:
            scale = math.sqrt(frames * height * width / self._most)
            sides = (math.floor(side / scale / factor) * factor for side in (height, width))
            down, right = (max(factor, side) for side in sides)
        elif pixels < self._least:
            scale = math.sqrt(self._least / (frames * height * width))
            down, right = (math.ceil(side * scale / factor) * factor for side in (height, width))
        return down, right

    def expanded(self, form: ImageForm) -> str:
        """Returns the tokens of an image or a video as text."""
        if not form.frames:
            return super().expanded(form)
        times = [min(i, form.frames - 1) / form.fps for i in range(form.frames + self._frames)]
        starts = range(0, form.frames, self._frames)
        start, end = self._around
        tokens = start + self._video * (form.vectors // len(starts)) + end
        middles = ((times[i] + times[i + self._frames - 1]) / 2 for i in starts)
        return "".join(f"<{time:.1f} seconds>{tokens}" for time in middles)


class _Gemma4(ImageProcessor):
    """Images of any size, each as patches with their places, and places for as many in all."""

    def __init__(self, processor: Any):
        """Takes the processor, or its parts."""
        tokenizer = processor.tokenizer
        self.begin, self._around = tokenizer.image_token, (tokenizer.boi_token, tokenizer.eoi_token)
        self.begin_video = "<|video|>" if "<|video|>" in tokenizer.get_vocab() else None
        most = _options_of_videos(processor).get("max_soft_tokens", 70)
        self._of_frames = {"max_soft_tokens": most}
        super().__init__(processor, [self.begin, *self._around])
        pixels = self._processed([Image.new("RGB", (32, 32))])["pixel_values"]
        _, self._of_image, self._numbers = pixels.shape
        self._of_frame = most * self._images.pooling_kernel_size**2
        module = importlib.import_module(type(self._images).__module__)
        self._resized = module.get_aspect_ratio_preserving_size

    def _form(self, height: int, width: int, frames: int) -> ImageForm:
        """Returns the form of an image or a video; it is the same for a turned image."""
        patch, merge = self._images.patch_size, self._images.pooling_kernel_size
        most = self._of_frame if frames else self._of_image
        rows, columns = self._resized(height, width, patch, most, merge)
        count = max(1, frames)
        return ImageForm(count * rows * columns // (patch * merge) ** 2, images=count)

    def expanded(self, form: ImageForm) -> str:
        """Returns the tokens of an image or a video as text."""
        if not form.frames:
            return (self.begin * form.vectors).join(self._around)
        assert self.begin_video is not None
        tokens = (self.begin_video * (form.vectors // form.frames)).join(self._around)
        times = (int(i / form.fps) for i in range(form.frames))
        return " ".join(f"{time // 60:02d}:{time % 60:02d} {tokens}" for time in times)

    def arrays(self, rows: Sequence[Sequence[Media]], room: ImageRoom) -> dict[str, np.ndarray]:
        """Opens images: `pixel_values`, (rows, images, patches, numbers), and their places."""
        most = max(self._of_image, self._of_frame)
        shape = len(rows), max(1, room.images), most, self._numbers
        patches, places = np.zeros(shape, np.float32), np.full((*shape[:3], 2), -1, np.int32)
        for row, _, at, found in self._opened(rows, lambda x: sum(x["num_soft_tokens_per_image"])):
            here = row, at, slice(found["pixel_values"].shape[1])
            patches[here], places[here] = found["pixel_values"], found["image_position_ids"]
        return {"pixel_values": patches, "image_position_ids": places}


def _options_of_videos(processor: Any) -> Mapping[str, Any]:
    videos = getattr(processor, "video_processor", None) or {}
    return videos if isinstance(videos, Mapping) else videos.to_dict()


_KINDS: dict[str, type[_Gemma | _Gemma4 | _InternVL | _Llama4 | _Qwen2_5 | _Qwen3]] = {
    "Gemma3Processor": _Gemma,
    "Gemma4Processor": _Gemma4,
    "InternVLProcessor": _InternVL,
    "Llama4Processor": _Llama4,
    "Qwen2_5_VLProcessor": _Qwen2_5,
    "Qwen3VLProcessor": _Qwen3,
}


def image_processor(given: Any) -> ImageProcessor:
    """Takes a processor, or loads one from a folder.

    Raises:
        FileNotFoundError: If there is no such folder, and it can't be downloaded.
        TypeError: If it is no processor.
        ValueError: If it can't be loaded, or is of a kind that isn't supported.
    """
    kind, processor = type(given).__name__, given
    if isinstance(given, str | PathLike):
        kind, processor = _loaded(given)
    if kind not in _KINDS:
        if not hasattr(processor, "image_processor"):
            raise TypeError(
                f"`processor` must be the folder of a checkpoint with a processor of images, "
                f"or such a processor, but is a {kind}"
            )
        raise ValueError(f"`processor` is a {kind}; supported are {', '.join(_KINDS)}")
    return _KINDS[kind](processor)


def _loaded(given: str | PathLike[str]) -> tuple[str, Any]:
    """The kind of a processor in a folder, and the processor."""
    folder = folder_or_download("processor", given, "a processor of images", TOKENIZER_FILES)
    from megatrain_jax._src.lm.data.tokenizer import load_tokenizer  # needs Transformers

    tokenizer = load_tokenizer(folder, "processor")
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    files = (*PROCESSOR_FILES, "tokenizer_config.json")
    read = [read_json(folder / name) for name in files if (folder / name).is_file()]
    kind = next((x["processor_class"] for x in read if x.get("processor_class")), None)
    with as_value_errors(f"`processor` = {folder}: Transformers can't load it"):
        # Imported only here, because it imports PyTorch if that is installed.
        transformers = importlib.import_module("transformers")
        if _KINDS.get(str(kind), _Gemma) in (_Gemma, _Llama4):
            processor = transformers.AutoProcessor.from_pretrained(str(folder), **options)
            return type(processor).__name__, processor
        # The whole processor also has one of videos, which needs Torchvision.
        images = transformers.AutoImageProcessor.from_pretrained(str(folder), **options)
    template = folder / "chat_template.json"
    written = read_json(template).get("chat_template") if template.is_file() else None
    parts = {"image_processor": images, "tokenizer": tokenizer}
    parts["chat_template"] = tokenizer.chat_template or written
    parts["video_processor"] = _video_options(folder)
    length = next((x["image_seq_length"] for x in read if "image_seq_length" in x), 256)
    return str(kind), SimpleNamespace(**parts, image_seq_length=length)


def _video_options(folder: Path) -> dict[str, Any]:
    """The options of a processor of videos, where Transformers finds them."""
    inside = folder / "processor_config.json"
    own = read_json(inside).get("video_processor") if inside.is_file() else None
    names = ("video_preprocessor_config.json", "preprocessor_config.json")
    files = (folder / name for name in names)
    return own or next((read_json(file) for file in files if file.is_file()), {})
