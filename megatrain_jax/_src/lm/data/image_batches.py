"""The images of a batch's rows."""

import numpy as np
from jaxtyping import Float32, Int32

from megatrain_jax._src.lm.data.corpus import Corpus
from megatrain_jax._src.lm.data.packing import Packing


def most_images(corpus: Corpus, chosen: Int32[np.ndarray, " n"], packing: Packing) -> int:
    """Returns the maximum number of images in a row, in all epochs; 0 if documents have none.

    Every epoch assigns units of the same length to a place of a row, so a place counts with the
    maximum number of images among units of its length.

    Args:
        corpus: The documents; each is one unit.
        chosen: The units that are used.
        packing: Packing of their lengths.
    """
    if corpus.processor is None:
        return 0
    lengths = corpus.unit_lengths[chosen]
    counts = np.array([len(corpus.images[n]) for n in corpus.unit_documents[chosen]])
    most = np.zeros(lengths.max() + 1, np.int64)
    np.maximum.at(most, lengths, counts)
    places = most[np.sort(lengths)[::-1]][packing.ranks]
    # Batches without any image have the array, too.
    return max(1, int(np.add.reduceat(places, packing.offsets[:-1]).max()))


def pixels_of(
    corpus: Corpus, rows: list[np.ndarray], count: int
) -> Float32[np.ndarray, "rows images channels height width"]:
    """Opens the images of some rows.

    Args:
        corpus: The documents.
        rows: The units of each row.
        count: Number of images of each row in the result, with zeros behind its own.

    Raises:
        ValueError: If an image can't be read.
    """
    processor = corpus.processor
    assert processor is not None
    result = np.zeros((len(rows), count, *processor.shape), np.float32)
    for row, units in enumerate(rows):
        documents = corpus.unit_documents[units]
        images = [image.open() for number in documents for image in corpus.images[number]]
        if images:
            result[row, : len(images)] = processor.pixels(images)
    return result
