"""The largest batch, context and model of `megatrain-jax plan`."""

import itertools
import json
import math
import random
import re
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain_jax import models
from megatrain_jax._src.common.remembering import remembering
from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.engine.spec.host import COMMUNICATION_BYTES
from megatrain_jax._src.lm.cli import plan_command, planner
from megatrain_jax._src.lm.cli.catalogue import KnownModel, known_models
from megatrain_jax._src.lm.cli.few_layers import repeated_layers, with_few_layers
from megatrain_jax._src.lm.cli.largest import (
    confirmed,
    fits,
    largest,
    largest_size,
    least_host_bytes,
    round_number,
)
from megatrain_jax._src.lm.cli.main import main
from megatrain_jax._src.lm.cli.plan_settings import PlanSettings
from megatrain_jax._src.lm.cli.planner import Planner, config_of
from messages import tells
from tiny_sizes import TINY


@pytest.mark.parametrize("of_tokens", [0.1, 0.5, 1.0])
def test_the_largest_number_is_found_with_few_probes(of_tokens: float):
    rng = random.Random(0)
    for exact in [*range(80), *(round(10 ** rng.uniform(1, 6)) for _ in range(200))]:
        probes: list[int] = []

        # What is there once, and what each number takes; with tiles, up to a half, four times as
        # many fit.
        def share(n: int, most: int = exact, probes: list[int] = probes) -> float:
            probes.append(n)
            tiled = min(1.0, 4 * n / most) if 0 < n <= most else 2 * n / max(most, 0.1)
            return 1 - of_tokens + of_tokens * tiled

        found = largest(share, 16)
        expected = [n for n in map(round_number, range(90)) if n <= exact]
        assert found == (len(expected) - 1 if expected else None), exact
        assert len(probes) <= 20 and len(set(probes)) == len(probes) and min(probes) > 0


def test_what_was_found_is_confirmed_by_few_whole_plans():
    asked: list[int] = []

    def planned(n: int) -> Any:
        asked.append(n)
        return SimpleNamespace(n=n, fits_device=n <= 21, fits_host=None)

    for place, expected, most in ((None, None, 0), (2, 3, 1), (12, 20, 2), (40, 20, 12)):
        asked.clear()
        found: Any = confirmed(planned, place)
        assert len(asked) == len(set(asked)) <= most
        assert found == (expected and (expected, planned(expected)))
    assert confirmed(lambda n: planned(n + 22), 3) is None
    assert confirmed(lambda n: None, 3) is None


def test_a_number_that_all_smaller_ones_nearly_reach_is_halved_in():
    """Functions in tiles and blocks in parts take what there is, so fractions tell nothing."""
    probes: list[int] = []

    def share(n: int) -> float:
        probes.append(n)
        return 0.999 if n <= 1000 else 1.2

    place = largest(share, 16)
    assert place is not None and (round_number(place), round_number(place + 1)) == (896, 1024)
    assert len(probes) <= 13


def test_few_layers_stand_for_all_kinds_of_layers():
    config = config_of("Gemma-3-1B")
    few = with_few_layers(config)
    assert few.num_layers == 6 and set(few.windows) == set(config.windows) == {None, 512}
    sparse = with_few_layers(config_of("Qwen3-30B-A3B"))
    assert sparse.experts and sparse.experts.layers == tuple(range(4))
    assert with_few_layers(config_of("SmolLM3-3B")).unrotated == (3,)
    # Its options name the layers with linear attention.
    assert with_few_layers(config_of("Qwen3.5-27B")).num_layers == 7


def test_repeated_layers_are_those_of_the_whole_model():
    found = {name: repeated_layers(config_of(name)) for name in known_models()}
    for name, few in found.items():
        if few is not None:
            config, stop = config_of(name), few.first + few.period
            order = [*range(stop), *[*range(few.first, stop)] * few.times]
            order += range(stop, few.config.num_layers)
            unrotated = [i for i, layer in enumerate(order) if layer in few.config.unrotated]
            assert len(order) == config.num_layers and tuple(unrotated) == config.unrotated
            windows = tuple(few.config.windows[layer] for layer in order if few.config.windows)
            assert windows == config.windows
            # A next one shows that they can be repeated, and a last one ends the model.
            assert few.first >= few.period and few.config.num_layers >= stop + 2
    lengths = {name: few and few.config.num_layers for name, few in found.items()}
    assert lengths["Qwen3-8B"] == 4 and lengths["Gemma-3-1B"] == 14
    assert lengths["Qwen3-30B-A3B"] is lengths["Qwen3.5-27B"] is None


