"""States of data iterators in checkpoints: all of Python's and NumPy's types, others refused."""

import copy
import enum
import functools
import itertools
import json
import random
from collections import Counter, OrderedDict
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import megatrain_jax as mt
import small
from megatrain_jax._src.engine.train.source import Source, decoded_state, encoded_state
from messages import refuses

pytestmark = pytest.mark.usefixtures("started_once")


class Stateful:
    """An iterator that returns its one state each time and changes it in place."""

    def __init__(self, state: dict[Any, Any]):
        self.state, self.num_drawn = state, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.num_drawn += 1
        self.state["at"] = self.state["at"] + 1
        self.state["noise"] += 1
        return small.batch(int(self.state["at"]) - 1)

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def numpy_state() -> dict[Any, Any]:
    return {"at": np.int64(0), "noise": np.zeros(3, np.uint32), 0: (b"\0", 1.5)}


def test_a_state_of_numpy_s_types_is_gone_on_from(tmp_path):
    options = {"checkpoint_every": 1, "keep": 9}
    first, second = Stateful(numpy_state()), Stateful(numpy_state())
    small.fit(tmp_path, 3, data=first, **options)
    result = small.fit(tmp_path, 6, data=second, **options)
    assert small.losses(result) == small.expected(6)
    # The sample that decides on shapes, and the three steps: nothing was skipped over.
    assert second.num_drawn == 4
    assert type(second.state["at"]) is np.int64 and second.state["noise"].tolist() == [6] * 3
    assert second.state[0] == (b"\0", 1.5)
    # Each checkpoint has the state of its own step, though the iterator has only one dict.
    for step in range(1, 7):
        facts = json.loads((tmp_path / str(step) / "megatrain.json").read_text())
        assert decoded_state(facts["data"]["state"])["at"] == facts["data"]["batches"] == step


def same(a: Any, b: Any) -> bool:
    """Whether two states are equal in value and type, whatever they consist of."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return same([*a], [*b]) and same([*a.values()], [*b.values()])
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


STATES = {
    "plain": {"a": [1, 2.5, None, True, "x"], "b": {}},
    "generator": np.random.default_rng(0).bit_generator.state,
    "twister": np.random.RandomState(0).get_state(legacy=False),
    "legacy": np.random.RandomState(0).get_state(),
    "bytes": b"\xff\0",
    "buffer": [bytearray(b"\1\2")],
    "ordered": OrderedDict(b=1, a=OrderedDict()),
    "scalars": [np.float32(0.1), np.bool_(True), np.str_("é"), np.datetime64("2024-02-29")],
    "arrays": [np.zeros((0, 2), ">i4"), np.arange(6).reshape(2, 3).T, np.array(["a", "bc"])],
    "keys": {1: "a", (2, "b"): {None: "c"}, np.int32(3): "d"},
    "like ours": {"megatrain_jax": ["bytes", ""]},
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_comes_back_as_it_was(name):
    state = STATES[name]
    before = copy.deepcopy(state)
    assert same(decoded_state(json.loads(json.dumps(encoded_state(state)))), before)


def test_a_state_of_jax_arrays_comes_back_as_jax_s():
    state = [jax.random.key_data(jax.random.key(3)), jnp.arange(3)]
    found = decoded_state(json.loads(json.dumps(encoded_state(state))))
    assert all(isinstance(x, jax.Array) for x in found)
    assert same([*map(np.asarray, found)], [*map(np.asarray, state)])


def test_states_of_grain_are_gone_on_from(tmp_path):
    def data():
        rows = grain.MapDataset.range(40).seed(3).shuffle()
        return rows.map(small.batch).to_iter_dataset()

    whole = small.fit(None, 6, data=data())
    small.fit(tmp_path, 3, data=data())
    assert small.losses(small.fit(tmp_path, 6, data=data())) == small.losses(whole)


class Stage(enum.IntEnum):
    SECOND = 2


class Place(NamedTuple):
    file: int
    row: int


ITSELF: dict[str, Any] = {}
ITSELF["own"] = ITSELF
DEEP = functools.reduce(lambda inner, _: [inner], range(120), [])
STRANGE = {
    r"state\['rng'\]\[1\] .*Random": {"rng": [0, random.Random(0)]},
    r"state\['seen'\] .*set": {"seen": {1, 2}},
    r"state\['a'\] .*object": {"a": np.array([None])},
    r"state\['key'\] .*key<fry>": {"key": jax.random.key(0)},
    r"state\['m'\] .*MaskedArray.* array": {"m": np.ma.masked_array([1, 2], [True, False])},
    r"state\['stage'\] .*Stage.* int": {"stage": Stage.SECOND},
    r"state\['place'\] .*Place.* tuple": {"place": Place(1, 2)},
    r"state\['seen'\] .*Counter.* dict": {"seen": Counter("ab")},
    r"state\['own'\]\['own'\] .*itself": ITSELF,
    r"state\['deep'\](\[0\])+ .*100": {"deep": DEEP},
}


@pytest.mark.parametrize("message", STRANGE)
def test_a_state_that_cannot_be_saved_is_refused_with_the_first_batch(message, tmp_path):
    data = Stateful({"at": 0, "noise": 0, **STRANGE[message]})
    trainer = small.trainer()
    calls = (
        lambda: small.fit(tmp_path, 3, data=data),
        lambda: mt.train(trainer, data, steps=3, checkpoint_dir=tmp_path, progress=False),
    )
    for n, call in enumerate(calls, 1):
        with pytest.raises(TypeError, match=f"`data` .*`get_state`.*{message}"):
            call()
        assert data.num_drawn == n
    assert trainer.num_steps == 0 and not [*tmp_path.iterdir()]


@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("can_set", [True, False])
def test_without_a_state_or_a_method_to_set_it_batches_are_skipped(has_state, can_set):
    class Data(Stateful):
        set_state: Any = Stateful.set_state if can_set else property()

    data = Data({"at": 0, "noise": 0})
    source = Source(data, saved=True)
    state = encoded_state({"at": 3, "noise": 9}) if has_state else None
    source.go_to({"batches": 3, "state": state}, progress=False, once=False)
    assert source.count == 3 and data.num_drawn == (0 if has_state and can_set else 3)
    np.testing.assert_array_equal(next(source)["x"], small.batch(3)["x"])
    with refuses(ValueError, "`data`", 4, 6):
        source = Source(iter([small.batch(0)] * 4), saved=False)
        source.go_to({"batches": 6}, progress=False, once=False)


def test_a_state_that_is_not_saved_may_be_anything():
    data = Stateful({"at": 0, "noise": 0, "seen": {1, 2}})
    assert small.losses(small.fit(None, 3, data=data)) == small.expected(3)


def test_a_state_that_cannot_be_set_is_not_asked_for(tmp_path):
    class Counted:
        def __init__(self):
            self.batches = map(small.batch, itertools.count())

        def __iter__(self):
            return self

        def __next__(self):
            return next(self.batches)

        def get_state(self):
            raise AssertionError("asked for")

    small.fit(tmp_path, 2, data=Counted())
    assert small.losses(small.fit(tmp_path, 4, data=Counted())) == small.expected(4)
