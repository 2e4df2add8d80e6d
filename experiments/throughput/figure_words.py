"""Words beside figures: units, names of rows and cards, compared with the files of the figures.

A unit and a kind of quantity belong to a figure's name; a row's label belongs to the name and the
settings of its file, a card to the hardware that the file records, and a peer to the figure's file
or, beside a ratio, to the file of the ratio's other rate.
`check_figures.py` asks here after it has compared the numbers.
"""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from figures import RATIOS, Result, part, read

# What may follow a number: longer units first, as the first one that fits counts.
_UNIT = re.compile(
    r"(?<![A-Za-z])(tokens/s|tokens a second|tokens|[KMGT]i?B/s|[KMGT]i?B|[GTP]FLOP/s|[GTP]FLOP|"
    r"ms|s/step|steps|s|seconds?|minutes?|hours?|h)(?![A-Za-z/])"
)
_CARD = re.compile(r"\b(?:[ABH]\d{3}|L40S?|RTX \d{4})(?=s?\b)")
_UNITS = {
    "gib_per_s": ("GiB/s",),
    "link_rate": ("GiB/s",),
    "dd_of_several": ("GiB/s",),
    "gib": ("GiB",),
    "tokens_per_second": ("tokens/s", "tokens a second"),
    "tokens": ("tokens",),
    "tflops": ("TFLOP/s",),
    "seconds": ("s", "ms", "s/step", "second", "seconds"),
    "pinning": ("s", "ms"),
    "spread": ("s", "ms", "s/step"),
}
# Words for a kind of quantity, and the kinds of figures by words of their names.
_KINDS = {"throughput": "throughput", "speed": "throughput", "memory": "memory", "time": "time"}
_KIND_OF_NAME = {
    "tokens_per_second": "throughput",
    "gib_per_s": "throughput",
    "gib": "memory",
    "seconds": "time",
}
_KIND_BEHIND = re.compile(
    rf"(?:\s*(?:times|[KMGT]i?B|s|tokens/s)\b)?[\s*]*(?:of )?(?:the |its )?({'|'.join(_KINDS)})\b"
)
_KIND_BEFORE = re.compile(rf"\b({'|'.join(_KINDS)}) (?:is|was) (?:between )?$")
# Peers as pages call them, by words in the names of their files.
_PEERS = {
    "DeepSpeed": ("deepspeed", "zero-3"),
    "ZeRO-3": ("zero-3",),
    "Twin-Flow": ("twin-flow",),
    "SuperOffload": ("superoffload",),
    "ZenFlow": ("zenflow",),
    "FSDP2": ("fsdp2",),
    "PyTorch": ("pytorch",),
    "RoundPipe": ("roundpipe",),
    "`jax.jit`": ("jax.jit",),
}
_PEER = re.compile("|".join(_PEERS))
_PARTS_OF_DEEPSPEED = re.compile(
    r"\b(FSDP2|PyTorch|RoundPipe)(?: [\d.]+)?(?:'s)? (?:ZeRO-3|Twin-Flow|SuperOffload|ZenFlow)"
)
_SPELLINGS = {
    "bf16": "bfloat16",
    "fp32": "float32",
    "auto": "automatic",
    "minimum": "least",
    "one": "1",
    "two": "2",
}


def wrong_unit(text: str, end: int, name: str) -> str | None:
    """A unit in a text that a figure doesn't have; None if it fits or there is none.

    Args:
        text: The text of a link or a cell.
        end: Where the number ends in it. The next unit counts: `9.5 and 4.1 GiB` has one for both.
        name: The figure's name.
    """
    if name in RATIOS:
        beside = re.match(rf"\s*{_UNIT.pattern}", text[end:])
        return beside and beside[1]
    units = next((units for word, units in _UNITS.items() if word in name), None)
    found = _UNIT.search(text, end)
    if units is None or found is None or found[1] in units:
        return None
    return found[1]


def wrong_kind(before: str, behind: str, name: str) -> str | None:
    """The kind of quantity beside a figure, such as memory, if the figure is of another kind.

    Args:
        before: The text before the number.
        behind: The text behind it, up to the next number.
        name: The figure's name; a ratio is one of throughputs.
    """
    before, behind = " ".join(before[-200:].split()) + " ", " ".join(behind.split())
    found = _KIND_BEHIND.match(behind) or _KIND_BEFORE.search(before)
    kinds = (kind for word, kind in _KIND_OF_NAME.items() if word in name)
    own = "throughput" if name in RATIOS else next(kinds, None)
    return found[1] if found and own and _KINDS[found[1]] != own else None


