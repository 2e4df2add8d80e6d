"""References to images, opened only for their batch, and processors that read them."""

import hashlib
import importlib
import io
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Int
from PIL import Image, ImageOps, UnidentifiedImageError

from megatrain_jax._src.common.outside import as_value_errors, check_regular
from megatrain_jax._src.lm.common.hf_folder import PROCESSOR_FILES, read_json
from megatrain_jax._src.lm.common.hub import TOKENIZER_FILES, folder_or_download
from megatrain_jax._src.lm.data.report import InvalidRow

_UNREADABLE = "an image that can't be read"
# Pictures that Pillow decodes itself: it would start Ghostscript for EPS, for example.
_FORMATS = frozenset("AVIF BMP GIF JPEG JPEG2000 MPO PNG PPM TIFF WEBP".split())


class ImageForm(NamedTuple):
    """What the tokens of an image depend on.

    Attributes:
        vectors: The number of its vectors.
        rows: The number of rows of tiles, if the tokens tell it.
        columns: The number of tiles in a row.
    """

    vectors: int
    rows: int = 1
    columns: int = 1


@dataclass(frozen=True, kw_only=True)
class ImageReference:
    """An image of a row. It is decoded when it is opened.

    Attributes:
        source: Path of a file, the bytes of one, or a PIL image.
        digest: A hash of the file's path and size, of the bytes, or of the pixels.
        origin: Origin of the row, for errors.
        form: What its tokens depend on.
    """

    source: Path | bytes | Image.Image
    digest: bytes
    origin: str
    form: ImageForm

    @property
    def vectors(self) -> int:
        """The number of its vectors."""
        return self.form.vectors

    def open(self) -> Image.Image:
        """Decodes the image.

        Returns:
            The image as Transformers passes it to its processor. A file is turned upright and
            converted to RGB, without transparency. Bytes are turned upright, as `datasets` decodes
            them. A PIL image stays as it is. The processor then puts transparent pixels on white.

        Raises:
            ValueError: If it can't be read; the message names its row.
        """
        given = self.source
        try:
            if isinstance(given, Image.Image):
                _check_image(given)
                given.load()
                # Pillow converts the mode "La" only to "LA".
                return given.convert("LA") if given.mode == "La" else given
            with _opened(given) as image:
                upright = ImageOps.exif_transpose(image)
                return upright.convert("RGB") if isinstance(given, Path) else upright
        except Exception as error:  # Pillow's errors for damaged files have no common type
            name = f"{self.origin}, {given}," if isinstance(given, Path) else self.origin
            raise ValueError(
                f"an image of {name} can't be read: {error}. Repair the file, or leave its row "
                'out, as `invalid`="drop" does: only then all images are decoded before training, '
                "and not only their headers read"
            ) from error

    @property
    def num_bytes(self) -> int:
        """Host memory that it keeps."""
        given = self.source
        if isinstance(given, Path):
            return 0
        return len(given) if isinstance(given, bytes) else 3 * given.width * given.height


def to_reference(
    given: Any, folder: Path, origin: str, processor: "ImageProcessor", *, whole: bool
) -> ImageReference:
    """Returns a reference to a row's image.

    Args:
        given: A path, bytes, a PIL image, or a mapping with `bytes` or `path`, as `datasets` has.
        folder: The folder where relative paths begin.
        origin: Origin of the row.
        processor: Tells its form.
        whole: Whether the image is decoded to find damage; if not, only its header is read.

    Raises:
        InvalidRow: If it is none of these, or no image, or the processor refuses its size.
    """
    reference = _referred(given, folder, origin, processor)
    if whole:
        try:
            reference.open()
        except ValueError as error:
            raise InvalidRow(_UNREADABLE, str(error.__cause__)) from error
    return reference


