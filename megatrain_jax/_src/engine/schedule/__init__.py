"""The order of a step: instructions, tasks, residency, clock, search; standard library only."""
