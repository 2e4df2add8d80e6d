"""Bugs put in by hand, one at a time: each has to be noticed by the tests nearest to it."""

from mutations import ROOT, SOURCES, located, read_mutations, sample

ROOMS = """
    adapt callbacks checkpoint cli common data grpo kernels models objectives options program report
    runtime schedule spec startup state train
""".split()
MUTATIONS = read_mutations()


def test_each_mutation_applies_once_and_compiles():
    for mutation in MUTATIONS:
        assert mutation.old != mutation.new and mutation.tests, mutation.what
        compile(mutation.apply(ROOT / SOURCES), mutation.file, "exec")
        for argument in mutation.tests:
            located(argument)
    assert len({mutation.what for mutation in MUTATIONS}) == len(MUTATIONS)


def test_mutations_are_in_all_rooms():
    assert len(MUTATIONS) >= 60
    files = {mutation.file for mutation in MUTATIONS}
    assert {file.split("/")[0] for file in files if "/" in file} == set(ROOMS)
    assert {"cross_entropy.py", "train/source.py", "train/loop.py", "runtime/interrupt.py"} <= files


def test_a_sample_is_that_of_its_seed_and_samples_of_many_seeds_are_all():
    seeds = [f"{number:040x}" for number in range(1500)]
    samples = [sample(MUTATIONS, 10, seed) for seed in seeds]
    assert samples == [sample(MUTATIONS, 10, seed) for seed in seeds]
    assert {mutation.what for some in samples for mutation in some} == {m.what for m in MUTATIONS}
