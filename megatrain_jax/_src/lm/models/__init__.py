"""Open-weights language models as Flax modules, built only on the core's public names."""
