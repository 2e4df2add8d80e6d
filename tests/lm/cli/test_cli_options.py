"""Every option of the command line reaches the calls of the library that it is for."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pytest

import megatrain_jax as mt
from cli_calls import calls_of
from megatrain_jax._src.lm.cli.finetune_settings import FinetuneSettings
from megatrain_jax._src.lm.cli.plan_settings import PlanSettings
from megatrain_jax._src.lm.cli.run_settings import PretrainSettings, TrainingSettings

STEPS = 8
RUN = {"data": "a.jsonl", "out": "run", "steps": STEPS}
BASE = {
    "finetune": {"model": "model"} | RUN,
    "pretrain": {"model": "sizes.json", "tokenizer": "tokenizer"} | RUN,
    "plan": {"model": "sizes.json", "gpu": "H100", "tokens": 8192},
}


@dataclass(frozen=True, kw_only=True)
class At:
    """An argument of a call that an option sets.

    Attributes:
        place: The function and its argument.
        of: Function of the argument that has to equal `expected`.
        expected: Its value with the option, and not without; None for the option's value.
        calls: The calls that have it; all of them by default.
    """

    place: str
    of: Callable[[Any], Any] = lambda value: value
    expected: Any = None
    calls: slice = field(default_factory=lambda: slice(None))


@dataclass(frozen=True, kw_only=True)
class Option:
    """A value of an option, and where it has to arrive.

    Attributes:
        name: The field of the settings.
        value: A value that is not the default.
        at: The arguments that it sets.
        beside: Other options, which stay the same.
        interrupts: Whether the run is interrupted.
    """

    name: str
    value: Any
    at: tuple[At, ...]
    beside: dict[str, Any] = field(default_factory=dict)
    interrupts: bool = False


def option(name: str, value: Any, *places: str | At, **rest: Any) -> Option:
    at = tuple(At(place=place) if isinstance(place, str) else place for place in places)
    interrupts = rest.pop("interrupts", False)
    return Option(name=name, value=value, at=at, beside=rest, interrupts=interrupts)


def rates(of: Callable[[np.ndarray], Any], expected: Any, optimizer: str = "adamw") -> At:
    """The learning rates of all steps of the run, which follow the plan's."""

    def found(schedule: Any) -> Any:
        return of(np.array([float(schedule(step)) for step in range(STEPS + 1)]))

    return At(
        place=f"{optimizer}.learning_rate", of=found, expected=expected, calls=slice(-1, None)
    )


def count(function: str, argument: str, number: int) -> At:
    """How often a function is called with an argument."""
    return At(place=f"{function}.{argument}", of=len, expected=number)


def shape(at: int) -> Callable[[Any], int]:
    return lambda batch: batch["tokens"].shape[at]


def precision(name: str, expected: Any = None) -> tuple[At, At]:
    def of(given: mt.Precision) -> str | None:
        found = getattr(given, name)
        is_dtype = name != "products" and found not in (None, "nf4")
        return str(np.dtype(found)) if is_dtype else found

    return (
        At(place="fit.precision", of=of, expected=expected),
        At(place="plan.precision", of=of, expected=expected),
    )


EVALUATES = {"eval_every": 2, "keep_best": True, "stop_after": 5}


def judged(argument: str) -> tuple[At, At]:
    """What says which evaluation is the best; later a `KeepBest` is made that only finds it."""
    first = At(place=f"KeepBest.{argument}", calls=slice(1))
    return first, At(place=f"EarlyStopping.{argument}")


