"""Reads conversations with images and videos, and renders them with their placeholders.

While the turns of a row are read and checked, each image is a mark, one character, in their text.
A video is one more kind of image here.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.data.documents import Document, noted, read_rows
from megatrain_jax._src.lm.data.image_files import (
    GivenVideo,
    ImageForm,
    ImageRoom,
    Media,
    to_reference,
)
from megatrain_jax._src.lm.data.image_processors import ImageProcessor
from megatrain_jax._src.lm.data.report import InvalidRow, Report, to_fault
from megatrain_jax._src.lm.data.row_formats import Conversation, to_conversation
from megatrain_jax._src.lm.data.sources import Parts, Source, resolve
from megatrain_jax._src.lm.data.template import Template
from megatrain_jax._src.lm.data.turns import (
    CONVERSATIONS,
    Message,
    TurnRules,
    opened_turns,
    read_turns,
)

# Private-use characters of Unicode: the mark of an image, and the border of two texts. A mark gets
# the numbers of the image's form, up to a border, once they are known.
_IMAGE, _BORDER = "\ue0f1", "\ue0f2"
_MARKS = re.compile(f"{_IMAGE}([-+.e0-9,]*){_BORDER}|[{_IMAGE}{_BORDER}]")
_TURNS = (*CONVERSATIONS, "prompt", "completion", "response")
_COLUMNS = ("images", "image")
_SOURCES = ("path", "url")

Row = Mapping[str, Any]


def image_conversations(
    parts: Parts, rules: TurnRules, report: Report, processor: ImageProcessor
) -> Iterator[Document]:
    """Reads a conversation from each row, with its images; see `documents.conversations`."""

    def convert(row: Row) -> tuple[Conversation, list[Any]]:
        row, images = replace_images(row)
        return to_conversation(row, rules), images

    for origin, (one, images) in read_rows(parts, convert, report):
        try:
            check_places(one, images)
            folder = Path(origin.path).parent
            whole = not report.is_strict
            references = [
                to_reference(image, folder, str(origin), processor.form, whole=whole)
                for image in images
            ]
        except Exception as error:  # a row may have anything in any place
            report.leave_out(origin, to_fault(error))
            continue
        counts = iter(references)
        messages = [_counted(message, counts) for message in one.messages]
        one = one._replace(messages=messages)
        yield noted(Document(origin, (one,), images=references), report)


def image_prompt(
    messages: Sequence[Mapping[str, Any]],
    processor: ImageProcessor,
    template: "ImageTemplate",
    folder: Path,
    origin: str,
) -> dict[str, np.ndarray]:
    """Renders a question with images up to the beginning of its answer; see `image_prompts`.

    Raises:
        InvalidRow: If it can't be rendered, or an image can't be read.
    """
    row, given = replace_images({"messages": list(messages)})
    turns = read_turns("messages", row["messages"])
    check_places(Conversation(turns.messages, turns.learned, None, set(), set()), given)
    images = [to_reference(image, folder, origin, processor.form, whole=True) for image in given]
    counts = iter(images)
    text = template.prompt([_counted(message, counts) for message in turns.messages])
    ids = processor.tokenizer.encode(text, add_special_tokens=False)
    room = ImageRoom.of(images)
    arrays = processor.arrays([images], room) if images else {}
    return {"tokens": np.array(ids, np.int32)} | {name: x[0] for name, x in arrays.items()}


def _counted(message: Message, images: Iterator[Media]) -> Message:
    """A message whose marks have the forms of the next images."""
    start, *rest = message.get("content", "").split(_IMAGE)
    if not rest:
        return message
    forms = (",".join(map(str, next(images).form)) for _ in rest)
    marked = [f"{_IMAGE}{form}{_BORDER}{text}" for form, text in zip(forms, rest, strict=True)]
    return {**message, "content": "".join([start, *marked])}


def replace_images(row: Row) -> tuple[Row, list[Any]]:
    """Takes the images and videos out of a row, and leaves a mark in the place of each.

    An image is a part of a message's content, ``{"type": "image", "image": ...}``. Without an
    `image` of its own, it is the next of the row's `images`, or its `image`. If no message has such
    a part, these images stand at the beginning of the first user message, as in TRL. A video is a
    part, ``{"type": "video", "video": ..., "fps": ...}``, and becomes a `GivenVideo`.

    Returns:
        The row without images, and the images and videos in the order of their marks.

    Raises:
        InvalidRow: If there are more or fewer images than places for them, or other media.
    """
    given = [image for name in _COLUMNS for image in _listed(row.get(name))]
    waiting, images = iter(given), []
    changed = {name: value for name, value in row.items() if name not in _COLUMNS}
    for name in _TURNS:
        if isinstance(turns := opened_turns(name, row.get(name)), list | tuple):
            changed[name] = [_marked_turn(turn, waiting, images) for turn in turns]
    rest = list(waiting)
    if rest and not images:
        return _prepend_images(changed, rest), rest
    if rest:
        raise InvalidRow("images without a place", f"{len(rest)} more than parts of messages")
    return changed, images


def _has_images(row: Row) -> bool:
    """Whether a row has images or videos."""
    turns = [turn for name in _TURNS for turn in _listed(opened_turns(name, row.get(name)))]
    contents = [_content(turn)[1] for turn in turns if isinstance(turn, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(_kind(part) in ("image", "video") for part in parts) or any(
        _listed(row.get(name)) for name in _COLUMNS
    )


def has_images(source: Source, most: int = 1000, columns: Mapping[str, str] | None = None) -> bool:
    """Whether one of the first rows of a dataset has images or videos.

    Args:
        source: See `chat`; an iterator loses these rows.
        most: Maximum number of rows that are read, of each file.
        columns: See `chat`.

    Raises:
        FileNotFoundError: If a file does not exist.
        TypeError: If an argument has a wrong type.
        ValueError: If `source` names no data.
    """
    most = checks.integer("most", most)
    parts = resolve(source, texts=False, columns=columns)
    read = read_rows(parts, _has_images, Report(is_strict=False), most=most)
    return any(found for _, found in read)


def check_places(conversation: Conversation, images: Sequence[Any]) -> None:
    """Checks that all images of a conversation are in user or system messages.

    Raises:
        InvalidRow: If one isn't, or turns with images were dropped.
    """
    count = 0
    for number, message in enumerate(conversation.messages, 1):
        here = message.get("content", "").count(_IMAGE)
        if here and message["role"] not in ("user", "system"):
            raise InvalidRow(
                "an image outside of a question", f"in turn {number}, of the {message['role']}"
            )
        count += here
    if count != len(images):
        raise InvalidRow("images in turns that are dropped", f"{len(images) - count} of them")


class ImageTemplate(Template):
    """A chat template of messages with images, whose texts have the placeholders of images."""

    def __init__(
        self,
        processor: ImageProcessor,
        chat_template: str | None,
        variables: Mapping[str, Any] | None,
    ):
        """Finds the template; see `Template`."""
        super().__init__(processor.tokenizer, chat_template or processor.chat_template, variables)
        self._processor = processor

    def prompt(self, messages: list[Message]) -> str:
        """Returns the text of a question up to the beginning of the answer.

        Raises:
            InvalidRow: If the template refuses it, or doesn't show its images.
            DataError: If the template is not valid Jinja.
        """
        return self._text(messages, None, prompt=True)[0]

    def _text(
        self,
        messages: list[Message],
        tools: list[Any] | None,
        prompt: bool = False,
        marks: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        parted = [_split_content(message) for message in messages]
        text, spans = super()._text(parted, tools, prompt, marks)
        contents = "".join(message.get("content", "") for message in messages)
        forms = [_form_of(mark) for mark in _MARKS.findall(contents) if mark]
        begin, video = self._processor.begin, self._processor.begin_video
        begins = "|".join(re.escape(token) for token in (begin, video) if token is not None)
        found = list(re.finditer(begins, text))
        if [place[0] for place in found] != [video if form.frames else begin for form in forms]:
            raise InvalidRow(
                f"{self.name} doesn't show its images", f"{len(found)} of {len(forms)}"
            )
        images = [self._processor.expanded(form) for form in forms]
        grown = (len(image) - len(place[0]) for image, place in zip(images, found, strict=True))
        longer = list(accumulate(grown, initial=0))

        def moved(place: int) -> int:
            return place + longer[sum(one.end() <= place for one in found)]

        spans = [(moved(start), moved(stop)) for start, stop in spans]
        shown = iter(images)
        return re.sub(begins, lambda _: next(shown), text), spans


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def _content(turn: Mapping[str, Any]) -> tuple[str, Any]:
    """The name and the value of a turn's content."""
    name = "content" if turn.get("content") is not None else "value"
    return name, turn.get(name)


