"""What has to be set before JAX starts."""