SAMPLED = {"samples": ["count"]}
# "read" is the function that reads the data, which differs between the commands.
COMMON = [
    option("data", "b.jsonl", At(place="fit.data", of=lambda files: files.source)),
    option("data", ["b.jsonl", "c.jsonl"], "read.source"),
    option(
        "weights",
        [3.0, 1.0],
        At(place="mix.weights"),
        At(place="fit.data", of=lambda files: len(getattr(files, "datasets", ())), expected=2),
        data=["a.jsonl", "b.jsonl"],
        held_out=0,
    ),
    option(
        "out",
        "other",
        At(place="fit.checkpoint_dir", of=str, expected="other/checkpoints"),
        At(place="save_pretrained.folder", of=str, expected="other/model"),
    ),
    option("invalid", "drop", "read.invalid"),
    option("columns", {"prompt": "task"}, "read.columns"),
    option("too_long", "drop", "read.too_long"),
    option("workers", 3, "read.workers"),
    option("data_cache", "tokens", At(place="read.cache", of=str, expected="tokens")),
    option("data_cache", "none", At(place="read.cache", of=str, expected="None")),
    option("held_out", 0.25, At(place="fit.eval_data", of=lambda files: files.share)),
    option(
        "held_out",
        0,
        At(place="fit.eval_data", of=bool, expected=False),
        # Averages can't be evaluated where nothing is.
        At(place="fit.eval_params", expected="trained"),
        ema_decay=0.75,
    ),
    option(
        "eval_data",
        ["c.jsonl"],
        At(place="fit.eval_data", of=lambda files: files and files.source),
        held_out=0,
    ),
    option("length", 128, "read.length", At(place="plan.sample_batch", of=shape(1))),
    option(
        "batch",
        24,
        "read.batch_size",
        At(place="plan.sample_batch", of=shape(0)),
        "counted.rows",
        At(place="report.tokens_per_step", expected=24 * 2048),
    ),
    option(
        "microbatches",
        2,
        "fit.microbatches",
        "plan.microbatches",
    ),
    option("epochs", 3, "read.epochs"),
    option("steps", 9, "fit.steps"),
    # Without steps the documents are seen once, and with steps as often as they need.
    option(
        "steps",
        None,
        At(place="read.epochs", expected=1),
        At(place="fit.steps", expected=100),
        held_out=0,
    ),
    *(
        option("optimizer", name, count(name.removeprefix("optax:"), "learning_rate", 2))
        for name in ("lion", "muon", "adafactor", "sgd", "optax:lamb")
    ),
    option("optimizer_options", {"eps": 0.5}, At(place="adamw.eps", expected=0.5)),
    option("learning_rate", 0.125, rates(lambda found: found.max(), 0.125)),
    option("warmup", 0.5, rates(np.argmax, STEPS / 2)),
    option("decay", "linear", rates(lambda found: np.ptp(np.diff(found[1:])) < 1e-9, True)),
    option("final_rate", 0.5, rates(lambda found: round(found[-1] / found[1], 5), 0.5)),
    option("weight_decay", 0.25, "adamw.weight_decay"),
    option("weight_decay", 0.25, "muon.weight_decay", "muon.adam_weight_decay", optimizer="muon"),
    option("b1", 0.5, "adamw.b1"),
    option("b2", 0.5, "adamw.b2"),
    option("clip", 0.5, "clip_by_global_norm.max_norm"),
    option("clip", None, count("clip_by_global_norm", "max_norm", 0)),
    option("state", "int8", *precision("state")),
    option("precision", "compact", *precision("master", "bfloat16"), *precision("state", "int8")),
    option("precision", "two_bytes", *precision("master", "int8"), *precision("state", "int4")),
    option("precision", "float16", *precision("compute", "float16")),
    option("master", "bfloat16", *precision("master")),
    option("sums", "bfloat16", *precision("sums"), microbatches=2),
    option("compute", "float16", *precision("compute")),
    option("compute", "bfloat16", *precision("compute"), precision="float16"),
    option("products", "float8", *precision("products")),
    option("products", "float8-all", *precision("products", (("*", "float8"),))),
    option("device_budget", "minimum", "fit.device_budget", "plan.device_budget"),
    option("host_budget", "64GiB", "fit.host_budget", "plan.host_budget"),
    option("disk_dir", "drive", "fit.disk_dir", "plan.disk_dir"),
    option("disk_budget", "64GiB", "fit.disk_budget", "plan.disk_budget", disk_dir="drive"),
    option("state_per_process", True, "fit.state_per_process", "plan.state_per_process"),
    option(
        "state_per_process",
        "auto",
        *("fit.state_per_process", "plan.state_per_process"),
        At(place="fit.microbatches", expected="auto"),
        microbatches="auto",
    ),
    option("on_nonfinite", "skip", "fit.on_nonfinite", "plan.on_nonfinite"),
    option(
        "ema_decay",
        0.75,
        *("fit.ema_decay", "plan.ema_decay"),
        At(place="fit.eval_params", expected="ema"),
        At(place="Samples.params", expected="ema"),
        At(place="save_pretrained.params", expected="ema"),
        At(place="report.exported_params", expected="ema"),
        **SAMPLED,
    ),
    option("eval_every", 4, "fit.eval_every"),
    option("metric", "eval_accuracy", *judged("metric"), **EVALUATES),
    option("metric_mode", "max", *judged("mode"), **EVALUATES),
    option("min_delta", 0.5, *judged("min_delta"), **EVALUATES),
    option("stop_after", 3, "EarlyStopping.patience", eval_every=2),
    option("keep_best", True, count("KeepBest", "folder", 2), eval_every=2),
    option("checkpoints", False, At(place="fit.checkpoint_dir", of=bool, expected=False)),
    option("checkpoint_every", 4, "fit.checkpoint_every"),
    option("keep", 3, "fit.keep"),
    option("export", "never", count("save_pretrained", "folder", 0)),
    option(
        "export",
        "always",
        At(place="save_pretrained.folder", of=str, expected=f"run/model-step-{STEPS}"),
        interrupts=True,
    ),
    option("export_dtype", "float16", "save_pretrained.dtype"),
    option("push", "someone/mine", "upload.repository"),
    option("push_private", False, "upload.private", push="someone/mine"),
    option("logs", "csv", At(place="CSVLog.path", of=str, expected="run/log.csv")),
    option(
        "logs",
        ["jsonl", "tensorboard"],
        At(place="JSONLog.path", of=str, expected="run/log.jsonl"),
        At(place="TensorBoard.folder", of=str, expected="run/tensorboard"),
    ),
    option(
        "trackio",
        {"project": "mine"},
        At(place="Trackio.project", expected="mine"),
        logs="trackio",
    ),
    option("wandb", {"project": "mine"}, At(place="WandB.project", expected="mine"), logs="wandb"),
    option(
        "mlflow",
        {"experiment": "mine"},
        At(place="MLflow.experiment", expected="mine"),
        logs="mlflow",
    ),
    option("sample_tokens", 5, "Samples.num_tokens", **SAMPLED),
    option("sample_temperatures", [0.5, 1.0], "Samples.temperatures", **SAMPLED),
    option("log_every", 3, At(place="printed.steps", expected=[3, 6, STEPS])),
    option(
        "seed",
        7,
        "read.seed",
        "fit.seed",
        "plan.seed",
        "Samples.seed",
        At(place="fit.eval_data", of=lambda files: files.seed),
        **SAMPLED,
    ),
]
ADAPTED = (
    At(place="fit.params", expected="with adapters"),
    At(place="fit.trainable", expected="lora"),
    At(place="plan.trainable", expected="lora"),
    *precision("frozen", "bfloat16"),
)
OF_MERGED = {"lora_rank": 2, "export_as": "model"}


