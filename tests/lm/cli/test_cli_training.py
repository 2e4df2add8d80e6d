"""Runs of `finetune` and `pretrain` to their ends: adapters, preferences, early stops, exports."""

import csv
import itertools
import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import transformers
from flax import nnx

from disks import state_on_disk
from megatrain_jax import callbacks, models
from megatrain_jax._src.lm.cli import finetune
from megatrain_jax._src.lm.cli import training_recipe as training
from megatrain_jax._src.lm.cli.finetune import dataset
from megatrain_jax._src.lm.cli.finetune_settings import OBJECTIVE_KINDS, FinetuneSettings
from megatrain_jax._src.lm.cli.reference import ReferenceLogProbs
from messages import tells
from quantities import has_row, quantities

torch = pytest.importorskip("torch", reason='compared with PyTorch: pip install -e ".[torch]"')
peft = pytest.importorskip("peft", reason='compared with PEFT: pip install -e ".[torch]"')

from safetensors.numpy import load_file  # noqa: E402

from cli_runs import CHECKED, make_given, trained  # noqa: E402


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    return make_given(tmp_path_factory.mktemp("given"))


def interrupt_at(step, monkeypatch):
    """Has runs be interrupted after a step, as by Ctrl+C; None for never."""

    def interrupts(trainer, record):
        if record["step"] == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(training, "_callbacks", lambda *given: [*CALLBACKS(*given), interrupts])


CALLBACKS = training._callbacks


def report_of(out):
    return json.loads((out / "report.json").read_text())


def loss_of(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens), labels=torch.tensor(tokens)).loss.item()


@pytest.mark.exhaustive
@pytest.mark.parametrize("adapters", [{}, {"lora_rank": 2}], ids=["all", "adapters"])
def test_a_run_is_gone_on_with_on_a_disk_in_memory_and_on_a_disk(
    adapters, given, tmp_path, monkeypatch
):
    settings = {"model": str(given / "tiny"), "data": str(given / "chats.jsonl"), "steps": 6}
    settings |= {"learning_rate": 5e-2, "held_out": 0.2, **adapters}
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert trained("finetune", given, whole, **settings) == 0
    on_disk = settings | {"disk_dir": str(tmp_path / "disk")}
    for number, (step, status) in enumerate([(1, 130), (3, 130), (None, 0)]):
        interrupt_at(step, monkeypatch)
        with nullcontext() if number == 1 else state_on_disk():
            own = settings if number == 1 else on_disk
            assert trained("finetune", given, parted, **own) == status
    one, other = (report_of(out)["history"] for out in (whole, parted))
    assert [record["loss"] for record in one] == [record["loss"] for record in other]
    (weights,) = [path.relative_to(whole) for path in whole.glob("*/*.safetensors")]
    assert (parted / weights).read_bytes() == (whole / weights).read_bytes()


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_are_gone_on_with_and_exported_for_peft(given, tmp_path, monkeypatch, capsys):
    settings = {
        "model": str(given / "tiny"),
        "data": str(given / "chats.jsonl"),
        "steps": 6,
        "learning_rate": 5e-2,
        "held_out": 0.2,
        "eval_every": 3,
        "lora_rank": 2,
        "lora_alpha": 4,
        "lora_targets": "self_attn/(q|v)_proj",
        "export_as": "both",
        "logs": ["csv", "jsonl"],
        "samples": ["count from 3", "please"],
        "sample_tokens": 5,
    }
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert trained("finetune", given, whole, **settings) == 0

    with monkeypatch.context() as patched:
        interrupt_at(1, patched)
        assert trained("finetune", given, parted, **settings) == 130
    printed = capsys.readouterr().out
    assert tells(printed, "interrupted") and not (parted / "adapter").exists()
    assert trained("finetune", given, parted, **settings) == 0
    printed = capsys.readouterr().out
    assert tells(printed, "went on")

    # What was interrupted is what wasn't, to the bit.
    one, other = (report_of(out)["history"] for out in (whole, parted))
    assert [record["loss"] for record in one] == [record["loss"] for record in other]
    files = [load_file(out / "adapter" / "adapter_model.safetensors") for out in (whole, parted)]
    assert files[0].keys() == files[1].keys() and len(files[0]) == 8
    assert all(np.array_equal(array, files[1][name]) for name, array in files[0].items())

    merged = check_merged(given / "tiny", whole)
    for sample, prompt in zip(
        report_of(whole)["history"][-1]["samples"], settings["samples"], strict=True
    ):
        expected = continued(merged, whole / "model", prompt)
        assert sample == {"prompt": prompt, "temperature": 0.0, "text": expected}
        assert f"    {prompt}▸{expected}\n" in printed
        assert f"  prompt: {prompt}\n" in (parted / "log.csv.txt").read_text()
    for out in (whole, parted):  # that of the run in two parts is one
        check_logs(out)


