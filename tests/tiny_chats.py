"""A tiny checkpoint with a tokenizer of words, and conversations in its words."""

import transformers
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models

from families import VOCAB, make_torch, save


def make_checkpoint(folder):
    """A Qwen3 of some thousand parameters with a tokenizer of words."""
    words = ["<pad>", "<|end|>", "<|user|>", "<|assistant|>", "count", "from", "to", "please"]
    words += [str(number) for number in range(VOCAB - len(words) - 1)] + ["<unk>"]
    ids = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(tokenizer_models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(words[:4])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <|end|> {% endfor %}"
        "{% if add_generation_prompt %}<|assistant|> {% endif %}"
    )
    save(make_torch("qwen3"), folder)
    fast.save_pretrained(folder)
    return folder


def conversation(first):
    """A conversation in which five numbers are counted."""
    numbers = " ".join(str(first + k) for k in range(5))
    turns = [("user", f"count from {first} to {first + 4} please"), ("assistant", numbers)]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}
