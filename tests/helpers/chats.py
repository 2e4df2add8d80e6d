"""Tiny tokenizers, chat templates in the styles of known models, and conversations by a seed."""

import functools
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = (
    "<|endoftext|>",
    "<s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
WORDS = (
    "the cat sat on a mat, while rain fell; naïve façade 🙂 日本 42 x=1\nand then two\nlines".split(
        " "
    )
)

CHATML = (
    "{% for m in messages %}"
    "{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}"
    "{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The end of the turn is outside the mark, as in some templates that can be found.
CHATML_MARKED_SHORT = CHATML_MARKED.replace(
    "<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
# Leaves the reasoning out of all answers but those after the last question.
QWEN3 = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}"
    "{% set content = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') "
    "if '</think>' in m.content else '' %}"
    "<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ content }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
# Opens the reasoning in the prompt, as Qwen3's thinking models do.
QWEN3_THINKING = QWEN3.partition("{% if enable_thinking")[0] + "<think>\n{% endif %}"
# Opens it there, too, and shows no reasoning at all in what was said, as DeepSeek-R1 does.
R1 = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|assistant|>{{ m.content.split('</think>')[-1] }}"
    "{{ eos_token }}{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
# Has no end of a turn: the mark of the next one ends it. Shows reasoning after the last question
# alone, as GLM-4.5 does.
GLM = (
    "{{ bos_token }}{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' %}"
    "{% set parts = m.content.split('</think>') %}"
    "<think>{% if parts | length > 1 and loop.index0 > ns.last %}"
    "{{ parts[0].replace('<think>', '') | trim }}{% endif %}</think>\n{{ parts[-1] | trim }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# Ends the last answer by another token than the ones before, as gpt-oss does.
HARMONY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{{ eos_token if loop.last and m.role == 'assistant' else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(name, special=True) for name in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS), "\n\n\n\n"] * 4, trainer)
    return tokenizer.to_str()


def tokenizer(template: str | None = CHATML, trim: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer; with `trim`, offsets leave whitespace out as those of Llama 3 do."""
    made = Tokenizer.from_str(_trained())
    made.post_processor = processors.ByteLevel(trim_offsets=trim)
    result = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|endoftext|>", bos_token="<s>"
    )
    result.chat_template = template
    return result


def conversations(
    count: int, seed: int = 0, turns: int = 3, words: int = 12, system: bool = True
) -> list[list[dict[str, str]]]:
    rng = random.Random(seed)

    def say() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, words))).strip()

    result = []
    for _ in range(count):
        with_system = system and rng.random() < 0.3
        messages = [{"role": "system", "content": say()}] if with_system else []
        for _ in range(rng.randint(1, turns)):
            messages.append({"role": "user", "content": say()})
            messages.append({"role": "assistant", "content": say()})
        result.append(messages)
    return result


def sharegpt(messages: list[dict[str, str]]) -> dict[str, Any]:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    turns = [{"from": names[m["role"]], "value": m["content"]} for m in messages]
    return {"conversations": turns}


def alpaca(messages: list[dict[str, str]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    if messages[0]["role"] == "system":
        row["system"], messages = messages[0]["content"], messages[1:]
    said = [message["content"] for message in messages]
    pairs = list(zip(said[::2], said[1::2], strict=True))
    row["history"] = [list(pair) for pair in pairs[:-1]]
    row["instruction"], row["output"] = pairs[-1]
    return row


def openai(messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {"messages": messages}


def write(path: Path, rows: list[Any]) -> Path:
    """Writes rows as the path's suffix says."""
    if path.suffix == ".parquet":
        # Or it would have the columns of the first row only.
        columns = {name: None for row in rows for name in row}
        table = pyarrow.Table.from_pylist([{**columns, **row} for row in rows])
        pyarrow.parquet.write_table(table, path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8")
    else:
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        path.write_text("".join(lines), encoding="utf-8")
    return path


def assert_same_batches(ours: Iterable[Any], theirs: Iterable[Any]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])
