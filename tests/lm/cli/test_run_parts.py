"""Parts of runs of the command line that need neither a checkpoint nor training."""

import json
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optax
import pytest
from flax import nnx

import megatrain_jax as mt
from chats import tokenizer
from megatrain_jax import callbacks, data, models
from megatrain_jax._src.lm.cli import (
    chat,
    finetune,
    grpo_command,
    main,
    reference,
    run_data,
    training_recipe,
)
from megatrain_jax._src.lm.cli.finetune import (
    chat_template,
    check_new_rows,
    shapes,
    with_template,
)
from megatrain_jax._src.lm.cli.finetune_settings import OBJECTIVE_KINDS, FinetuneSettings
from megatrain_jax._src.lm.cli.grpo_settings import GrpoSettings
from megatrain_jax._src.lm.cli.pretrain import sizes_of
from megatrain_jax._src.lm.cli.run_folder import RunFolder
from megatrain_jax._src.lm.cli.run_report import (
    ProgressLines,
    make_logs,
    peak_memory,
    tell_interrupted,
)
from megatrain_jax._src.lm.cli.run_settings import PretrainSettings
from messages import refuses, tells
from places import ROOT
from tiny_sizes import TINY, tiny_decoder

GIVEN: dict[str, Any] = {"model": "m", "data": "d", "out": "o"}


def test_the_best_checkpoint_of_a_run_that_goes_on_stays(tmp_path):
    folder, settings = RunFolder(tmp_path), FinetuneSettings(**GIVEN)
    for path in (folder.best / "3", folder.checkpoints / "4"):
        path.mkdir(parents=True)
    folder.begin(settings)
    assert (folder.best / "3").exists()
    # Without a checkpoint, the run begins anew.
    (folder.checkpoints / "4").rmdir()
    folder.begin(settings)
    assert not folder.best.exists()


def test_data_may_change_until_the_first_checkpoint(tmp_path):
    folder = RunFolder(tmp_path)
    folder.take_note("data", "one")
    folder.check_data("other")
    (folder.checkpoints / "1").mkdir(parents=True)
    folder.check_data("one")
    with refuses(ValueError, "`data`", tmp_path):
        folder.check_data("other")


def test_shapes_of_a_plan_are_those_of_batches_but_for_the_number_of_answers():
    prompt = [{"role": "user", "content": "the cat"}]
    said = [{"role": "assistant", "content": text} for text in ("sat", "rain")]
    options: Any = {"length": 96, "batch_size": 3, "progress": False}
    pair: Any = {"prompt": prompt, "chosen": said[:1], "rejected": said[1:]}
    single = [{"prompt": prompt, "completion": [text], "label": text is said[0]} for text in said]
    for objective, read, rows in (
        ("sft", data.chat, [{"messages": [*prompt, said[0]]}]),
        ("dpo", data.preferences, [pair]),
        ("kto", data.unpaired, single),
        ("reward", partial(data.preferences, margins=True), [pair | {"margin": 0.5}]),
    ):
        asked: Any = {"objective": objective, "length": 96, "batch": 3}
        asked |= {} if objective == "reward" else {"lora_rank": 2}
        settings = FinetuneSettings(**GIVEN, **asked)
        (batch,) = read(rows, tokenizer(), **options)
        found = shapes(settings)
        assert found.keys() == batch.keys()
        for name, array in batch.items():
            assert found[name].dtype == array.dtype, name
            assert len(found[name].shape) == array.ndim and found[name].shape[0] == 3, name


def test_adapters_are_exported_unless_told_otherwise():
    given = GIVEN | {"rewards": "r.py:f", "steps": 1}
    options: dict[str, Any]
    for options, exported in (({}, ["model"]), ({"lora_rank": 2}, ["adapter"])):
        assert [*GrpoSettings(**given, **options).exports] == exported
        assert [*FinetuneSettings(**GIVEN, **options).exports] == exported


