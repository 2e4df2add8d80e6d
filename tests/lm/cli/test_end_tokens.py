"""What ends a text: learned from data, named by a checkpoint, exported, and stopped at."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

import megatrain_jax as mt
from megatrain_jax import callbacks, data, models
from megatrain_jax._src.lm.cli.chat import open_chat_model
from megatrain_jax._src.lm.cli.main import main
from megatrain_jax._src.lm.cli.plan_settings import ChatSettings
from megatrain_jax._src.lm.common.hf_folder import GENERATION_CONFIG
from megatrain_jax._src.lm.models.config import config_end_tokens
from megatrain_jax._src.lm.models.export import write_end_tokens

torch = pytest.importorskip("torch", reason='compared with PyTorch: pip install -e ".[torch]"')

import transformers  # noqa: E402

from families import VOCAB, make_torch, save  # noqa: E402
from tiny_chats import conversation  # noqa: E402
from word_tokenizer import word_tokenizer  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
# In this tokenizer of words: what ends a text for a base model, and a turn in its chat template.
END_OF_TEXT, END_OF_TURN = 0, 1
QUESTION = [{"role": "user", "content": "count from 3 to 7 please"}]


def base_model(folder: Path, eos: Any = END_OF_TEXT, *, generation: bool = True) -> Path:
    """A base model whose tokenizer has a template of which the model has learned nothing."""
    model = make_torch("qwen3", eos_token_id=eos, bos_token_id=5, pad_token_id=6)
    model.generation_config.eos_token_id = eos
    save(model, folder)
    if not generation:
        (folder / "generation_config.json").unlink()
    tokenizer = word_tokenizer(VOCAB)
    tokenizer.eos_token = "<pad>"
    tokenizer.save_pretrained(folder)
    return folder


def dataset(folder: Path, **options: Any) -> data.Dataset:
    rows = [conversation(first) for first in range(4)]
    options = {"length": 32, "batch_size": 2, "epochs": None, "progress": False, **options}
    return data.chat(rows, folder, **options)


def fitted(folder: Path, batches: Any, steps: int = 1, **options: Any) -> mt.FitResult:
    pretrained = models.load_pretrained(folder)
    given = {"params": pretrained.params, "steps": steps, "progress": False, **options}
    optimizer = optax.adamw(1e-2)
    return mt.fit(pretrained.model, models.next_token_loss, batches, optimizer, **given)


def named(folder: Path) -> Any:
    """What Transformers reads as the tokens that end a text."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return model.generation_config.eos_token_id


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return base_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def taught(base) -> mt.FitResult:
    """The base model after it was taught the template."""
    return fitted(base, dataset(base), steps=60)


def test_a_base_model_that_is_taught_a_template_stops_where_it_ends_a_turn(base, taught, tmp_path):
    assert taught.trainer.end_tokens == (END_OF_TURN,)
    folder = models.save_pretrained(taught.trainer, tmp_path / "taught")
    assert named(base) == END_OF_TEXT and named(folder) == [END_OF_TEXT, END_OF_TURN]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    options: dict[str, Any] = {"max_tokens": 16, "tokenizer": tokenizer}
    (ours,) = models.generate(taught, [QUESTION], **options)
    (read,) = models.generate(models.load_pretrained(folder), [QUESTION], **options)
    inputs = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    theirs = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    expected = theirs[0, inputs["input_ids"].shape[1] :].tolist()
    assert len(expected) < 16 and expected[-1] == END_OF_TURN
    assert ours.ids.tolist() == read.ids.tolist() == expected
    assert (ours.finish, read.finish) == ("stop", "stop")
    # As before training: the base doesn't name the token, and so doesn't stop at it.
    trained = taught.params
    (endless,) = models.generate(
        (models.load_pretrained(base).model, trained), [QUESTION], **options
    )
    assert endless.finish == "length" and endless.ids[: len(expected)].tolist() == expected


def test_samples_stop_at_the_ends_that_their_run_learns(base, taught):
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    (sample,) = callbacks.Samples([QUESTION], tokenizer, num_tokens=16).draw(taught.trainer)
    (answer,) = models.generate(taught, [QUESTION], max_tokens=16, tokenizer=tokenizer)
    assert sample["text"] == answer.text and len(answer.ids) < 16

    def logits(model: Any, batch: Any) -> Any:
        return model(batch["tokens"])

    # Without caches, in whole rows, as any model writes.
    samples = callbacks.Samples([QUESTION], tokenizer, logits=logits, num_tokens=16)
    assert samples.draw(taught.trainer)[0]["text"] == answer.text


