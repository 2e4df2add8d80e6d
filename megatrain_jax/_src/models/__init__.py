"""Open-weights language models as Flax modules; users of the core's public names only."""
