"""Decoders whose state rests on a disk: trained, resumed, exported and generated with."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import megatrain_jax as mt
from disks import counted_reads, state_on_disk
from filled_models import tensors_of
from inside import spec_of, store_of
from megatrain_jax import models
from megatrain_jax._src.lm.models import tensors
from runs import check_each_continues_the_other, check_same_bits, train
from tiny_sizes import TINY

SGD = optax.sgd(0.1)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 32, "norm_topk_prob": True}
DENSE_CASE = pytest.param({}, id="dense", marks=pytest.mark.exhaustive)
PRECISIONS = {
    "exact": mt.Precision(compute="float32"),
    "nf4": mt.Precision(compute="float32", frozen="nf4"),
    "float8": mt.Precision(compute="float32", products={"*": "float8"}),
    "compact": mt.Precision.compact(compute="float32"),
}


def batch(seed: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(seed).integers(0, 40, (2, 9)).astype(np.int32)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def make(folder: Path, optimizer: Any, precision: str, adapters: bool, **sizes: Any) -> mt.Trainer:
    config = models.DecoderConfig.from_hf(TINY | {"vocab_size": 40, "hidden_size": 32} | sizes)

    def build() -> models.Decoder:
        model = models.Decoder(config, rngs=nnx.Rngs(0))
        if not adapters:
            return model
        found: Any = models.lora(model, targets=r"layers/\d+/self_attn", rank=2).model
        return found

    return mt.Trainer(
        build,
        models.next_token_loss,
        optimizer,
        batch(0),
        precision=PRECISIONS[precision],
        trainable=".*lora_" if adapters else None,
        device_budget="minimum",
        disk_dir=folder,
        progress=False,
    )


@pytest.mark.exhaustive
@pytest.mark.usefixtures("started_once_in_test")
@pytest.mark.parametrize(
    ("precision", "adapters"),
    [("exact", True), ("nf4", True), ("float8", True), ("float8", False), ("compact", False)],
)
def test_each_form_of_state_trains_and_resumes_from_a_disk(
    precision: str, adapters: bool, tmp_path: Path
):
    given = tmp_path / "disk", CLIPPED, precision, adapters
    memory = make(*given)
    with state_on_disk():
        disk = make(*given)
    on_disk = spec_of(disk).on_disk
    assert on_disk and not spec_of(memory).on_disk
    frozen = {key for key in on_disk if key.owner in spec_of(disk).grouping.frozen}
    assert bool(frozen) == adapters
    runs = [train(run, [batch(0), batch(1)], gradients=False) for run in (memory, disk)]
    assert runs[0].losses == runs[1].losses and runs[0].losses[0] != runs[0].losses[1]
    check_same_bits((disk.params, disk.opt_state), (memory.params, memory.opt_state))
    check_each_continues_the_other(memory, disk, batch(2), tmp_path)
    assert disk.evaluate([batch(3)]) == memory.evaluate([batch(3)])


@pytest.fixture(scope="module", params=[DENSE_CASE, pytest.param(EXPERTS, id="experts")])
def disk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> mt.Trainer:
    """A trainer of adapters; all of its state is on a disk."""
    with state_on_disk():
        return make(tmp_path_factory.mktemp("disk"), SGD, "exact", True, **request.param)


@pytest.mark.parametrize("save", [models.save_pretrained, models.save_lora])
def test_a_decoder_on_a_disk_is_exported_tensor_by_tensor(
    disk: mt.Trainer, save: Any, tmp_path: Path
):
    arrays = jax.tree.leaves(disk.params)
    largest, num_bytes = max(x.nbytes for x in arrays), sum(x.nbytes for x in arrays)
    with counted_reads() as reads:
        found = tensors_of(save(disk, tmp_path / "of disk"))
    expected = tensors_of(save(disk.model, tmp_path / "of memory"))
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    if save is models.save_pretrained:
        # Two stacks of experts, which alternate in a file, or a matrix with its two adapters.
        assert num_bytes <= reads.total < 2 * num_bytes
        assert reads.most < 4 * largest < num_bytes
    else:
        assert 0 < reads.total < num_bytes / 4, "the base is not read"


@pytest.mark.exhaustive
def test_texts_are_generated_from_a_disk(disk: mt.Trainer):
    disk.read(disk.step(batch(0)))
    found, expected = (
        models.generate(source, [[1, 2, 3]], max_tokens=4)[0] for source in (disk, disk.model)
    )
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_allclose(found.log_probs, expected.log_probs, rtol=1e-5)
    disk.read(disk.step(batch(1)))  # whose reads ahead begin anew


def test_processes_read_together_what_the_first_one_writes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """In one order, each array once, also if the writing fails: others wait for each array."""
    trainer = make(tmp_path / "disk", SGD, "exact", True)
    expected = tensors_of(models.save_pretrained(trainer, tmp_path / "alone"))
    store, gathered = store_of(trainer), []
    placement = type(store.placement)
    monkeypatch.setattr(placement, "num_processes", 2)
    monkeypatch.setattr(placement, "readable", lambda _, x: gathered.append(id(x)) or x)
    processes = SimpleNamespace(count=2, is_first=True)
    monkeypatch.setattr(mt.Trainer, "processes", processes)
    monkeypatch.setattr(mt.distributed, "in_first", lambda action, _: action())

    def order_of(folder: str) -> list[int]:
        gathered.clear()
        store._copied = ()
        models.save_pretrained(trainer, tmp_path / folder, max_shard_bytes=1)
        return list(gathered)

    first = order_of("first")
    assert len(set(first)) == len(first) > 2
    found = tensors_of(tmp_path / "first")
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    write, files = tensors._write_file, []

    def full(path: Path, *args: Any) -> None:
        files.append(path)
        if len(files) == 3:
            raise OSError("no space left")
        write(path, *args)

    monkeypatch.setattr(tensors, "_write_file", full)
    with pytest.raises(OSError, match="no space left"):
        order_of("full")
    assert gathered == first
    processes.is_first = False
    monkeypatch.setattr(mt.distributed, "in_first", lambda action, _: None)
    assert order_of("other") == first and not (tmp_path / "other").exists()
    # Processes that each hold all state read nothing together, nor does one alone.
    for number, copies in ((2, 2), (1, 1)):
        processes.count = number
        monkeypatch.setattr(mt.Trainer, "plan", SimpleNamespace(num_copies=copies))
        assert order_of(f"{number} with {copies}") == []