def template_of(tokenizer: Any) -> str | None:
    """The template with which a tokenizer renders messages."""
    return tokenizer.apply_chat_template.keywords["chat_template"]


def variables_of(tokenizer: Any) -> dict[str, Any]:
    """The further variables with which it renders them."""
    given = tokenizer.apply_chat_template.keywords
    return {name: value for name, value in given.items() if name != "chat_template"}


FINETUNE = [
    option(
        "model",
        "other-model",
        "load_pretrained.folder",
        "chat.tokenizer",
        At(place="Samples.tokenizer", of=lambda given: given.folder),
        **SAMPLED,
    ),
    option("ignore", ["rope"], "load_pretrained.ignore"),
    option(
        "new_tokens",
        ["<a>", "<b>"],
        At(place="resize_vocabulary.vocabulary", of=lambda tokenizer: tokenizer.added),
        At(place="chat.tokenizer", of=lambda tokenizer: getattr(tokenizer, "added", None)),
        At(place="save_pretrained.source", of=lambda source: source is not None, expected=True),
    ),
    option("objective", "dpo", count("preferences", "source", 1), lora_rank=2, held_out=0),
    option("beta", 0.5, "dpo.beta", objective="dpo", lora_rank=2),
    option("label_smoothing", 0.2, "dpo.label_smoothing", objective="dpo", lora_rank=2),
    option("loss_type", "hinge", "dpo.loss_type", objective="dpo", lora_rank=2),
    option("beta", 0.5, "ipo.beta", objective="ipo", lora_rank=2),
    option("beta", 0.5, "simpo.beta", objective="simpo"),
    option("beta", 0.5, "orpo.beta", objective="orpo"),
    option("objective", "kto", count("unpaired", "source", 1), lora_rank=2, held_out=0),
    option("beta", 0.5, "kto.beta", objective="kto", lora_rank=2),
    option("desirable_weight", 0.5, "kto.desirable_weight", objective="kto", lora_rank=2),
    option("undesirable_weight", 0.5, "kto.undesirable_weight", objective="kto", lora_rank=2),
    option(
        "objective",
        "reward",
        At(place="preferences.margins", expected=True),
        count("reward_model", "pretrained", 1),
        held_out=0,
    ),
    option(
        "center_rewards_coefficient",
        0.01,
        "reward.center_rewards_coefficient",
        objective="reward",
    ),
    option(
        "lora_rank",
        2,
        At(place="fit.trainable", expected=["lora", "^score/"]),
        "lora.rank",
        objective="reward",
    ),
    option("objective", "distill", count("distillation", "source", 1), held_out=0),
    option("neftune_noise_alpha", 5.0, "neftune.alpha"),
    option("distill_alpha", 0.25, "distill.alpha", objective="distill"),
    option("temperature", 2.0, "distill.temperature", objective="distill", tail=False),
    option("tail", False, "distill.tail", objective="distill"),
    option(
        "topk",
        4,
        "distillation.topk",
        At(place="plan.sample_batch", of=lambda batch: batch["topk_logprobs"].shape[2]),
        objective="distill",
    ),
    option("simpo_gamma", 1.5, "simpo.simpo_gamma", objective="simpo"),
    option("cpo_alpha", 0.0, "simpo.cpo_alpha", objective="simpo"),
    option("batch", 24, "counted.rows", objective="dpo", lora_rank=2),
    option("format", "text", count("text", "source", 1), held_out=0),
    option("train_on", "all", "chat.train_on"),
    option(
        "chat_template",
        "{{ messages }}",
        "chat.chat_template",
        "save_pretrained.chat_template",
        At(place="Samples.tokenizer", of=template_of),
        **SAMPLED,
    ),
    option(
        "template_variables",
        {"thinks": True},
        "chat.template_variables",
        At(place="Samples.tokenizer", of=variables_of),
        **SAMPLED,
    ),
    option("merge", " and ", "chat.merge"),
    option("leading", "drop", "chat.leading"),
    option("trainable", "norm", "fit.trainable", "plan.trainable"),
    option(
        "trainable",
        "norm",
        At(place="fit.trainable", expected=["lora", "norm"]),
        At(place="plan.trainable", expected=["lora", "norm"]),
        **OF_MERGED,
    ),
    option("frozen", "int8", *precision("frozen"), trainable="norm"),
    option(
        "lora_rank",
        2,
        "lora.rank",
        *ADAPTED,
    ),
    option(
        "adapter",
        "other-model",
        "load_lora.folder",
        At(place="save_lora.folder", of=str, expected="run/adapter"),
        *ADAPTED,
    ),
    option(
        "adapter",
        "other-model",
        At(place="fit.trainable", expected=["lora", "^score/"]),
        objective="reward",
    ),
    option("lora_alpha", 8.0, "lora.alpha", lora_rank=2),
    option("lora_dropout", 0.25, "lora.dropout", lora_rank=2),
    option("lora_rslora", True, "lora.rslora", lora_rank=2),
    option("lora_dora", True, "lora.dora", lora_rank=2),
    option("lora_targets", "q_proj", "lora.targets", lora_rank=2),
    option("lora_modules_to_save", ["lm_head"], "lora.modules_to_save", lora_rank=2),
    option(
        "export_as",
        "both",
        At(place="save_pretrained.folder", of=str, expected="run/model"),
        lora_rank=2,
    ),
    option(
        "samples",
        ["count"],
        At(place="Samples.prompts", expected=[[{"role": "user", "content": "count"}]]),
    ),
    option("export_dtype", "float16", "save_lora.dtype", lora_rank=2),
    option("ema_decay", 0.75, At(place="save_lora.params", expected="ema"), lora_rank=2),
    option("seed", 7, "lora.seed", lora_rank=2),
    option("seed", 7, "neftune.seed", neftune_noise_alpha=5.0),
]
SIZED = option(
    "model", "wide.json", At(place="Decoder.config", of=lambda c: c.hidden_size, expected=64)
)
PRETRAIN = [
    SIZED,
    option("samples", ["count"], "Samples.prompts"),
    option("ema_decay", 0.75, At(place="save_pretrained.params", expected="ema")),
    option(
        "tokenizer",
        "other-tokenizer",
        "text.tokenizer",
        At(place="save_pretrained.source", of=str),
        At(place="Samples.tokenizer", of=lambda tokenizer: tokenizer.folder),
        **SAMPLED,
    ),
    option(
        "sizes",
        {"num_hidden_layers": 5},
        At(place="Decoder.config", of=lambda config: config.num_layers, expected=5),
    ),
    option("seed", 7, "Decoder.rngs"),
]


