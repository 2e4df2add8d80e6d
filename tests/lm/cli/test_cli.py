"""The command `megatrain-jax plan`: known models, plans, advice and mistakes."""

import gc
import inspect
import json
import math
import random
import re
import runpy
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import jax
import optax
import pytest
from flax import nnx

import megatrain_jax as mt
from megatrain_jax import models
from megatrain_jax._src.common import checks
from megatrain_jax._src.engine.report.table import UNFIT
from megatrain_jax._src.engine.state.pool import usable_bytes
from megatrain_jax._src.lm.cli import main as cli_main
from megatrain_jax._src.lm.cli import planner, training_recipe
from megatrain_jax._src.lm.cli.catalogue import config_values, known_model, known_models
from megatrain_jax._src.lm.cli.errors import with_cli_options
from megatrain_jax._src.lm.cli.main import main
from megatrain_jax._src.lm.cli.model_and_batch import batch_shapes, frozen_of
from megatrain_jax._src.lm.cli.plan_command import advice
from megatrain_jax._src.lm.cli.plan_settings import PlanSettings
from megatrain_jax._src.lm.cli.planner import config_of
from megatrain_jax._src.lm.models import causal_attention
from messages import refuses, tells
from published import num_parameters
from tiny_sizes import TINY


def count(config: dict[str, Any]) -> int:
    """Parameters of the abstract model."""
    sizes = models.DecoderConfig.from_hf(config)
    model = nnx.eval_shape(lambda: models.Decoder(sizes, rngs=nnx.Rngs(0)))
    return sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def test_only_a_process_that_ends_with_its_plan_leaves_its_garbage(monkeypatch):
    monkeypatch.setattr(cli_main, "_run", lambda name, arguments: int(gc.isenabled()))
    before = gc.get_freeze_count()  # it falls when one of these objects is dropped
    assert main(["plan"]) == 1 and gc.get_freeze_count() <= before
    monkeypatch.setattr(sys, "argv", ["megatrain-jax", "plan"])
    try:
        assert main() == 0 and gc.get_freeze_count() > before
    finally:
        gc.enable()
        gc.unfreeze()


_SIZES = (
    "model_type hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim vocab_size tie_word_embeddings"
)


def test_known_models_have_the_published_number_of_parameters():
    assert len(known_models()) >= 40
    for known in known_models().values():
        assert set(_SIZES.split()) <= known.config.keys() and known.num_parameters > 0
    sample = random.Random(0).sample(sorted(known_models()), 16)
    for name, known in ((name, known_models()[name]) for name in sample):
        config = models.DecoderConfig.from_hf(known.config)
        assert num_parameters(config) == known.num_parameters, name


@pytest.mark.long
@pytest.mark.parametrize("name", known_models())
def test_whole_known_models_have_the_published_number_of_parameters(name: str):
    known = known_models()[name]
    assert count(dict(known.config)) == known.num_parameters


def test_known_models_are_found_by_name():
    found = known_model("Qwen/qwen3-8b")
    assert found is known_models()["Qwen3-8B"] and known_model("Qwen3") is None
    for name, known in (
        ("GPT-OSS-20B", "gpt-oss-20b"),
        ("unsloth/gpt-oss-120b-BF16", "gpt-oss-120b"),
        ("google/gemma-3-12b-it", "Gemma-3-12B"),
        ("zai-org/glm-4.5-air", "GLM-4.5-Air"),
        ("zai-org/GLM-4-9B-0414", "GLM-4-9B-0414"),
        ("Qwen3-VL-8B-Instruct", "Qwen3-VL-8B"),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", "Qwen3-30B-A3B"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "Llama-3-8B"),
    ):
        assert known_model(name) is known_models()[known], name
    assert known_model("instruct") is None and known_model("Qwen3-8B-VL") is None
    assert len({name.lower() for name in known_models()}) == len(known_models())
    with refuses(FileNotFoundError, "Qwen/QWEN3-9B", "Qwen3-8B"):
        config_values("Qwen/QWEN3-9B")


