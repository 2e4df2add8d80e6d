"""Settings of `finetune` and `pretrain` that are refused before anything is trained."""

from dataclasses import replace
from typing import Any

import pytest

import megatrain_jax as mt
from megatrain_jax import data
from megatrain_jax._src.cli.finetune_settings import FinetuneSettings
from megatrain_jax._src.cli.main import main
from megatrain_jax._src.cli.run_folder import RunFolder

pytest.importorskip("torch", reason='makes a checkpoint with PyTorch: pip install -e ".[torch]"')

from cli_runs import make_given, trained  # noqa: E402


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    return make_given(tmp_path_factory.mktemp("given"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"objective": "dpo", "lora_rank": 2, "trainable": "norm", "export_as": "model"},
            "leave `trainable` out, or `lora_rank`",
        ),
        ({"objective": "dpo", "lora_rank": 2, "too_long": "cut"}, "would part pairs"),
        (
            {"objective": "kto", "lora_rank": 2, "trainable": "norm", "export_as": "model"},
            "`objective`=kto compares with the model without its adapters",
        ),
        ({"objective": "orpo", "format": "text"}, "`objective`=orpo learns answers"),
        ({"objective": "reward", "samples": "x"}, "`objective`=reward trains scores"),
        (
            {"objective": "reward", "lora_rank": 2, "export_as": "both"},
            "no place for the head of `objective`=reward",
        ),
        (
            {"objective": "dpo", "simpo_gamma": 1.0},
            "`simpo_gamma`=1.0 counts only with `objective`=simpo",
        ),
        ({"objective": "kto"}, "no `label`, and no `chosen` with `rejected`, among the fields m"),
        ({"objective": "orpo"}, "no `chosen` among the fields messages"),
        ({"export_as": "adapter"}, "`export_as`=adapter needs adapters: set `lora_rank`"),
        ({"lora_rank": 2, "trainable": "norm"}, "set `export_as`=model"),
        ({"new_tokens": "<a>", "trainable": "norm"}, "but these are not trained: choose them by"),
        (
            {"new_tokens": "<a>", "lora_rank": 2, "trainable": "norm", "export_as": "model"},
            "but these are not trained: choose them by",
        ),
        ({"lora_rank": 2, "lora_dropout": 1.0}, "`lora_dropout` must be a share from 0, below 1"),
        ({"lora_rank": 2, "lora_targets": "nothing"}, "chooses no matrix"),
        ({"lora_rank": 2, "lora_targets": "("}, "`lora_targets`='(' is no regular expression"),
        ({"stop_after": 2}, "`stop_after`=2 needs evaluations: set `eval_every`"),
        ({"metric": "loss"}, "`metric` must be one of evaluations, eval_..."),
        ({"keep_best": True, "eval_every": 1, "checkpoints": False}, "needs `checkpoints`"),
        ({"logs": "csv", "wandb": {"project": "mine"}}, "`logs` has no wandb"),
        ({"logs": "mlflow", "mlflow": {"project": "mine"}}, "unexpected keyword argument"),
        (
            {"logs": "mlflow", "mlflow": {"tracking_uri": "nosuch://x"}},
            "MLflow can't use `tracking_ur",
        ),
        (
            {"logs": "wandb", "wandb": {"projct": "mine"}},
            "no argument `projct`; did you mean `proj",
        ),
        ({"format": "text", "merge": " "}, "`merge`=  counts only with conversations"),
        ({"format": "text", "train_on": "all"}, "`train_on`=all counts only with conversations"),
        ({"lora_alpha": 8}, "`lora_alpha`=8.0 counts only with fresh adapters: set `lora_rank`"),
        ({"lora_targets": "q_proj"}, "`lora_targets`=q_proj counts only with fresh adapters"),
        ({"beta": 0.3, "lora_rank": 2}, "`beta`=0.3 counts only with `objective`=dpo or"),
        ({"frozen": "int8"}, "`frozen`=int8 counts only with parameters that are not trained"),
        ({"min_delta": 0.1, "eval_every": 1}, "`min_delta`=0.1 counts only with an evaluation"),
        ({"keep": 2, "checkpoints": False}, "`keep`=2 counts only with `checkpoints`"),
        ({"final_rate": 0.2, "decay": "constant"}, "`final_rate`=0.2 counts only with a rate that"),
        ({"held_out": 0.3, "eval_data": "x"}, "`held_out`=0.3 counts only with documents of"),
        ({"data": []}, "`data` is empty"),
        (
            {"neftune_noise_alpha": 5.0, "objective": "dpo"},
            "`neftune_noise_alpha`=5.0 counts only with `objective`=sft",
        ),
        ({"sample_tokens": 4}, "`sample_tokens`=4 counts only with prompts: set `samples`"),
        ({"sample_temperatures": [1.0]}, "`sample_temperatures`=[1.0] counts only with prompts"),
        ({"samples": "count", "held_out": 0}, "`samples` are of evaluations: set `held_out`"),
        ({"samples": []}, "`samples` must be prompts that are not empty"),
        ({"samples": "x", "chat_template": "{{ 1 // 0 }}"}, "makes no question of `samples`: "),
    ],
)
def test_what_does_not_go_together_is_told(given, tmp_path, settings, message, capsys):
    common = {"model": str(given / "tiny"), "data": str(given / "chats.jsonl"), "steps": 1}
    assert trained("finetune", given, tmp_path / "out", **(common | settings)) == 2
    printed = capsys.readouterr().err
    assert message in printed and printed.startswith("megatrain-jax finetune: error: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "gives ids up to 95, but the model has 64 rows: set `sizes`={vocab_size: 96}"),
        ({"tokenizer": "there/is/none"}, "must be the folder of a tokenizer"),
        ({"tokenizer": "."}, "Transformers can't load it"),
        ({"sizes": {"num_layers": 2}}, "num_layers"),
        ({"model": "Llama-4"}, "no known name"),
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
    assert message in printed.err and not printed.out
    assert not (tmp_path / "out").exists()


def test_a_flag_needs_no_value(tmp_path, capsys):
    words = ["finetune", "--model", "m", "--data", "d", "--out", str(tmp_path), "--keep-best"]
    assert main([*words, "--eval-every", "2", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert "\nkeep_best: true\n" in printed
    assert "# Prompts that are continued at each evaluation, one or several" in printed


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
        with pytest.raises(ValueError, match="different settings: batch was 16 and is 4"):
            folder.check(smaller)


H100_OF_64_KIB = replace(mt.H100, device_bytes=2**16, device_share=1.0)


@pytest.mark.parametrize(
    ("command", "card", "budgets", "message"),
    [
        ("finetune", mt.H100, {"host_budget": "2GiB"}, "process itself. It may take 2.00 GiB"),
        ("finetune", H100_OF_64_KIB, {"device_budget": "1GiB"}, "of the 64.00 KiB that the GPU ha"),
        ("pretrain", mt.H100, {"host_budget": "2GiB"}, "process itself. It may take 2.00 GiB"),
        ("pretrain", None, {"device_budget": "1MiB"}, "device_budget=1048576 (1.00 MiB) is too s"),
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
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