def hardware(of: Callable[[mt.Hardware], Any], expected: Any) -> At:
    return At(place="plan.hardware", of=of, expected=expected)


PLAN = [
    SIZED,
    option("gpu", "L40S", hardware(lambda card: "L40S" in card.name, True)),
    option("gpus", 2, "plan.num_gpus"),
    option("hosts", 2, "plan.hosts"),
    option("network", "400Gb/s", "plan.network", hosts=2),
    option("state_per_process", True, "plan.state_per_process", hosts=2),
    option("state_per_process", "auto", "plan.state_per_process", hosts=2),
    option("disk", "2GB/s", "plan.disk"),
    option("host", "64GiB", hardware(lambda card: card.host_bytes, 64 * 2**30)),
    option("tokens", 16384, At(place="plan.sample_batch", of=shape(0), expected=4)),
    option(
        "length",
        1024,
        At(place="plan.sample_batch", of=shape(1)),
        At(place="plan.sample_batch", of=shape(0), expected=8),
    ),
    option("microbatches", 2, "plan.microbatches"),
    option("precision", "compact", precision("state", "int8")[1]),
    option("state", "int8", precision("state")[1]),
    option("master", "bfloat16", precision("master")[1]),
    option("sums", "bfloat16", precision("sums")[1]),
    option("compute", "float16", precision("compute")[1]),
    option("products", "float8", precision("products")[1]),
    option("products", "float8-all", precision("products", (("*", "float8"),))[1]),
    option("optimizer", "muon", count("muon", "learning_rate", 1)),
    option("optimizer_options", {"eps": 0.5}, At(place="adamw.eps", expected=0.5)),
    option("clip", 0.5, "clip_by_global_norm.max_norm"),
    option("ema_decay", 0.75, "plan.ema_decay"),
    option("trainable", "norm", "plan.trainable"),
    option("trainable", "norm", At(place="plan.trainable", expected=["lora", "norm"]), lora_rank=2),
    option("frozen", "int8", precision("frozen")[1], trainable="norm"),
    option("frozen", "nf4", precision("frozen")[1], lora_rank=2),
    option(
        "lora_rank",
        2,
        "lora.rank",
        At(
            place="plan.model",
            of=lambda build: getattr(build(), "name", None),
            expected="with adapters",
        ),
        At(place="plan.trainable", expected="lora"),
        precision("frozen", "bfloat16")[1],
    ),
    option("lora_dora", True, "lora.dora", lora_rank=2),
    option("lora_targets", "q_proj", "lora.targets", lora_rank=2),
    option("lora_modules_to_save", ["lm_head"], "lora.modules_to_save", lora_rank=2),
    option("device_budget", "2GiB", "plan.device_budget"),
    option("host_budget", "64GiB", "plan.host_budget"),
]
OPTIONS = {"finetune": COMMON + FINETUNE, "pretrain": COMMON + PRETRAIN, "plan": PLAN}
# Of the common ones, `pretrain` reads its data and exports in ways of its own.
OWN = set(
    "data data_cache invalid too_long workers length batch microbatches epochs steps "
    "export_dtype".split()
)
SETTINGS = {"finetune": FinetuneSettings, "pretrain": PretrainSettings, "plan": PlanSettings}
READERS = {"finetune": "chat", "pretrain": "text", "plan": "plan"}


