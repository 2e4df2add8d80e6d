"""The plan of a run: what it needs, as numbers and as a table."""
