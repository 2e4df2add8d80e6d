"""The command `megatrain-jax finetune`: trained, interrupted, gone on with, done, exported."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import transformers

import megatrain_jax as mt
from megatrain_jax import data, models
from megatrain_jax._src.lm.cli import training_recipe as training
from megatrain_jax._src.lm.cli.finetune import dataset
from megatrain_jax._src.lm.cli.finetune_settings import FinetuneSettings
from megatrain_jax._src.lm.cli.main import main
from megatrain_jax._src.lm.cli.recipe import schedule_of
from megatrain_jax._src.lm.cli.run_data import RunData, file_stamps
from megatrain_jax._src.lm.cli.run_data import read as read_data
from megatrain_jax._src.lm.cli.run_folder import RunFolder
from megatrain_jax._src.lm.cli.run_report import ProgressLines, steady
from megatrain_jax._src.lm.cli.run_settings import PretrainSettings
from messages import refuses, tells
from places import ROOT

torch = pytest.importorskip("torch", reason='compared with PyTorch: pip install -e ".[torch]"')

from tiny_chats import conversation, make_checkpoint  # noqa: E402

SCRIPT = ROOT / "experiments" / "finetune.py"


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A checkpoint, conversations, and a file of settings for them."""
    folder = tmp_path_factory.mktemp("given")
    make_checkpoint(folder / "tiny")
    rows = [json.dumps(conversation(first)) + "\n" for first in range(40)]
    (folder / "chats.jsonl").write_text("".join(rows))
    settings = {
        "model": str(folder / "tiny"),
        "data": [str(folder / "chats.jsonl")],
        "length": 32,
        "batch": 4,
        "microbatches": 2,
        "epochs": 40,
        "learning_rate": 3e-3,
        "held_out": 0.2,
        "checkpoint_every": 30,
    }
    (folder / "tune.yaml").write_text(json.dumps(settings))  # JSON is YAML
    return folder


def tune(given, *options):
    """Runs the command in this process, which has imported all that it needs."""
    return main(["finetune", str(given / "tune.yaml"), *map(str, options)])


def interrupted_at(step, command):
    """Runs a command in a process of its own and sends SIGINT once it has printed a step."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith(f"step {step}/"):
                process.send_signal(signal.SIGINT)
        return process.wait(), "".join(lines)


def check_export(exported):
    """Compares the logits of an exported model with those of Transformers."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    text = tokenizer.apply_chat_template(conversation(3)["messages"], tokenize=False)
    tokens = np.asarray(tokenizer(text)["input_ids"], np.int32)[None]
    again = models.load_pretrained(exported)
    trainer = mt.Trainer(
        again.model,
        models.next_token_loss,
        optax.sgd(0.0),
        {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]},
        params=again.params,
        precision=mt.Precision(compute=jnp.float32),
        progress=False,
    )
    with torch.no_grad():
        logits = theirs(torch.tensor(tokens[:, :-1]).long()).logits.numpy()
    ours = jax.tree.map(jnp.asarray, trainer.model)(tokens[:, :-1])
    np.testing.assert_allclose(ours, logits, atol=1e-4)


