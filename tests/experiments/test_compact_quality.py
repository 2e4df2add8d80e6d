"""The experiment on quality: its runs against plain JAX, its workers, its sums and its picture."""

import dataclasses
import json
import os
import sys
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import one_run
import optax
import pytest
import settings
import sources
import summary
import tokens
import workers
from flax import nnx
from quickstart import Decoder, loss_fn, random_batches, spread_batches
from record import Origin
from tokenizers import decoders

import megatrain_jax as mt
from inside import spec_of
from megatrain_jax._src.engine.checkpoint.contents import coding_of, entries_of
from messages import refuses, tells

ORIGIN = Origin(commit=None, commit_from=None, clean=False, run="x")
SIZES = dataclasses.replace(
    settings.TINY, steps=6, eval_every=3, loss_every=2, seq_len=16, final_batches=3
)
PACKAGES = "stdlib/site-packages"
PLACES = {"stdlib": "stdlib", "purelib": PACKAGES, "platlib": PACKAGES}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Two folders of sources, in place of the machine's."""
    rng = np.random.default_rng(0)
    for folder, count in (("stdlib", 160), ("stdlib/site-packages", 150)):
        (tmp_path / folder / "deep").mkdir(parents=True)
        for number in range(count):
            text = " ".join(f"x{n}" for n in rng.integers(0, 50, 200))
            path = tmp_path / folder / "deep" / f"{folder[-3:]}{number}.py"
            path.write_text(f"# {folder} {text}\n")
    (tmp_path / "stdlib/again.py").write_bytes((tmp_path / "stdlib/deep/lib7.py").read_bytes())
    (tmp_path / "stdlib" / "large.py").write_text("x = 1\n" * 10**5)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / PLACES[name]))
    return tmp_path


