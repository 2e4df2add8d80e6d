"""Answers with labels, each with a mismatched one, compared with Transformers and with TRL."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chats import tokenizer, write
from megatrain_jax import data
from messages import refuses, warns
from preference_pairs import FORMS, answer, by_transformers, found, pairs


def load(source: Any, **options: Any) -> data.Dataset:
    options = {"length": 256, "batch_size": 3, "progress": False, **options}
    return data.unpaired(source, tokenizer(), **options)


def labels(batches: Any) -> list[bool]:
    return [label for b in batches for label in b["desirable"][b["pairs"]].tolist()]


LABELLED = {
    "texts": lambda p, said, label: {"prompt": p, "completion": said, "label": label},
    "messages": lambda p, said, label: {"prompt": p, "completion": [answer(said)], "label": label},
    "whole": lambda p, said, label: {"messages": [*p, answer(said)], "label": label},
    "LLaMA-Factory": lambda p, said, label: {"messages": [*p, answer(said)], "kto_tag": label},
}


@pytest.mark.parametrize("form", LABELLED)
def test_answers_and_mismatched_ones_are_those_of_transformers(tmp_path: Path, form: str):
    given = [(prompt, said, i % 3 != 0) for i, (prompt, said, _) in enumerate(pairs(20))]
    rows = [LABELLED[form](*one) for one in given]
    dataset = load(write(tmp_path / "a.jsonl", rows))
    expected = Counter(
        (by_transformers(prompt, said), by_transformers(prompt, given[i - 1][1]), label)
        for i, (prompt, said, label) in enumerate(given)
    )
    batches = list(dataset)
    ours = Counter(
        (*pair, label) for pair, label in zip(found(batches), labels(batches), strict=True)
    )
    assert ours == expected
    for batch in batches:
        assert (
            batch["desirable"].dtype == np.bool_ and not batch["desirable"][~batch["pairs"]].any()
        )
        assert batch["desirable_per_row"].sum() == pytest.approx(batch["desirable"].sum())
        assert batch["pairs_per_row"].sum() == pytest.approx(batch["pairs"].sum())
    name = "kto_tag" if form == "LLaMA-Factory" else "label"
    flipped = [row | {name: not row[name]} for row in rows]
    assert load(flipped).fingerprint != dataset.fingerprint


def test_pairs_are_two_labelled_answers():
    given = pairs(6)
    dataset = load([FORMS["texts"](*one) for one in given])
    assert dataset.summary.num_rows == dataset.num_documents == 12
    batches = list(dataset)
    ours = Counter(
        (*pair, label) for pair, label in zip(found(batches), labels(batches), strict=True)
    )
    assert ours == Counter(
        (by_transformers(one[0], one[side]), by_transformers(one[0], given[i - 1][side]), side == 1)
        for i, one in enumerate(given)
        for side in (1, 2)
    )


@pytest.mark.parametrize(("label", "kind"), [(True, "desirable"), (False, "not desirable")])
def test_labels_that_are_all_alike_give_a_warning(label: bool, kind: str):
    rows = [LABELLED["texts"](prompt, said, label) for prompt, said, _ in pairs(4)]
    with warns(UserWarning, 4, kind):
        load(rows)


def test_labels_of_csv_files_are_read(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text("prompt,completion,label\nthe cat,sat,True\na mat,rain,false\n")
    assert Counter(labels(load(path))) == {True: 1, False: 1}


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no label": ({"prompt": "a", "completion": "b"}, "no `label`.* `chosen` .*`rejected`"),
    "half a pair": ({"prompt": "a", "chosen": "b"}, "no `label`.* `chosen` .*`rejected`"),
    "a number": (
        {"prompt": "a", "completion": "b", "label": 2},
        "`label` .*2",
    ),
    "no answer": ({"prompt": "a", "label": True}, "prompt .*`completion`"),
    "a dialogue": (
        {
            "prompt": [{"role": "user", "content": "a"}],
            "completion": [answer("b"), {"role": "user", "content": "c"}, answer("d")],
            "label": True,
        },
        "`completion` .*user",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_row_is_named(fault: str):
    row, message = FAULTS[fault]
    good = {"prompt": "a", "completion": "b", "label": True}
    with pytest.raises(data.DataError, match=f"`source`, row 2: .*{message}"):
        load([good, row, good])
    assert load([good, row, good | {"label": False}], invalid="drop").num_documents == 2


@pytest.mark.parametrize("is_pair", [True, False])
def test_a_single_row_has_no_mismatched_answer_and_is_refused(is_pair: bool):
    """Its own answer would take its place, and the baseline would be that of no other text."""
    (given,) = pairs(1)
    row = FORMS["texts"](*given) if is_pair else LABELLED["texts"](given[0], given[1], True)
    with refuses(data.DataError, "`source`, row 1:", "only", "two"):
        load([row])
    with refuses(data.DataError, "nothing", "only"):
        load([row], invalid="drop")


def test_datasets_of_different_kinds_are_not_mixed():
    good = {"prompt": "a", "completion": "b", "label": True}
    labelled = load([good, {**good, "label": False}])
    preferences = data.preferences(
        [FORMS["texts"](*one) for one in pairs(2)],
        tokenizer(),
        length=256,
        batch_size=3,
        progress=False,
    )
    with refuses(ValueError, "preferences", "labelled"):
        data.mix([labelled, preferences])
