"""Tracing of the loss and its division into stages."""
