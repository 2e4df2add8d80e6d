"""The families of open-weights models: one file each, listed in `registry.py`."""
