"""The gated delta rule: by a kernel where there is one, else in chunks of JAX's operations."""

from megatrain_jax._src.lm.models import kernel_checks
from megatrain_jax._src.lm.models.delta_rule import (
    Decays,
    Keys,
    Numbers,
    Segments,
    Values,
    delta_rule,
    delta_rule_and_state,
    fits,
)
from megatrain_jax._src.lm.models.past import Past


def gated_delta_rule(
    q: Keys,
    k: Keys,
    v: Values,
    log_decay: Decays,
    rate: Numbers | None,
    segments: Segments | Past | None = None,
) -> Values:
    """Returns the values that queries read from a state to which tokens write one after another.

    With keys and queries normalised to length 1, and queries divided by sqrt(key_dim), for each
    head and token: `S = exp(log_decay) S`, `S = S + rate * k (v - k S)`, and the result is `q S`.

    Args:
        q: Queries; each query head serves heads / key_heads neighbouring value heads.
        k: Keys.
        v: Values.
        log_decay: At most 0, in fp32; of a head's whole state, or of each channel of its keys
            (https://arxiv.org/abs/2510.26692).
        rate: From 0 to 2. None for a sum without corrections, `S = exp(log_decay) S + k v`, of
            queries and keys as they are (Mamba-2, https://arxiv.org/abs/2405.21060).
        segments: The document of each token; each document starts with an empty state. None if each
            row is one document. While text is generated, a `Past` with the state so far.

    Returns:
        An array with the shape and dtype of `v`.
    """
    if isinstance(segments, Past):
        return segments.delta_rule(q, k, v, log_decay, rate)
    if rate is not None and fits(q, k, v, log_decay) and kernel_checks.has_delta_rule():
        return delta_rule(q, k, v, log_decay, rate, segments)
    return delta_rule_and_state(q, k, v, log_decay, rate, segments)[0]