@pytest.mark.exhaustive  # plans of whole models take seconds
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Qwen3-0.6B", {"gpus": 8, "hosts": 2}),
        ("Gemma-3-270M", {"lora_rank": 16}),
        ("Qwen3-4B", {"gpu": "RTX 4090", "host": "48GiB", "disk": "7GB/s"}),
        ("Qwen2.5-0.5B", {"optimizer": "muon", "precision": "compact"}),
        ("Llama-3.2-1B", {"microbatches": 8, "clip": None}),
        # Windows, layers without rotary embeddings, norms behind, attention beside the MLP.
        *((name, {}) for name in ("Gemma-2-2B", "SmolLM3-3B", "OLMo-2-1B", "Phi-2")),
        *(
            pytest.param(name, {}, marks=pytest.mark.long)
            for name in ("Falcon3-1B", "Granite-3.1-2B", "GLM-4-9B-0414", "Phi-3-mini")
        ),
    ],
)
def test_plans_by_few_layers_equal_those_of_all(name, changes, monkeypatch):
    settings = PlanSettings(**{"gpu": "H100", "length": 2048, **changes})
    plans = []
    for found in (repeated_layers, lambda config: None):
        monkeypatch.setattr(planner, "repeated_layers", found)
        plans.append(Planner(settings).plan(config_of(name), 16, 2048))
    assert plans[0] == plans[1]


def variants(folder):
    """Models whose sizes bound a step in different ways."""
    wide = {"num_hidden_layers": 6, "vocab_size": 32768, "tie_word_embeddings": True}
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
    changes = {"tiny": {}, "wide": wide, "experts": experts | {"moe_intermediate_size": 64}}
    for name, change in changes.items():
        (folder / f"{name}.json").write_text(json.dumps(TINY | change))
    return {name: config_of(str(folder / f"{name}.json")) for name in changes}


def test_patterns_that_tell_layers_apart_are_planned_with_all_of_them(tmp_path):
    settings = PlanSettings(gpu="H100", length=512, trainable=["layers/5/"])
    plan = Planner(settings).plan(variants(tmp_path)["wide"], 1, 512)
    (trained,) = (row for row in plan.groups if "frozen" not in row.name and row.num_parameters)
    assert trained.name == "layers.5" and trained.count == 1
    assert trained.num_parameters == plan.num_parameters - plan.num_frozen


class Formula:
    """A planner by a formula: a fixed part, and tokens in up to 64 tiles, each with a rest."""

    def __init__(self, rng, tiles=64):
        self.settings = PlanSettings(gpu="H100", length=512)
        self.machine, self.host_limit = SimpleNamespace(usable_bytes=10**9), None
        self._fixed, self._each = rng.uniform(0, 1e9), 10 ** rng.uniform(1, 6)
        self._rest, self._deep, self._tiles = rng.random(), 1 + rng.random() / 2, tiles

    def plan(self, config, rows, length, least=False):
        if rows * length > 2**31:
            raise ValueError("more elements than a kernel counts")
        whole = rows * length * self._each
        counts = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= self._tiles]
        deep = 1 if config.num_layers == 4 else self._deep
        needs = [deep * (self._fixed + whole * (self._rest + (1 - self._rest) / n)) for n in counts]
        needed = next((need for need in needs if need <= 10**9), needs[-1])
        return SimpleNamespace(
            device_bytes=needed,
            fits_device=needed <= 10**9,
            fits_host=None,
            hardware=self.machine,
            of=(rows, length, least),
        )

    def smallest(self, config):
        host = {"host_process_limit": self.host_limit, "host_fixed_bytes": 10**8}
        layers = SimpleNamespace(name="layers.0 … layers.3", count=4, host_bytes=2 * 10**8)
        return SimpleNamespace(host_bytes=10**9, groups=[layers], num_processes=1, **host)


