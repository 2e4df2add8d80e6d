"""How the experiments time steps, and what their files say of where they come from."""

import argparse
import dataclasses
import functools
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import all_rows
import batches
import common
import jax
import large
import numpy as np
import peers
import plain
import pytest
import record
import small_gpu
import updates
from flax import nnx
from shapes import SHAPES
from timing import MIN_STEPS, Work, time_from_rest, time_long_steps, time_steps

from inside import engine_of, store_of
from megatrain_jax import models
from messages import refuses
from places import ROOT

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Machine:
    """A made-up device with a clock of its own, whose updates ride on the next step."""

    def __init__(self, rng: random.Random, *, ahead: bool):
        self.step, self.update = rng.uniform(0.5, 4), rng.uniform(0, 2)
        self.way, self.alone = rng.uniform(0, 5), rng.uniform(0, 3)
        self.dispatch = rng.uniform(0, 0.4)
        self.ahead = ahead  # whether `begin` returns before the step is over
        self.now = self.free = 0.0
        self.owed, self.at_rest = False, True
        self.reads: list[bool] = []

    def begin(self) -> float:
        self.now += self.dispatch
        if self.at_rest:
            self.now += self.way
        self.free = max(self.free, self.now) + self.step + self.owed * self.update
        self.owed, self.at_rest = True, False
        if not self.ahead:
            self.now = self.free
        return self.free

    def finish(self, end: float) -> float:
        self.now = max(self.now, end)
        return end

    def drain(self) -> None:
        self.now = max(self.now, self.free) + self.owed * self.alone
        self.now += 0 if self.at_rest else self.way
        self.free, self.owed, self.at_rest = self.now, False, True

    def clock(self) -> float:
        self.reads.append(not self.owed and self.free <= self.now)
        return self.now

    def work(self) -> Work:
        return Work(begin=self.begin, finish=self.finish, drain=self.drain)


def read_while_drained(reads: list[bool], num_steps: int) -> list[bool]:
    """What was so at the first and the last reading of each of the two runs."""
    short = len(reads) - (1 + 2 + num_steps + 1)
    return [reads[0], reads[short - 1], reads[short], reads[-1]]


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_a_step_is_timed_with_its_update_and_without_the_way_to_the_device(seed, ahead):
    rng = random.Random(seed)
    machine, num_steps = Machine(rng, ahead=ahead), rng.randint(MIN_STEPS, 20)
    if seed % 2:
        machine.work().begin()  # in flight, with an update to come
    times = time_steps(machine.work(), num_steps, clock=machine.clock, cpu_clock=machine.clock)
    cost = machine.step + machine.update + (0 if ahead else machine.dispatch)
    assert times.mean == pytest.approx(cost)
    assert len(times.intervals) == num_steps and times.intervals == pytest.approx(
        [cost] * num_steps
    )
    assert times.figures()["num_measured_steps"] == num_steps
    assert times.figures()["stdev_seconds_per_step"] == pytest.approx(0, abs=1e-9)
    # Each of both clocks is read at the start and the end.
    reads = machine.reads
    assert all([*reads[:2], *reads[4:8], *reads[-2:]]), reads
    assert not all(reads)


@pytest.mark.parametrize("seed", range(4))
def test_steps_of_minutes_are_timed_with_the_update_of_the_step_before(seed):
    rng = random.Random(seed)
    machine, num_steps = Machine(rng, ahead=True), rng.randint(1, 3)
    times = time_long_steps(machine.work(), num_steps, clock=machine.clock)
    cost = machine.dispatch + machine.step + machine.update
    assert times.intervals == pytest.approx([cost] * num_steps)
    assert len(times.losses) == num_steps + 1
    spread = times.figures()["stdev_seconds_per_step"]
    assert spread is None if num_steps == 1 else spread == pytest.approx(0, abs=1e-9)
    with refuses(ValueError, 1, 0):
        time_long_steps(machine.work(), 0)


@pytest.mark.parametrize("seed", range(4))
def test_a_step_from_rest_is_timed_with_all_that_it_owes(seed):
    machine = Machine(random.Random(seed), ahead=True)
    machine.work().drain()
    times = time_from_rest(machine.work(), clock=machine.clock)
    cost = machine.dispatch + 2 * machine.way + machine.step + machine.alone
    assert times.mean == pytest.approx(cost) and times.intervals == [times.mean]
    assert len(times.losses) == 1 and all(machine.reads)


def test_too_few_steps_are_no_mean():
    with refuses(ValueError, 8, 7):
        time_steps(Machine(random.Random(0), ahead=True).work(), 7)


