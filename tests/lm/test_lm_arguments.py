"""Wrong arguments and names of the modules for language models: each error names what was meant."""

import dataclasses
import importlib
import inspect
import os
import pickle
import re
from pathlib import Path
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np
import pytest

import megatrain_jax as mt
from megatrain_jax import callbacks, data, losses, models, objectives
from megatrain_jax._src.common import other_libraries, suggestions
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.lm.cli.finetune_settings import FinetuneSettings
from megatrain_jax._src.lm.cli.grpo_settings import GrpoSettings
from megatrain_jax._src.lm.cli.plan_settings import ChatSettings, MergeSettings, PlanSettings
from megatrain_jax._src.lm.cli.recipe import precision_of
from megatrain_jax._src.lm.cli.run_settings import PrecisionName, PretrainSettings
from megatrain_jax._src.lm.common.hf_folder import read_json
from messages import refuses, tells
from misuses import NO_COUNTS, all_public, check_all, check_hints, error_of, loss_fn

MODULES = (mt, callbacks, data, losses, models, objectives)
# The options of the command.
SETTINGS = (ChatSettings, FinetuneSettings, GrpoSettings, MergeSettings, PlanSettings)
SETTINGS += (PretrainSettings,)


def test_wrong_arguments_of_the_loss_of_tokens_are_named():
    no_arrays = (None, "x", object(), loss_fn, {}, np.array(["a"]), jnp.ones((2, 4)) * 1j)
    check_all(
        losses.next_token,
        {"hidden": jnp.ones((2, 4)), "head": jnp.ones((5, 4)), "labels": jnp.zeros(2, int)},
        {
            "hidden": (*no_arrays, 3, [1.0, 2.0], jnp.ones((2, 4), int), jnp.ones(()), jnp.ones(4)),
            "head": (*no_arrays, 3, jnp.ones((5, 4), int), jnp.ones(4), jnp.ones((5, 3))),
            "labels": (*no_arrays, 3, jnp.zeros(2), np.zeros(2, bool), [0.0, 1.0], jnp.zeros(3)),
            "mask": (*no_arrays[1:], 1.0, np.ones(3), "yes"),
            "count": (*no_arrays[1:], np.ones(2), "2"),
            "z_loss": (
                None,
                "a",
                True,
                10**400,
                float("nan"),
                float("inf"),
                -1e-4,
                1j,
                jnp.ones(2),
            ),
            "softcap": ("a", True, float("nan"), float("inf"), 0, -30.0, 1j, [30.0]),
            "chunk": (*NO_COUNTS, None),
        },
    )


def test_json_of_a_pipe_or_device_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "a.json")
    (tmp_path / "b.json").symlink_to("/dev/zero")
    for name, kind in (("b.json", "device"), ("a.json", "pipe")):
        with refuses(ValueError, tmp_path / name, kind):
            read_json(tmp_path / name)


