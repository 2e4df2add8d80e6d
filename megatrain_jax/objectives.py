"""Losses of language models for `fit`, with TRL's names, defaults and metrics.

    result = mt.fit(model, objectives.dpo(beta=0.1), data.preferences(...), optimizer, ...)

The functions of arrays that they use are in `losses`.
"""

from megatrain_jax._src.common.suggestions import explain as _explain
from megatrain_jax._src.lm.objectives.decoder_objectives import (
    answer_log_probabilities,
    distill,
    dpo,
    ipo,
    kto,
    orpo,
    reward,
    simpo,
)

__all__ = [
    "answer_log_probabilities",
    "distill",
    "dpo",
    "ipo",
    "kto",
    "orpo",
    "reward",
    "simpo",
]

_explain(globals())
