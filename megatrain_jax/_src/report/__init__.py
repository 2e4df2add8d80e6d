"""What a run needs, as numbers and as a table."""
