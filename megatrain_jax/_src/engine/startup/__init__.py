"""The settings that have to be made before JAX starts."""