def _referred(given: Any, folder: Path, origin: str, processor: "ImageProcessor") -> ImageReference:
    if isinstance(given, Mapping):
        given = next((given[name] for name in ("bytes", "path") if given.get(name)), given)
    if isinstance(given, str) and given.startswith(("http://", "https://", "data:")):
        raise InvalidRow("an image that is no file", f"{given[:60]} isn't downloaded")
    if isinstance(given, Image.Image):
        try:
            _check_image(given)
            pixels = given.tobytes()
        except Exception as error:  # see `open`; PIL decodes late
            raise InvalidRow(_UNREADABLE, str(error)) from error
        # With a different palette, equal pixels are different colours.
        mode = f"{given.mode} {given.size} {given.getpalette()} {given.info.get('transparency')}"
        digest, form = _hash(mode.encode() + pixels), _form(given, processor)
        return ImageReference(source=given, digest=digest, origin=origin, form=form)
    if not isinstance(given, str | PathLike | bytes):
        kinds = "a path, bytes or a PIL image"
        raise InvalidRow("an image of an unknown kind", f"{type(given).__name__} is not {kinds}")
    source = given if isinstance(given, bytes) else folder / Path(given).expanduser()
    try:
        with _opened(source) as image:
            form = _form(image, processor, turned=True)
        size = 0 if isinstance(source, bytes) else source.stat().st_size
    except InvalidRow:
        raise
    except Exception as error:  # see `open`
        raise InvalidRow(_UNREADABLE, str(error)) from error
    known = source if isinstance(source, bytes) else f"{source} {size}".encode()
    return ImageReference(source=source, digest=_hash(known), origin=origin, form=form)


def _form(image: Image.Image, processor: "ImageProcessor", *, turned: bool = False) -> ImageForm:
    """The form of an image, which `open` may have `turned` upright."""

    def of(width: int, height: int) -> ImageForm:
        try:
            return processor.form(height, width)
        except ValueError as error:
            why = f"{width} × {height} pixels: {error}"
            raise InvalidRow("an image of a size that the processor refuses", why) from error

    width, height = image.size
    found = of(width, height)
    # Mostly it makes no difference, and to find the tag may mean to decode the image.
    if turned and found != of(height, width):
        found = of(*ImageOps.exif_transpose(image).size)
    return found


def _opened(source: Path | bytes) -> Image.Image:
    """An image whose header has been read, but no pixels.

    Raises:
        ValueError: If it is no regular file, of another format, or too large.
        Exception: Any error of Pillow.
    """
    if isinstance(source, Path):
        check_regular(source)
    Image.init()
    formats = [name for name in Image.ID if name in _FORMATS]
    try:
        image = Image.open(
            io.BytesIO(source) if isinstance(source, bytes) else source, "r", formats
        )
    except UnidentifiedImageError as error:
        raise ValueError(f"it is of none of the formats {', '.join(formats)}") from error
    try:
        return _check_image(image)
    except ValueError:
        image.close()
        raise


def _check_image(image: Image.Image) -> Image.Image:
    """Returns an image that can be decoded safely, as far as its header says."""
    if image.format is not None and image.format not in _FORMATS:
        raise ValueError(f"it is of the format {image.format}, not {', '.join(sorted(_FORMATS))}")
    # A small file can have an image that takes gigabytes.
    most, size = Image.MAX_IMAGE_PIXELS, image.width * image.height
    if most is not None and size > most:
        raise ValueError(
            f"it has {image.width:,} × {image.height:,} pixels, more than the {most:,} allowed: "
            "make it smaller, or set `PIL.Image.MAX_IMAGE_PIXELS` to a larger number"
        )
    return image


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


class ImageRoom(NamedTuple):
    """The maximum of images in a row of a dataset.

    Attributes:
        images: Number of images.
        vectors: Number of their vectors.
    """

    images: int
    vectors: int


