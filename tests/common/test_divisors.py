"""The divisors of a number."""

import random

from megatrain_jax._src.common.sizes import divisors


def test_divisors_are_all_numbers_that_divide():
    numbers = [*range(1, 200), *random.Random(0).sample(range(1, 20_000), 50), 144**2]
    for number in numbers:
        assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


def test_a_batch_of_many_rows_has_its_divisors_without_counting_to_it():
    assert divisors(10**12 + 39) == [1, 10**12 + 39]  # a prime number