@pytest.mark.exhaustive
def test_the_librarys_steps_owe_nothing_when_the_clock_is_read(monkeypatch):
    import measure
    from shapes import SHAPES

    reads = []

    def timed(work, num_steps):
        trainer = work.drain.__self__

        def clock():
            reads.append(engine_of(trainer)._running is None and not store_of(trainer).on_device)
            return float(len(reads))

        return time_steps(work, num_steps, clock=clock)

    monkeypatch.setattr(measure, "time_steps", timed)
    args = argparse.Namespace(
        device_budget="least",
        clip=1.0,
        optimizer="adamw",
        microbatches=1,
        waves=None,
        host_budget=None,
        disk_dir=None,
        pinned=None,
        network=None,
        state_per_process=False,
        devices=1,
        loss="own",
        steps=MIN_STEPS,
        timed="drained",
        profile=None,
        master="float32",
        state="float32",
        sums="float32",
        products=None,
    )
    shape = dataclasses.replace(SHAPES["tiny"], num_layers=2, vocab_size=64, seq_len=8)
    found = measure.measure(args, shape)
    assert found["update_mode"] == "deferred"
    assert read_while_drained(reads, MIN_STEPS) == [True] * 4 and not all(reads)
    assert found["num_measured_steps"] == MIN_STEPS == len(found["seconds_of_steps"])


@pytest.mark.exhaustive
def test_a_mixture_of_experts_is_measured():
    import experts

    sizes = {"tiny": True, "layers": 1, "batch": 2, "seq": 8, "microbatches": 1}
    held = {"master": "bfloat16", "state": "int8", "device_budget": "auto"}
    args = argparse.Namespace(**sizes, **held, steps=MIN_STEPS, no_clip=False)
    found = experts.measure(args)
    assert found["num_measured_steps"] == MIN_STEPS and np.isfinite(found["losses"]).all()
    assert found["active_parameters"] < found["num_parameters"]
    # https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json, and its model card's sizes.
    config = experts.chosen_config(argparse.Namespace(tiny=False, layers=48))
    few = [experts.chosen_config(argparse.Namespace(tiny=False, layers=n)) for n in (1, 2)]
    one, two = (size_of(models.Decoder, config) for config in few)
    number = one + 47 * (two - one)
    assert round(number / 1e9, 1) == 30.5
    assert experts.active_parameters(config, number) == pytest.approx(3.3e9, rel=0.02)


def size_of(kind, config):
    """The number of a model's parameters, without making them."""
    model = nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0)))
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


@pytest.mark.exhaustive
def test_the_plain_step_trains_as_the_library_does():
    import plain_measure
    from shapes import SHAPES

    shape = dataclasses.replace(SHAPES["tiny"], num_layers=2, vocab_size=64, seq_len=8)
    options = {"model": "decoder", "clip": 1.0, "microbatches": 2, "steps": MIN_STEPS}
    found = {
        budget: plain_measure.measure(argparse.Namespace(device_budget=budget, **options), shape)
        for budget in ("plain", "least")
    }
    assert found["plain"]["num_parameters"] == found["least"]["num_parameters"]
    np.testing.assert_allclose(found["plain"]["losses"], found["least"]["losses"], rtol=1e-5)


def test_peers_are_timed_by_the_same_lines(monkeypatch):
    # Stand-ins, as PyTorch need not be there and takes long to import.
    zero = lambda: 0  # noqa: E731
    cuda = SimpleNamespace(
        reset_peak_memory_stats=zero, max_memory_allocated=zero, max_memory_reserved=zero
    )
    parts = {"build_model": None, "BUILDERS": {}, "Peer": None, "Setting": None}
    for name in ("torch_model", "torch_peers", "torch"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(cuda=cuda, **parts))
    monkeypatch.delitem(sys.modules, "torch_measure", raising=False)
    # It sets variables for PyTorch's launchers.
    monkeypatch.setattr(os, "environ", dict(os.environ))
    import torch_measure

    machine = Machine(random.Random(0), ahead=False)
    monkeypatch.setattr(
        torch_measure,
        "time_steps",
        lambda work, steps: time_steps(work, steps, clock=machine.clock),
    )
    peer = SimpleNamespace(step=machine.begin, finish=machine.drain)
    found = torch_measure.measure(peer, MIN_STEPS)  # type: ignore
    assert found["mean_seconds_per_step"] == pytest.approx(
        machine.step + machine.update + machine.dispatch
    )
    assert read_while_drained(machine.reads, MIN_STEPS) == [True] * 4 and not all(machine.reads)
    del sys.modules["torch_measure"]


