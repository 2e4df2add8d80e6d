"""Preferences in every form of a row, and their tokens by Transformers."""

import random
from typing import Any

import numpy as np

from chats import CHATML, WORDS, conversations, tokenizer


def pairs(count: int, seed: int = 0) -> list[tuple[Any, ...]]:
    """Prompts that end with the user, each with two answers."""
    rng = random.Random(seed)
    prompts = [messages[:-1] for messages in conversations(count, seed=seed, turns=2, words=5)]
    return [
        (prompt, *(f"{n} {' '.join(rng.choices(WORDS, k=rng.randint(1, 5)))}" for n in (1, 2)))
        for prompt in prompts
    ]


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


FORMS = {
    "texts": lambda p, c, r: {"prompt": p, "chosen": c, "rejected": r},
    "messages": lambda p, c, r: {"prompt": p, "chosen": [answer(c)], "rejected": [answer(r)]},
    "whole": lambda p, c, r: {"chosen": [*p, answer(c)], "rejected": [*p, answer(r)]},
    "sharegpt": lambda p, c, r: {
        "conversations": [{"from": m["role"], "value": m["content"]} for m in p],
        "chosen": {"from": "gpt", "value": c},
        "rejected": {"from": "gpt", "value": r},
    },
}


def by_transformers(prompt: list[dict[str, str]], said: str) -> tuple[tuple[int, ...], int, int]:
    """The tokens of a conversation, and where its last answer begins and ends."""
    made = tokenizer(CHATML)

    def tokens(messages: Any, asking: bool) -> list[int]:
        return made.apply_chat_template(  # type: ignore[return-value]
            messages, add_generation_prompt=asking, return_dict=False
        )

    whole = tokens([*prompt, answer(said)], False)
    # The line end after the last token of a turn is the template's.
    return tuple(whole), len(tokens(prompt, True)), len(whole) - 1


def found(batches: Any) -> list[tuple[Any, Any]]:
    """The pairs of batches: of each conversation its tokens, and the span of labels that count."""
    result = []
    for batch in batches:
        for row in range(len(batch["tokens"])):
            segments = batch["segments"][row]
            assert segments.max() == 2 * batch["pairs"][row].sum()
            for pair in np.flatnonzero(batch["pairs"][row]):
                sides = []
                for number in (2 * pair + 1, 2 * pair + 2):
                    here = segments == number
                    assert batch["positions"][row][here].tolist() == list(range(here.sum()))
                    tokens = batch["tokens"][row][here]
                    assert batch["labels"][row][here].tolist() == [*tokens[1:], 0]
                    counts = np.flatnonzero(batch["mask"][row][here])
                    assert counts.tolist() == list(range(counts[0], counts[-1] + 1))
                    sides.append((tuple(tokens.tolist()), int(counts[0]) + 1, int(counts[-1]) + 2))
                result.append(tuple(sides))
    return result
