"""Tiles of a jaxpr: what treats every token alike, computed in a loop over runs of tokens."""
