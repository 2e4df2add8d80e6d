"""The computation of a step: traced equations, stages and templates, without any arrays."""
