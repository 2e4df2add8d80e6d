"""References to images and videos, which are opened only for their batch."""

import hashlib
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, ImageOps, UnidentifiedImageError

from megatrain_jax._src.common.outside import check_regular
from megatrain_jax._src.lm.data.report import InvalidRow

_UNREADABLE = "an image that can't be read"
_URLS = ("http://", "https://", "data:")
# Pictures that Pillow decodes itself: it would start Ghostscript for EPS, for example.
_FORMATS = frozenset("AVIF BMP GIF JPEG JPEG2000 MPO PNG PPM TIFF WEBP".split())


class ImageForm(NamedTuple):
    """What the tokens of an image or a video depend on.

    Attributes:
        vectors: The number of its vectors.
        rows: The number of rows of tiles, if the tokens tell it.
        columns: The number of tiles in a row.
        frames: The number of a video's frames; 0 for an image.
        fps: The video's frames per second.
        images: The number of images that it counts as in the arrays of a batch.
    """

    vectors: int
    rows: int = 1
    columns: int = 1
    frames: int = 0
    fps: float = 0.0
    images: int = 1


class GivenVideo(NamedTuple):
    """A video of a row, as it is given.

    Attributes:
        frames: A list of images, or the path of a folder.
        fps: Frames per second.
    """

    frames: Any
    fps: Any