def test_a_run_is_done_when_all_is_exported(tmp_path):
    folder = RunFolder(tmp_path)
    settings = FinetuneSettings(**GIVEN, lora_rank=2, export_as="both")
    (tmp_path / "model").mkdir()
    folder.finish({})
    assert not folder.is_done(settings)
    (tmp_path / "adapter").mkdir()
    assert folder.is_done(settings)
    other, settings = RunFolder(tmp_path / "other"), FinetuneSettings(**GIVEN, export="never")
    assert not other.is_done(settings)
    other.path.mkdir()
    other.finish({})
    assert other.is_done(settings)


def test_a_record_has_the_learning_rate_of_its_own_step(capsys):
    lines = ProgressLines(9, optax.linear_schedule(0.0, 100.0, 100), 1)
    record: dict[str, Any] = {"step": 8, "loss": 1.0, "grad_norm": 1.0, "tokens": 1, "seconds": 1}
    lines(None, record)  # type: ignore[arg-type]  # it asks nothing of the trainer
    # The first step has the rate of 0 steps before it.
    assert record["learning_rate"] == 7
    assert "step 8/9, loss 1, learning rate 7," in capsys.readouterr().out


@pytest.mark.parametrize(("name", "kind"), [("wandb", "WandB"), ("trackio", "Trackio")])
def test_what_the_user_says_of_a_log_counts_before_what_the_run_does(
    name, kind, tmp_path, monkeypatch
):
    monkeypatch.setattr(callbacks, kind, lambda **given: given)

    def arguments(**own: Any) -> Any:
        options: dict[str, Any] = {"logs": name} | ({name: own} if own else {})
        settings = FinetuneSettings(**GIVEN, **options)
        (found,) = make_logs(settings, RunFolder(tmp_path / "run"), "1a")
        return found

    usual = arguments()
    assert usual["resume"] == "allow" and any("1a" in str(value) for value in usual.values())
    for given in usual:
        assert arguments(**{given: "mine"}) == usual | {given: "mine"}


def test_mlflow_goes_on_with_its_own_run_unless_the_user_names_one(tmp_path, monkeypatch):
    given: list[Any] = []
    monkeypatch.setattr(callbacks.MLflow, "__init__", lambda log, run_id: given.append(run_id))
    folder, settings = RunFolder(tmp_path), FinetuneSettings(**GIVEN, logs="mlflow")
    make_logs(settings, folder, "1a")
    folder.take_note("mlflow", "noted")
    for own in (None, {"run_id": "mine"}):
        make_logs(replace(settings, mlflow=own), folder, "1a")
    assert given == [None, "noted", "mine"]


def test_the_peak_of_host_memory_is_what_the_system_counts():
    status = Path("/proc/self/status").read_text()
    (kib,) = re.findall(r"VmHWM:\s*(\d+) kB", status)
    found = peak_memory()["peak_host_gib"]
    # A process begins with the peak of the one that has started it.
    assert found is not None and 0.9 * int(kib) * 2**10 <= found * 2**30 < 2**44


def test_a_chat_template_may_be_in_a_file(tmp_path):
    (tmp_path / "a.jinja").write_text("{{ messages }}")
    assert chat_template(str(tmp_path / "a.jinja")) == "{{ messages }}"
    assert chat_template("{{ a }}") == "{{ a }}" and chat_template("named") == "named"


def test_new_tokens_are_listed_or_the_lines_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "new.txt").write_text("<a>\n\n<b c>\n")
    (tmp_path / "empty.txt").write_text("\n\n")
    for given in ("~/new.txt", str(tmp_path / "new.txt"), ["<a>", "<b c>"]):
        assert finetune._tokens(given) == ["<a>", "<b c>"]
    assert finetune._tokens("<a>") == ["<a>"]
    with refuses(ValueError, "`new_tokens`", "empty.txt"):
        finetune._tokens("~/empty.txt")


def test_a_folder_in_the_home_folder_is_a_video(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "frames").mkdir()
    for given, kind in (("~/frames", "video"), ("~/a.mp4", "video"), ("~/a.png", "image")):
        assert chat._part(given) == {"type": kind, kind: given}