# Newer releases of Transformers have another name for it, which older ones don't know.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
def test_blocks_of_a_peer_whose_inputs_the_host_keeps_give_the_same_gradients(monkeypatch):
    torch = pytest.importorskip("torch", reason="the peers are PyTorch's")
    import torch_model
    import torch_peers

    shape = dataclasses.replace(SHAPES["tiny"], batch_size=1)
    tokens = torch.arange(shape.seq_len)[None] % 7

    def gradients(built):
        model = torch_model.build_model(shape)
        setting = torch_peers.Setting(
            model=model, tokens=tokens, clip=1.0, microbatches=1, loss_tokens=16
        )
        loss = built(setting)(tokens)
        loss.backward()
        return loss.detach(), *(parameter.grad for parameter in model.parameters())

    expected, packed = gradients(torch_peers.decoder), []

    class Seen(torch.autograd.graph.save_on_cpu):
        def __init__(self, pin_memory):
            super().__init__(pin_memory)
            pack = self.pack_hook
            self.pack_hook = lambda value: packed.append(value) or pack(value)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Seen)
    found = gradients(functools.partial(torch_peers.long_decoder, tiled=False))
    assert all(map(torch.equal, found, expected))
    # Of each block nothing but its input goes through the host.
    width = (1, shape.seq_len, shape.dim)
    assert [tuple(value.shape) for value in packed] == [width] * shape.num_layers


@pytest.mark.parametrize("num_tokens", [24, 1000])
def test_the_peers_loss_in_parts_is_that_of_transformers(num_tokens):
    torch = pytest.importorskip("torch", reason="the peers are PyTorch's")
    pytest.importorskip("transformers")
    from shapes import SHAPES
    from torch_loss import Decoder
    from torch_model import build_model

    shape = dataclasses.replace(SHAPES["tiny"], num_layers=2, vocab_size=64, seq_len=16)
    model = build_model(shape).float()
    tokens = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))
    losses, gradients = [], []
    for loss in (model(input_ids=tokens, labels=tokens).loss, Decoder(model, num_tokens)(tokens)):
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert all(gradient.any() for gradient in gradients[0].values())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-8)


def test_only_one_file_reads_the_clock_around_steps():
    # What the others time is a checkpoint, a file, a copy, a process or a dispatch.
    others = {"checkpoint", "checksums", "data", "decoder_run", "disk_to_disk", "dispatch"}
    others |= {"machine"}
    folder = ROOT / "experiments" / "throughput"
    timed = {p.stem for p in folder.glob("*.py") if "perf_counter" in p.read_text("utf-8")}
    assert timed == {*others, "measure", "timing"}


# ---- where results come from


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    record.add_origin_options(parser)
    return parser.parse_args(words)


def checkout(folder: Path) -> str:
    """Makes a clean repository and returns its commit."""

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(folder), *who, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    (folder / "a").write_text("1")
    git("add", "a")
    git("commit", "-q", "-m", "first")
    return git("rev-parse", "HEAD")


def test_a_file_says_where_it_comes_from(tmp_path):
    commit = checkout(tmp_path)
    origin, other = (record.find_origin(options(), tmp_path) for _ in range(2))
    written = record.write(tmp_path / "new/b.json", {"x": 1}, origin)
    assert json.loads((tmp_path / "new/b.json").read_text()) == written
    said = written["record"]
    assert written["x"] == 1 and set(said) == {
        *("commit", "commit_from", "clean", "utc", "host", "run")
    }
    assert (said["commit"], said["commit_from"], said["clean"]) == (commit, "git", True)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", said["utc"])
    assert re.fullmatch("[0-9a-f]{16}", said["host"]) and said["host"] == record.host_id()
    assert re.fullmatch("[0-9a-f]{12}", said["run"]) and said["run"] == origin.run != other.run


def test_a_tree_that_no_commit_has_is_refused(tmp_path):
    commit = checkout(tmp_path)
    (tmp_path / "a").write_text("2")
    with refuses(SystemExit, "commit", "--unclean yes"):
        record.find_origin(options(), tmp_path)
    origin = record.find_origin(options("--unclean", "yes"), tmp_path)
    assert (origin.commit, origin.clean) == (commit, False)
    (tmp_path / "a").write_text("1")
    (tmp_path / "new.py").write_text("it may be what is measured")
    with refuses(SystemExit, "commit", "--unclean yes"):
        record.find_origin(options(), tmp_path)
    (tmp_path / "new.py").unlink()
    with refuses(SystemExit, commit):
        record.find_origin(options("--commit", COMMIT), tmp_path)


