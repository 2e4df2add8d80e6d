"""Packed batches, compared with documents that are tokenised and cut apart naively."""

import inspect
import json
import pickle
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from chats import CHATML, assert_same_batches, conversations, openai, tokenizer, write
from megatrain_jax import data, fit
from megatrain_jax._src.engine.options.precision import Precision
from megatrain_jax._src.lm.data.batches import draw_epoch, pack
from megatrain_jax._src.lm.data.corpus import Corpus, CorpusBuilder
from megatrain_jax._src.lm.data.report import Report, RowOrigin
from messages import refuses, tells

LENGTH = 256
Batches = Iterable[dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def chats_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [openai(messages) for messages in conversations(60)]
    return write(tmp_path_factory.mktemp("data") / "chats.jsonl", rows)


def load(path: Any, **options: Any) -> data.Dataset:
    options = {"length": LENGTH, "batch_size": 4, "progress": False, **options}
    return data.chat(path, tokenizer(), **options)


def rendered(messages: list[dict[str, str]]) -> tuple[int, ...]:
    made = tokenizer().apply_chat_template(messages, chat_template=CHATML, return_dict=False)
    return tuple(made)  # type: ignore[arg-type]


def differ(ours: Batches, theirs: Batches) -> bool:
    pairs = zip(ours, theirs, strict=False)
    return any(not np.array_equal(one["tokens"], other["tokens"]) for one, other in pairs)


def documents(batches: Batches) -> list[tuple[int, ...]]:
    """The documents of batches, one after the other; each row is checked entry by entry."""
    found = []
    for batch in batches:
        for row in range(len(batch["tokens"])):
            line = {k: v[row].tolist() for k, v in batch.items() if k != "learned_per_row"}
            segments, at = line["segments"], 0
            number = 1
            while at < len(segments) and segments[at]:
                end = at
                while end < len(segments) and segments[end] == number:
                    end += 1
                assert end > at
                document = line["tokens"][at:end]
                assert line["labels"][at:end] == [*document[1:], 0]
                assert line["positions"][at:end] == list(range(end - at))
                assert not line["mask"][end - 1]
                found.append(tuple(document))
                number, at = number + 1, end
            for name in line:
                assert not any(line[name][at:]), name
    return found


# Packing


@pytest.mark.parametrize("seed", range(5))
def test_packing_places_every_piece_once_and_overfills_no_row(seed: int):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 65, rng.integers(1, 300)).astype(np.int32)
    packing = pack(lengths, 64)
    for epoch in range(2):
        drawn = draw_epoch(packing, lengths, seed, epoch)
        rows = [drawn[row] for row in range(packing.num_rows)]
        assert sorted(np.concatenate(rows)) == list(range(len(lengths)))
        sizes = [int(lengths[row].sum()) for row in rows]
        assert 0 < min(sizes) and max(sizes) <= 64
        # Best fit never opens a row that it does not need.
        assert sum(2 * size <= 64 for size in sizes) <= 1


def test_packing_fits_as_well_as_the_naive_best_fit():
    lengths = np.random.default_rng(0).integers(1, 100, 500).astype(np.int32)
    rooms: list[int] = []
    for size in sorted(lengths.tolist(), reverse=True):
        fitting = [room for room in rooms if room >= size]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else 128) - size)
    packing = pack(lengths, 128)
    assert packing.num_rows == len(rooms)
    drawn = draw_epoch(packing, lengths, 0, 0)
    sizes = [128 - int(lengths[drawn[row]].sum()) for row in range(packing.num_rows)]
    assert sorted(sizes) == sorted(rooms)


def test_without_a_seed_rows_come_in_the_order_of_their_first_units():
    lengths = np.random.default_rng(0).integers(1, 65, 100).astype(np.int32)
    packing = pack(lengths, 64)
    drawn = draw_epoch(packing, lengths, None, 0)
    rows = [drawn[row] for row in range(packing.num_rows)]
    firsts = [row.min() for row in rows]
    assert firsts == sorted(firsts) != [row[0] for row in rows]


# Batches


