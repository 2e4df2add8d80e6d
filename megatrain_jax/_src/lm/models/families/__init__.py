"""Families of open-weights models, one file each, listed in `registry.py`."""
