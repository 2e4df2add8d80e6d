"""When: instructions, tasks, residency, clock and search; the standard library only."""