@pytest.mark.parametrize("seed", range(3))
def test_every_document_is_there_once_per_epoch_and_whole(tmp_path: Path, seed: int):
    messages = conversations(50, seed=seed)
    path = write(tmp_path / "a.jsonl", [openai(one) for one in messages])
    batches = list(load(path, seed=seed, batch_size=3))
    assert Counter(documents(batches)) == Counter(map(rendered, messages))
    assert {batch["tokens"].shape for batch in batches} == {(3, LENGTH)}


def test_epochs_follow_each_other_without_a_gap(chats_file: Path):
    dataset = load(chats_file, epochs=3, batch_size=5)
    found = documents(dataset)
    once = Counter(map(rendered, conversations(60)))
    assert Counter(found) == Counter({document: 3 * n for document, n in once.items()})
    # An epoch is over when its rows are, in the middle of a batch or not.
    assert Counter(found[:60]) == once
    assert len(dataset) == -(-3 * dataset.num_rows // 5)
    endless = load(chats_file, epochs=None, batch_size=5)
    assert_same_batches(islice(dataset, len(dataset) - 1), islice(endless, len(dataset) - 1))
    with pytest.raises(TypeError, match="`epochs`=None"):
        len(endless)


def test_dtypes_shapes_and_counts(chats_file: Path):
    dataset = load(chats_file)
    first = next(iter(dataset))
    assert {name: str(value.dtype) for name, value in first.items()} == {
        "tokens": "int32",
        "labels": "int32",
        "mask": "bool",
        "segments": "int32",
        "positions": "int32",
        "learned_per_row": "float32",
    }
    batches = list(dataset)
    assert sum(batch["mask"].sum() for batch in batches) == dataset.summary.num_learned
    for batch in batches:
        assert batch["learned_per_row"].sum() == pytest.approx(batch["mask"].sum())
    assert sum((batch["segments"] > 0).sum() for batch in batches) == dataset.num_tokens
    assert dataset.num_tokens == dataset.summary.num_tokens
    assert tells(str(dataset), dataset.num_rows, LENGTH)


def test_no_row_of_the_last_batch_is_empty_if_there_are_documents_for_it(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", [openai(one) for one in conversations(6, turns=1, words=2)])
    (batch,) = load(path, length=2048, batch_size=4)
    assert batch["mask"].any(axis=1).all()
    assert len(documents([batch])) == 6
    (batch,) = load(path, length=2048, batch_size=8)
    assert batch["mask"].any(axis=1).tolist() == [True] * 6 + [False] * 2


def test_shuffle_is_drawn_by_the_seed_anew_every_epoch(chats_file: Path):
    dataset = load(chats_file, epochs=2, batch_size=1, seed=3)
    batches = list(dataset)
    assert_same_batches(batches, load(chats_file, epochs=2, batch_size=1, seed=3))
    half = dataset.num_rows
    assert differ(batches[:half], batches[half:])
    assert differ(batches, load(chats_file, epochs=2, batch_size=1, seed=4))


def test_without_shuffle_documents_keep_their_order_where_they_can(tmp_path: Path):
    messages = conversations(30, turns=1)
    path = write(tmp_path / "a.jsonl", [openai(one) for one in messages])
    longest = max(len(rendered(one)) for one in messages)
    shortest = min(len(rendered(one)) for one in messages)
    assert longest < 2 * shortest
    dataset = load(path, shuffle=False, length=longest, batch_size=1, epochs=2)
    assert documents(dataset) == [rendered(one) for one in messages] * 2


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_give_the_same_batches(chats_file: Path, workers: int):
    assert_same_batches(load(chats_file, epochs=3), load(chats_file, epochs=3, workers=workers))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_each_process_takes_its_rows_of_the_whole_batch(count: int, monkeypatch, chats_file: Path):
    dataset = load(chats_file)
    whole = list(dataset)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: count)
    shares = []
    for process in range(count):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        shares.append(list(dataset))
    joined = [
        {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        for parts in zip(*shares, strict=True)
    ]
    # Counts, too, are those of the whole batch.
    assert_same_batches(joined, whole)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    with pytest.raises(ValueError, match="`batch_size`=4 .* a multiple"):
        next(iter(dataset))


# Resuming


@pytest.mark.parametrize("workers", [0, 2])
def test_resumes_at_every_batch(chats_file: Path, workers: int):
    dataset = load(chats_file, epochs=2, workers=workers)
    whole = list(dataset)
    iterator = iter(dataset)
    for count in range(len(whole) + 1):
        state = json.loads(json.dumps(iterator.get_state()))
        # In another process: nothing but the files and the state.
        resumed = iter(load(chats_file, epochs=2, workers=workers)) if count < 2 else iter(dataset)
        resumed.set_state(state)
        assert_same_batches(resumed, whole[count:])
        next(iterator, None)


def test_a_state_of_other_batches_is_refused(chats_file: Path):
    state = iter(load(chats_file)).get_state()
    others = {"seed": 1, "length": 512, "batch_size": 2, "train_on": "all", "shuffle": False}
    for other in ({name: value} for name, value in others.items()):
        with refuses(ValueError, "state", "different"):
            iter(load(chats_file, **other)).set_state(state)
    iter(load(chats_file, epochs=None, workers=2)).set_state(state)
    # Each side of each split is other data than the whole and than all other sides.
    dataset = load(chats_file)
    (train, held_out), (drawn_anew, _), (smaller, _) = (
        dataset.split(0.2), dataset.split(0.2, seed=1), dataset.split(0.5),
    )  # fmt: skip
    state = iter(train).get_state()
    for side in (dataset, held_out, drawn_anew, smaller):
        with refuses(ValueError, "`split`"):
            iter(side).set_state(state)
    iter(load(chats_file).split(0.2)[0]).set_state(state)


def test_its_grain_dataset_can_go_on_in_grain(chats_file: Path):
    dataset = load(chats_file)
    counts = dataset.grain().map(lambda batch: batch["mask"].sum())
    assert sum(counts) == dataset.summary.num_learned
    assert_same_batches(pickle.loads(pickle.dumps(dataset)), dataset)


# Held-out documents


@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.5, 0.99])
def test_a_split_is_disjoint_and_complete(chats_file: Path, fraction: float):
    dataset = load(chats_file)
    train, held_out = dataset.split(fraction)
    ours, theirs = documents(train), documents(held_out)
    assert not set(ours) & set(theirs)
    assert Counter(ours + theirs) == Counter(documents(dataset))
    assert len(theirs) == held_out.num_documents == min(max(1, round(60 * fraction)), 59)
    assert Counter(documents(dataset.split(fraction)[1])) == Counter(theirs)
    if fraction == 0.2:
        assert Counter(documents(dataset.split(fraction, seed=1)[1])) != Counter(theirs)


