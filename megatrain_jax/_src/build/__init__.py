"""A run before it has arrays: options, bound steps, costs and budgets."""
