"""Files for runs of the command line in this process, and such runs."""

import json
from pathlib import Path
from typing import Any

from megatrain_jax._src.lm.cli.main import main
from tiny_chats import conversation, make_checkpoint

SIZES = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
CHECKED = " ".join(str(number) for number in range(30, 44))


def make_given(folder: Path) -> Path:
    """Writes a checkpoint, conversations, preferences, texts and sizes into a folder."""
    make_checkpoint(folder / "tiny")
    numbers = range(24)
    pairs = [
        {"prompt": f"count from {n}", "chosen": f"{n} {n + 1}", "rejected": "please please"}
        for n in numbers
    ]
    texts = [{"text": f"{n} {n + 1} {n + 2} please"} for n in numbers]
    labelled = [
        {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for number, pair in enumerate(pairs)
        for side in [("chosen", "rejected")[number % 2]]
    ]
    rows = {"chats": list(map(conversation, numbers)), "pairs": pairs, "texts": texts}
    rows["labelled"] = labelled
    # A teacher that is nearly sure of the next token.
    taught = [[40 + (n + i) % 8 for i in range(12)] for n in numbers]
    rows["taught"] = [
        {
            "input_ids": ids,
            "topk_token_ids": [[one, 0] for one in [*ids[1:], 1]],
            "topk_logprobs": [[-0.1, -3.0]] * len(ids),
        }
        for ids in taught
    ]
    for name, some in rows.items():
        lines = (json.dumps(row) + "\n" for row in some)
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "checked.txt").write_text(CHECKED)
    (folder / "sizes.json").write_text(json.dumps(SIZES))
    return folder


def trained(command: str, given: Path, out: Path, **settings: Any) -> int:
    """Runs a command in this process; returns its exit status."""
    common = {"out": str(out), "length": 32, "batch": 4, "epochs": None}
    file = given / "settings.yaml"
    file.write_text(json.dumps(common | settings))  # JSON is YAML
    return main([command, str(file)])
