"""What to compute: traced equations, stages and templates, without any arrays."""