def test_an_interrupted_run_is_gone_on_with_exported_and_then_done(given, tmp_path, capsys):
    out = tmp_path / "out"
    options = ["--out", str(out), "--steps", "60", "--eval-every", "30"]
    command = [sys.executable, str(SCRIPT), str(given / "tune.yaml"), *options]
    status, printed = interrupted_at(2, command)
    assert status == 130 and tells(printed, "training", 32)
    assert not (out / "model").exists() and not (out / "report.json").exists()
    before = max(int(p.name) for p in (out / "checkpoints").iterdir() if p.name.isdigit())
    assert tells(printed, f"step {before}", 60)
    assert 2 <= before < 60
    # Data that has changed since is told in a line.
    chats = given / "chats.jsonl"
    whole = chats.read_text()
    chats.write_text(whole + json.dumps(conversation(7)) + "\n")
    assert tune(given, *options) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert tells(told, "megatrain-jax finetune: error:", "`data`", "changed")
    chats.write_text(whole)
    # The same command again, and once more.
    assert tune(given, *options) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"step {before}\n.*step {before + 1}/60,", printed)
    last = [line for line in printed.splitlines() if "step 60/60" in line]
    assert len(last) == 1 and tells(last[0], "loss", "eval loss", "00:00")
    report = json.loads((out / "report.json").read_text())
    assert report["steps"] == 60 and report["last_loss"] < 0.7 * report["first_loss"]
    assert report["eval_loss"] > 0 and len(report["history"]) == 60
    assert 0 < report["tokens_per_second_without_padding"] < report["tokens_per_second"]
    # In both processes the first steps compile, and the last ones wait.
    assert report["num_measured_steps"] == max(0, before - 5) + 60 - before - 5
    own = FinetuneSettings(**json.loads((out / "settings.json").read_text()))
    counts = [(batch["segments"] > 0).sum() for batch in islice(read(own).train, 60)]
    assert [record["tokens"] for record in report["history"]] == counts
    check_export(out / "model")
    capsys.readouterr()
    assert tune(given, *options) == 0
    is_done = capsys.readouterr().out
    assert tells(is_done, out, "done", 60) and is_done.count("\n") == 1
    # Of data that has changed since it warns in one more line.
    chats.write_text(whole + json.dumps(conversation(7)) + "\n")
    assert tune(given, *options) == 0
    told, _, warned = capsys.readouterr().out.partition("warning: ")
    assert told == is_done and tells(warned, "`data`", "changed")
    assert warned.count("\n") == 1
    chats.write_text(whole)
    assert tune(given, *options, "--learning-rate", "1e-4") == 2
    assert tells(capsys.readouterr().err, "learning_rate", 0.003, 0.0001)
    assert tune(given, *options, "--steps", "62") == 2
    told = capsys.readouterr().err
    assert tells(told, "steps", 60, 62, "done")
    assert tells(told, "`out`", "`megatrain-jax finetune`", f"`model`={out}/model")


def test_microbatches_that_the_plan_chose_are_kept(given, tmp_path, monkeypatch, capsys):
    rates: dict[str, Any] = {"link_bytes_per_s": 1e9, "flops_per_s": 1e12}
    small = mt.Hardware(name="small", device_bytes=2**20, device_share=1.0, **rates)
    options = ["--steps", "4", "--checkpoint-every", "1", "--held-out", "0", "--export", "never"]
    options += ["--compute", "float32"]

    own = training._callbacks

    def interrupts(trainer, record):
        if trainer.num_steps == 2:
            os.kill(os.getpid(), signal.SIGINT)

    auto = [*options, "--out", str(tmp_path / "auto"), "--microbatches", "auto"]
    with monkeypatch.context() as patched:
        patched.setattr(training.mt, "this_machine", lambda: small)
        patched.setattr(training.run_report, "num_gpus", lambda: None)
        patched.setattr(training, "_callbacks", lambda *given: [*own(*given), interrupts])
        assert tune(given, *auto) == 130
    # A plan for this machine, on which memory is not limited, would choose 1.
    assert tune(given, *auto) == 0
    report = json.loads((tmp_path / "auto" / "report.json").read_text())
    assert report["microbatches"] > 1
    # Of a step, although each part counts its own.
    settings = json.loads((given / "tune.yaml").read_text()) | {"out": "out", "epochs": None}
    batches = dataset(FinetuneSettings(**settings), settings["data"], None)
    tokens = [(batch["segments"] > 0).sum() for batch in islice(batches, 4)]
    assert [record["tokens"] for record in report["history"]] == tokens


@pytest.mark.exhaustive
def test_a_part_of_the_parameters_is_trained(given, tmp_path, monkeypatch, capsys):
    """By the script, which is the same command; and a run's last line is printed."""
    # Of a single step, which learns, too.
    trainable = ["--steps", "1", "--trainable", r"layers/.*/(q|v)_proj", "--checkpoint-every=null"]
    words = [str(given / "tune.yaml"), "--out", str(tmp_path / "part"), *trainable]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 0
    assert tells(capsys.readouterr().out, 1, tmp_path / "part")
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).state_dict()
        for f in (given / "tiny", tmp_path / "part" / "model")
    )
    # All others are as they were, to the bit.
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.split(".")[-2] in ("q_proj", "v_proj")}


def read(settings: FinetuneSettings) -> RunData:
    return read_data(settings, lambda files, epochs: dataset(settings, files, epochs))


