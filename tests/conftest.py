"""Set before JAX starts: tiny models spend their time in the CPU's code generator."""

import os

# Concerns the CPU's code generator only; a GPU's programs are compiled as ever.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