@pytest.fixture
def tiny(tmp_path):
    """The folder of a model of three layers, without weights."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.mark.exhaustive
def test_a_plan_is_that_of_the_library(tiny, capsys):
    options = ["--gpu", "h100", "--gpus", "2", "--host", "8GiB", "--tokens", "512"]
    two_bytes = mt.Precision.two_bytes(compute="float32")
    for model, precision, more in (
        (str(tiny), mt.Precision.compact(), ["--precision=compact"]),
        (str(tiny / "config.json"), two_bytes, ["--precision=two_bytes", "--compute=float32"]),
    ):
        assert main(["plan", model, *options, "--length=128", *more]) == 0
        printed = capsys.readouterr().out
        plan = mt.plan(
            lambda: models.Decoder(config_of(str(tiny)), rngs=nnx.Rngs(0)),
            models.next_token_loss,
            optax.chain(
                optax.clip_by_global_norm(1.0), optax.adamw(1e-5, b2=0.95, weight_decay=0.0)
            ),
            batch_shapes(4, 128),
            hardware="H100",
            host_gib=8,
            num_gpus=2,
            precision=precision,
        )
        assert tells(printed, model, 4, 128, "2 × NVIDIA H100 80GB")
        assert str(plan) in printed and plan.seconds_per_step
        assert tells(printed, f"{512 / plan.seconds_per_step:,.0f}")


def test_frozen_parameters_stay_bfloat16_where_the_checkpoint_has_it():
    def saved(**config: Any) -> str:
        return planner._saved_dtype(models.DecoderConfig.from_hf(TINY | config))

    # Transformers has written either name.
    assert saved() == "bfloat16"
    for name in ("dtype", "torch_dtype"):
        assert saved(**{name: "float32"}) == "float32" and saved(**{name: "bfloat16"}) == "bfloat16"
    assert frozen_of(None, True, "bfloat16") == "bfloat16"
    assert frozen_of(None, True, "float32") is frozen_of(None, False, "bfloat16") is None
    assert frozen_of("int8", True, "bfloat16") == "int8"


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 10**400},
        {"num_hidden_layers": 2**31},
        {"rope_theta": float("nan")},
        {"rms_norm_eps": "x"},
        {"hidden_act": []},
        {"layer_types": "\ud800"},
    ],
)
def test_a_configuration_with_wrong_values_is_named(change, tiny, capsys):
    (tiny / "config.json").write_text(json.dumps(TINY | change))
    assert main(["plan", str(tiny), "--gpu", "H100"]) == 2
    assert str(tiny) in capsys.readouterr().err


@pytest.mark.exhaustive
def test_adapters_are_planned_as_they_are_trained(tiny, capsys):
    options = ["--gpu", "H100", "--host", "8GiB", "--tokens", "512", "--length=128"]
    rank = ["--lora-rank", "2", "--lora-targets", "self_attn/(q|v)_proj"]
    adapted = models.lora(
        lambda: models.Decoder(config_of(str(tiny)), rngs=nnx.Rngs(0)),
        targets="self_attn/(q|v)_proj",
        rank=2,
    )
    for more, trainable, frozen in (
        ([], adapted.trainable, "bfloat16"),
        (["--trainable", "norm", "--frozen", "int8"], [adapted.trainable, "norm"], "int8"),
    ):
        assert main(["plan", str(tiny), *options, *rank, *more]) == 0
        plan = mt.plan(
            adapted.model,
            models.next_token_loss,
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-5, b2=0.95)),
            batch_shapes(4, 128),
            hardware="H100",
            host_gib=8,
            trainable=trainable,
            precision=mt.Precision(frozen=frozen),
        )
        assert str(plan) in capsys.readouterr().out and plan.num_frozen > 0
    assert main(["plan", str(tiny), *options, *rank[2:]]) == 2
    assert tells(capsys.readouterr().err, "adapters", "`lora_rank`")


@pytest.mark.exhaustive
def test_patterns_and_bytes_may_be_given_as_in_python(tiny, tmp_path, capsys):
    plan = mt.plan(
        lambda: models.Decoder(config_of(str(tiny)), rngs=nnx.Rngs(0)),
        models.next_token_loss,
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-5, b2=0.95)),
        batch_shapes(4, 128),
        hardware="H100",
        host_gib="8GiB",
        host_budget=6 * 2**30,
        trainable=["self_attn/q_proj", "norm"],
    )
    options = ["plan", str(tiny), "--gpu", "H100", "--tokens", "512", "--length=128"]
    several = ["--trainable", "self_attn/q_proj", "--trainable=norm"]
    config = tmp_path / "plan.yaml"
    config.write_text(f"host: {8 * 2**30}\nhost_budget: {6 * 2**30}\n")
    for given in (
        [*several, "--host=8GiB", "--host-budget=6GiB"],
        ["--trainable", '["self_attn/q_proj", "norm"]', "--config", str(config)],
        [*several, "--host", str(8 * 2**30), "--host-budget", str(6 * 2**30)],
    ):
        assert main([*options, *given]) == 0
        assert str(plan) in capsys.readouterr().out and plan.num_frozen > 0
    for given in ("--host-budget", "--device-budget", "--host"):
        assert main([*options, given, "200"]) == 2
        name, printed = given[2:].replace("-", "_"), capsys.readouterr().err
        assert tells(printed, f"`{name}`=200", '"200 GiB"')


@pytest.mark.exhaustive
def test_warnings_advise_options_of_the_command(tiny, capsys):
    plan = ["plan", str(tiny), "--gpu", "H100", "--tokens", "512", "--length=128"]
    assert main([*plan, "--products", "float8"]) == 0
    printed = capsys.readouterr().out
    assert tells(printed, "--products", "float8", "--products float8-all")
    assert "Precision" not in printed
    assert main([*plan, "--products", "float8-all"]) == 0
    assert "float8" in capsys.readouterr().out
    # As all warnings with arguments of Python.
    texts = (
        'Precision(frozen="bfloat16") or frozen="float32", or use precision="float16"',
        "Precision(products=...) asks, Map these paths to float32 in Precision(state={...})",
        'device_budget="minimum", `microbatches="auto"`, more `microbatches`',
        "(Precision.compact())",
    )
    assert [with_cli_options(text) for text in texts] == [
        "--frozen bfloat16 or --frozen float32, or use --precision float16",
        "--products asks, Use --state float32",
        "--device-budget minimum, --microbatches auto, more --microbatches",
        "(--precision compact)",
    ]


@pytest.mark.parametrize("number", [1, 4, "auto"])
def test_a_planned_batch_is_named_with_microbatches_that_are_asked_for(number):
    words = PlanSettings(gpu="H100", tokens=4096, length=512, microbatches=number).batch
    assert tells(words, 8, 512) and tells(words, "4 microbatches") == (number == 4)
    assert "auto" not in words


def advised(fits_host: bool | None, fits_device: bool, enough: Any, **settings: Any) -> str:
    """The advice for a run that fits with the settings that a function accepts."""
    given = PlanSettings(**settings)
    host: Any = checks.num_bytes("host", given.host)
    budget: Any = checks.num_bytes("host_budget", given.host_budget)
    plan: Any = SimpleNamespace(
        fits_host=fits_host,
        fits_device=fits_device,
        host_budget=budget,
        host_process_limit=usable_bytes(budget, host or mt.card("H100").assumed_host_bytes),
    )
    return advice(plan, given, enough)


def test_a_model_that_cannot_have_adapters_gets_other_advice():
    def is_enough(settings: PlanSettings) -> bool:
        if settings.lora_rank is not None:
            raise ValueError("no layer can have adapters")
        return settings.clip is None

    assert tells(advised(False, True, is_enough), "--clip null")


def test_a_run_whose_state_of_all_hosts_one_can_t_hold_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
):
    sizes = {"host_bytes": 80 * 2**30, "host_fixed_bytes": 2**31, "host_process_limit": 30 * 2**30}
    plan: Any = SimpleNamespace(hardware=None, **sizes)
    for count, copies, fits in ((1, False, False), (4, "auto", True), (4, True, False)):
        monkeypatch.setattr(jax, "process_count", lambda count=count: count)
        settings: Any = SimpleNamespace(state_per_process=copies, device_budget=None)
        with nullcontext() if fits else refuses(MemoryError, "host memory", "`host_budget`"):
            training_recipe._check_memory(plan, settings)


def test_only_what_helps_is_advised():
    of_host = advised(False, True, lambda s: s.clip is None)
    assert tells(of_host, "host", "--clip null", "docs/fitting.md") and not tells(of_host, "GPU")
    batch = {"model": "m", "tokens": 16384, "gpus": 2}
    of_device = advised(None, False, lambda s: s.microbatches == "auto", **batch)
    assert tells(of_device, "GPU", "--microbatches auto") and not tells(of_device, "host")
    # Each GPU has two of four rows.
    in_rows = advised(
        None,
        False,
        lambda s: s.microbatches == "auto" and s.length == 4096,
        microbatches=2,
        **batch,
    )
    assert not tells(in_rows, "--microbatches")
    # Twice as many rows are divided once more.
    halves = {**batch, "tokens": 8192, "enough": lambda s: s.microbatches == "auto"}
    assert tells(advised(None, False, **halves), "--length 2048 --microbatches auto")
    shorter = advised(None, False, lambda s: s.length == 2048, **batch)
    assert tells(shorter, "--length 2048", "2,048")
    both = advised(False, False, lambda s: False, device_budget="minimum", clip=None)
    assert tells(both, "host", "GPU", "--host", "--gpu", "smaller")
    for host, budget, limit in (
        (None, "2GiB", "--host-budget"),
        (None, "1TiB", "--host"),  # the card's typical host is smaller
        ("8GiB", "2GiB", "--host-budget"),
        ("1GiB", "2GiB", "--host"),
    ):
        given = {"host": host, "host_budget": budget, "clip": None}
        of_budget = advised(False, True, lambda s: False, **given)
        assert re.findall(r"--[\w-]+", of_budget)[-1] == limit


@pytest.mark.parametrize(
    ("most", "options"),
    [
        (16, "--sums bfloat16"),  # a sum in two bytes instead of four
        (8, "--precision compact"),
        (6, "--sums bfloat16 --precision compact"),
        (5, "--sums bfloat16 --precision compact --optimizer lion"),
        (4, "--sums bfloat16 --precision compact --optimizer adafactor"),
        (3, "--sums bfloat16 --optimizer adafactor --precision two_bytes"),
        (2, "--lora-rank 16"),
        (1, "--lora-rank 16 --frozen nf4"),
    ],
)
def test_adapters_are_advised_only_where_no_form_of_all_parameters_fits(most: int, options: str):
    def num_bytes(s: PlanSettings) -> float:
        """Bytes of a parameter and its state."""
        if s.lora_rank is not None:
            return 0.5 if s.frozen == "nf4" else 2
        forms = {"auto": (4, 4), "compact": (2, 1), "two_bytes": (1, 0.5)}
        master, moment = forms[s.precision]
        moments = {"adamw": 2, "lion": 1, "adafactor": 0}[s.optimizer]
        return master + moments * moment + (4 if s.sums == "float32" else 2)

    given = {"model": "m", "tokens": 4096, "clip": None}
    said = advised(False, True, lambda s: num_bytes(s) <= most, **given)
    assert said.partition(options)[1] and tells(said, options.partition(" --")[0])
    assert {*re.findall(r"--[\w-]+", said)} == {*re.findall(r"--[\w-]+", options)}


def test_sums_that_need_more_memory_are_no_reason_to_advise_adapters():
    def is_enough(s: PlanSettings) -> bool:
        has_wide = s.sums == "float32" and s.precision != "auto"
        return s.lora_rank is not None or (has_wide and s.length == 2048)

    said = advised(None, False, is_enough, model="m", tokens=16384)
    assert tells(said, "--precision compact", "--length 2048")
    assert not any(other in said for other in ("--sums", "--lora-rank"))


@pytest.mark.exhaustive
def test_a_plan_by_name_is_that_of_its_sizes(capsys):
    options = ["--gpu", "NVIDIA GeForce RTX 4090", "--tokens", "2048", "--length", "1024"]
    assert main(["plan", "smollm2-135m", *options]) == 0
    printed = capsys.readouterr().out
    assert tells(printed, "smollm2-135m", 2, "1,024", "NVIDIA GeForce RTX 4090", "135M", 32)


@pytest.mark.exhaustive
def test_packed_documents_without_an_attention_kernel_are_remarked_on(tiny, capsys, monkeypatch):
    """In long rows, cuDNN tells documents of wide heads apart on Hopper only."""
    assert planner._MARK == causal_attention._MARK
    assert f"{causal_attention._LONGEST_MASKED:,}" in inspect.getsource(planner)
    for name in "_MASKED", "_LONGEST_MASKED":
        monkeypatch.setattr(causal_attention, name, 96)
    (tiny / "config.json").write_text(json.dumps(TINY | {"head_dim": 128}))
    said = {}
    for gpu, compute in (("4090", "bfloat16"), ("4090", "float32"), ("H100", "bfloat16")):
        options = ["--gpu", gpu, "--compute", compute, "--tokens=256", "--length=128"]
        assert main(["plan", str(tiny), *options]) == 0
        said[gpu, compute] = "`segments`" in capsys.readouterr().out
    assert said == {
        ("4090", "bfloat16"): True, ("4090", "float32"): False, ("H100", "bfloat16"): False
    }  # fmt: skip


@pytest.mark.exhaustive
def test_a_plan_says_how_experts_are_computed_and_that_rates_are_unmeasured(tiny, capsys):
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
    sizes = TINY | experts | {"hidden_size": 128, "moe_intermediate_size": 128}
    (tiny / "config.json").write_text(json.dumps(sizes))
    for gpu, by_kernels in (("H100", True), ("A100", False)):
        options = ["--gpu", gpu, "--tokens=256", "--length=128"]
        assert main(["plan", str(tiny), *options]) == 0
        printed = capsys.readouterr().out
        assert any(line.startswith("experts ") for line in printed.splitlines()) == by_kernels
        assert tells(printed, "loop") != by_kernels
        assert ("unmeasured" in printed) != by_kernels


@pytest.mark.exhaustive
def test_what_is_advised_fits_when_it_is_planned(tiny, capsys):
    sizes = TINY | {"vocab_size": 200_000, "hidden_size": 512}
    (tiny / "config.json").write_text(json.dumps(sizes))
    given = ["plan", str(tiny), "--gpu", "RTX 4090", "--tokens", "512", "--length", "256"]
    assert main([*given, "--host", "5GiB"]) == 1
    printed = capsys.readouterr().out
    assert UNFIT in printed and tells(printed, "5.00 GiB")
    (said,) = (line for line in printed.splitlines() if "docs/fitting.md" in line)
    assert tells(said, "host") and "GPU" not in said and "--lora-rank" not in said
    options = " ".join(re.findall(r"--[\w-]+ [^\s.-]+", said.partition("cost")[0]))
    assert main([*given, "--host", "5GiB", *options.split()]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plna"], "'plna' plan, finetune, grpo, pretrain, chat merge"),
        (["plan", "Qwen3-8b-bass", "--gpu", "H100"], "known Qwen3-8B"),
        (["plan", "there/is/none", "--gpu", "H100"], "folder file known"),
        (["plan", "Qwen3-8B", "--gpu", "H1000"], "card 'H1000' H100"),
        (["plan", "Qwen3-8B", "--gpu", "H1000", "--tokens=8", "--length=9"], "card 'H1000'"),
        (["plan", "Qwen3-8b-bass", "--tokens=8", "--length=9"], "known Qwen3-8B"),
        (["plan", "Qwen3-8B"], "GPU here --gpu H100"),
        (["plan", "Qwen3-8B", "--gpus", "0"], "`gpus` 1 0"),
        (["plan", "Qwen3-8B", "--gpus", "two"], "--gpus integer two"),
        (["plan", "Qwen3-8B", "--gpu=H100", "--host", "much"], "`host` 512GiB much"),
        (["plan", "Qwen3-8B", "--gpu=H100", "--host=512"], '`host`=512 "512 GiB"'),
        (["plan", "Qwen3-8B", "--tokens", "5000"], "`tokens`=5000 `length`=4096"),
        (["plan", "Qwen3-8B", "--tokens=8192", "--gpus=4"], "2 rows `length`=4096 4"),
        (["plan", "Qwen3-8B", "--tokens=12288", "--gpus=1", "--hosts=2"], "3 rows 2 `hosts`=2"),
        (["plan", "--frozen=int8"], "`frozen`=int8"),
        (["plan", "--tokens=8192"], "`tokens` model"),
        (["plan", "--state", "compact"], "--state float32 compact --precision"),
        (["plan", "--state", "int3"], "--state float32, bfloat16, int8, int4"),
        (["plan", "--clip", "-1"], "`clip` 0 -1.0"),
        (["plan", "--gpuss", "H100"], "--gpuss `--gpus`"),
        (["plan", "--gp", "H100"], "--gp `--gpu` `--gpus`"),
        (["finetune", "--product", "float8"], "--product `--products`"),
        (["finetune", "--keep-best", "maybe"], "--keep-best true false maybe"),
        (["chat", "--max-new-tokens", "5"], "--max-new-tokens `--max-tokens`"),
        (["finetune", "--gpus", "2"], "--gpus JAX"),
        (["grpo", "--num-processes", "2"], "--num-processes"),
        (["pretrain", "--resume-from-checkpoint", "x"], "--resume-from-checkpoint `--out`"),
        (["finetune", "--qlora", "true"], "--qlora `--frozen nf4 --lora-rank 16`"),
        (["finetune", "--load-in-4bit", "true"], "--load-in-4bit `--frozen`"),
        (["finetune", "--shup", "x"], "--shup"),
        (["plan", "--n-gpus", "2"], "--n-gpus `--gpus`"),
        (["merge", "--output-dir", "x"], "--output-dir `--out`"),
        (["plan", "--device-budget", "most", "--gpu=H100"], "`device_budget` most"),
        (["plan", "--config", "there/is/none.yaml"], "none.yaml"),
        (["plan", "--gpu=H100", "Phi-2", "Phi-4"], "Phi-2 Phi-4 option"),
    ],
)
def test_what_is_asked_wrongly_is_told_in_a_line(arguments, message, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert not printed.out and tells(printed.err, *message.split())
    assert printed.err.count("\n") == 1


def test_a_printed_configuration_is_read_again(tiny, tmp_path, capsys):
    given = ["plan", str(tiny), "--gpu", "L40S", "--tokens", "512", "--length", "256"]
    assert main([*given, "--print-config"]) == 0
    written = capsys.readouterr().out
    assert re.search(r"^# .*\n", written, re.M) and "length: 256\n" in written
    file = tmp_path / "plan.yaml"
    file.write_text(written)
    assert main(["plan", "--config", str(file), "--length", "512", str(tiny)]) == 0
    assert tells(capsys.readouterr().out, 1, 512, "NVIDIA L40S")
    file.write_text("lenght: 256\n")
    assert main(["plan", "--config", str(file)]) == 2
    assert "lenght" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_the_library_needs_no_command_line_and_what_is_asked_wrongly_no_jax():
    code = (
        "import sys, megatrain_jax;"
        "assert not [m for m in sys.modules if 'jsonargparse' in m or '_src.lm.cli' in m];"
        "modules = ('callbacks', 'data', 'losses', 'models');"
        "assert not {f'megatrain_jax.{m}' for m in modules} & {*sys.modules};"
        "from megatrain_jax._src.lm.cli.main import main;"
        "assert main(['--help']) == main(['plan', '--help']) == main(['finetune', '--help']) == 0;"
        "assert main(['pretrain']) == main(['plan', '--gpus', 'two']) == main(['plan', 'Qw']) == 2;"
        "assert not {'jax', 'flax', 'optax', 'transformers'} & {*sys.modules};"
        "print(); sys.exit(main(['--version']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith(f"\n{mt.__version__}\n"), done.stderr


def test_the_package_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["megatrain_jax", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("megatrain_jax", run_name="__main__")
    assert (ended.value.code, capsys.readouterr().out) == (0, f"{mt.__version__}\n")
