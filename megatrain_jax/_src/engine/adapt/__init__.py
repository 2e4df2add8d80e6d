"""Conversion of any Flax, Equinox or pytree model to parameters and a pure loss."""
