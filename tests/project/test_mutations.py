"""Bugs put in by hand, one at a time: each has to be noticed by the tests nearest to it."""

import ast
from pathlib import Path

import pytest
from mutations import ROOT, SOURCES, located, read_mutations, sample

ROOMS = """
    callbacks common engine/adapt engine/checkpoint engine/kernels engine/options engine/program
    engine/report engine/runtime engine/schedule engine/spec engine/startup engine/state
    engine/train lm/cli lm/data lm/grpo lm/models lm/objectives
""".split()
MUTATIONS = read_mutations()


def test_each_mutation_applies_once():
    for mutation in MUTATIONS:
        assert mutation.old != mutation.new and mutation.tests, mutation.what
        mutation.apply(ROOT / SOURCES)
        for argument in mutation.tests:
            located(argument)
    assert len({mutation.what for mutation in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.exhaustive
def test_each_mutation_compiles():
    for mutation in MUTATIONS:
        ast.parse(mutation.apply(ROOT / SOURCES), mutation.file)


def test_mutations_are_in_all_rooms():
    assert len(MUTATIONS) >= 60
    files = {mutation.file for mutation in MUTATIONS}
    assert set(ROOMS) <= {str(parent) for file in files for parent in Path(file).parents}
    single = {"lm/cross_entropy.py", "engine/train/source.py", "engine/train/loop.py"}
    assert {*single, "engine/runtime/interrupt.py"} <= files


def test_a_sample_is_that_of_its_seed_and_samples_of_many_seeds_are_all():
    seeds = [f"{number:040x}" for number in range(2 * len(MUTATIONS))]
    samples = [sample(MUTATIONS, 10, seed) for seed in seeds]
    assert samples == [sample(MUTATIONS, 10, seed) for seed in seeds]
    assert {mutation.what for some in samples for mutation in some} == {m.what for m in MUTATIONS}
