"""The call that makes a dataset of conversations with images: `image_chat`."""

from collections.abc import Mapping
from typing import Any

from megatrain_jax._src.lm.data.corpus import CorpusBuilder
from megatrain_jax._src.lm.data.dataset import Dataset
from megatrain_jax._src.lm.data.fast_tokenizer import load_fast_tokenizer
from megatrain_jax._src.lm.data.finish import (
    INVALID,
    Invalid,
    check_choices,
    check_template,
    find_or_build,
    to_options,
    to_rules,
    with_progress_bar,
)
from megatrain_jax._src.lm.data.image_files import ImageProcessor
from megatrain_jax._src.lm.data.image_rows import ImageTemplate, image_conversations
from megatrain_jax._src.lm.data.report import Report
from megatrain_jax._src.lm.data.sources import Source, resolve
from megatrain_jax._src.lm.data.tokenise import TRAIN_ON, TrainOn, add_conversations
from megatrain_jax._src.lm.data.turns import LEADING, Leading

_TOO_LONG = ("error", "drop")


def image_chat(
    source: Source,
    processor: Any,
    *,
    length: int,
    batch_size: int,
    seed: int = 0,
    shuffle: bool = True,
    epochs: int | None = 1,
    train_on: TrainOn = "assistant",
    too_long: Invalid = "error",
    invalid: Invalid = "error",
    merge: str | None = None,
    leading: Leading = "error",
    chat_template: str | None = None,
    template_variables: Mapping[str, Any] | None = None,
    columns: Mapping[str, str] | None = None,
    workers: int = 2,
    progress: bool = True,
) -> Dataset:
    """Makes packed batches of conversations with images, for Gemma 3.

    Rows have the formats of `chat`. An image is a part of a user's message, ``{"type": "image",
    "image": IMAGE}``, or the row has a column `images` with a list of them, or `image`: they belong
    to the parts ``{"type": "image"}`` in order, or, if there is none, to the beginning of the first
    question. IMAGE is the path of a file, the bytes of one, or a PIL image. A relative path begins
    at the folder of its data file. Rows without images may be among them.

    Batches also have `pixel_values`, float32 (batch_size, images, channels, height, width): the
    images of each row in order, and zeros behind them. `images` is the same in all batches, the
    largest number that a row of this packing can have. Tokens of images are never labels.

    Tokens and references to images are kept in host memory; each image is opened, resized and
    normalised for its batch. Images given as bytes or by PIL stay in memory. Pixels are those of
    Transformers for the same image: a file is turned upright and loses its transparency, a PIL
    image is not turned, and its transparent pixels are put on white. Bytes are turned
    upright, as `datasets` does, and then treated like a PIL image.

    Args:
        source: See `chat`.
        processor: The folder of the checkpoint, its name on the Hugging Face Hub, or a
            `Gemma3Processor` of Transformers.
        length: See `chat`. A conversation is never cut.
        batch_size: See `chat`.
        seed: See `chat`.
        shuffle: See `chat`.
        epochs: See `chat`.
        train_on: See `chat`.
        too_long: Treatment of conversations longer than `length`: "error" lists them, "drop" leaves
            them out.
        invalid: See `chat`. With "drop", each image is decoded before training, so that damaged
            ones are found; otherwise only its header is read.
        merge: See `chat`.
        leading: See `chat`.
        chat_template: See `chat`.
        template_variables: See `chat`.
        columns: See `chat`.
        workers: Number of threads that open images ahead; with 0 a step waits for its images.
        progress: See `chat`.

    Raises:
        DataError: See `chat`; rows are also invalid if an image can't be read, belongs to an
            answer, or has no place.
        FileNotFoundError: If a file does not exist.
        TypeError: If an argument has a wrong type.
        ValueError: If an option has an unknown value, or the processor can't be loaded or is of
            another kind.
    """
    options = to_options(length, batch_size, seed, shuffle, epochs, workers, progress)
    check_choices(
        train_on=(train_on, TRAIN_ON),
        too_long=(too_long, _TOO_LONG),
        invalid=(invalid, INVALID),
        leading=(leading, LEADING),
    )
    check_template(chat_template, template_variables)
    rules = to_rules(merge, leading)
    parts = resolve(source, texts=False, columns=columns)
    images = ImageProcessor(processor)
    tokens = load_fast_tokenizer(images.tokenizer)
    template = ImageTemplate(images, chat_template, template_variables)
    errors = invalid == "error"

    def fill(builder: CorpusBuilder, report: Report) -> None:
        builder.processor = images
        documents = with_progress_bar(image_conversations(parts, rules, report, errors), progress)
        add_conversations(
            documents, template, tokens, train_on, errors, builder, report, images.tokens
        )

    return find_or_build(
        None,
        options,
        progress,
        fill,
        too_long=too_long,
        invalid=invalid,
        tokens=tokens,
        chat_template=template.source,
    )
