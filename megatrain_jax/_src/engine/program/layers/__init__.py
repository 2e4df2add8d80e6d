"""Finds a model's layers in the trace of its loss: blocks, stacked arrays and loops over them."""
