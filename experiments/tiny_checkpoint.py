"""Makes a tiny chat checkpoint with random weights, and conversations it can learn.

    python experiments/tiny_checkpoint.py           # checkpoints/tiny and chats.jsonl
    python experiments/tiny_checkpoint.py FOLDER    # the checkpoint alone, in this folder

Programs that are written for a real checkpoint run with these in seconds on a CPU.
"""

import json
import sys
import tempfile
from pathlib import Path

from flax import nnx
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from megatrain_jax import models

CHECKPOINT, CHATS = "checkpoints/tiny", "chats.jsonl"
_SIZES = {
    "model_type": "qwen3",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_checkpoint(folder: str = CHECKPOINT) -> None:
    """Writes the checkpoint, with a token for each byte and three special ones."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: number for number, token in enumerate([*special, *alphabet])}
    byte_level = Tokenizer(tokenizer_models.BPE(vocab=ids, merges=[]))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    byte_level.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level, eos_token="<|im_end|>")
    tokenizer.chat_template = _TEMPLATE
    model = models.Decoder(models.DecoderConfig.from_hf(_SIZES), rngs=nnx.Rngs(0))
    with tempfile.TemporaryDirectory() as source:
        tokenizer.save_pretrained(source)
        models.save_pretrained(model, folder, source=source, overwrite=True)


def make_chats() -> None:
    """Writes 400 conversations."""
    lines = []
    for a in range(20):
        for b in range(20):
            question = {"role": "user", "content": f"Say {a} and {b}."}
            answer = {"role": "assistant", "content": f"{a} and {b}, as you asked."}
            lines.append(json.dumps({"messages": [question, answer]}) + "\n")
    Path(CHATS).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    make_checkpoint(*sys.argv[1:])
    if not sys.argv[1:]:
        make_chats()