@pytest.mark.parametrize("is_first", [True, False])
def test_the_first_process_prints_what_all_of_a_command_know(is_first, monkeypatch, capsys):
    monkeypatch.setattr(mt.distributed, "initialize", lambda progress: True)
    monkeypatch.setattr(mt.distributed, "is_first", lambda: is_first)
    monkeypatch.setattr(mt.distributed, "summary", lambda: "2 processes")
    dataset: Any = SimpleNamespace(summary="5 rows")
    assert main._takes_part("finetune") and main._takes_part("plan") == is_first
    assert run_data.summarised(dataset) is dataset
    out, err = capsys.readouterr()
    assert out == "2 processes\n" * is_first and err == "5 rows\n" * is_first
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run_data.has_bar() == is_first
    run_data.summarised(dataset)
    assert not capsys.readouterr().err, "the first one's bar has said it"


def test_one_of_the_trained_parameters_has_to_be_the_embeddings():
    settings = FinetuneSettings(**GIVEN, new_tokens=["<a>"])
    check_new_rows(settings, ["norm", "embed_tokens"])
    check_new_rows(settings, None)
    with pytest.raises(ValueError, match="`new_tokens` .* are not trained"):
        check_new_rows(settings, ["norm", "layers"])


def test_adapters_of_grpo_are_those_of_the_settings(monkeypatch):
    def build() -> models.Decoder:
        return models.Decoder(tiny_decoder(), rngs=nnx.Rngs(0))

    config = SimpleNamespace(saved_dtype="bfloat16")
    pretrained = SimpleNamespace(model=build, params=None, config=config)
    monkeypatch.setattr(models, "load_pretrained", lambda folder, ignore: pretrained)
    options: dict[str, Any] = {"lora_rank": 3, "lora_alpha": 5.0, "lora_targets": "q_proj"}
    settings = GrpoSettings(**GIVEN, rewards="f.py:f", steps=1, seed=7, **options)
    found = grpo_command._model(settings, "m")
    adapted = nnx.eval_shape(found["model"]).layers[0].self_attn.q_proj.lora_settings
    assert (adapted.rank, adapted.alpha, adapted.seed) == (3, 5.0, 7)
    assert found["trainable"] == r"(^|/)lora_[AB]$"


def test_a_report_has_null_for_what_is_not_finite(tmp_path):
    folder = RunFolder(tmp_path)
    folder.finish({"history": [{"reward": float("nan"), "loss": 0.5}], "last": float("-inf")})
    found = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert found == {"history": [{"reward": None, "loss": 0.5}], "last": None}


