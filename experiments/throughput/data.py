"""The rates at which conversations become tokens, and tokens packed batches, on this host.

The conversations are pieces of the sources of Python's standard library in a ChatML template. The
tokenizer is a byte-level BPE trained on them, unless `--tokenizer` names the folder of a model's.
A GPU that trains 7B parameters takes some 12,000 tokens a second.
"""

import argparse
import json
import random
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from machine import hardware, peak_host_gib, versions
from record import add_origin_options, find_origin, write
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megatrain_jax import data
from megatrain_jax._src.lm.data import reading
from megatrain_jax._src.lm.data.batches import draw_epoch, pack
from megatrain_jax._src.lm.data.report import Report

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_GPU_TOKENS = 12_000


def sources() -> list[str]:
    """Returns the sources of Python's standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(folder.rglob("*.py")) if "site-packages" not in path.parts]
    return [path.read_text(encoding="utf-8", errors="ignore") for path in paths]


def conversations(texts: list[str], count: int) -> list[dict[str, Any]]:
    """Cuts texts into conversations of one to three turns, of some hundreds of tokens each."""
    rng = random.Random(0)
    long = [text for text in texts if len(text) > 10_000]

    def say(least: int, most: int) -> str:
        size = rng.randint(least, most)
        text = rng.choice(long)
        start = rng.randrange(len(text) - size)
        return text[start : start + size].strip() or "pass"

    rows = []
    for _ in range(count):
        messages = []
        for _ in range(rng.randint(1, 3)):
            messages.append({"role": "user", "content": say(40, 400)})
            messages.append({"role": "assistant", "content": say(200, 2400)})
        rows.append({"messages": messages})
    return rows


def train_tokenizer(texts: list[str], size: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    trainer: Any = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[AddedToken(name, special=True) for name in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>")


@contextmanager
def timed(seconds: dict[str, float], name: str, parts: int = 1) -> Iterator[None]:
    """Times its body, and keeps the seconds of one of its equal parts."""
    start = time.perf_counter()
    yield
    seconds[name] = (time.perf_counter() - start) / parts


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Times each part on its own; seconds and tokens a second."""
    texts = sources()
    if args.tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    else:
        tokenizer = train_tokenizer(texts[:: max(1, len(texts) // 300)], 32_000)
    path = folder / "chats.jsonl"
    with path.open("w", encoding="utf-8") as stream:
        for row in conversations(texts, args.conversations):
            stream.write(json.dumps(row) + "\n")
    seconds: dict[str, float] = {}

    with timed(seconds, "reading alone"):
        num_rows = sum(1 for _ in reading.rows(str(path), Report()))
    assert num_rows == args.conversations

    options = {"length": args.length, "batch_size": args.batch_size, "too_long": "cut"}
    dataset = None
    templates: dict[str, str | None] = {"": TEMPLATE, ", marked": MARKED}
    if args.tokenizer:
        templates = {"": None}
    for name, template in templates.items():
        with timed(seconds, f"reading and tokenising{name}"):
            dataset = data.chat(path, tokenizer, chat_template=template, epochs=2, **options)
    assert dataset is not None

    lengths = dataset._corpus.lengths
    with timed(seconds, "packing, once"):
        packed = pack(lengths, args.length)
    with timed(seconds, "drawing an epoch"):
        draw_epoch(packed, lengths, 0, 0)

    for workers in (0, 2):
        batches = data.chat(
            path, tokenizer, chat_template=templates[""], workers=workers, epochs=2,
            progress=False, **options,
        )  # fmt: skip
        next(iter(batches))
        with timed(seconds, f"batches, {workers} workers", parts=2):  # two epochs
            num_batches = sum(1 for _ in batches)
        assert num_batches == len(batches)

    tokens = dataset.num_tokens
    return {
        "name": "data",
        "num_conversations": args.conversations,
        "num_tokens": tokens,
        "length": args.length,
        "batch_size": args.batch_size,
        "fill": dataset.fill,
        "bytes_per_token": dataset.summary.num_bytes / tokens,
        "seconds": seconds,
        "tokens_per_second": {name: tokens / value for name, value in seconds.items()},
        "peak_host_gib": peak_host_gib(),
        "hardware": hardware(),
        "versions": {
            **versions(),
            **{name: version(name) for name in ("grain", "tokenizers", "transformers")},
        },
    }


def main() -> None:
    """Measures, prints a table and saves a JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=20_000)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--tokenizer", help="folder of a tokenizer with a chat template")
    parser.add_argument("--out", type=Path, default=Path("runs/throughput/data/data.json"))
    add_origin_options(parser)
    args = parser.parse_args()
    origin = find_origin(args)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(args, Path(folder))
    print(f"\n| {result['hardware']['num_cores']} cores | s | tokens/s | × {_GPU_TOKENS:,} |")
    print("|---|---|---|---|")
    for name, seconds in result["seconds"].items():
        rate = result["tokens_per_second"][name]
        print(f"| {name} | {seconds:.2f} | {rate:,.0f} | {rate / _GPU_TOKENS:,.0f} |")
    write(args.out, result, origin)


if __name__ == "__main__":
    main()
