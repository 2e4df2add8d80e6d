"""Divisors of a number."""

import math


def divisors(number: int) -> list[int]:
    """The divisors of a positive number, ascending: 1, 2, 3, 4, 6 and 12 for 12."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]