def _kind(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return "image" if kind == "image_url" else kind


def _marked_turn(turn: Any, waiting: Iterator[Any], images: list[Any]) -> Any:
    if not isinstance(turn, Mapping):
        return turn
    name, content = _content(turn)
    if not isinstance(content, list | tuple):
        _check_text(content)
        return turn
    kinds = {_kind(part) for part in content}
    if "audio" in kinds:
        raise InvalidRow("audio in a message", "only text, images and videos are supported")
    if not kinds & {"image", "video"}:
        return turn
    texts: list[str] = []
    for part in content:
        if _kind(part) in ("image", "video"):
            images.append(_image_of(part, waiting))
            texts.append(_IMAGE)
            continue
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise InvalidRow("content that is neither text nor image", f"{part!r}"[:80])
        _check_text(text)
        texts += [_BORDER, text] if texts and texts[-1] != _IMAGE else [text]
    return {**turn, name: "".join(texts)}


def _check_text(text: Any) -> None:
    if isinstance(text, str) and _MARKS.search(text):
        raise InvalidRow("a character for private use", f"{_IMAGE!r} or {_BORDER!r}")


def _image_of(part: Mapping[str, Any], waiting: Iterator[Any]) -> Any:
    """The image or video of a part, or the next of the row's images."""
    if (linked := part.get("image_url")) is not None:
        return linked.get("url") if isinstance(linked, Mapping) else linked
    kind = "video" if _kind(part) == "video" else "image"
    names = (kind, *_SOURCES)
    own = next((part[name] for name in names if part.get(name) is not None), None)
    if kind == "video" and own is None:
        raise InvalidRow(
            "a video without frames",
            'its part has them, {"type": "video", "video": [...]}, and not a column of the row',
        )
    if kind == "video":
        return GivenVideo(own, part.get("fps"))
    if own is not None:
        return own
    found = next(waiting, None)
    if found is None:
        raise InvalidRow("fewer images than places", "a part of a message has no image")
    return found


def _prepend_images(row: dict[str, Any], images: Sequence[Any]) -> Row:
    """The row with marks of images at the beginning of its first question."""
    marks = _IMAGE * len(images)
    for name in _TURNS:
        for at, turn in enumerate(turns := _listed(row.get(name))):
            if not isinstance(turn, Mapping):
                continue
            # In a table of rows of several kinds, every turn has all names.
            if (turn.get("role") or turn.get("from")) in ("user", "human"):
                field, content = _content(turn)
                if isinstance(content, list | tuple):
                    content = _BORDER.join(str(part.get("text", "")) for part in content)
                turns[at] = {**turn, field: f"{marks}{content}"}
                return {**row, name: turns}
    for name in ("prompt", "question", "instruction"):
        if isinstance(row.get(name), str):
            return {**row, name: f"{marks}{row[name]}"}
    raise InvalidRow("images without a place", "there is no question")


def _split_content(message: Message) -> Message:
    """A message with its content as parts, if it has images."""
    content = message.get("content", "")
    if _IMAGE not in content:
        return message
    parts: list[dict[str, str]] = []
    # Texts and the numbers of marks in turn; None for the border of two texts.
    for number, piece in enumerate(_MARKS.split(content)):
        if piece and number % 2:
            parts.append({"type": "video" if _form_of(piece).frames else "image"})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return {**message, "content": parts}


def _form_of(mark: str) -> ImageForm:
    return ImageForm(*json.loads(f"[{mark}]"))
