"""Samples of a run: continuations by the streamed model are those of the model in one piece."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import megatrain_jax as mt
import small
from inside import steps_of
from megatrain_jax import callbacks, models
from megatrain_jax._src.lm.samples import _stop, choose
from messages import refuses, tells

VOCAB, WIDTH = 12, 16
PROMPTS = [[1, 2, 3], [7], [4, 4]]


@pytest.mark.parametrize("is_first", [True, False])
def test_samples_are_shown_by_the_first_process(is_first, monkeypatch, capsys):
    trainer: Any = SimpleNamespace(processes=SimpleNamespace(is_first=is_first), num_steps=3)
    row = {"prompt": "a", "temperature": 0.5, "text": "b c"}
    monkeypatch.setattr(callbacks.Samples, "draw", lambda self, trainer: [row])
    samples, record = object.__new__(callbacks.Samples), {"step": 3}
    samples._every, samples._show = 3, True
    samples(trainer, record)
    assert record["samples"] == [row]
    assert tells(capsys.readouterr().out, "step 3", "b c") == is_first


# A model that is no decoder: each token follows from the sum of those before it.


def toy() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"table": (VOCAB, WIDTH), "head": (WIDTH, VOCAB)}
    params: dict[str, Any] = {
        k: rng.normal(size=shape).astype(np.float32) for k, shape in shapes.items()
    }
    layers = rng.normal(size=(2, WIDTH, WIDTH)).astype(np.float32)
    return params | {"layers": list(layers)}


def toy_logits(params: Any, batch: Any) -> jax.Array:
    x = params["table"][batch["tokens"]].cumsum(axis=1)
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer)
    return x @ params["head"]


def toy_loss(params: Any, batch: Any) -> jax.Array:
    logits = toy_logits(params, batch)[:, :-1]
    labels = batch["tokens"][:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def toy_batch(seed: int) -> dict[str, np.ndarray]:
    return {"tokens": np.random.default_rng(seed).integers(0, VOCAB, (4, 6)).astype(np.int32)}


def toy_trainer(**options: Any) -> mt.Trainer:
    precision = mt.Precision(compute="float32")
    given: Any = {"precision": precision, "progress": False, **options}
    return mt.Trainer(toy(), toy_loss, optax.adam(0.1), toy_batch(0), **given)


def plain(
    logits: Callable[[np.ndarray], Any],
    prompts: list[list[int]],
    num_tokens: int,
    temperatures: tuple[float, ...] = (0.0,),
    seed: int = 0,
    stop: int | None = None,
) -> list[str]:
    """Continues prompts one by one, with draws as `Samples` makes them."""
    rows = [(list(p), t) for p in prompts for t in temperatures]
    rng, texts = np.random.default_rng(seed), []
    draws = [rng.random(len(rows), np.float32) for _ in range(num_tokens)]
    for k, (ids, temperature) in enumerate(rows):
        start = len(ids)
        for draw in draws:
            found = np.asarray(logits(np.array(ids)[None]))[0, -1]
            token = int(found.argmax())
            if temperature:
                odds = np.exp((found - found.max()) / temperature).cumsum()
                token = int((odds >= (1 - draw[k]) * odds[-1]).argmax())
            if token == stop:
                break
            ids.append(token)
        texts.append(" ".join(map(str, ids[start:])))
    return texts


def texts(samples: list[dict[str, Any]]) -> list[str]:
    return [sample["text"] for sample in samples]


@pytest.mark.by_default("1-2")
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_model_of_ones_own_is_continued(microbatches: int, num_devices: int):
    mesh = jax.make_mesh((num_devices,), ("data",), devices=jax.devices()[:num_devices])
    trainer = toy_trainer(microbatches=microbatches, mesh=mesh)
    temperatures = (0.0, 0.7)
    samples = callbacks.Samples(
        PROMPTS, logits=toy_logits, num_tokens=5, temperatures=temperatures, seed=3
    )
    found = samples.draw(trainer)
    expected = plain(
        lambda ids: toy_logits(toy(), {"tokens": ids}), PROMPTS, 5, temperatures, seed=3
    )
    assert texts(found) == expected
    assert [s["prompt"] for s in found] == ["1 2 3", "1 2 3", "7", "7", "4 4", "4 4"]
    assert [s["temperature"] for s in found] == [0.0, 0.7] * 3
    # One pass for each token, and one function for all of them.
    assert len(steps_of(trainer)) == 2


def test_draws_are_as_often_as_they_are_probable():
    logits = jnp.log(jnp.array([0.25, 0.0, 0.5, 0.25]))
    draws = (np.arange(400) + 0.5) / 400
    rows = jnp.broadcast_to(logits, (400, 4))
    found = np.asarray(choose(rows, np.ones(400, np.float32), draws.astype(np.float32)))
    assert np.bincount(found, minlength=4).tolist() == [100, 0, 200, 100]
    # The ends of what may be drawn are tokens that can come.
    ends = np.array([0.0, np.nextafter(np.float32(1), np.float32(0))], np.float32)
    assert np.asarray(choose(rows[:2], np.ones(2, np.float32), ends)).tolist() == [3, 0]
    hot = np.full(400, 0.5, np.float32)  # probabilities go by their squares
    found = np.asarray(choose(rows, hot, draws.astype(np.float32)))
    assert np.bincount(found, minlength=4).tolist() == [67, 0, 266, 67]


class Letters:
    """A tokenizer of letters, of which z ends a text."""

    eos_token_id = 11

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 97 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + i) for i in ids)


def test_a_run_shows_its_samples_and_hands_them_to_logs(tmp_path: Path, capsys: Any):
    samples = callbacks.Samples(["abc", "b"], Letters(), logits=toy_logits, num_tokens=6)
    seen = {}

    def note(trainer: mt.Trainer, record: dict[str, Any]) -> None:
        if "samples" in record:
            params = jax.tree.map(np.array, trainer.params)
            ids = [Letters().encode(sample["prompt"]) for sample in record["samples"]]
            found = plain(lambda x: toy_logits(params, {"tokens": x}), ids, 6, stop=11)
            seen[record["step"]] = [Letters().decode([*map(int, text.split())]) for text in found]

    trainer = toy_trainer()
    log = callbacks.CSVLog(tmp_path / "run.csv")
    result = mt.train(
        trainer,
        [toy_batch(seed) for seed in range(5)],
        eval_data=[toy_batch(9)],
        eval_every=2,
        callbacks=[samples, note, log],
        progress=False,
    )
    assert list(seen) == [2, 4, 5]
    in_history = {r["step"]: texts(r["samples"]) for r in result.history if "samples" in r}
    assert in_history == seen
    written = (tmp_path / "run.csv.txt").read_text()
    assert written.count("step ") == 3 and f"  text: {seen[5][1]}\n" in written
    shown = capsys.readouterr().out
    assert re.search(rf"samples .*\b5\n.*\b0\n +abc▸{re.escape(seen[5][0])}", shown)
    assert tells(repr(result.history), 2)


def test_samples_come_after_so_many_steps():
    samples = callbacks.Samples([[1]], logits=toy_logits, num_tokens=1, every=2, show=False)
    batches = [toy_batch(seed) for seed in range(5)]
    result = mt.train(toy_trainer(), batches, callbacks=[samples], progress=False)
    assert [r["step"] for r in result.history if "samples" in r] == [2, 4]


def test_a_decoder_is_asked_once_for_each_temperature(monkeypatch: pytest.MonkeyPatch):
    class Generator:
        """Writes the prompt's first id, the temperature and the seed."""

        def __init__(self, trainer: Any, *, tokenizer: Any, params: str):
            assert params == "ema"

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

        def generate(self, prompts: Any, *, temperature: float, seed: int, **given: Any) -> Any:
            assert given == {"max_tokens": 5, "stop": [3]}
            return [SimpleNamespace(text=f"{ids[0]} {temperature} {seed}") for ids in prompts]

    monkeypatch.setattr(models, "Generator", Generator)
    decoder = object.__new__(models.Decoder)
    trainer: Any = SimpleNamespace(
        processes=SimpleNamespace(count=1),
        compute_copy=lambda params: SimpleNamespace(model=decoder),
    )
    rates = (0.5, 0.0, 0.5)
    options: dict[str, Any] = {"temperatures": rates, "seed": 7, "stop": [3], "params": "ema"}
    samples = callbacks.Samples(PROMPTS, num_tokens=5, **options)
    found = [(s["prompt"], s["temperature"], s["text"]) for s in samples.draw(trainer)]
    assert found == [
        (" ".join(map(str, ids)), rate, f"{ids[0]} {rate} 7") for ids in PROMPTS for rate in rates
    ]


