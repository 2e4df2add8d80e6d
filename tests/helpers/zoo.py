"""The zoo: every model that training has to agree on with plain JAX, by name.

The models themselves are in zoo_nnx, zoo_linen and zoo_pytree.
"""

import zoo_linen
import zoo_nnx
import zoo_pytree
from zoo_case import NUM_EXAMPLES, Case, token_batch

CASES: dict[str, Case] = {
    case.name: case for case in (*zoo_nnx.CASES, *zoo_linen.CASES, *zoo_pytree.CASES)
}

__all__ = ["CASES", "NUM_EXAMPLES", "Case", "token_batch"]
