"""Settings of `finetune` and `pretrain` that are refused before anything is trained."""

import math
import re
import typing
from dataclasses import replace
from typing import Any

import pytest

import megatrain_jax as mt
from megatrain_jax import data
from megatrain_jax._src.lm.cli.finetune_settings import OBJECTIVE_KINDS, FinetuneSettings
from megatrain_jax._src.lm.cli.main import main
from megatrain_jax._src.lm.cli.run_folder import RunFolder
from megatrain_jax._src.lm.cli.run_settings import PretrainSettings
from messages import refuses, tells

pytest.importorskip("torch", reason='makes a checkpoint with PyTorch: pip install -e ".[torch]"')

from cli_runs import make_given, trained


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    return make_given(tmp_path_factory.mktemp("given"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"objective": "dpo", "lora_rank": 2, "trainable": "norm", "export_as": "model"},
            "leave `trainable` `lora_rank`",
        ),
        ({"objective": "dpo", "lora_rank": 2, "too_long": "cut"}, "pairs"),
        (
            {"objective": "kto", "lora_rank": 2, "trainable": "norm", "export_as": "model"},
            "`objective`=kto adapters",
        ),
        ({"objective": "orpo", "format": "text"}, "`objective`=orpo answers"),
        ({"objective": "reward", "samples": "x"}, "`objective`=reward scores"),
        (
            {"objective": "reward", "lora_rank": 2, "export_as": "both"},
            "head `objective`=reward",
        ),
        (
            {"objective": "dpo", "simpo_gamma": 1.0},
            "`simpo_gamma`=1.0 `objective`=simpo",
        ),
        (
            {"objective": "dpo", "label_smoothing": 0.1, "loss_type": "hinge"},
            "`label_smoothing`=0.1 `loss_type`=sigmoid robust",
        ),
        ({"objective": "kto"}, "`label` `chosen` `rejected`"),
        ({"objective": "orpo"}, "`chosen` messages"),
        ({"export_as": "adapter"}, "`export_as`=adapter `lora_rank`"),
        ({"lora_rank": 2, "trainable": "norm"}, "`export_as`=model"),
        ({"new_tokens": "<a>", "trainable": "norm"}, "trained choose"),
        (
            {"new_tokens": "<a>", "lora_rank": 2, "trainable": "norm", "export_as": "model"},
            "trained choose",
        ),
        ({"lora_rank": 2, "lora_dropout": 1.0}, "`lora_dropout` 0 1"),
        ({"lora_rank": 2, "lora_targets": "nothing"}, "`lora_targets`='nothing' matrix"),
        ({"lora_rank": 2, "lora_targets": "("}, "`lora_targets`='(' regular"),
        ({"stop_after": 2}, "`stop_after`=2 `eval_every`"),
        ({"metric": "loss"}, "`metric` eval_..."),
        ({"keep_best": True, "eval_every": 1, "checkpoints": False}, "keep_best `checkpoints`"),
        ({"logs": "csv", "wandb": {"project": "mine"}}, "`logs` wandb"),
        ({"logs": "wandb", "trackio": {"project": "mine"}}, "`logs` trackio"),
        ({"logs": "mlflow", "mlflow": {"project": "mine"}}, "'project'"),
        (
            {"logs": "mlflow", "mlflow": {"tracking_uri": "nosuch://x"}},
            "MLflow `tracking_uri`",
        ),
        (
            {"logs": "wandb", "wandb": {"projct": "mine"}},
            "`projct` `project`",
        ),
        ({"format": "text", "merge": " "}, "`merge`= conversations"),
        ({"format": "text", "train_on": "all"}, "`train_on`=all conversations"),
        ({"lora_alpha": 8}, "`lora_alpha`=8.0 `lora_rank`"),
        ({"lora_targets": "q_proj"}, "`lora_targets`=q_proj `lora_rank`"),
        ({"beta": 0.3, "lora_rank": 2}, "`beta`=0.3 `objective`=dpo"),
        ({"frozen": "int8"}, "`frozen`=int8 trained"),
        ({"min_delta": 0.1, "eval_every": 1}, "`min_delta`=0.1"),
        ({"keep": 2, "checkpoints": False}, "`keep`=2 `checkpoints`"),
        ({"final_rate": 0.2, "decay": "constant"}, "`final_rate`=0.2 rate"),
        ({"held_out": 0.3, "eval_data": "x"}, "`held_out`=0.3 documents"),
        ({"data": []}, "`data` empty"),
        (
            {"neftune_noise_alpha": 5.0, "objective": "dpo"},
            "`neftune_noise_alpha`=5.0 `objective`=sft",
        ),
        ({"sample_tokens": 4}, "`sample_tokens`=4 `samples`"),
        ({"sample_temperatures": [1.0]}, "`sample_temperatures`=[1.0] `samples`"),
        ({"samples": "count", "held_out": 0}, "`samples` `held_out`"),
        ({"samples": []}, "`samples` empty"),
        ({"samples": "x", "chat_template": "{{ 1 // 0 }}"}, "`samples` question"),
        (
            {"keep_best": True, "eval_every": 1, "metric": "eval_space", "held_out": 0.3},
            "`metric` 'eval_space' `metric_mode`",
        ),
    ],
)
def test_what_does_not_go_together_is_told(given, tmp_path, settings, message, capsys):
    common = {"model": str(given / "tiny"), "data": str(given / "chats.jsonl"), "steps": 1}
    assert trained("finetune", given, tmp_path / "out", **(common | settings)) == 2
    printed = capsys.readouterr().err
    assert tells(printed, "megatrain-jax finetune: error:", *message.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "95 64 `sizes`={vocab_size:"),
        ({"tokenizer": "there/is/none"}, "tokenizer there/is/none"),
        ({"tokenizer": "."}, "Transformers"),
        ({"sizes": {"num_layers": 2}}, "num_layers"),
        ({"model": "Llama-4"}, "known Llama-4"),
    ],
)
def test_sizes_and_tokenizers_are_checked_first(
    given, tmp_path, settings, message, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    common = {"model": str(given / "sizes.json"), "tokenizer": str(given / "tiny"), "steps": 1}
    common |= {"data": str(given / "texts.jsonl")}
    assert trained("pretrain", given, tmp_path / "out", **(common | settings)) == 2
    printed = capsys.readouterr()
    assert tells(printed.err, *message.split()) and not printed.out
    assert not (tmp_path / "out").exists()


def test_a_folder_in_an_object_store_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["finetune", "--model", "m", "--data", "d", "--out", "s3://bucket/run"]
    assert main(words) == 2
    assert tells(capsys.readouterr().err, "`out`=s3://bucket/run", "disk")
    assert not list(tmp_path.iterdir())


def test_a_flag_needs_no_value(tmp_path, capsys):
    words = ["finetune", "--model", "m", "--data", "d", "--out", str(tmp_path), "--keep-best"]
    words.append("--state-per-process")
    for given, value in ([], "true"), (["auto"], "auto"), (["no"], "false"):
        assert main([*words, *given, "--eval-every", "2", "--print-config"]) == 0
        printed = capsys.readouterr().out
        assert "\nkeep_best: true\n" in printed and f"\nstate_per_process: {value}\n" in printed
    assert re.search("\n# .*\n(# .*\n)*samples:", printed)


@pytest.mark.parametrize("left", [None, "checkpoints/1", "ended.json", "report.json"])
def test_other_settings_are_refused_only_where_a_run_has_left_something(tmp_path, left):
    """A run that didn't fit the memory is begun anew with a smaller batch, in the same folder."""
    out, folder = str(tmp_path / "run"), RunFolder(tmp_path / "run")
    given: dict[str, Any] = {"model": "m", "data": "d", "out": out}
    folder.begin(FinetuneSettings(**given, batch=16))
    folder.checkpoints.mkdir()
    smaller = FinetuneSettings(**given, batch=4)
    if left is None:
        folder.check(smaller)
    else:
        (folder.path / left).write_text("{}")
        with refuses(ValueError, "batch", 16, 4):
            folder.check(smaller)


H100_OF_64_KIB = replace(mt.card("H100"), device_bytes=2**16, device_share=1.0)


@pytest.mark.by_default(
    "finetune-card0-budgets0-process 2.00 GiB", "finetune-card1-budgets1-64.00 KiB GPU"
)
@pytest.mark.parametrize(
    ("command", "card", "budgets", "message"),
    [
        ("finetune", mt.card("H100"), {"host_budget": "2GiB"}, "process 2.00 GiB"),
        ("finetune", H100_OF_64_KIB, {"device_budget": "1GiB"}, "64.00 KiB GPU"),
        ("pretrain", mt.card("H100"), {"host_budget": "2GiB"}, "process 2.00 GiB"),
        ("pretrain", None, {"device_budget": "1MiB"}, "device_budget=1048576"),
    ],
)
def test_budgets_that_can_not_work_are_told_before_data_is_read(
    given, tmp_path, monkeypatch, capsys, command, card, budgets, message
):
    def read(*args: Any, **options: Any) -> Any:
        pytest.fail("data was read")

    for name in ("chat", "text"):
        monkeypatch.setattr(data, name, read)
    monkeypatch.setattr(mt, "this_machine", lambda: card)
    settings: dict[str, Any] = {"model": str(given / "tiny"), "data": str(given / "chats.jsonl")}
    if command == "pretrain":
        settings = {"model": str(given / "sizes.json"), "tokenizer": str(given / "tiny")}
        settings |= {"data": str(given / "texts.jsonl"), "sizes": {"vocab_size": 8192}}
    assert trained(command, given, tmp_path / "out", **settings, **budgets) in (1, 2)
    assert tells(capsys.readouterr().err, *message.split())
    assert not (tmp_path / "out").exists()


SETTINGS: dict[type[Any], dict[str, Any]] = {
    FinetuneSettings: {"model": "m"},
    PretrainSettings: {"model": "m", "tokenizer": "t"},
}
# What numbers need beside them.
BESIDE: dict[str, dict[str, Any]] = {
    "final_rate": {"decay": "cosine"},
    "lora_alpha": {"lora_rank": 2},
    "lora_dropout": {"lora_rank": 2},
    "min_delta": {"eval_every": 2, "stop_after": 1},
    "sample_tokens": {"samples": "x"},
    "stop_after": {"eval_every": 2},
    "temperature": {"tail": False},
}
MAY_BE_0 = {"seed", "workers"}


@pytest.mark.parametrize("kind", SETTINGS)
def test_numbers_out_of_range_are_refused_by_every_kind_of_settings(kind: type[Any]):
    hints = typing.get_type_hints(kind)
    kinds = {name: {hint, *typing.get_args(hint)} for name, hint in hints.items()}
    others = {str, list[float]}
    numbers = [name for name, own in kinds.items() if own & {int, float} and not own & others]
    for name in numbers:
        given = SETTINGS[kind] | {"data": "d", "out": "o"} | BESIDE.get(name, {})
        if objectives := [o for o, own in OBJECTIVE_KINDS.items() if name in own.options]:
            given |= {"objective": objectives[-1]}
        given = {option: value for option, value in given.items() if option in hints}
        is_whole = int in kinds[name]
        kind(**given | {name: 1 if is_whole else 0.5})
        for wrong in [-1, *[0] * (name not in MAY_BE_0)] if is_whole else [-1e-9, math.nan]:
            with pytest.raises(ValueError, match=f"`?{name}"):
                kind(**given | {name: wrong})
    assert {"seed", "learning_rate", "weight_decay"} < set(numbers)
