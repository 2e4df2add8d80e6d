"""The names that settings choose from."""

from typing import Literal

State = Literal["float32", "bfloat16", "int8", "int4", "compact"]
Master = Literal["float32", "bfloat16", "int8"]
Frozen = Literal["float32", "bfloat16", "int8"]
Products = Literal["float8"]
Microbatches = int | Literal["auto"]
Decay = Literal["cosine", "linear", "constant"]
OptimizerName = Literal["adamw", "lion"]