def test_a_report_of_grpo_counts_completions_once_however_often_they_are_used(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(mt.History, "plot", lambda self: SimpleNamespace(savefig=str))
    written = {"generation/seconds": 2.0, "generation/tokens_per_second": 100.0}
    updates = [{"reward": 0.25} | written, {"reward": 0.25}, {"reward": 0.75} | written]
    history = mt.History([row | {"training/seconds": 1.0} for row in updates])
    plan = SimpleNamespace(num_parameters=7, microbatches=2)
    trainer = SimpleNamespace(num_steps=3, plan=plan)
    result: Any = SimpleNamespace(ended="done", reason="", trainer=trainer, history=history)
    settings = GrpoSettings(**GIVEN, rewards="f.py:f", steps=3, export="never")
    grpo_command._finish(settings, RunFolder(tmp_path), result)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["seconds"] == {"generation": 4.0, "training": 3.0}
    assert report["completion_tokens_per_second"] == pytest.approx(400 / 7)
    assert (report["first_reward"], report["last_reward"]) == (0.25, 0.75)
    assert (report["steps"], report["microbatches"], report["num_parameters"]) == (3, 2, 7)


def test_adapters_have_the_default_learning_rate_of_their_page():
    def rate(**options: Any) -> float | None:
        return FinetuneSettings(**GIVEN, **options).learning_rate

    page = (ROOT / "docs" / "adapters.md").read_text()
    assert (
        {float(x) for x in re.findall(r"adamw\(([^)]*)\)", page)} == {rate(lora_rank=2)} == {1e-4}
    )
    assert rate() == 1e-5 and rate(adapter="folder") == 1e-4
    assert rate(lora_rank=2, learning_rate=1e-5) == 1e-5
    by_objective = {name: rate(lora_rank=2, objective=name) for name in OBJECTIVE_KINDS}
    high = {name for name, found in by_objective.items() if found == 1e-4}
    assert high == {"sft", "distill", "reward"} and set(by_objective.values()) == {1e-4, 1e-5}
    rewarded = {**GIVEN, "rewards": "f.py:f", "steps": 1}
    assert GrpoSettings(**rewarded).learning_rate == 1e-6
    assert GrpoSettings(**rewarded, lora_rank=2).learning_rate == 1e-5


@pytest.mark.parametrize("has_checkpoints", [False, True])
def test_a_run_keeps_its_microbatches_from_its_first_checkpoint_on(has_checkpoints):
    noted: Any = SimpleNamespace(has_checkpoints=has_checkpoints, note=lambda name: "4 2")
    settings = FinetuneSettings(**GIVEN, microbatches="auto")
    found = training_recipe._parts(settings, noted)
    assert found == (
        {"microbatches": 4, "waves": 2} if has_checkpoints else {"microbatches": "auto"}
    )


def test_another_arithmetic_has_another_reference(tmp_path, monkeypatch):
    monkeypatch.setattr(reference, "_digest", str)
    job: Any = SimpleNamespace(reference=["model"], trainable=None)

    def key(**precision: Any) -> str:
        options = {"precision": mt.Precision(**precision), "hardware": None}
        found = reference.load_or_compute_reference(RunFolder(tmp_path), [], job, options)
        assert found is not None
        return found.key

    given = [{}, {"compute": "float32"}, {"master": "bfloat16"}, {"frozen": "int8"}]
    assert len({key(**one) for one in given}) == 4
    assert key() == key()


@pytest.mark.parametrize("objective", OBJECTIVE_KINDS)
def test_only_fresh_adapters_leave_the_model_without_them_as_the_reference(objective):
    trained: dict[str, bool] = {  # and whether the reference is another model than the trained one
        "{}": True,
        '{"lora_rank": 2}': False,
        '{"lora_rank": 2, "lora_modules_to_save": "lm_head"}': True,
        '{"adapter": "a"}': True,
    }
    for options, differs in trained.items():
        settings = FinetuneSettings(**GIVEN, objective=objective, **json.loads(options))
        assert settings.stores_reference == (OBJECTIVE_KINDS[objective].has_reference and differs)


def test_a_tokenizer_renders_with_the_template_and_variables_of_the_settings():
    given = with_template(tokenizer(), "{{ word }} {{ messages[0].content }}", {"word": "the"})
    messages = [{"role": "user", "content": "cat"}]
    assert given.apply_chat_template(messages, tokenize=False) == "the cat"


def test_a_new_models_sizes_hold_all_tokens_and_name_the_special_ones(tmp_path):
    given = tokenizer()
    given.save_pretrained(tmp_path)
    most = max(given.get_vocab().values())
    file = tmp_path / "sizes.json"
    file.write_text(json.dumps(TINY | {"bos_token_id": most, "eos_token_id": most}))

    def found(rows: int) -> dict[str, Any]:
        common = GIVEN | {"model": str(file), "sizes": {"vocab_size": rows}, "steps": 1}
        config = sizes_of(PretrainSettings(**common, tokenizer=str(tmp_path)))
        return json.loads(config.original or "null")

    sizes = found(most + 1)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert sizes[name] == getattr(given, name), name
    with refuses(ValueError, "`tokenizer`", most, "`sizes`", most + 1):
        found(most)


def test_who_interrupts_a_run_is_told_whether_it_goes_on(capsys):
    told: list[str] = []
    for checkpoints in (True, False):
        settings = FinetuneSettings(**GIVEN, checkpoints=checkpoints)
        assert tell_interrupted(settings, 3, 7) == 130
        told.append(capsys.readouterr().out)
        assert tells(told[-1], 3, 7)
    assert told[0] != told[1]
