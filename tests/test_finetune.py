"""Fine-tuning as a user does it: the loss curve of Transformers, and the script from end to end."""

import json
import runpy
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import transformers

import megatrain_jax as mt
from megatrain_jax import models

torch = pytest.importorskip("torch", reason='compared with PyTorch: pip install -e ".[torch]"')

from families import VOCAB, make_torch, random_tokens, save  # noqa: E402

SCRIPT = Path(__file__).parents[1] / "experiments" / "finetune.py"
STEPS = 20


def batches():
    for seed in range(STEPS):
        tokens = random_tokens(4, 17, seed)
        mask = np.random.default_rng(seed).random((4, 16)) < 0.7
        yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "mask": mask}


def curve_of_torch(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    curve = []
    for batch in batches():
        logits = model(torch.tensor(batch["tokens"]).long()).logits
        labels = torch.tensor(np.where(batch["mask"], batch["labels"], -100)).long()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        curve.append(loss.item())
    return curve


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen2", marks=pytest.mark.long), "gemma2"])
def test_the_loss_curve_is_that_of_transformers(name, tmp_path):
    model = make_torch(name)
    pretrained = models.load_pretrained(save(model, tmp_path / "model"))
    expected = curve_of_torch(model)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, weight_decay=0.01))
    result = mt.fit(
        pretrained.model,
        models.next_token_loss,
        batches(),
        optimizer,
        params=pretrained.params,
        precision=mt.Precision(compute=jnp.float32),
        progress=False,
    )
    curve = [record["loss"] for record in result.history]
    assert abs(expected[-1] - expected[0]) > 0.05
    np.testing.assert_allclose(curve, expected, atol=1e-4)


def make_checkpoint(folder):
    """A Qwen3 of some thousand parameters with a tokenizer of words."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as tokenizer_models

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


def run(monkeypatch, *arguments):
    """Runs the script as a user does, in this process, which has imported all that it needs."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
    runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.mark.slow
def test_the_script_trains_saves_resumes_and_exports(tmp_path, monkeypatch):
    checkpoint = make_checkpoint(tmp_path / "tiny")
    chats = tmp_path / "chats.jsonl"
    rows = []
    for first in range(40):
        numbers = " ".join(str(first + k) for k in range(5))
        question = f"count from {first} to {first + 4} please"
        turns = [("user", question), ("assistant", numbers)]
        rows.append({"messages": [{"role": r, "content": c} for r, c in turns]})
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ["--model", checkpoint, "--data", chats, "--length", 32, "--batch", 4]
    common += ["--learning-rate", 3e-3, "--held-out", 0.2, "--checkpoint-every", 3]
    common += ["--epochs", 40, "--microbatches", 2]
    run(monkeypatch, *common, "--out", tmp_path / "out", "--steps", 30)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["steps"] == 30 and report["last_loss"] < 0.7 * report["first_loss"]
    exported = tmp_path / "out" / "model"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    text = tokenizer.apply_chat_template(rows[3]["messages"], tokenize=False)
    tokens = np.asarray(tokenizer(text)["input_ids"], np.int32)[None]
    again = models.load_pretrained(exported)
    trainer = mt.Trainer(
        again.model,
        models.next_token_loss,
        optax.sgd(0.0),
        {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]},
        params=again.params,
        precision=mt.Precision(compute=jnp.float32),
    )
    with torch.no_grad():
        logits = theirs(torch.tensor(tokens[:, :-1]).long()).logits.numpy()
    ours = jax.tree.map(jnp.asarray, trainer.model)(tokens[:, :-1])
    np.testing.assert_allclose(ours, logits, atol=1e-4)
    for option, dtype in (("master", "int8"), ("state", "int3")):
        with pytest.raises(ValueError, match=rf"Precision\({option}=.*{dtype}"):
            run(monkeypatch, *common, "--out", tmp_path / option, f"--{option}", dtype)
    with pytest.raises(SystemExit, match="exists"):
        run(monkeypatch, *common, "--out", tmp_path / "out")
    # A part of the parameters: all others are as they were, to the bit.
    part = ["--out", tmp_path / "part", "--steps", 3, "--trainable", r"layers/.*/(q|v)_proj"]
    run(monkeypatch, *common, *part)
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).state_dict()
        for f in (checkpoint, tmp_path / "part" / "model")
    )
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(name.split(".")[-2] in ("q_proj", "v_proj") for name in changed)