def test_files_are_mixed_by_their_weights(given, capsys):
    (given / "more.jsonl").write_text((given / "chats.jsonl").read_text())
    files = [str(given / name) for name in ("chats.jsonl", "more.jsonl")]
    settings: dict[str, Any] = {"data": files, "weights": [3.0, 1.0], "steps": 2}
    settings |= {"model": str(given / "tiny"), "out": "out", "length": 32, "batch": 8}
    batches = read(FinetuneSettings(**settings, held_out=0.2))
    assert isinstance(batches.train, data.Mixture) and batches.train.proportions == (3, 1)
    assert isinstance(batches.held_out, data.Mixture) and batches.steps == 2
    rows = [part.num_rows for part in batches.train.datasets]
    used = batches.train.rows_used(2)
    printed = capsys.readouterr().out.splitlines()
    parts = [
        (file, part)
        for mixture in (batches.train, batches.held_out)
        for file, part in zip(files, mixture.datasets, strict=True)
    ]
    for line, (file, part) in zip(printed[:-2], parts, strict=True):
        assert file in line and line.endswith(str(part))
    for line, file, n, m in zip(printed[-2:], files, used, rows, strict=True):
        assert tells(line, file, n, m, m - n)
    assert used == [12, 4]
    # Without steps, all ends with the first that has no row left.
    shares: dict[str, Any] = {"steps": None, "weights": [0.2, 0.8], "held_out": 0.2}
    ended = read(FinetuneSettings(**settings | shares))
    assert isinstance(ended.train, data.Mixture)
    ours, theirs = ended.train.rows_used()
    assert ours < theirs == rows[1]
    told = capsys.readouterr().out.splitlines()[-2:]
    assert tells(told[0], files[0], ours, rows[0], rows[0] - ours)
    assert tells(told[1], files[1], rows[1], "once")
    settings |= {"weights": None, "held_out": 0.0}
    whole = read(FinetuneSettings(**settings))
    assert isinstance(whole.train, data.Dataset) and whole.train.num_documents == 80
    assert whole.held_out is None
    # Epochs may end within a batch.
    rows = whole.train.num_rows
    read(FinetuneSettings(**settings | {"steps": None, "epochs": 1, "batch": rows - 1}))
    assert tells(capsys.readouterr().out.splitlines()[-1], rows, "once")