@pytest.mark.parametrize("what", ["batch", "context"])
def test_the_search_finds_what_trying_all_sizes_finds(tmp_path, what):
    rng, config = random.Random(0), variants(tmp_path)["wide"]
    for _ in range(300):
        planner: Any = Formula(rng, tiles=rng.choice([1, 4, 64]))
        found = largest_size(planner, what, "wide", config)
        expected = None
        for number in map(round_number, range(80)):
            shape = (number, 512) if what == "batch" else (1, 1024 * number)
            if math.prod(shape) <= 2**31 and fits(plan := planner.plan(config, *shape)):
                expected = plan
        assert (found and found.plan) == expected


@pytest.mark.parametrize("what", ["batch", "context"])
def test_nothing_is_searched_where_the_state_alone_fills_the_host(tmp_path, what):
    class Full(Formula):
        def plan(self, config, rows, length, least=False):
            pytest.fail("a size was planned")

    planner: Any = Full(random.Random(0))
    planner.host_limit = 10**9 + 10**8 - 1
    assert largest_size(planner, what, "wide", variants(tmp_path)["wide"]) is None


@pytest.mark.parametrize("what", ["batch", "context"])
def test_one_plan_tells_that_no_size_fits_a_host_that_the_state_nearly_fills(tmp_path, what):
    config, planned = variants(tmp_path)["wide"], []

    class Nearly(Formula):
        def plan(self, config, rows, length, least=False):
            planned.append((config, rows, length, least))
            return SimpleNamespace(fits_device=True, fits_host=False)

    planner: Any = Nearly(random.Random(0))
    # The state of 4 layers takes 1 GB, that of 6 layers seems to take 1.4. That of a host with less
    # is planned: it takes 1 GB here, too.
    for limit in (18 * 10**8, 14 * 10**8):
        planner.host_limit = limit
        assert largest_size(planner, what, "wide", config) is None
        assert planned == [(config, 1, 512 if what == "batch" else 1024, False)]
        planned.clear()
    planner.host_limit = 22 * 10**8
    with pytest.raises(AttributeError):  # the plans here are of no use to a search
        largest_size(planner, what, "wide", config)
    assert planned[0][0] == with_few_layers(config)


@pytest.mark.exhaustive
def test_plans_of_one_model_build_it_once(tmp_path, monkeypatch):
    built = []

    def decoder(*args: Any, **options: Any) -> models.Decoder:
        built.append(args)
        return real(*args, **options)

    real = models.Decoder
    monkeypatch.setattr(models, "Decoder", decoder)
    config = variants(tmp_path)["tiny"]
    planner = Planner(PlanSettings(gpu="H100", length=512))
    with remembering():
        plans = [planner.plan(config, rows, 512, least=True) for rows in (1, 2)]
    assert len(built) == 1
    assert plans == [planner.plan(config, rows, 512, least=True) for rows in (1, 2)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", [{}, {"lora_rank": 4, "precision": "compact"}])
def test_a_few_layers_tell_the_least_host_memory_of_all(tmp_path, settings):
    sizes = TINY | {"hidden_size": 512, "num_hidden_layers": 8}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    config = config_of(str(tmp_path))
    planner = Planner(PlanSettings(gpu="H100", length=512, **settings))
    few: Any
    whole: Any
    with remembering():
        few, whole = (
            planner.plan(of, 1, 512, least=True) for of in (with_few_layers(config), config)
        )
    beside = few.host_process_bytes - few.host_pool_bytes
    assert few.host_bytes < 0.8 * whole.host_bytes
    least = least_host_bytes(few, config)
    assert least < whole.host_process_bytes
    assert 0.8 * whole.host_bytes < least - beside < whole.host_bytes


@pytest.mark.parametrize(
    ("limit", "hosts"), [("--host", 1), ("--host-budget", 1), ("--host-budget", 4)]
)
def test_a_search_for_advice_plans_no_model_whose_state_fills_the_host(
    tmp_path, monkeypatch, capsys, limit, hosts
):
    gib, planned = 2**30, []
    per_layer = {"auto": 12 * gib, "compact": 4 * gib, "two_bytes": 2 * gib}

    def plan(self, config, *shape, **options):
        num, each = config.num_layers, per_layer[self.settings.precision]
        planned.append((num, self.settings.precision))
        row = SimpleNamespace(name="layers.0 … layers.9", count=num, host_bytes=hosts * each)
        return SimpleNamespace(
            groups=[row],
            num_processes=hosts,
            host_bytes=hosts * num * each,
            host_peak_bytes=hosts * (num * each + gib),
            host_process_bytes=num * each + 3 * gib,
            host_pool_bytes=num * each + gib,
            host_fixed_bytes=2 * gib,
            host_process_limit=30 * gib,
            fits_host=num * each + 3 * gib <= 30 * gib,
            fits_device=True,
            seconds_per_step=1.0,
            attention_flops_per_step=1,
            by_kernels=(),
        )

    monkeypatch.setattr(Planner, "plan", plan)
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"num_hidden_layers": 10}))
    given = ["--gpu", "H100", "--tokens", "2048", "--length", "512", limit, "30GiB"]
    given += ["--hosts", str(hosts)]
    assert main(["plan", str(tmp_path), *given]) == 1
    advised = re.findall(r"--[\w-]+ [\w-]+", capsys.readouterr().out.splitlines()[-1])
    assert advised and {*advised} == {"--precision two_bytes"}
    # The first plan was asked for.
    assert {state for num, state in planned[1:] if num == 10} == {"two_bytes"}
    assert {state for num, state in planned if num == 4} > {"two_bytes"}