def test_what_is_held_out_is_there_once_in_the_order_that_it_was_read_in(tmp_path: Path):
    messages = conversations(30, turns=1)
    path = write(tmp_path / "a.jsonl", [openai(one) for one in messages])
    read = [rendered(one) for one in messages]
    # Rows of one document each, which keep the documents' order.
    dataset = load(path, length=max(map(len, read)), batch_size=1, epochs=3)
    found = documents(dataset.split(0.5)[1])
    assert len(found) == 15 and found == [one for one in read if one in set(found)]


def test_a_split_keeps_equal_documents_and_pieces_together(tmp_path: Path):
    rows = [openai(messages) for messages in conversations(20)]
    path = write(tmp_path / "a.jsonl", rows + rows)
    dataset = load(path, length=64, too_long="split", train_on="all")
    train, held_out = dataset.split(0.3)
    assert held_out.num_documents == 12 and train.num_documents == 28
    tokens = [
        np.concatenate([b["tokens"][b["segments"] > 0] for b in side])
        for side in dataset.split(0.3)
    ]
    assert sum(map(len, tokens)) == dataset.num_tokens


def test_documents_that_only_begin_alike_are_split(tmp_path: Path):
    question, answer = conversations(1, turns=1)[0]
    long = {**question, "content": " ".join([question["content"]] * 30)}
    answers = [{**answer, "content": " ".join([answer["content"]] * n)} for n in range(1, 11)]
    path = write(tmp_path / "a.jsonl", [openai([long, one]) for one in answers])
    dataset = load(path, length=64, too_long="split", train_on="all")
    assert [side.num_documents for side in dataset.split(0.5)] == [5, 5]


