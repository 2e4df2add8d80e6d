"""A run before it has arrays: bound steps, costs and budgets."""
