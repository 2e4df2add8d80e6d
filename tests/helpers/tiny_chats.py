"""A tiny checkpoint with a tokenizer of words, and conversations in its words."""

from families import VOCAB, make_torch, save
from word_tokenizer import word_tokenizer


def make_checkpoint(folder):
    """A Qwen3 of some thousand parameters with a tokenizer of words."""
    save(make_torch("qwen3"), folder)
    word_tokenizer(VOCAB).save_pretrained(folder)
    return folder


def conversation(first):
    """A conversation in which five numbers are counted."""
    numbers = " ".join(str(first + k) for k in range(5))
    turns = [("user", f"count from {first} to {first + 4} please"), ("assistant", numbers)]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}
