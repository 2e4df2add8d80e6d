"""Tracing of the optimizer and its division by group."""
