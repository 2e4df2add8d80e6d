"""References to images, opened only for their batch, and processors that read them."""

import hashlib
import importlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32
from PIL import Image, ImageOps, UnidentifiedImageError

from megatrain_jax._src.common.outside import check_regular
from megatrain_jax._src.lm.common.hub import TOKENIZER_FILES, folder_or_download
from megatrain_jax._src.lm.data.report import InvalidRow

_PROCESSORS = ("Gemma3Processor",)
_UNREADABLE = "an image that can't be read"
# Pictures that Pillow decodes itself: it would start Ghostscript for EPS, for example.
_FORMATS = frozenset("AVIF BMP GIF JPEG JPEG2000 MPO PNG PPM TIFF WEBP".split())


@dataclass(frozen=True, kw_only=True)
class ImageReference:
    """An image of a row. It is decoded when it is opened.

    Attributes:
        source: Path of a file, the bytes of one, or a PIL image.
        digest: A hash of the file's path and size, of the bytes, or of the pixels.
        origin: Origin of the row, for errors.
    """

    source: Path | bytes | Image.Image
    digest: bytes
    origin: str

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


def to_reference(given: Any, folder: Path, origin: str, *, whole: bool) -> ImageReference:
    """Returns a reference to a row's image.

    Args:
        given: A path, bytes, a PIL image, or a mapping with `bytes` or `path`, as `datasets` has.
        folder: The folder where relative paths begin.
        origin: Origin of the row.
        whole: Whether the image is decoded to find damage; if not, only its header is read.

    Raises:
        InvalidRow: If it is none of these, or no image.
    """
    reference = _referred(given, folder, origin)
    if whole:
        try:
            reference.open()
        except ValueError as error:
            raise InvalidRow(_UNREADABLE, str(error.__cause__)) from error
    return reference


def _referred(given: Any, folder: Path, origin: str) -> ImageReference:
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
        form = f"{given.mode} {given.size} {given.getpalette()} {given.info.get('transparency')}"
        return ImageReference(source=given, digest=_hash(form.encode() + pixels), origin=origin)
    if not isinstance(given, str | PathLike | bytes):
        kinds = "a path, bytes or a PIL image"
        raise InvalidRow("an image of an unknown kind", f"{type(given).__name__} is not {kinds}")
    source = given if isinstance(given, bytes) else folder / Path(given).expanduser()
    try:
        with _opened(source):
            pass
        size = 0 if isinstance(source, bytes) else source.stat().st_size
    except Exception as error:  # see `open`
        raise InvalidRow(_UNREADABLE, str(error)) from error
    known = source if isinstance(source, bytes) else f"{source} {size}".encode()
    return ImageReference(source=source, digest=_hash(known), origin=origin)


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


class ImageProcessor:
    """A processor of Transformers: its tokenizer, the tokens of an image, and its pixels.

    Attributes:
        tokenizer: The tokenizer.
        chat_template: The chat template; None if there is none.
        begin: The token that a chat template writes for an image.
        expanded: The tokens of an image as text, in place of `begin`.
        tokens: Ids of the image tokens, which are never labels.
    """

    def __init__(self, given: Any):
        """Takes a processor, or loads one from a folder.

        Raises:
            FileNotFoundError: If there is no such folder, and it can't be downloaded.
            TypeError: If it is no processor.
            ValueError: If it can't be loaded, or is of a kind that isn't supported.
        """
        processor = _loaded(given) if isinstance(given, str | PathLike) else given
        kind = type(processor).__name__
        if kind not in _PROCESSORS:
            if not hasattr(processor, "image_processor"):
                raise TypeError(
                    f"`processor` must be the folder of a checkpoint with a processor of images, "
                    f"or such a processor, but is a {kind}"
                )
            raise ValueError(f"`processor` is a {kind}; supported is {' or '.join(_PROCESSORS)}")
        if getattr(processor.image_processor, "do_pan_and_scan", None):
            raise ValueError(
                "`processor` divides images into crops (`do_pan_and_scan`), which isn't supported: "
                "set it to false in preprocessor_config.json"
            )
        self._processor = processor
        self.tokenizer = tokenizer = processor.tokenizer
        self.chat_template: str | None = processor.chat_template
        self.begin: str = processor.boi_token
        self.expanded: str = processor.full_image_sequence
        names = (tokenizer.boi_token, tokenizer.image_token, tokenizer.eoi_token)
        self.tokens = frozenset(tokenizer.convert_tokens_to_ids(list(names)))
        self.shape = self.pixels([Image.new("RGB", (32, 32))]).shape[1:]

    def pixels(
        self, images: Sequence[Image.Image]
    ) -> Float32[np.ndarray, "n channels height width"]:
        """Returns the pixel values of images, converted to RGB, resized and normalised."""
        # As the whole processor passes it: released preprocessor files don't set this option.
        options = {"do_convert_rgb": True, "return_tensors": "np"}
        found = self._processor.image_processor(images=list(images), **options)
        return np.asarray(found["pixel_values"], np.float32)


def _loaded(given: str | PathLike[str]) -> Any:
    folder = folder_or_download("processor", given, "a processor of images", TOKENIZER_FILES)
    from megatrain_jax._src.lm.data.tokenizer import load_tokenizer  # needs Transformers

    load_tokenizer(folder, "processor")
    try:
        # Imported only here, because it imports PyTorch if that is installed.
        loader = importlib.import_module("transformers").AutoProcessor
        return loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # Transformers' errors for damaged files have no common type
        why = f"{type(error).__name__}: {str(error)[:500]}"
        raise ValueError(f"`processor` = {folder}: Transformers can't load it: {why}") from error