# A decoder, compared with Transformers


@pytest.fixture(scope="module")
def pair(tmp_path_factory: Any) -> tuple[Any, models.Pretrained]:
    pytest.importorskip("torch", reason='compared with PyTorch: pip install -e ".[torch]"')
    from families import make_torch, save

    theirs = make_torch("gemma2")
    return theirs, models.load_pretrained(save(theirs, tmp_path_factory.mktemp("gemma2")))


def test_greedy_continuations_are_those_of_transformers(pair: tuple[Any, models.Pretrained]):
    import torch

    theirs, pretrained = pair
    prompts = [np.random.default_rng(n).integers(0, 96, n).tolist() for n in (3, 9)]
    found = {}
    for budget in ("least", 2**30):  # streamed, and with room for all
        trainer = mt.Trainer(
            pretrained.model,
            models.next_token_loss,
            optax.sgd(0.0),
            {name: np.zeros((2, 8), np.int32) for name in ("tokens", "labels")},
            params=pretrained.params,
            precision=mt.Precision(compute="float32"),
            device_budget=budget,  # type: ignore[arg-type]
            progress=False,
        )
        found[budget] = callbacks.Samples(prompts, num_tokens=8, stop=()).draw(trainer)
    assert found["least"] == found[2**30]
    for prompt, sample in zip(prompts, found["least"], strict=True):
        tokens = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None}
        with torch.no_grad():
            ids = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        assert sample["text"] == " ".join(map(str, ids[0, len(prompt) :].tolist()))


