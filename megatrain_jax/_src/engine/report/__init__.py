"""Plans, and how plans, histories and results are shown: numbers, tables, figures, warnings."""