def test_steps_that_are_given_repeat_the_data_unless_epochs_are_given(given):
    settings: dict[str, Any] = {"data": str(given / "chats.jsonl"), "held_out": 0.0}
    settings |= {"model": str(given / "tiny"), "out": "out", "length": 32, "batch": 4}
    once = read(FinetuneSettings(**settings))
    assert once.steps == len(once.train)
    twice = read(FinetuneSettings(**settings, epochs=2))
    steps = twice.steps + 3
    repeated = read(FinetuneSettings(**settings, steps=steps))
    found = list(islice(repeated.train, repeated.steps))
    assert len(found) == repeated.steps == steps > 2 * once.steps
    for one, other in zip(found, islice(twice.train, twice.steps - 1), strict=False):
        np.testing.assert_array_equal(one["tokens"], other["tokens"])
    with refuses(ValueError, once.steps + 1, "`epochs`"):
        read(FinetuneSettings(**settings, steps=once.steps + 1, epochs=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--master", "int4"], "--master float32, bfloat16, int8 null int4"),
        (["--state", "int3"], "--state float32, bfloat16, int8, int4 int3"),
        (["--model", "there/is/none"], "`model` there/is/none"),
        (["--data", __file__], "test_cli_finetune.py `data` .csv"),
        (["--microbatches", "3"], "`microbatches`=3 `batch`=4"),
        (["--learning-rate", "1e-46"], "`learning_rate`=1e-46 0 float32"),
        (["--steps", "1000"], "`steps`=1000 160 `epochs`=40"),
        (["--weights", "[1, 2]"], "`weights` two `data`"),
        (["--warmup", "2"], "`warmup` 0 1 2.0"),
        (["--lora-rank", "2", "--lora-targets", "nothing"], "`lora_targets`='nothing'"),
        (["--lora-rank", "2", "--lora-modules-to-save", "nothing"], "`lora_modules_to_save`"),
        (["--trainable", "("], "`trainable`='(' regular"),
        (["--trainable", "a", "--trainable", "("], "`trainable`='(' regular"),
        (["--chat-template", "{% if %}"], "`chat_template` Jinja"),
        (["--chat-template", "/no/such.jinja"], "`chat_template` Jinja"),
        (["--learning-rate", "fast"], "--learning-rate number null fast"),
        (["--compute", "fp16"], "float32 null fp16 `float16`"),
        (["--clip", "none"], "--clip number null none `null`"),
        (["--logs", "[csv, foo]"], "mlflow [a, b] null ['csv"),
        (["--optimizer-options", "5"], "{name: value} null 5"),
        (["--lr", "1"], "--lr `--learning-rate`"),
        (["--batch", ""], "--batch integer empty"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(given, tmp_path, options, message, capfd):
    assert tune(given, "--out", tmp_path / "out", *options) == 2
    printed = capfd.readouterr().err.splitlines()[-1]
    assert tells(printed, "megatrain-jax finetune: error:", *message.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.exhaustive
def test_files_with_mistakes_are_told_in_the_commands_words(given, tmp_path, capsys):
    (tmp_path / "typo.yaml").write_text("comput: float32\n")
    assert tune(given, "--config", tmp_path / "typo.yaml", "--out", tmp_path / "out") == 2
    assert tells(capsys.readouterr().err, "--comput", "`--compute`")
    (tmp_path / "empty.jsonl").write_text('{"messages": []}\n')
    (tmp_path / "long.jsonl").write_text(json.dumps(conversation(1)) + "\n")
    for name, options, hint in (
        ("empty", (), "`--invalid drop`"),
        ("long", ("--length", 2), "`--too-long cut`"),
    ):
        data = tmp_path / f"{name}.jsonl"
        assert tune(given, "--data", data, "--out", tmp_path / "out", *options) == 2
        assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "none.jsonl"], "`data` file none.jsonl"),
        (["--data", "no*.jsonl"], "`data` pattern no*.jsonl"),
        (["--eval-data", "none.jsonl"], "`eval_data` file none.jsonl"),
    ],
)
def test_missing_files_are_told_before_the_plan(given, tmp_path, options, message, capsys):
    # `held_out` is for documents of `data`.
    assert tune(given, "--out", tmp_path / "out", "--held-out", 0, *options) == 2
    printed = capsys.readouterr()
    assert tells(printed.err, *message.split())
    assert printed.err.count("\n") == 1 and not printed.out


def test_what_datasets_on_the_hub_need_is_told_before_the_plan(
    given, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert tune(given, "--out", tmp_path / "out", "--data", "some/chats:train") == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert tells(printed.err, "`data`", "some/chats:train", "pip install datasets")


@pytest.mark.parametrize("name", ["settings.json", "notes.json", "ended.json", "report.json"])
def test_damaged_files_of_a_run_are_named(name, tmp_path):
    folder = RunFolder(tmp_path)
    common: dict[str, Any] = {"model": "m", "data": "d", "out": str(tmp_path), "steps": 10}
    settings = FinetuneSettings(**common)
    folder.begin(settings)
    (folder.checkpoints / "10").mkdir(parents=True)

    def read() -> None:
        folder.check(settings)
        folder.check_data("1")
        assert folder.report is folder.ended is None

    texts = ["", "{", "[]", "[" * 100_000 + "]" * 100_000, '{"a": ' + "9" * 5000 + "}"]
    if name == "notes.json":
        texts += ['{"data": 10}', '{"data": []}']
    for text in texts:
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=str(tmp_path / name)):
            read()
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with refuses(ValueError, tmp_path / name, "pipe"):
        read()


@pytest.mark.parametrize("began", ["1 x", "-1", "3000000000", "1.5", "9" * 5000])
def test_the_notes_of_a_run_are_checked(began, tmp_path):
    folder = RunFolder(tmp_path)
    for step in (8, 1, 8):
        folder.begin_at(step)
    assert folder.began == [1, 8]
    folder.take_note("began", began)
    with pytest.raises(ValueError, match=str(tmp_path / "notes.json")):
        _ = folder.began