@pytest.mark.parametrize(("fraction", "number"), [(0.01, 1), (0.3, 3), (0.99, 9)])
def test_the_end_of_a_single_document_is_held_out(tmp_path: Path, fraction: float, number: int):
    turns = [one for part in conversations(9) for one in part]
    messages = [one for one in turns if one["role"] != "system"]
    path = write(tmp_path / "a.jsonl", [openai(messages)])
    length = -(-load(path, length=4096, train_on="all").num_tokens // 10)
    dataset = load(path, length=length, batch_size=1, too_long="split", train_on="all")

    def tokens(side: Any) -> list[int]:
        return np.concatenate([b["tokens"][b["segments"] > 0] for b in side]).tolist()

    unshuffled = load(
        path, length=length, batch_size=1, too_long="split", train_on="all", shuffle=False
    )
    whole, (train, held_out) = tokens(unshuffled), dataset.split(fraction)
    assert (train.num_rows, held_out.num_rows) == (10 - number, number)
    assert tokens(held_out) == whole[-held_out.num_tokens :]
    assert sorted(tokens(train) + tokens(held_out)) == sorted(whole)


def test_a_split_that_makes_no_sense_is_named(tmp_path: Path):
    rows = [openai(conversations(1)[0])] * 2
    dataset = load(write(tmp_path / "a.jsonl", rows))
    with refuses(ValueError, "two", "documents"):
        dataset.split(0.5)
    with refuses(ValueError, "`fraction`", 1):
        dataset.split(1)


# Documents that are too long


def test_cut_keeps_the_beginning_and_drop_drops(tmp_path: Path):
    messages = conversations(40)
    path = write(tmp_path / "a.jsonl", [openai(one) for one in messages])
    full = list(map(rendered, messages))
    short = [document for document in full if len(document) <= 100]
    assert 0 < len(short) < len(full)

    dropped = load(path, length=100, too_long="drop")
    assert Counter(documents(dropped)) == Counter(short)
    ((why, num_long),) = dropped.summary.left_out.items()
    assert tells(why, "`length`=100") and num_long == len(full) - len(short)
    assert dropped.summary.num_rows == dropped.summary.num_documents + len(full) - len(short)

    cut = load(path, length=100, too_long="cut", train_on="all")
    assert Counter(documents(cut)) == Counter(document[:100] for document in full)
    assert cut.summary.num_cut == len(full) - len(short)
    assert cut.summary.longest == max(map(len, full))
    assert tells(str(cut.summary), "cut")


@pytest.mark.parametrize("invalid", ["error", "drop"])
def test_a_conversation_that_is_cut_before_its_answer_is_left_out(invalid: str):
    rows = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": "cat"}]}
        for asked in ("the", "the cat " * 50)
    ]
    kept = load(rows, length=64, too_long="cut", invalid=invalid)
    assert documents(kept) == documents(load(rows[:1], length=64))
    ((why, count),) = kept.summary.left_out.items()
    assert tells(why, "`length`") and count == 1 and kept.summary.num_cut == 0


def test_split_learns_every_token_but_the_first(tmp_path: Path):
    messages = conversations(10)
    path = write(tmp_path / "a.jsonl", [openai(one) for one in messages])
    full = list(map(rendered, messages))
    dataset = load(path, length=50, too_long="split", train_on="all", shuffle=False, batch_size=1)
    learned, pieces = Counter(), Counter()
    for batch in dataset:
        learned.update(batch["labels"][batch["mask"]].tolist())
        line = {name: values[0] for name, values in batch.items()}
        for number in range(1, line["segments"].max() + 1):
            here = line["segments"] == number
            pieces[tuple(line["tokens"][here].tolist())] += 1
            assert line["labels"][here][:-1].tolist() == line["tokens"][here][1:].tolist()
    assert learned == Counter(token for document in full for token in document[1:])
    # A last piece of one token has nothing to learn: the piece before has learned it.
    expected = [document[at : at + 50] for document in full for at in range(0, len(document), 50)]
    kept = [piece for piece in expected if len(piece) > 1]
    assert pieces == Counter(kept)
    assert dataset.summary.num_pieces_left_out == len(expected) - len(kept)


