"""Computes the parts of a jaxpr that treat all tokens alike in a loop over tiles of tokens."""
