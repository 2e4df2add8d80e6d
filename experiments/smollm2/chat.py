"""Asks a model questions in the terminal, through Transformers, until an empty line.

python experiments/smollm2/chat.py checkpoints/smollm2
"""

import sys

from transformers import pipeline

if __name__ == "__main__":
    chat = pipeline("text-generation", sys.argv[1], dtype="float32")
    while text := input("you: ").strip():
        messages = [{"role": "user", "content": text}]
        (answer,) = chat(messages, max_new_tokens=60, do_sample=False)
        print("model:", answer["generated_text"][-1]["content"])