def built(learned: np.ndarray, border: int | None = None) -> Corpus:
    """One document of these labels, split into pieces of four; of two parts with a border."""
    count = 1 if border is None else 2
    builder = CorpusBuilder(4, "split", Report(), lambda tokens: None, count)
    for part in np.split(np.arange(len(learned)), [] if border is None else [border]):
        if part[:1] == border:
            builder.end_part()
        builder.extend(part.astype(np.int32), learned[part])
    assert builder.end(RowOrigin("a.txt"))
    return builder.finish()


def test_split_keeps_the_pieces_that_have_a_label_of_their_own():
    learned = np.random.default_rng(0).random(200) < 0.2
    # The label of a piece's last token is the next piece's first token.
    kept = [start for start in range(0, 200, 4) if learned[start + 1 : start + 5].any()]
    assert built(learned).starts.tolist() == kept != list(range(0, 200, 4))


def test_the_border_of_a_pair_belongs_to_its_data():
    learned = np.array([False, True, False, False, True])
    assert built(learned, 2).digest != built(learned, 3).digest


def test_too_long_is_an_error_by_default_that_names_all(tmp_path: Path):
    messages = conversations(40)
    path = write(tmp_path / "a.jsonl", [openai(one) for one in messages])
    sizes = [len(rendered(one)) for one in messages]
    count, first = (
        sum(size > 100 for size in sizes),
        next(i for i, s in enumerate(sizes) if s > 100),
    )
    with pytest.raises(data.DataError) as caught:
        load(path, length=100)
    message = str(caught.value)
    assert tells(message, count, 40, f"{path}, line {first + 1}:", "`length`=100", sizes[first])
    assert tells(message, count - 5, max(sizes), 'too_long="cut"')


# With fit


def language_loss(params: Any, batch: dict[str, jax.Array]) -> Any:
    hidden = params["embedding"][batch["tokens"]] + params["positions"][batch["positions"]]
    logits = hidden @ params["head"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    loss = (losses * batch["mask"]).sum() / batch["mask"].sum()
    # Tells batches apart, whatever the order of their tokens.
    weights = jnp.arange(batch["tokens"].size, dtype=jnp.float32).reshape(batch["tokens"].shape)
    return loss, {"batch": jnp.sum(batch["tokens"] * weights)}


@pytest.mark.exhaustive
def test_fit_resumes_on_the_same_batches(chats_file: Path, tmp_path: Path):
    rng = np.random.default_rng(0)
    shapes = {"embedding": (400, 8), "positions": (LENGTH, 8), "head": (8, 400)}
    params = {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}

    def run(steps: int, **options: Any) -> list[dict[str, float]]:
        train, held_out = load(chats_file, epochs=None, workers=1).split(0.1)
        result = fit(
            params,
            language_loss,
            train,
            optax.adam(1e-2),
            steps=steps,
            microbatches=2,
            precision=Precision(compute=jnp.float32),
            eval_data=held_out,
            progress=False,
            **options,
        )
        return [{k: r[k] for k in ("step", "loss", "batch")} for r in result.history]

    straight = run(9)
    assert len({record["batch"] for record in straight}) == 9
    assert straight[-1]["loss"] < straight[0]["loss"]
    folder = {"checkpoint_dir": tmp_path / "run", "checkpoint_every": 2}
    first = run(4, **folder)
    second = run(9, **folder)
    assert first == straight[:4]
    assert second[-5:] == straight[4:]


OTHER_DEFAULTS = {("text", "too_long"): "split", ("image_chat", "workers"): 2}


@pytest.mark.parametrize(
    "loader",
    [data.preferences, data.unpaired, data.text, data.distillation, data.image_chat, data.prompts],
)
def test_options_that_loaders_share_have_the_defaults_of_chat(loader: Any):
    expected = inspect.signature(data.chat).parameters
    for name, parameter in inspect.signature(loader).parameters.items():
        if name in expected:
            default = OTHER_DEFAULTS.get((loader.__name__, name), expected[name].default)
            assert (name, parameter.default) == (name, default)