@dataclass(frozen=True, kw_only=True)
class VideoReference:
    """A video of a row. Its frames are decoded when it is opened.

    Attributes:
        frames: The frames, of one size.
        digest: A hash of the frames and of their rate.
        origin: Origin of the row, for errors.
        form: What its tokens depend on.
    """

    frames: "Sequence[ImageReference]"
    digest: bytes
    origin: str
    form: ImageForm

    def open(self) -> list[Image.Image]:
        """Decodes the frames; see `ImageReference`.

        Raises:
            ValueError: If one can't be read, or is turned and others aren't.
        """
        images = [image for frame in self.frames for image in frame.open()]
        if sizes := {image.size for image in images} - {images[0].size}:
            raise ValueError(
                f"a video of {self.origin} has frames of {images[0].size} and {sizes.pop()} pixels"
            )
        return images

    @property
    def num_bytes(self) -> int:
        """Host memory that it keeps."""
        return sum(frame.num_bytes for frame in self.frames)


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

    def open(self) -> list[Image.Image]:
        """Decodes the image.

        Returns:
            One image, as Transformers passes it to its processor. A file is turned upright and
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
                return [given.convert("LA") if given.mode == "La" else given]
            with _opened(given) as image:
                upright = ImageOps.exif_transpose(image)
                return [upright.convert("RGB") if isinstance(given, Path) else upright]
        except Exception as error:  # Pillow's errors for damaged files have no common type
            name = f"{self.origin}, {given}," if isinstance(given, Path) else self.origin
            named = ValueError(_with_file(given, error))  # the reason of `to_reference`
            named.__cause__ = error
            raise ValueError(
                f"an image of {name} can't be read: {error}. Repair the file, or leave its row "
                'out, as `invalid`="drop" does: only then all images are decoded before training, '
                "and not only their headers read"
            ) from named

    @property
    def num_bytes(self) -> int:
        """Host memory that it keeps."""
        given = self.source
        if isinstance(given, Path):
            return 0
        return len(given) if isinstance(given, bytes) else 3 * given.width * given.height


Media = ImageReference | VideoReference
FormOf = Callable[..., ImageForm]


def to_reference(given: Any, folder: Path, origin: str, form: FormOf, *, whole: bool) -> Media:
    """Returns a reference to a row's image or video.

    Args:
        given: A path, bytes, a PIL image, or a mapping with `bytes` or `path`, as `datasets` has;
            or a `GivenVideo` of these.
        folder: The folder where relative paths begin.
        origin: Origin of the row.
        form: Returns the form of an image from its height and width, or of a video, from those of
            its frames and their number.
        whole: Whether images are decoded to find damage; if not, only their headers are read.

    Raises:
        InvalidRow: If it is none of these, or no image, or the processor refuses its size.
    """
    if isinstance(given, GivenVideo):
        reference = _video(given, folder, origin, form)
    else:
        reference = _referred(given, folder, origin, form)
    if whole:
        try:
            reference.open()
        except ValueError as error:
            raise InvalidRow(_UNREADABLE, str(error.__cause__ or error)) from error
    return reference


def _video(given: GivenVideo, folder: Path, origin: str, form: FormOf) -> VideoReference:
    fps = 24.0 if given.fps is None else given.fps
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf:
        raise InvalidRow("a video's `fps` that is no number above 0", f"{given.fps!r}")
    sources = given.frames
    if isinstance(sources, str | PathLike):
        sources = _in_folder(sources, folder)
    if not isinstance(sources, list | tuple) or not sources:
        raise InvalidRow("a video without frames", f"{sources!r:.80} is no list of images")

    def sides(height: int, width: int) -> ImageForm:
        return ImageForm(1, *sorted((height, width)))

    # Whether frames are turned is only known once they are opened, and the form is the same.
    frames = [_referred(frame, folder, origin, sides) for frame in sources]
    sizes = {(frame.form.rows, frame.form.columns) for frame in frames}
    if len(sizes) > 1:
        raise InvalidRow("a video with frames of several sizes", f"{sorted(sizes)}")
    height, width = sizes.pop()
    own = _refusing(lambda: form(height, width, len(frames)), height, width)
    own = own._replace(frames=len(frames), fps=float(fps))
    digest = _hash(b"".join([str(float(fps)).encode(), *(frame.digest for frame in frames)]))
    return VideoReference(frames=frames, digest=digest, origin=origin, form=own)


def _in_folder(given: str | PathLike[str], folder: Path) -> list[Path]:
    """The frames in a folder, by their names; numbers in names count as numbers."""
    is_url, path = str(given).startswith(_URLS), folder / Path(given).expanduser()
    if is_url or path.exists() and not path.is_dir():
        shown = f"{given:.200}" if is_url else path
        raise InvalidRow(
            "a video that is no folder of frames",
            f"{shown}: write its frames as images and pass their folder, such as from `ffmpeg -i "
            f"{shown} -vf fps=2 frames/%04d.png` with `fps` 2",
        )
    if not path.is_dir():
        raise InvalidRow("a video that is no folder of frames", f"{path} doesn't exist")
    files = [file for file in path.iterdir() if not file.name.startswith(".")]
    if not files:
        raise InvalidRow("a video without frames", f"there are no files in {path}")
    # Digits are at odd places, so numbers are only compared with numbers.
    parts = {file: re.split(r"([0-9]+)", file.name) for file in files}
    return sorted(
        files, key=lambda file: [int(x) if i % 2 else x for i, x in enumerate(parts[file])]
    )


def _referred(given: Any, folder: Path, origin: str, form: FormOf) -> ImageReference:
    if isinstance(given, Mapping):
        given = next((given[name] for name in ("bytes", "path") if given.get(name)), given)
    if isinstance(given, str) and given.startswith(_URLS):
        raise InvalidRow("an image that is no file", f"{given[:60]} isn't downloaded")
    if isinstance(given, Image.Image):
        try:
            _check_image(given)
            pixels = given.tobytes()
        except Exception as error:  # see `open`; PIL decodes late
            raise InvalidRow(_UNREADABLE, str(error)) from error
        # With a different palette, equal pixels are different colours.
        mode = f"{given.mode} {given.size} {given.getpalette()} {given.info.get('transparency')}"
        digest, own = _hash(mode.encode() + pixels), _form(given, form)
        return ImageReference(source=given, digest=digest, origin=origin, form=own)
    if not isinstance(given, str | PathLike | bytes):
        kinds = "a path, bytes or a PIL image"
        raise InvalidRow("an image of an unknown kind", f"{type(given).__name__} is not {kinds}")
    source = given if isinstance(given, bytes) else folder / Path(given).expanduser()
    try:
        with _opened(source) as image:
            own = _form(image, form, turned=True)
        size = 0 if isinstance(source, bytes) else source.stat().st_size
    except InvalidRow:
        raise
    except Exception as error:  # see `open`
        raise InvalidRow(_UNREADABLE, _with_file(source, error)) from error
    known = source if isinstance(source, bytes) else f"{source} {size}".encode()
    return ImageReference(source=source, digest=_hash(known), origin=origin, form=own)


def _with_file(source: Any, error: Exception) -> str:
    """An error's message with the file that it is about, if the image is in one."""
    is_named = not isinstance(source, Path) or str(source) in str(error)
    return str(error) if is_named else f"{source}: {error}"


def _refusing(form: Callable[[], ImageForm], height: int, width: int) -> ImageForm:
    try:
        return form()
    except ValueError as error:
        why = f"{width} × {height} pixels: {error}"
        raise InvalidRow("an image of a size that the processor refuses", why) from error


def _form(image: Image.Image, form: FormOf, *, turned: bool = False) -> ImageForm:
    """The form of an image, which `open` may have `turned` upright."""

    def of(width: int, height: int) -> ImageForm:
        return _refusing(lambda: form(height, width), height, width)

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

    @classmethod
    def of(cls, images: Sequence[Media]) -> "ImageRoom":
        """Returns what some images and videos take."""
        forms = [image.form for image in images]
        return cls(sum(form.images for form in forms), sum(form.vectors for form in forms))