class ImageProcessor(ABC):
    """A processor of Transformers: its tokenizer, the tokens of an image, and its pixels.

    Attributes:
        tokenizer: The tokenizer.
        chat_template: The chat template; None if there is none.
        begin: The token that a chat template writes for an image.
        tokens: Ids of the image tokens, which are never labels.
    """

    begin: str
    # What the whole processor passes to that of images.
    _options: ClassVar[dict[str, Any]] = {}

    def __init__(self, processor: Any, names: Sequence[str]):
        """Takes a processor, and the names of the image tokens."""
        self._images = processor.image_processor
        self.tokenizer = processor.tokenizer
        self.chat_template: str | None = processor.chat_template
        self.tokens = frozenset(self.tokenizer.convert_tokens_to_ids(list(names)))

    @abstractmethod
    def form(self, height: int, width: int) -> ImageForm:
        """Returns the form of an image of this size, in pixels.

        Raises:
            ValueError: If the processor refuses this size.
        """

    @abstractmethod
    def expanded(self, form: ImageForm) -> str:
        """Returns the tokens of an image as text, in place of `begin`."""

    @abstractmethod
    def arrays(
        self, rows: Sequence[Sequence[ImageReference]], room: ImageRoom
    ) -> dict[str, np.ndarray]:
        """Opens the images of some rows of a batch.

        Args:
            rows: The images of each row.
            room: Number of places of each row; those behind its images are filled with zeros.

        Returns:
            The arrays of a batch that hold images.

        Raises:
            ValueError: If an image can't be read.
        """

    def _processed(self, images: Sequence[Image.Image]) -> Any:
        # As the whole processor passes it: released preprocessor files don't set this option.
        options = {"do_convert_rgb": True, "return_tensors": "np", **self._options}
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

    def form(self, height: int, width: int) -> ImageForm:
        """Returns the form of an image."""
        return ImageForm(self._count)

    def expanded(self, form: ImageForm) -> str:
        """Returns the tokens of an image as text."""
        tiles = form.vectors // self._count
        return self._sequence.replace(self._placeholders, self._placeholders * tiles)

    def arrays(
        self, rows: Sequence[Sequence[ImageReference]], room: ImageRoom
    ) -> dict[str, np.ndarray]:
        """Opens images: `pixel_values`, (rows, images, channels, height, width)."""
        shape = (len(rows), room.vectors // self._count, *self._shape)
        result = np.zeros((shape[0], max(1, shape[1]), *self._shape), np.float32)
        for row, images in zip(result, rows, strict=True):
            if images:
                found = self._processed([image.open() for image in images])
                tiles = found.get("num_patches", np.ones(len(images), int))
                _check_vectors(images, self._count * np.asarray(tiles))
                row[: sum(tiles)] = found["pixel_values"]
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
    """Images divided into tiles of one size, with a tile that shows the whole image."""

    _options: ClassVar[dict[str, Any]] = {"crop_to_patches": True}

    def __init__(self, processor: Any):
        """Takes the processor, or its parts."""
        tokenizer = processor.tokenizer
        self.begin, count = tokenizer.context_image_token, processor.image_seq_length
        around = start, end = tokenizer.start_image_token, tokenizer.end_image_token
        super().__init__(processor, self.begin, around, start + self.begin * count + end, count)

    def form(self, height: int, width: int) -> ImageForm:
        """Returns the form of an image."""
        tiles = self._images.get_number_of_image_patches(height, width, self._options)
        return ImageForm(self._count * tiles)


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

    def form(self, height: int, width: int) -> ImageForm:
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

    def _processed(self, images: Sequence[Image.Image]) -> Any:
        found = super()._processed(images)
        tiles = [_with_whole(int(rows * columns)) for rows, columns in found["aspect_ratios"]]
        return {"pixel_values": found["pixel_values"].float().numpy(), "num_patches": tiles}


def _with_whole(tiles: int) -> int:
    """The number of tiles, and the one that shows the whole image if there are several."""
    return tiles + (tiles > 1)


class _AnySize(ImageProcessor):
    """Images of any size as patches, of which squares become a vector each."""

    def __init__(self, processor: Any):
        """Takes a processor of Qwen's models, or its parts."""
        tokenizer = processor.tokenizer
        self.begin = getattr(tokenizer, "image_token", None) or "<|image_pad|>"
        around = [n for n in ("<|vision_start|>", "<|vision_end|>") if n in tokenizer.get_vocab()]
        super().__init__(processor, [self.begin, *around])
        self._each = self._images.merge_size**2
        patches = self._processed([Image.new("RGB", (32, 32))])["pixel_values"]
        self._numbers = patches.shape[1]

    def form(self, height: int, width: int) -> ImageForm:
        """Returns the form of an image; it is the same for a turned image."""
        return ImageForm(self._images.get_number_of_image_patches(height, width) // self._each)

    def expanded(self, form: ImageForm) -> str:
        """Returns the tokens of an image as text."""
        return self.begin * form.vectors

    def arrays(
        self, rows: Sequence[Sequence[ImageReference]], room: ImageRoom
    ) -> dict[str, np.ndarray]:
        """Opens images: `pixel_values`, (rows, patches, numbers), and `image_grid_thw`."""
        patches = np.zeros((len(rows), room.vectors * self._each, self._numbers), np.float32)
        grids = np.zeros((len(rows), room.images, 3), np.int32)
        for row, images in enumerate(rows):
            if not images:
                continue
            found = self._processed([image.open() for image in images])
            sizes = np.asarray(found["image_grid_thw"])
            _check_vectors(images, sizes.prod(axis=1) // self._each)
            patches[row, : sizes.prod(axis=1).sum()] = found["pixel_values"]
            grids[row, : len(images)] = sizes
        return {"pixel_values": patches, "image_grid_thw": grids}


class _Gemma4(ImageProcessor):
    """Images of any size, each as patches with their places, and places for as many in all."""

    def __init__(self, processor: Any):
        """Takes the processor, or its parts."""
        tokenizer = processor.tokenizer
        self.begin, self._around = tokenizer.image_token, (tokenizer.boi_token, tokenizer.eoi_token)
        super().__init__(processor, [self.begin, *self._around])
        self._shape = self._processed([Image.new("RGB", (32, 32))])["pixel_values"][0].shape
        module = importlib.import_module(type(self._images).__module__)
        self._resized = module.get_aspect_ratio_preserving_size

    def form(self, height: int, width: int) -> ImageForm:
        """Returns the form of an image; it is the same for a turned image."""
        patch, merge = self._images.patch_size, self._images.pooling_kernel_size
        rows, columns = self._resized(height, width, patch, self._shape[0], merge)
        return ImageForm(rows * columns // (patch * merge) ** 2)

    def expanded(self, form: ImageForm) -> str:
        """Returns the tokens of an image as text."""
        return (self.begin * form.vectors).join(self._around)

    def arrays(
        self, rows: Sequence[Sequence[ImageReference]], room: ImageRoom
    ) -> dict[str, np.ndarray]:
        """Opens images: `pixel_values`, (rows, images, patches, numbers), and their places."""
        shape = len(rows), max(1, room.images), *self._shape
        patches, places = np.zeros(shape, np.float32), np.full((*shape[:3], 2), -1, np.int32)
        for row, images in enumerate(rows):
            if images:
                found = self._processed([image.open() for image in images])
                _check_vectors(images, np.asarray(found["num_soft_tokens_per_image"]))
                patches[row, : len(images)] = found["pixel_values"]
                places[row, : len(images)] = found["image_position_ids"]
        return {"pixel_values": patches, "image_position_ids": places}


def _check_vectors(images: Sequence[ImageReference], counts: Int[np.ndarray, " images"]) -> None:
    for image, count in zip(images, counts, strict=True):
        if count != image.vectors:
            raise ValueError(
                f"an image of {image.origin} now has {count:,} vectors instead of "
                f"{image.vectors:,}: don't change images while a dataset is used"
            )


_KINDS: dict[str, type[_Gemma | _Gemma4 | _InternVL | _Llama4 | _AnySize]] = {
    "Gemma3Processor": _Gemma,
    "Gemma4Processor": _Gemma4,
    "InternVLProcessor": _InternVL,
    "Llama4Processor": _Llama4,
    "Qwen2_5_VLProcessor": _AnySize,
    "Qwen3VLProcessor": _AnySize,
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
    length = next((x["image_seq_length"] for x in read if "image_seq_length" in x), 256)
    return str(kind), SimpleNamespace(**parts, image_seq_length=length)