def check_merged(base_folder: Path, out: Path) -> Any:
    """Returns a run's merged model, after PEFT has computed the same with its adapter."""
    make = transformers.AutoModelForCausalLM.from_pretrained
    base = make(base_folder, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, str(out / "adapter"))
    merged: Any = make(out / "model", dtype=torch.float32)
    tokens = [list(range(8, 20))]
    assert loss_of(adapted, tokens) == pytest.approx(loss_of(merged, tokens), rel=1e-5)
    with adapted.disable_adapter():
        assert loss_of(adapted, tokens) != pytest.approx(loss_of(merged, tokens), rel=1e-3)
    return merged


def continued(model: Any, folder: Path, prompt: str) -> str:
    """The five tokens that Transformers continues a prompt with."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], **options)
    out = model.generate(**ids, max_new_tokens=5, do_sample=False)[0]
    text = tokenizer.decode(out[ids["input_ids"].shape[1] :])
    return text.removesuffix(tokenizer.eos_token).strip()


def check_logs(out: Path) -> None:
    """Checks that both logs of a run of six steps have what its report has."""
    rows = list(csv.DictReader((out / "log.csv").read_text().splitlines()))
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in report_of(out)["history"]]
    assert [float(row["loss"]) for row in rows] == losses
    assert [line["loss"] for line in lines] == losses
    assert [bool(row["eval_loss"]) for row in rows] == [False, False, True] * 2


def test_pretraining_stops_early_and_exports_the_best_for_transformers(given, tmp_path, capsys):
    out = tmp_path / "out"
    settings = {
        "model": str(given / "sizes.json"),
        "tokenizer": str(given / "tiny"),
        "sizes": {"vocab_size": 96},
        "data": str(given / "text*.jsonl"),
        "eval_data": str(given / "checked.txt"),
        "steps": 50,
        "learning_rate": 0.1,
        "warmup": 0,
        "decay": "constant",
        "eval_every": 2,
        "stop_after": 1,
        "keep_best": True,
    }
    assert trained("pretrain", given, out, **settings) == 0
    printed = capsys.readouterr().out
    report = report_of(out)
    evaluated = {r["step"]: r["eval_loss"] for r in report["history"] if "eval_loss" in r}
    best = min(evaluated, key=lambda step: evaluated[step])
    assert report["ended"] == "stopped" and report["steps"] == best + 2 < 50
    assert report["exported_step"] == best
    assert has_row(printed, [best]) and has_row(
        printed, [best + 2, 50, *quantities(report["reason"])]
    )
    assert callbacks.KeepBest(out / "best").path == out / "best" / str(best)

    model = transformers.AutoModelForCausalLM.from_pretrained(out / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out / "model")
    assert model.config.eos_token_id == tokenizer.eos_token_id is not None
    tokens = [[*tokenizer(CHECKED)["input_ids"], tokenizer.eos_token_id]]
    assert loss_of(model, tokens) == pytest.approx(evaluated[best], rel=1e-5)

    # It is done; what is missing is exported again, and nothing is trained.
    assert trained("pretrain", given, out, **settings) == 0
    assert tells(capsys.readouterr().out, "done", best + 2, 50)
    shutil.move(out / "model", tmp_path / "before")
    assert trained("pretrain", given, out, **settings) == 0
    assert "step " not in capsys.readouterr().out.partition("held out")[2].partition("best")[0]
    how = "ended reason steps steps_asked_for exported_step".split()
    assert [report_of(out)[name] for name in how] == [report[name] for name in how]
    before, after = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "before", out / "model")
    )
    assert all(np.array_equal(array, after[name]) for name, array in before.items())


@pytest.mark.exhaustive
def test_preferences_are_learned_by_adapters(given, tmp_path, capsys):
    out = tmp_path / "out"
    settings = {
        "model": str(given / "tiny"),
        "data": [str(given / "pairs.jsonl")],
        "objective": "dpo",
        "beta": 0.5,
        "lora_rank": 2,
        "steps": 6,
        "learning_rate": 1e-2,
        "warmup": 0,
        "held_out": 0.2,
        "eval_every": 6,
        "keep_best": True,
    }
    assert trained("finetune", given, out, **settings) == 0
    first, *_, last = report_of(out)["history"]
    assert first["loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert last["loss"] < 0.9 * first["loss"] and 0.5 < last["accuracy"] <= 1
    printed = capsys.readouterr().out
    assert tells(printed, "accuracy")
    assert tells(printed, "best", "step 6")
    assert sorted(p.name for p in (out / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "generation_config.json",
        "megatrain_export.json",
    ]
    # The base names no end of its own.
    settings = json.loads((out / "adapter" / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [1]


OBJECTIVES = {
    "orpo": ("pairs", {}, "rewards/margins"),
    "kto": ("labelled", {"lora_rank": 2}, "rewards/margins"),
    "reward": ("pairs", {"lora_rank": 2}, "margin"),
    "distill": ("taught", {"topk": 2}, "loss"),
}


@pytest.mark.by_default("orpo")
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_objective_is_learned_and_exported(given, tmp_path, objective):
    data, options, gains = OBJECTIVES[objective]
    out = tmp_path / "out"
    settings = {
        "model": str(given / "tiny"),
        "data": str(given / f"{data}.jsonl"),
        "objective": objective,
        "steps": 6,
        "learning_rate": 1e-2,
        "warmup": 0,
        "held_out": 0.2,
        "eval_every": 6,
        "microbatches": 2,
        "export_as": "model",
    }
    assert trained("finetune", given, out, **settings, **options) == 0
    first, *_, last = report_of(out)["history"]
    assert last["loss"] < first["loss"] and last[f"eval_{gains}"] > min(first[gains], 0)
    kind = "SequenceClassification" if objective == "reward" else "CausalLM"
    loaded = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(out / "model")
    assert objective != "reward" or loaded.config.num_labels == 1


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_have_dropout_only_where_trl_leaves_it_on(given, tmp_path, capsys):
    plain = transformers.AutoModelForCausalLM.from_pretrained(given / "tiny")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.25)
    peft.get_peft_model(plain, config).save_pretrained(tmp_path / "adapter")
    common: dict[str, Any] = {"model": str(given / "tiny"), "data": "unread", "out": str(tmp_path)}
    for objective, kind in OBJECTIVE_KINDS.items():
        for adapters, share in (
            ({"lora_rank": 2, "lora_dropout": 0.5}, 0.5),
            ({"adapter": str(tmp_path / "adapter")}, 0.25),
        ):
            settings: Any = common | adapters | {"objective": objective}
            model = nnx.eval_shape(finetune.prepare(FinetuneSettings(**settings)).model)
            found = [m for _, m in nnx.iter_graph(model) if isinstance(m, nnx.Dropout)]
            assert found and {m.rate for m in found} == {share}
            assert {m.deterministic for m in found} == {not kind.has_dropout}
            printed = capsys.readouterr().out
            assert tells(printed, "dropout", share) != kind.has_dropout
            assert (f"--objective {objective} " in printed) != kind.has_dropout
    finetune.prepare(FinetuneSettings(**common, objective="dpo", lora_rank=2))
    assert not capsys.readouterr().out


def plain_losses(settings, out):
    """The losses of preferences in plain JAX, with a model and the one before training beside."""
    given = FinetuneSettings(**settings, out=str(out), length=32, batch=4, epochs=None)
    pretrained = models.load_pretrained(given.model)
    graph, own = nnx.split(pretrained.model())
    before = nnx.state(nnx.merge(graph, own), nnx.Param)
    nnx.replace_by_pure_dict(before, jax.tree.map(jnp.asarray, pretrained.params))

    def logs(params, batch):
        logits = nnx.merge(graph, params)(
            batch["tokens"], batch["positions"], segments=batch["segments"]
        )
        each = jax.nn.log_softmax(logits.astype(jnp.float32))
        each = jnp.take_along_axis(each, batch["labels"][..., None], -1)[..., 0] * batch["mask"]
        numbers = range(1, 1 + 2 * batch["pairs"].shape[1])
        return jnp.stack([jnp.where(batch["segments"] == n, each, 0).sum(1) for n in numbers], 1)

    def loss(params, reference, batch):
        gained = logs(params, batch) - reference
        each = jax.nn.log_sigmoid(given.beta * (gained[:, 0::2] - gained[:, 1::2]))
        return -jnp.where(batch["pairs"], each, 0).sum() / batch["pairs"].sum()

    rate = optax.constant_schedule(given.learning_rate or 0.0)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95))

    @jax.jit
    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, logs(before, batch), batch)
        updates, state = optimizer.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    params, state, found = before, optimizer.init(before), []
    train, _ = dataset(given, given.data, None).split(given.held_out)
    for batch in itertools.islice(train, given.steps):
        value, params, state = step(params, state, batch)
        found.append(float(value))
    return found


def test_preferences_are_learned_by_all_parameters(given, tmp_path, monkeypatch, capsys):
    model, out = tmp_path / "tiny", tmp_path / "out"
    shutil.copytree(given / "tiny", model)
    settings = {
        "model": str(model),
        "data": [str(given / "pairs.jsonl")],
        "objective": "dpo",
        "beta": 0.5,
        "steps": 4,
        "learning_rate": 1e-3,
        "warmup": 0.0,
        "decay": "constant",
        "held_out": 0.2,
        "microbatches": 2,
        "checkpoint_every": 1,
    }

    def interrupts(trainer, record):
        if record["step"] == 2:
            raise KeyboardInterrupt

    own = training._callbacks
    with monkeypatch.context() as patched:
        patched.setattr(training, "_callbacks", lambda *given: [*own(*given), interrupts])
        assert trained("finetune", given, out, **settings) == 130
    assert tells(capsys.readouterr().out, "reference:", 48)
    # Of another checkpoint it is refused; else it is found again, unless it is damaged.
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    assert trained("finetune", given, out, **settings) == 2
    assert tells(capsys.readouterr().err, "changed")
    (model / "model.safetensors").write_bytes(weights)
    assert trained("finetune", given, out, **settings) == 0
    printed = capsys.readouterr().out
    assert "reference:" not in printed and tells(printed, "went on")
    stored = (out / "reference.npz").read_bytes()
    (out / "damaged.npz").write_bytes(stored[:-300] + bytes(8) + stored[-292:])
    # What another process has damaged, and comes first by its name, is not all there is.
    (out / "reference-1.npz").write_bytes((out / "damaged.npz").read_bytes())
    key = json.loads((out / "notes.json").read_text())["reference"]
    for name, other, count in (
        ("reference", key, 48),
        ("reference", f"{key} ", 0),
        ("damaged", key, 0),
        ("missing", key, 0),
    ):
        reference = ReferenceLogProbs(out / f"{name}.npz", other)
        reference.load()
        assert len(reference.values) == count

    history = report_of(out)["history"]
    assert history[0]["loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert [r["loss"] for r in history] == pytest.approx(plain_losses(settings, out), rel=1e-5)
    assert history[-1]["loss"] < 0.9 * history[0]["loss"]
    assert (out / "model" / "model.safetensors").exists()
    # What the answers were seen to end with reaches the export through the reference, too.
    settings = json.loads((out / "model" / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [1]


def test_new_tokens_are_learned_and_exported(given, tmp_path, capsys):
    rows = [{"text": f"<think> {n} {n + 1} </think> please"} for n in range(12)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "new.txt").write_text("<think>\n</think>\n")
    settings = {
        "model": str(given / "tiny"),
        "data": str(tmp_path / "texts.jsonl"),
        "format": "text",
        "held_out": 0,
        "steps": 2,
        "compute": "float32",
        "new_tokens": str(tmp_path / "new.txt"),
    }
    adapters = trained("finetune", given, tmp_path / "out", **settings, lora_rank=2)
    assert adapters == 2 and tells(capsys.readouterr().err, "`new_tokens`", "adapters")
    assert trained("finetune", given, tmp_path / "out", **settings) == 0
    exported = tmp_path / "out" / "model"
    before = transformers.AutoTokenizer.from_pretrained(given / "tiny")
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    assert len(tokenizer) == len(before) + 2 == model.config.vocab_size
    ids = tokenizer("<think> 3 </think>")["input_ids"]
    assert [ids[0], ids[-1]] == [len(before), len(before) + 1] and len(ids) == 3
    old = transformers.AutoModelForCausalLM.from_pretrained(given / "tiny", dtype=torch.float32)
    mean = old.get_parameter("model.embed_tokens.weight").mean(0)
    learned = model.get_parameter("model.embed_tokens.weight")[-2:] - mean
    # AdamW's two steps move each number by about the learning rate.
    assert 1e-7 < learned.abs().mean().item() < 1e-3
