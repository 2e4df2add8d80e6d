"""Any Flax model as parameters and a pure loss."""
