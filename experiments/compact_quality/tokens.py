"""The text as tokens of a byte-level BPE: made once, then mapped into the memory of every run."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sources
from settings import BYTES, Sizes

MOST = 2**16
# The BPE is made of fewer bytes than are trained on, and those are several times what runs draw.
_LEARNED_FROM, _TRAINED_ON = 2**24, 2**27
_AT_ONCE = 512
_NAMES = ("train", "held_out")


def read(sizes: Sizes, folder: Path) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Returns what to train on, what is held out, and how much that is: bytes, or tokens in uint16.

    Args:
        sizes: The vocabulary, and where text is looked for.
        folder: The folder that keeps tokens; they are made if it has none.
    """
    if sizes.vocab == BYTES:
        return sources.read(sizes.packages)
    place = prepare(sizes, folder)
    train, held_out = (np.load(place / f"{name}.npy", mmap_mode="r") for name in _NAMES)
    return train, held_out, json.loads((place / "figures.json").read_text())


def prepare(sizes: Sizes, folder: Path) -> Path:
    """Returns the folder of the tokens, which are made and written if it is not there."""
    place = folder / f"tokens-{sizes.vocab}{'' if sizes.packages else '-stdlib'}"
    if place.exists():
        return place
    train, held_out = sources.find(sizes.packages)
    train = _spread(train, _TRAINED_ON)
    tokenizer = _learn(_spread(train, _LEARNED_FROM), sizes.vocab)
    arrays = [_encode(tokenizer, part) for part in (train, held_out)]
    figures = {
        **sources.count(train, held_out),
        **{f"{name}_tokens": array.size for name, array in zip(_NAMES, arrays, strict=True)},
        "digest": sources.digest(*arrays),
    }
    # Whole or not at all, since what is there is not made again.
    unfinished = place.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for name, array in zip(_NAMES, arrays, strict=True):
        np.save(unfinished / f"{name}.npy", array)
    (unfinished / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    return unfinished.rename(place)


def _spread(texts: Sequence[bytes], most: int) -> Sequence[bytes]:
    """Every n-th text, so that they have about as many bytes as are asked for at the most."""
    return texts[:: -(-sum(map(len, texts)) // most) or 1]


def _learn(texts: Sequence[bytes], vocab: int) -> Any:
    """A byte-level BPE of as many tokens, or fewer if the text has not as many."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers  # bytes need none

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(map(_decoded, texts), trainer)
    return tokenizer


def _encode(tokenizer: Any, texts: Sequence[bytes]) -> np.ndarray:
    """The tokens of all texts, one after the other."""
    found = []
    for i in range(0, len(texts), _AT_ONCE):
        encoded = tokenizer.encode_batch_fast([_decoded(text) for text in texts[i : i + _AT_ONCE]])
        found.extend(np.array(row.ids, np.uint16) for row in encoded)
    return np.concatenate(found)


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "replace")
