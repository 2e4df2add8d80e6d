"""A tokenizer of Transformers whose tokens are words."""

import transformers
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models


def word_tokenizer(vocab_size):
    """A tokenizer of words, of which the first four are special tokens."""
    words = ["<pad>", "<|end|>", "<|user|>", "<|assistant|>", "count", "from", "to", "please"]
    words += [str(number) for number in range(vocab_size - len(words) - 1)] + ["<unk>"]
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
    return fast