def wrong_yardstick(text: str, name: str) -> str | None:
    """The peer that a text names, if a ratio is beside another one's rate.

    Args:
        text: The text behind the ratio, up to the next figure.
        name: The ratio's name.
    """
    found = _PEER.findall(text) if name in RATIOS else ()
    return next((peer for peer in found if not _is_of(peer, RATIOS[name])), None)


def wrong_peer(text: str, path: Path) -> str | None:
    """The peers that a paragraph names, if a figure in it is of a peer that it doesn't name."""
    if not any(_is_of(peer, path.stem) for peer in _PEERS):
        return None
    named = set(_PEER.findall(text))
    return " and ".join(sorted(named)) if not any(_is_of(p, path.stem) for p in named) else None


def wrong_owners(text: str) -> list[re.Match[str]]:
    """The places of a text where a part of DeepSpeed is called another peer's."""
    return [*_PARTS_OF_DEEPSPEED.finditer(text)]


def _is_of(peer: str, file: str) -> bool:
    return any(word in file for word in _PEERS[peer])


def wrong_labels(rows: Sequence[tuple[str, Path, str]]) -> list[str]:
    """What is wrong with the labels of a table's rows.

    A row's label and its file have a word in common, and two labels that differ have more words in
    common with their own files than with each other's. So no two can change places unnoticed.

    Args:
        rows: The label, the file and the path of keys to its part, of each row.
    """
    labels = [_words(label) for label, _, _ in rows]
    files = [_words_of_file(path, base) for _, path, base in rows]
    found = [
        f"the row {row[0]!r} has no word of its file {row[1].name}"
        for row, label, file in zip(rows, labels, files, strict=True)
        if not label & file
    ]
    for i, j in combinations(range(len(rows)), 2):
        if labels[i] == labels[j]:
            continue
        own = (labels[i] & files[i]).total() + (labels[j] & files[j]).total()
        swapped = (labels[i] & files[j]).total() + (labels[j] & files[i]).total()
        pair = f"the rows {rows[i][0]!r} and {rows[j][0]!r}"
        if own < swapped:
            found.append(f"{pair} have each other's label")
        elif own == swapped:
            found.append(f"{pair} could have each other's label: name them by words of their files")
    return found


def wrong_card(texts: Sequence[str], path: Path) -> str | None:
    """The cards that are named where a figure is, if its file is of another one.

    Args:
        texts: A row's label or a paragraph, then what stands above it. The first one that names a
            card counts.
        path: The figure's file.
    """
    named = next((found for text in texts if (found := set(_CARD.findall(text)))), set())
    own = cards(read(path))
    return " and ".join(sorted(named)) if named and own and not named & own else None


def wrong_place(text: str, name: str) -> str | None:
    """The memory that a text names, GPU or host, if a figure is of the other one.

    Args:
        text: The text behind the number, up to the next one.
        name: The figure's name.
    """
    named = set(re.findall(r"\b(?:GPU|host)\b", text))
    own = {"device_gib": "GPU", "host_gib": "host"}
    place = next((place for word, place in own.items() if word in name), None)
    return None if place is None or place in named else min(named, default=None)


def wrong_form(row: str, path: Path) -> str | None:
    """The form of state that a table's row names, if the row's file is of another one."""
    held = read(path).get("held")
    if not held:
        return None
    row = re.sub(r"\]\([^)]*\)", "]", row)
    is_compact = held["master"] == "bfloat16" and held["state"] == "int8"
    if re.search(r"\bcompact\b", row) and not is_compact:
        return "compact"
    narrow = re.search(r"\b(?:compact|bf16|bfloat16|int8|int4)\b", row)
    return "fp32" if re.search(r"\bfp32\b", row) and not narrow and is_compact else None


def cards(result: Result) -> set[str]:
    """The cards that a result is of, such as H200."""
    return set(_CARD.findall(str(result.get("hardware", {}).get("device", ""))))


def _words_of_file(path: Path, base: str) -> Counter[str]:
    """Words of a file's path, of the name that it gives a part, and of its settings."""
    result = read(path)
    settings = result.get("held") or {}
    layers, pieces = result.get("sizes", {}).get("num_layers"), result.get("microbatches")
    said = [
        path.parent.name,
        path.stem,
        str(part(result, base).get("name", "")),
        f"{settings['master']} masters, {settings['state']} state" if settings else "",
        f"{layers} layers" if layers else "",
        f"{pieces} microbatches" if pieces else "",
    ]
    return _words(" ".join(said))


def _words(text: str) -> Counter[str]:
    """The words and numbers of a text, each in one spelling, and how often it has them."""
    found: list[str] = re.findall(r"[a-z]+\d*|\d+", text.lower().replace(",", ""))
    return Counter(_SPELLINGS.get(word, word) for word in found)
