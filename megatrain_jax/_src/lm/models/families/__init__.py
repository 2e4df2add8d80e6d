"""Families of open-weights models: each is a `Family`, found here by `config.py`."""