def test_chat_stops_at_the_end_of_a_turn(base, taught, tmp_path, capsys):
    folder = models.save_pretrained(taught.trainer, tmp_path / "taught")
    words = ["--prompt", QUESTION[0]["content"], "--max-tokens", "16", "--temperature", "0"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    (answer,) = models.generate(taught, [QUESTION], max_tokens=16, tokenizer=tokenizer)
    for library in ("jax", "transformers"):
        assert main(["chat", str(folder), *words, "--library", library]) == 0
        assert capsys.readouterr().out.split() == answer.text.split()


@pytest.mark.exhaustive
def test_completions_that_end_a_turn_are_not_cut_off(base, taught, tmp_path):
    folder = models.save_pretrained(taught.trainer, tmp_path / "taught")
    pretrained = models.load_pretrained(folder)
    result = models.train_grpo(
        pretrained.model,
        [{"prompt": QUESTION}],
        lambda completions, **_: [float(i) for i in range(len(completions))],
        optax.sgd(0.0),
        steps=1,
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
        options=models.GrpoOptions(
            num_generations=2, prompts_per_step=1, max_completion_length=24, temperature=1e-3
        ),
        params=pretrained.params,
        progress=False,
    )
    assert result.history[0]["completions/clipped_ratio"] == 0.0


@pytest.mark.parametrize(
    ("eos", "generation", "expected"),
    [
        ([3, END_OF_TEXT], True, [3, END_OF_TEXT, END_OF_TURN]),
        (None, True, [END_OF_TURN]),
        (END_OF_TURN, True, END_OF_TURN),
        (3, False, [3, END_OF_TURN]),
        ([3, 4], False, [3, 4, END_OF_TURN]),
        (None, False, [END_OF_TURN]),
    ],
)
def test_learned_ends_join_what_was_there(eos, generation, expected, tmp_path):
    base = base_model(tmp_path / "base", eos, generation=generation)
    config, path = models.load_pretrained(base).config, base / GENERATION_CONFIG

    def read() -> dict[str, Any]:
        model = transformers.AutoModelForCausalLM.from_pretrained(base)
        values = model.generation_config.to_dict()
        return {name: x for name, x in values.items() if name != "_from_model_config"}

    before = read()
    assert config.end_tokens == (() if eos is None else tuple(np.atleast_1d(eos).tolist()))
    write_end_tokens(base, path if generation else None, config, config.end_tokens)
    assert path.exists() == generation and read() == before
    write_end_tokens(base, path if generation else None, config, [END_OF_TURN])
    # Nothing else that Transformers reads has changed.
    assert read() == before | {"eos_token_id": expected}


@pytest.mark.parametrize("inside", [False, True])
def test_ends_that_only_the_configuration_names_are_read_as_transformers_does(inside, tmp_path):
    base = base_model(tmp_path / "base", [7, 9], generation=False)
    path = base / "config.json"
    values = json.loads(path.read_text())
    if inside:  # as in a configuration of several parts
        values["text_config"] = {"eos_token_id": values.pop("eos_token_id")}
    theirs = transformers.GenerationConfig.from_model_config(dict(values)).eos_token_id
    assert list(config_end_tokens(values)) == theirs == [7, 9]
    # A generation_config.json counts alone, even if it names none.
    (base / "generation_config.json").write_text('{"pad_token_id": 2}')
    assert models.load_pretrained(base).config.end_tokens == ()
    assert named(base) is None


def test_adapters_bring_the_ends_that_they_learned(base, tmp_path):
    pytest.importorskip("peft", reason='compared with PEFT: pip install -e ".[torch]"')
    pretrained = models.load_pretrained(base)
    adapted = models.lora(pretrained.model, targets="q_proj", rank=2, params=pretrained.params)
    result = mt.fit(
        adapted.model,
        models.next_token_loss,
        dataset(base),
        optax.adamw(1e-3),
        params=adapted.params,
        trainable=adapted.trainable,
        steps=1,
        progress=False,
    )
    adapter = models.save_lora(result.trainer, tmp_path / "adapter")
    again = models.load_lora(pretrained, adapter)
    merged = models.merge_adapter(adapter, tmp_path / "merged", base=base)
    assert named(merged) == [END_OF_TEXT, END_OF_TURN]
    assert again.model().config.end_tokens == (END_OF_TEXT, END_OF_TURN)
    chat = open_chat_model(
        ChatSettings(model=str(adapter), base=str(base), library="transformers", max_tokens=2)
    )
    assert chat.options["eos_token_id"] == [END_OF_TEXT, END_OF_TURN]


def test_every_kind_of_data_knows_its_ends(base, tmp_path):
    pairs = [{"prompt": "count", "chosen": "1 2", "rejected": "3"}] * 2
    options: dict[str, Any] = {"length": 32, "batch_size": 2, "progress": False}
    texts = data.text([{"text": "count from 1"}], base, **options)
    chats = dataset(base, epochs=1)
    assert texts.end_tokens == (END_OF_TEXT,)
    for made in (
        chats,
        iter(chats),
        *chats.split(0.5),
        data.preferences(pairs, base, **options),
        data.unpaired(pairs, base, **options),
        dataset(base, train_on="all"),
    ):
        assert made.end_tokens == (END_OF_TURN,)
    assert data.mix([chats, texts]).end_tokens == (END_OF_TEXT, END_OF_TURN)
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps(conversation(first)) for first in range(2)))
    found = [data.chat(path, base, cache=tmp_path / "cache", **options) for _ in range(2)]
    assert found[1].summary.is_reused
    assert [one.end_tokens for one in found] == [(END_OF_TURN,)] * 2


def test_the_data_of_every_call_counts(base):
    chats = dataset(base, epochs=1)
    trainer = fitted(base, list(chats)).trainer
    assert trainer.end_tokens == ()
    mt.train(trainer, chats, epochs=2, progress=False)
    assert trainer.end_tokens == (END_OF_TURN,)
    texts = [{"text": "count from 1 to 3 please"}] * 2
    more = data.text(texts, base, length=32, batch_size=2, progress=False)
    mt.train(trainer, iter(more), steps=1, progress=False)
    assert trainer.end_tokens == (END_OF_TURN, END_OF_TEXT)
    with pytest.raises(ValueError, match="`tokens`"):
        trainer.add_end_tokens([-1])