@pytest.mark.parametrize(
    ("function", "name", "hint"),
    [
        (models.generate, "max_new_tokens", "`max_tokens`"),
        (models.Generator.generate, "num_return_sequences", "`num_samples`"),
        (models.generate, "top", "`top_p`"),
        (models.lora, "r", "`rank`"),
        (models.lora, "target_modules", "`targets`"),
        (models.load_pretrained, "pretrained_model_name_or_path", "`folder`"),
        (models.load_pretrained, "torch_dtype", "`Trainer` `fit` `precision`"),
        (models.load_pretrained, "load_in_4bit", 'precision=mt.Precision(frozen="nf4")'),
        (models.load_pretrained, "max_length", "`data.chat` takes `length`"),
        (models.save_pretrained, "max_shard_size", "`max_shard_bytes`"),
        (models.merge_adapter, "base_model", "`base`"),
        (models.GrpoOptions, "group_size", "`num_generations`"),
        (models.GrpoOptions, "max_steps", "`fit` `train` `steps`"),
        (models.train_grpo, "reward_funcs", "`rewards`"),
        (models.train_grpo, "epsilon", "options=models.GrpoOptions(epsilon=...)"),
        (data.chat, "max_length", "`length`"),
        (data.chat, "dataset_num_proc", "`workers`"),
        (data.chat, "packing", "packed"),
        (data.text, "block_size", "`length`"),
        (data.preferences, "processing_class", "`tokenizer`"),
        (data.unpaired, "assistant_only_losses", ""),
        (data.mix, "probabilities", "`weights`"),
        (data.prompts, "data_files", "`source`"),
        (data.Dataset.split, "test_size", "`fraction`"),
        (losses.next_token, "ignore_index", "negative"),
        (losses.next_token, "attention_mask", "`mask`"),
        (losses.dpo, "ref_chosen_logps", "`reference_chosen`"),
        (losses.grpo, "old_per_token_logps", "`old_logs`"),
    ],
)
def test_arguments_of_other_libraries_say_the_ones_that_were_meant(
    function: Any, name: str, hint: str
):
    said = error_of(lambda: function(**{name: 3}))
    assert said.endswith(f"argument '{name}'") if not hint else tells(said, *hint.split())
    # A help page shows the function's own arguments.
    assert name not in inspect.signature(function).parameters


@pytest.mark.parametrize(
    ("module", "name", "hint"),
    [
        (data, "load_dataset", "`chat`"),
        (data, "load_pretrained", "`megatrain_jax.models.load_pretrained`"),
        (models, "AutoModelForCausalLM", "`load_pretrained`"),
        (models, "GRPOConfig", "`GrpoOptions`"),
        (models, "SFTTrainer", "`megatrain_jax.fit`"),
        (losses, "CrossEntropyLoss", "`next_token`"),
        (losses, "mse", "(model, batch)"),
        (losses, "kto_los", ""),
        (models, "grpo", "`train_grpo`"),
        (losses, "GRPOLoss", "`grpo`"),
    ],
)
def test_names_in_other_libraries_say_the_ones_that_were_meant(module: Any, name: str, hint: str):
    assert hint in error_of(lambda: getattr(module, name))
    assert not hasattr(module, "_mine")


def test_tables_of_other_libraries_name_what_there_is():
    public = {name: function for name, function in all_public(*MODULES)}
    for words, options in other_libraries.TAKERS.items():
        for name in re.findall("`(.*?)`", words):
            shown = inspect.signature(public[name.removeprefix("mt.")]).parameters
            assert not {*options} - {*shown}, name
    for module, names in other_libraries.MODULES.items():
        assert {*names.split()} <= {*getattr(mt, module).__all__}
    signatures = [inspect.signature(function).parameters for function in public.values()]
    known = {name for shown in signatures for name in shown}
    known |= {name for module in MODULES for name in module.__all__}
    known |= {f.name for kind in SETTINGS for f in dataclasses.fields(kind)}
    assert not {ours for meant in other_libraries.MEANT.values() for ours in meant} - known
    # A name that a function has itself needs no hint there.
    assert suggestions.meant_option("dtype", ["dtype", "precision"]) == "precision"


def test_each_public_function_hints_at_a_misspelt_argument():
    check_hints(callbacks, data, losses, models, objectives)


def test_public_functions_of_all_modules_can_be_pickled():
    for function in (data.chat, losses.dpo, models.generate):
        assert pickle.loads(pickle.dumps(function)) is function


def test_names_of_precisions_mean_what_they_mean_on_the_command_line():
    for name in get_args(PrecisionName):
        assert Options(precision=name).precision == precision_of(PlanSettings(precision=name), None)


def test_modules_are_there_without_an_import_of_their_own():
    # By the function itself: other tests have imported them, and Python keeps them as attributes.
    for name in ("data", "losses", "models", "objectives"):
        assert vars(mt)["__getattr__"](name) is importlib.import_module(f"megatrain_jax.{name}")