def test_a_copy_without_git_names_its_commit(tmp_path):
    with refuses(SystemExit, "--commit"):
        record.find_origin(options(), tmp_path)
    origin = record.find_origin(options("--commit", COMMIT, "--run", "x"), tmp_path)
    assert (origin.commit, origin.commit_from, origin.clean) == (COMMIT, "argument", None)
    assert origin.run == "x" and origin.options() == {"run": "x", "commit": COMMIT}
    origin = record.find_origin(options("--unclean", "yes"), tmp_path)
    assert (origin.commit, origin.commit_from, origin.clean) == (None, None, False)
    with refuses(SystemExit, 40):
        record.find_origin(options("--commit", "main"), tmp_path)


ROW = """
import argparse, json, pathlib, record
parser = argparse.ArgumentParser()
parser.add_argument("--steps"), parser.add_argument("--out", type=pathlib.Path)
record.add_origin_options(parser)
args = parser.parse_args()
figures = {"mean_seconds_per_step": 2.0, "tokens_per_step": 6, "tokens_per_second": 3.0}
record.write(args.out, figures, record.find_origin(args, args.out.parent))
"""


def test_all_rows_are_rows_of_the_tables(monkeypatch):
    monkeypatch.setattr(small_gpu, "fraction_of_device", lambda gib: 0.1)
    shape = "qwen2.5-3b-untied"
    tables = {
        "updates": updates.rows(shape),
        "batches": batches.rows(shape),
        "small_gpu": small_gpu.rows(shape, 4, 10.0, {}, compact=False),
        "large": large.rows("qwen2.5-7b-untied", 32),
    }
    names = {table: {row.name for row in rows} for table, rows in tables.items()}
    tables["plain"] = plain.rows(shape, "vit-g")
    names["plain"] = {row.name for row in tables["plain"]}
    names["peers"] = {peer.title for peer in peers.PEERS}
    for part in all_rows.PARTS:
        assert part.row is None or part.row in names[part.script], part.name
        assert (ROOT / "experiments" / "throughput" / f"{part.script}.py").exists()
        assert part.seconds < 570
    assert len({part.name for part in all_rows.PARTS}) == len(all_rows.PARTS)


def test_a_run_goes_on_where_its_last_call_ended(tmp_path, monkeypatch, capsys):
    begun: list[list[str]] = []
    now = [0.0]

    def run(words: list[str], check: bool) -> SimpleNamespace:
        begun.append(words)
        now[0] += 80
        return SimpleNamespace(returncode=int("32 layers, auto" in words))

    monkeypatch.setattr(all_rows, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(all_rows, "time", SimpleNamespace(monotonic=lambda: now[0]))
    words = ["all_rows.py", "--run", "x", "--unclean", "yes", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*words, "--parts", "updates:", "large: 32"])
    all_rows.main()  # 7 of 80 s fit into 570 s
    assert len(begun) == 7 and "large: 32 layers, auto" in capsys.readouterr().out
    with refuses(SystemExit, "large: 32 layers, auto"):
        all_rows.main()
    assert len(begun) == 10  # two that were left, and the one that fails
    assert all(words[words.index("--run") + 1] == "x" for words in begun)
    record.save(tmp_path / "updates/a.json", {"record": {"run": "x", "host": "another"}})
    with refuses(SystemExit, "run", "machine"):
        all_rows.main()


def test_rows_of_a_table_are_of_one_run_or_say_so(tmp_path, capsys):
    (tmp_path / "row.py").write_text(ROW)
    folder = ROOT / "experiments" / "throughput"
    rows = [
        common.Row(
            name=name,
            yardstick="a",
            environment={"PYTHONPATH": str(folder)},
            command=(sys.executable, str(tmp_path / "row.py")),
        )
        for name in ("a", "b")
    ]
    words = ["--unclean", "yes", "--out", str(tmp_path / "out")]
    for more in (["--run", "first"], ["--run", "second", "--resume"]):
        args = common.parser(None, "rows").parse_args([*words, *more])
        common.run_table(rows, args, [common.SECONDS, common.TOKENS])
        said = [json.loads((tmp_path / f"out/{n}.json").read_text()) for n in ("a", "b")]
        runs = [row["record"]["run"] for row in said]
        table = capsys.readouterr().out
        if more[-1] == "first":
            assert runs == ["first", "first"] and "another run" not in table
            (tmp_path / "out/b.json").unlink()
    assert runs == ["first", "second"]
    assert "| a | 2.000 | 3 | 1.000 |" in table
    assert "| b (another run) | 2.000 | 3 | 1.000 |" in table
    # The row's script lies outside Git: it takes the commit on trust, or says that there is none.
    assert said[0]["name"] == "a" and said[0]["record"]["clean"] in (None, False)