@pytest.mark.by_default("tokens0---host-budget")
@pytest.mark.parametrize(
    ("tokens", "larger"),
    [(["--tokens", "1024"], "--host-budget"), (["--tokens", "1024"], "--host"), ([], "--host")],
)
def test_a_host_too_small_for_the_process_is_told_without_a_search(
    tmp_path, capsys, tokens, larger
):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    given = ["--gpu", "H100", "--gpus", "2", "--length", "512", larger, "1GiB"]
    assert main(["plan", str(tmp_path), *tokens, *given]) == 1
    printed = capsys.readouterr()
    needed = sized(15 * 2**27 + COMMUNICATION_BYTES)
    assert tells(printed.out, needed)
    assert re.findall(r"--[\w-]+", printed.out.splitlines()[-1]) == [larger]
    assert not printed.err


@pytest.mark.long
@pytest.mark.parametrize("what", ["batch", "context"])
@pytest.mark.parametrize("gpu", ["RTX3080", "H100"])
@pytest.mark.parametrize("name", ["tiny", "wide", "experts"])
def test_the_search_finds_what_planning_all_sizes_finds(tmp_path, name, gpu, what):
    config = variants(tmp_path)[name]
    planner = Planner(PlanSettings(gpu=gpu, host="24GiB", length=512))
    found = largest_size(planner, what, name, config)
    assert found is not None
    rows, length = (found.rows, 1) if what == "batch" else (1, found.length // 1024)
    place = [round_number(at) for at in range(90)].index(rows * length)
    # Fresh plans, of all sizes from far above down to the first that fits.
    for number in (round_number(at) for at in range(place + 2, -1, -1)):
        other = Planner(planner.settings)
        shape = (number, 512) if what == "batch" else (1, 1024 * number)
        try:
            plan = other.plan(config, *shape)
        except ValueError:  # more elements than a kernel counts
            continue
        if fits(plan):
            assert (shape, plan) == ((found.rows, found.length), found.plan)
            break


@pytest.mark.long
def test_the_largest_sizes_fit_and_larger_ones_do_not(tmp_path, capsys):
    planner = Planner(PlanSettings(gpu="RTX3080", host="6GiB", length=512))
    config, path = variants(tmp_path)["tiny"], str(tmp_path / "tiny.json")
    kinds = ["batch", "context", "model"]
    sizes = [largest_size(planner, kind, path, config) for kind in kinds]
    batch, context, model = sizes
    assert batch and context and model and [size and size.what for size in sizes] == kinds
    assert fits(batch.plan) and fits(context.plan) and fits(model.plan)
    assert batch.length == 512 and context.rows == 1
    assert not fits(planner.plan(config, batch.rows * 5 // 4, 512))
    assert not fits(planner.plan(config, 1, context.length * 5 // 4))
    options = ["--gpu", "RTX3080", "--host", "6GiB", "--length", "512"]
    assert main(["plan", path, *options]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == list(map(str, sizes))


def test_few_plans_tell_the_largest_known_model(monkeypatch):
    """Larger models take more of the host; what they take of the device has no order."""
    rng, planned = random.Random(0), []
    known = {model.num_parameters: name for name, model in known_models().items()}
    sizes = {config_of(name): size for size, name in known.items()}
    for host in (10 ** rng.uniform(9, 13) for _ in range(100)):
        wide = {size: rng.random() < 0.3 for size in known}

        class Counting:
            settings = PlanSettings(gpu="H100", hosts=rng.choice((1, 4)))

            def plan(self, config, rows, length, least=False, wide=wide, host=host):
                hosts = self.settings.hosts
                size = sizes.get(config, 10**9)  # a few layers are of no known model
                planned.extend([size] if config in sizes else [])
                return SimpleNamespace(
                    groups=[SimpleNamespace(name="layers.0", num_parameters=2, host_bytes=8)],
                    num_parameters=size,
                    hardware=SimpleNamespace(usable_bytes=host / 100),
                    num_processes=hosts,
                    host_bytes=4 * size,
                    host_process_limit=host / hosts,
                    host_fixed_bytes=0,
                    fits_host=6 * size <= host,
                    fits_device=not wide.get(size),
                )

        planned.clear()
        planner: Any = Counting()
        found = largest_size(planner, "model", None, None)
        largest_held = max((n for n in known if 6 * n <= host), default=0)
        expected = max((n for n in known if n <= largest_held and not wide[n]), default=None)
        assert (found and found.model) == (expected and known[expected])
        between = sum(expected <= n < largest_held for n in known) if expected else len(known)
        assert len(planned) == len(set(planned)) <= 10 + between
        for size in planned:
            config = config_of(known[size])
            layer = (size - 2 * config.vocab_size * config.hidden_size) / config.num_layers
            # Beside the state, a single host has old versions of layers that are being updated.
            moving = 2 * layer if planner.settings.hosts == 1 else 0
            assert 4 * (size + moving) <= 1.02 * host, "a plan that can't fit"


@pytest.mark.parametrize("name", [None, "Llama-3.2-1B"])
def test_of_each_kind_of_size_the_largest_is_printed_or_advice_if_there_is_none(
    name, monkeypatch, capsys
):
    """The command fails if none fits of the model that it is asked for, though another one may."""
    kinds = ("model",) if name is None else ("batch", "context", "model")
    asked = kinds[:2] if name else kinds
    monkeypatch.setattr(plan_command, "_advise_smallest", lambda planner: "take fewer rows")
    for fit in itertools.product([False, True], repeat=len(kinds)):
        sizes = {kind: f"{kind} of size 7" for kind, yes in zip(kinds, fit, strict=True) if yes}
        monkeypatch.setattr(
            plan_command, "largest_size", lambda planner, kind, *_, sizes=sizes: sizes.get(kind)
        )
        options = ["plan", *([name] if name else []), "--gpu", "RTX3080", "--host", "8GiB"]
        fails = main([*options, "--length", "256"])
        lines = capsys.readouterr().out.splitlines()[2:]
        assert lines[: len(sizes)] == list(sizes.values()), "in the order of the kinds"
        assert fails == (not any(kind in sizes for kind in asked))
        assert len(lines) == len(sizes) + fails and ("fewer rows" in lines[-1]) == fails
        if name and fails and sizes:
            assert name in lines[-1]


@pytest.mark.exhaustive
def test_the_largest_known_model_that_fits_is_named(monkeypatch, capsys):
    for name in set(known_models()) - {"Llama-3.2-1B"}:
        monkeypatch.delitem(known_models(), name)
    for name, layers in (("small", 1), ("middle", 2)):
        config = TINY | {"num_hidden_layers": layers, "tie_word_embeddings": False}
        known = KnownModel(num_parameters=layers * 10**6, config=config)
        monkeypatch.setitem(known_models(), name, known)
    options = ["plan", "--gpu", "RTX3080", "--length", "256"]
    assert main([*options, "--host", "8GiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert tells(lines[0], "NVIDIA GeForce RTX 3080", "8.00 GiB", "unmeasured")
    assert tells(lines[2], "middle", 1, 256) and len(lines) == 3
    assert main([*options, "--host", "1GiB"]) == 1
    assert tells(capsys.readouterr().out, "host")