def test_a_longer_run_is_told_where_to_begin(tmp_path):
    folder = RunFolder(tmp_path)
    common: dict[str, Any] = {"model": "m", "data": "d", "out": str(tmp_path), "steps": 10}
    settings = FinetuneSettings(**common, lora_rank=2)
    folder.begin(settings)
    (folder.checkpoints / "10").mkdir(parents=True)
    longer = replace(settings, steps=12)
    with refuses(ValueError, "steps", 10, 12, "`out`"):
        folder.check(longer)
    folder.check(replace(settings, out="moved"))
    folder.finish({})
    folder.check(settings)
    with pytest.raises(ValueError, match="`export`=finished .*`export_as`=model$"):
        folder.check(longer)
    pretrained = PretrainSettings(**common, tokenizer="t")
    folder.begin(pretrained)
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match="finetune`.* `model`=.*/model .*`format`=text$"):
        folder.check(replace(pretrained, epochs=2))


def test_files_that_were_written_to_are_told_by_their_option(given, tmp_path):
    for name in ("a.jsonl", "b.jsonl", "folder/deep/c.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    settings = FinetuneSettings(
        model=str(given / "tiny"),
        data=[str(tmp_path / "[a].jsonl"), str(tmp_path / "folder")],
        eval_data=str(tmp_path / "b.jsonl"),
        out=str(tmp_path / "out"),
    )
    folder = RunFolder(tmp_path / "out")
    folder.path.mkdir()

    def changed():
        return folder.changed_files(file_stamps(settings))

    assert changed() == []  # a run of an earlier version has noted nothing
    for written, options in (
        ("a.jsonl", ["data"]),
        ("b.jsonl", ["eval_data"]),
        ("folder/deep/c.jsonl", ["data"]),
        ("folder/d.jsonl", ["data"]),
    ):
        for option, stamp in file_stamps(settings).items():
            folder.take_note(f"files of {option}", stamp)
        assert changed() == []
        (tmp_path / written).write_text("22\n333\n" + written)
        assert changed() == options


def test_a_folder_of_something_else_is_left_alone(given, tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    assert tune(given, "--out", tmp_path) == 2
    assert tells(capsys.readouterr().err, tmp_path)
    assert tune(given) == 2
    assert "out" in capsys.readouterr().err


def test_rates_are_of_the_last_steps_that_do_not_compile(capsys):
    began: list[int] = []
    lines = ProgressLines(50, optax.constant_schedule(1.0), 1, began.append)
    seconds = [100.0, 50.0, *(1.0 + step for step in range(28))]
    history = [
        {"step": 11 + n, "loss": 1.0, "grad_norm": 1.0, "tokens": 16.0, "seconds": taken}
        for n, taken in enumerate(seconds)
    ]
    for record in history:
        lines(None, record)  # type: ignore[arg-type]  # it asks nothing of the trainer
    printed = capsys.readouterr().out.splitlines()
    assert began == [11] and tells(printed[0], 10)
    assert all(line.endswith(" 1") for line in printed[1:3])
    assert tells(printed[3], 1, "16 tokens/s", "00:37")
    mean = np.mean(seconds[-20:])
    left = f"{10 * mean // 60:02.0f}:{10 * mean % 60:02.0f}"
    assert tells(printed[-1], 1, f"{16 / mean:.0f} tokens/s", left)

    # Those of a report are of all processes.
    assert [record["step"] for record in steady(history, [])] == list(range(14, 39))
    expected = [*range(14, 19), *range(24, 39)]
    assert [record["step"] for record in steady(history, [11, 21])] == expected
    assert [record["step"] for record in steady(history[:9], [11, 14])] == [17]


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0.0, 0.24])
def test_the_learning_rate_rises_and_falls(decay, warmup):
    rates = [np.asarray(schedule_of(2.0, 40, warmup, decay, 0.1)(step)) for step in range(41)]
    top = round(40 * warmup)
    np.testing.assert_allclose(rates[: top + 1], np.linspace(0, 2, top + 2)[1:], rtol=1e-6)
    share = np.arange(41 - top) / (40 - top)
    falling = {
        "cosine": 0.2 + 1.8 * 0.5 * (1 + np.cos(np.pi * share)),
        "linear": 2 - 1.8 * share,
        "constant": 2 + 0 * share,
    }[decay]
    np.testing.assert_allclose(rates[top:], falling, rtol=1e-5)