def words_of(settings: dict[str, Any]) -> list[str]:
    values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in settings.items()}
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]


@pytest.mark.parametrize("command", SETTINGS)
def test_every_option_has_its_place_here(command):
    names = {field.name for field in fields(SETTINGS[command])}
    assert {option.name for option in OPTIONS[command]} == names
    assert {option.name for option in COMMON} <= {f.name for f in fields(TrainingSettings)}


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (command, option)
        for command in OPTIONS
        for option in OPTIONS[command]
        if command != "pretrain" or option in PRETRAIN or option.name in OWN
    ],
    ids=lambda given: given if isinstance(given, str) else f"{given.name}-{given.value}",
)
def test_an_option_reaches_the_calls_that_it_is_for(command, option, tmp_path):
    settings = BASE[command] | option.beside
    given = settings | {option.name: option.value}
    without = {k: v for k, v in settings.items() if k != option.name or k in BASE[command]}
    found = [
        calls_of(tmp_path / name, command, words_of(some), interrupts=option.interrupts)
        for name, some in (("with", given), ("without", without))
    ]
    for at in option.at:
        place = at.place.replace("read.", f"{READERS[command]}.")
        expected = option.value if at.expected is None else at.expected
        after, before = (calls.given(place) for calls in found)
        if at.of is len:
            after, before = [after], [before]
        after, before = ([at.of(x) for x in values[at.calls]] for values in (after, before))
        assert after and all(value == expected for value in after), (place, after, expected)
        assert expected not in before, f"{place} is the same without {option.name}"