def test_whole_files_are_held_out_and_equal_ones_count_once(files, monkeypatch):
    for packages, count in ((False, 160), (True, 310)):
        train, held_out, figures = sources.read(packages)
        parts = [bytes(part) for part in (train, held_out)]
        texts = [p.read_bytes() for p in files.rglob("deep/*.py")]
        texts = [text for text in texts if packages or b"site-packages" not in text]
        assert len(texts) == count == figures["train_files"] + figures["held_out_files"]
        assert sum(map(len, parts)) == sum(map(len, texts))
        assert all((text in parts[0]) != (text in parts[1]) for text in texts)
        assert 0 < figures["held_out_files"] < count / 4
    # Where the folder lies makes no difference.
    moved = files.rename(files.with_name("moved"))
    there = {name: sysconfig.get_path(name).replace(str(files), str(moved)) for name in PLACES}
    monkeypatch.setattr(sysconfig, "get_path", there.__getitem__)
    assert sources.read(True)[2] == figures


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", ["fp32", "muon"])
def test_a_run_is_that_of_plain_jax(row, files, tmp_path):
    setting, seed = settings.SETTINGS[row], 3
    text, held_out, figures = whole = sources.read(SIZES.packages)
    found = one_run.train(setting, SIZES, seed, whole, tmp_path / "checkpoints")
    model = Decoder(SIZES.dim, SIZES.heads, SIZES.layers, jnp.float32, nnx.Rngs(seed))
    optimizer = one_run.optimizer(setting, SIZES)
    graph, params = nnx.split(model)
    state, losses = optimizer.init(params), []

    @jax.jit
    def value(params, batch):
        return loss_fn(nnx.merge(graph, params), batch)

    def held_out_loss(count):
        batches = spread_batches(held_out, SIZES.eval_batch_size, SIZES.seq_len, count)
        return np.mean([value(params, batch) for batch in batches])

    curve = {}
    batches = random_batches(text, SIZES.batch_size, SIZES.seq_len, seed)
    for step in range(1, SIZES.steps + 1):
        loss, gradients = jax.value_and_grad(value)(params, next(batches))
        updates, state = jax.jit(optimizer.update)(gradients, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(loss)
        if step % SIZES.eval_every == 0:
            curve[str(step)] = held_out_loss(SIZES.eval_batches)
    means = {str(n): np.mean(losses[n - 2 : n]) for n in (2, 4, 6)}
    for ours, expected in ((found["curve"], curve), (found["training_curve"], means)):
        assert list(ours) == list(expected)
        np.testing.assert_allclose(list(ours.values()), list(expected.values()), rtol=2e-5)
    np.testing.assert_allclose(found["held_out_loss"], held_out_loss(3), rtol=2e-5)
    assert found["text"] == figures
    assert len(found["start_seconds"]) == 1 and len(found["evaluation_seconds"]) == 2


@pytest.mark.exhaustive
def test_waves_with_wide_sums_are_one_batch_and_narrow_sums_are_rounded(files, tmp_path):
    text = sources.read(False)
    rows = ["bf16 masters, int8 state" + end for end in ("", ", 4 waves", ", 4 waves, bf16 sums")]
    runs = [one_run.train(settings.SETTINGS[r], SIZES, 0, text, tmp_path / r) for r in rows]
    # Runs side by side share one link, so nothing crosses it.
    assert [run["copied_bytes_per_step"] for run in runs] == [0, 0, 0]
    whole, wide, narrow = (run["held_out_loss"] for run in runs)
    np.testing.assert_allclose(wide, whole, rtol=1e-4)
    np.testing.assert_allclose(narrow, wide, rtol=1e-2)
    assert narrow != wide


@pytest.mark.exhaustive
def test_a_run_that_was_stopped_keeps_its_seconds(files, tmp_path, monkeypatch):
    class Stops(one_run._Watch):
        def __call__(self, trainer, record):
            super().__call__(trainer, record)
            if record["step"] == 4:
                raise KeyboardInterrupt

    def run():
        text = sources.read(False)
        return one_run.train(settings.SETTINGS["fp32"], SIZES, 0, text, tmp_path / "checkpoints")

    with monkeypatch.context() as patch:
        patch.setattr(one_run, "_Watch", Stops)
        with pytest.raises(SystemExit, match=r"step [45]\b.*\d+ ms"):
            run()
    found = run()
    assert list(found["curve"]) == ["3", "6"]
    seconds = [*found["start_seconds"], *found["evaluation_seconds"]]
    assert len(seconds) == 4 and min(*seconds, found["final_evaluation_seconds"]) > 0


def test_muon_has_the_matrices_of_blocks():
    params = nnx.state(Decoder(8, 2, 2, jnp.float32, nnx.Rngs(0)))
    chosen = one_run._matrices_of_blocks(params)
    # Where there is no number, the parameter is AdamW's.
    is_number = lambda x: isinstance(x, one_run.MuonDimensionNumbers)  # noqa: E731
    found = jax.tree_util.tree_leaves_with_path(chosen, is_leaf=is_number)
    names = {jax.tree_util.keystr(path) for path, _ in found}
    assert len(names) == 8
    assert all(any(x in name for x in ("qkv", "out", "up", "down")) for name in names)


def test_tokens_are_made_once_and_stand_for_whole_files(files, tmp_path, monkeypatch):
    sizes, folder = dataclasses.replace(SIZES, vocab=300), tmp_path / "out"
    learn, made = tokens._learn, []
    monkeypatch.setattr(tokens, "_learn", lambda *given: made.append(learn(*given)) or made[-1])
    monkeypatch.setattr(tokens, "_AT_ONCE", 7)
    arrays = tokens.read(sizes, folder)
    again = tokens.read(sizes, folder)
    (tokenizer,) = made
    assert tokenizer.get_vocab_size() == 300 and again[2] == arrays[2]
    tokenizer.decoder = decoders.ByteLevel()
    for name, array, part in zip(("train", "held_out"), arrays, sources.find(False), strict=False):
        assert isinstance(array, np.memmap) and array.dtype == np.uint16
        assert array.max() < 300 and array.size == arrays[2][f"{name}_tokens"] < sum(map(len, part))
        assert tokenizer.decode(array.tolist()) == b"".join(part).decode()
    assert arrays[2].items() > sources.count(*sources.find(False)).items()
    # Of more text than there is time for, files from all over it.
    monkeypatch.setattr(tokens, "_TRAINED_ON", arrays[2]["train_bytes"] // 3)
    fewer = tokens.read(sizes, tmp_path / "other")[2]
    assert 0.3 < fewer["train_files"] / arrays[2]["train_files"] <= 0.34
    assert fewer["held_out_files"] == arrays[2]["held_out_files"]


@pytest.mark.exhaustive
def test_the_last_row_of_a_vocabulary_codes_embeddings_and_no_norms():
    names = ("bf16 masters, int8 state", "bf16 masters, int8 state, embeddings too")
    batch = {name: np.zeros((2, 4), np.int32) for name in ("inputs", "targets")}
    coded = []
    for name in names:
        setting = settings.SETTINGS[name]
        trainer = mt.Trainer(
            Decoder(64, 2, 2, jnp.float32, nnx.Rngs(0), 512), loss_fn,
            one_run.optimizer(setting, SIZES), batch, progress=False,
            precision=mt.Precision(compute=jnp.float32, **setting.held),
        )  # fmt: skip
        coded.append(coding_of(spec_of(trainer), entries_of(spec_of(trainer))))
    usual, too = coded
    moments = [f"opt_state/1/0/{moment}" for moment in ("mu", "nu")]
    assert set(too) - set(usual) == {f"{m}/embedding/embedding/value" for m in moments}
    matrices = [f"blocks/{i}/{x}" for i in (0, 1) for x in ("qkv", "out", "up", "down")] + ["head"]
    assert set(usual) == {f"{m}/{x}/kernel/value" for m in moments for x in matrices}
    assert all(too[path] == row for path, row in usual.items())
    assert {row["bits"] for row in too.values()} == {8}


ONE_RUN = """
import argparse, json, os, signal, sys
from pathlib import Path
parser = argparse.ArgumentParser()
for name in ("row", "seed", "sizes", "run", "commit", "unclean", "out"):
    parser.add_argument("--" + name)
args = parser.parse_args()
if args.row == "int8 state":
    raise ValueError("no such state")
if args.row == "bf16 masters":
    Path(args.out + ".waits").touch()
    signal.pause()
figures = {"held_out_loss": 2.0, "median_seconds_per_step_beside_others": 0.1}
figures["fraction"] = os.environ["XLA_CLIENT_MEM_FRACTION"]
figures["gpu"] = os.environ.get("CUDA_VISIBLE_DEVICES")
Path(args.out).write_text(json.dumps({**figures, "sizes": json.loads(args.sizes)}))
"""


def test_runs_that_are_done_stay_and_others_go_on(tmp_path, monkeypatch, capsys):
    script, out = tmp_path / "one_run.py", tmp_path / "out"
    script.write_text(ONE_RUN)
    out.mkdir()
    monkeypatch.setattr(workers, "_ONE_RUN", script)
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    jobs = [("fp32", 0), ("int8 state", 0), ("muon", 0), ("fp32", 1)]
    names = [settings.file_name(*job) for job in jobs]
    found = workers.run_all(jobs, SIZES, ORIGIN, out, workers=2, seconds=0)
    assert found == {"done": [], "failed": [], "left": names}
    found = workers.run_all(jobs, SIZES, ORIGIN, out, workers=2, seconds=60)
    assert found == {"done": [names[0], *names[2:]], "failed": [names[1]], "left": []}
    said = capsys.readouterr().out
    assert tells(said, "fp32-seed-1", "2.0000", "100 ms")
    assert tells(said, "int8-state-seed-0", "ValueError: no such state")
    written = json.loads((out / names[0]).read_text())
    assert float(written["fraction"]) == pytest.approx(0.425)
    assert dataclasses.replace(settings.FULL, **written["sizes"]) == SIZES
    # Of several GPUs a process sees one.
    jobs_of_gpus = [("fp32", 2), ("fp32", 3)]
    workers.run_all(jobs_of_gpus, SIZES, ORIGIN, out, workers=1, seconds=60, gpus=2)
    texts = [(out / settings.file_name(*job)).read_text() for job in jobs_of_gpus]
    found = {json.loads(text)["gpu"] for text in texts}
    assert found == {"0", "1"} and written["gpu"] == os.environ.get("CUDA_VISIBLE_DEVICES")
    # What is done is not begun again, and what takes too long is stopped.
    (out / names[0]).write_text("{}")
    # What a process says when it is stopped is the last line of its log.
    log = out / "bf16-masters-seed-0.log"
    log.write_text("step 5: loss 1\nstopped after step 7, 100 ms a step\n")
    jobs = [("fp32", 0), ("bf16 masters", 0)]
    found = workers.run_all(jobs, SIZES, ORIGIN, out, workers=2, seconds=1)
    assert found == {"done": names[:1], "failed": [], "left": ["bf16-masters-seed-0.json"]}
    assert (out / names[0]).read_text() == "{}"
    assert tells(capsys.readouterr().out, "bf16-masters-seed-0", "step 7", "100 ms")


def made_up(name, seed, over, run="x"):
    steps = np.arange(10, 3001, 10)
    training = 1 + 4 / np.sqrt(steps) + 0.02 * np.random.default_rng(seed).normal(size=300)
    curve = {str(n): (1 + 4 / np.sqrt(n)) * over for n in range(250, 3001, 250)}
    return {
        "name": name,
        "seed": seed,
        "sizes": dataclasses.asdict(settings.FULL),
        "text": {"train_bytes": 1},
        "num_parameters": 1,
        "hardware": {},
        "versions": {},
        "host_bytes_per_parameter": 12.0,
        "held_out_loss": over * (1 + seed / 100),
        "curve": curve,
        "training_curve": dict(zip(map(str, steps), over * training, strict=True)),
        "record": {"utc": f"2026-01-0{1 + seed}", "run": run},
    }


def save(folder, *runs):
    folder.mkdir(exist_ok=True)
    for run in runs:
        (folder / settings.file_name(run["name"], run["seed"])).write_text(json.dumps(run))


@pytest.mark.exhaustive
def test_a_row_is_compared_with_its_yardstick_seed_by_seed(tmp_path, capsys):
    rng = np.random.default_rng(0)
    over = {(name, s): rng.uniform(1, 1.02) for name in settings.SETTINGS for s in range(3)}
    del over["bf16 masters", 1]  # not run yet
    runs = [made_up(*key, value) for key, value in over.items()]
    save(tmp_path / "a", *runs[::2])
    save(tmp_path / "b", *runs[1::2])
    out = tmp_path / "new" / "summary.json", tmp_path / "new" / "picture.png"
    summary.main([tmp_path / "a", tmp_path / "b"], *out)
    found = json.loads(out[0].read_text())
    assert [row["name"] for row in found["rows"]] == list(settings.SETTINGS)
    assert found["record"]["utc"] == "2026-01-03" and out[1].stat().st_size > 10**4
    for row in found["rows"]:
        seeds = [s for s in range(3) if (row["name"], s) in over]
        losses = [over[row["name"], s] * (1 + s / 100) for s in seeds]
        shown = row["held_out_loss"]
        assert list(shown["of_seeds"].values()) == pytest.approx(losses)
        assert shown["mean"] == pytest.approx(np.mean(losses))
        assert (shown["min"], shown["max"]) == pytest.approx((min(losses), max(losses)))
        yardstick = "muon" if row["name"].startswith("muon,") else "fp32"
        # With compact state, float8 is compared with the same state.
        if row["name"].startswith("float8 products, bf16"):
            yardstick = "bf16 masters, int8 state"
        if row["name"].startswith("float8 products, adafactor"):
            yardstick = "adafactor, bf16 masters"
        if row["name"].endswith("bf16 sums"):
            yardstick = "bf16 masters, int8 state, 4 waves"
        percent = [100 * (over[row["name"], s] / over[yardstick, s] - 1) for s in seeds]
        assert list(row["percent_over_yardstick"]["of_seeds"].values()) == pytest.approx(percent)
        assert list(row["records"]) == [str(s) for s in seeds]
    assert "% over fp32" not in capsys.readouterr().out.splitlines()[0]


@pytest.mark.exhaustive
def test_seeds_are_added_to_an_earlier_summary(tmp_path):
    rng = np.random.default_rng(0)
    runs = [made_up(n, s, rng.uniform(1, 1.02)) for n in settings.SETTINGS for s in range(3)]
    save(tmp_path / "all", *runs)
    save(tmp_path / "old", *(run for run in runs if run["seed"] != 1 or run["name"] == "fp32"))
    save(tmp_path / "new", *(run for run in runs if run["seed"] == 1 and run["name"] != "fp32"))
    of = {name: (tmp_path / f"{name}.json", tmp_path / f"{name}.png") for name in ("all", "old")}
    for name, files in of.items():
        summary.main([tmp_path / name], *files)
    added = tmp_path / "added.json", tmp_path / "added.png"
    summary.main([tmp_path / "new"], *added, earlier=of["old"][0])
    expected, found = (json.loads(file.read_text()) for file in (of["all"][0], added[0]))
    assert found["rows"] == expected["rows"] and not added[1].exists()
    with refuses(SystemExit, "'fp32'", 0):
        summary.main([tmp_path / "all"], *added, earlier=of["old"][0])
    other = {**json.loads(of["old"][0].read_text()), "text": {"train_bytes": 2}}
    of["old"][0].write_text(json.dumps(other))
    with refuses(SystemExit, "text"):
        summary.main([tmp_path / "new"], *added, earlier=of["old"][0])


def test_a_row_without_its_yardstick_has_its_losses(tmp_path):
    save(tmp_path / "a", made_up("muon, bf16 masters, int8 state", 0, 1.0))
    (row,) = summary.summarise(summary.read([tmp_path / "a"]))["rows"]
    assert row["percent_over_yardstick"] is None and row["held_out_loss"]["mean"] == 1.0


def test_what_is_not_alike_is_not_mixed(tmp_path):
    save(tmp_path / "a", made_up("fp32", 0, 1.0))
    sizes = settings.FULL
    workers.check_folder(tmp_path / "a", "x", sizes)
    for run, others in (("y", sizes), ("x", dataclasses.replace(sizes, steps=5))):
        with refuses(SystemExit, "run", "sizes"):
            workers.check_folder(tmp_path / "a", run, others)
    save(tmp_path / "b", made_up("fp32", 0, 1.0))
    with refuses(SystemExit, "'fp32'", "run"):
        summary.read([tmp_path / "a", tmp_path / "b"])
    save(tmp_path / "c", {**made_up("muon", 0, 1.0), "text": {"train_bytes": 2}})
    small = made_up("fp32", 0, 1.0)
    del small["sizes"]["vocab"]  # as files had it before there was another
    save(tmp_path / "old", small)
    workers.check_folder(tmp_path / "old", "x", sizes)
    with refuses(SystemExit, "text"):
        summary.read([tmp_path / "a", tmp_path / "c"])
    with refuses(SystemExit, "JSON"):
        summary.read([tmp_path / "none"])


@pytest.mark.by_default("256--byte")
@pytest.mark.parametrize(
    ("vocab", "name", "unit"), [(256, "", "byte"), (16384, "_16384_tokens", "token")]
)
def test_a_vocabulary_has_files_and_a_unit_of_its_own(tmp_path, monkeypatch, vocab, name, unit):
    monkeypatch.setattr(summary, "_RESULTS", tmp_path / "results")
    run = made_up("fp32", 0, 1.0)
    run["sizes"]["vocab"] = vocab
    save(tmp_path / "a", run)
    summary.main([tmp_path / "a"], None, None)
    assert (tmp_path / f"results/pictures/compact_quality{name}.png").exists()
    found = json.loads((tmp_path / f"results/h200/compact_quality{name}.json").read_text())
    assert unit in found["loss_unit"]
    axes = summary.draw(summary.read([tmp_path / "a"])).axes
    assert unit in axes[1].get_title()


def test_every_row_has_a_name_of_its_own_and_a_yardstick():
    names = {settings.file_name(name, 0) for name in settings.SETTINGS}
    assert len(names) == len(settings.SETTINGS)
    assert all(s.yardstick in settings.SETTINGS for s in settings.SETTINGS.values())
    assert settings.FULL.steps >= 3000
    for sizes in (settings.FULL, settings.TINY):
        assert sizes.steps % sizes.eval_every == 0 == sizes.steps % sizes.loss_every


@pytest.mark.exhaustive
@pytest.mark.parametrize(("vocab", "unit"), [(256, "nats per byte"), (300, "nats per token")])
def test_the_script_runs_from_end_to_end(tmp_path, monkeypatch, files, vocab, unit):
    """One run in this process, which has imported all that it needs."""
    sizes = dataclasses.replace(SIZES, vocab=vocab)
    path = tmp_path / "out" / "bf16-masters-seed-1.json"
    words = ["--row", "bf16 masters", "--seed", "1", "--unclean", "yes", "--out", str(path)]
    words += ["--sizes", json.dumps(dataclasses.asdict(sizes)), "--run", "x"]
    monkeypatch.setattr(sys, "argv", ["one_run.py", *words])
    one_run.main()
    result = json.loads(path.read_text())
    assert result["held"] == {"master": "bfloat16"} and result["record"]["run"] == "x"
    assert result["sizes"] == dataclasses.asdict(sizes) and result["loss_unit"] == unit
    rows = 2 * vocab * sizes.dim
    assert 0 < result["num_parameters"] - rows == 12 * 2 * sizes.dim**2 + 5 * sizes.dim
    assert {p.name for p in path.parent.iterdir()} - {"tokens-300-stdlib"} == {path.name}
    summary.main([path.parent], tmp_path / "s.json", tmp_path / "p.png")