def test_a_question_is_put_by_the_chat_template():
    class Chat(Letters):
        def apply_chat_template(self, messages: Any, **options: Any) -> dict[str, list[int]]:
            assert options == {"add_generation_prompt": True, "return_dict": True}
            return {"input_ids": [10, *self.encode(messages[-1]["content"]), 10]}

    asked = callbacks.Samples([[{"role": "user", "content": "ab"}]], Chat(), logits=toy_logits)
    given = callbacks.Samples([[10, 0, 1, 10]], Chat(), logits=toy_logits)
    trainer = toy_trainer()
    (first,), (second,) = asked.draw(trainer), given.draw(trainer)
    assert (first["prompt"], second["prompt"]) == ("ab", "kabk")
    assert first["text"] == second["text"]


# Misuse

GIVEN: dict[str, Any] = {"prompts": [[1]]}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"prompts": "abc"}, TypeError, "prompts sequence 'abc'"),
        ({"prompts": []}, ValueError, "prompts empty"),
        ({"prompts": ["abc"]}, ValueError, "texts tokenizer"),
        ({"prompts": [[]]}, ValueError, "prompts token"),
        ({"prompts": [[-1]]}, ValueError, "prompts 0 -1"),
        ({"prompts": [3]}, TypeError, "prompts sequence 3"),
        (
            {"prompts": [[{"role": "user", "content": "a"}]], "tokenizer": Letters()},
            ValueError,
            "Transformers template",
        ),
        ({"tokenizer": "gpt2"}, TypeError, "tokenizer encode"),
        ({"logits": 3}, TypeError, "logits function"),
        ({"num_tokens": 0}, ValueError, "num_tokens 1 0"),
        ({"temperatures": ()}, ValueError, "temperatures empty"),
        ({"temperatures": 0.5}, TypeError, "temperatures sequence 0.5"),
        ({"temperatures": (-1,)}, ValueError, "temperatures -1"),
        ({"seed": 2**32}, ValueError, "seed 4294967295"),
        ({"stop": 3}, TypeError, "stop 3"),
        ({"every": 0}, ValueError, "every 1 0"),
        ({"show": 1}, TypeError, "show 1"),
    ],
)
def test_misuses_of_samples_are_named(changes: dict[str, Any], error: Any, message: str):
    with refuses(error, *message.split()):
        callbacks.Samples(**(GIVEN | changes))


def test_what_is_no_logits_is_named():
    trainer = small.trainer()
    with refuses(TypeError, "`logits`", "models.Decoder"):
        callbacks.Samples([[1]]).draw(trainer)
    samples = callbacks.Samples([[1]], logits=lambda model, batch: model[0]["w"], num_tokens=2)
    with refuses(ValueError, "(1, 3, vocabulary)", (64, 64)):
        samples.draw(trainer)


@pytest.mark.parametrize(("end", "ids"), [(0, [0]), (7, [7]), (None, [])])
def test_continuations_stop_at_the_end_of_text_if_there_is_one(end, ids):
    tokenizer = SimpleNamespace(eos_token_id=end)
    assert _stop(None, tokenizer) == ids and _stop([3, 0], tokenizer) == [3, 0]
