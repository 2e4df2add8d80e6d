"""A decoder beside a frozen copy of itself, the reference of reinforcement learning."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from megatrain_jax._src.lm.models.decoder import Decoder

_POLICY, _REFERENCE = "policy", "reference"


class WithReference(nnx.Module):
    """Two decoders of one run: the policy is trained, and the reference stays as it is.

    Attributes:
        policy: The decoder that is trained, and that generates completions.
        reference: The decoder as it was before training.
    """

    def __init__(self, policy: Decoder, reference: Decoder):
        """Holds both decoders, which share nothing."""
        self.policy = policy
        self.reference = reference


def with_reference(
    model: Decoder | Callable[[], Decoder], params: Any, trainable: Any
) -> tuple[Callable[[], WithReference], Any, Callable[[str], bool]]:
    """A decoder with a frozen copy of itself, as arguments of a run.

    Args:
        model: The decoder, or a function that builds one; each call has to build the same.
        params: Its parameters; None for the ones that it is built with.
        trainable: Paths of its trained parameters, as `fit` takes them.

    Returns:
        A function that builds both; their parameters, the same arrays for each; and a predicate of
        the paths of trained parameters.
    """

    def built() -> WithReference:
        if isinstance(model, Decoder):
            return WithReference(nnx.clone(model), nnx.clone(model))
        return WithReference(model(), model())

    def is_trained(path: str) -> bool:
        whose, _, rest = path.partition("/")
        return whose == _POLICY and _is_chosen(trainable, rest)

    both = None if params is None else {_POLICY: params, _REFERENCE: jax.tree.map(_same, params)}
    return built, both, is_trained


def policy_of(model: Any) -> Any:
    """The decoder that is trained."""
    return model.policy if isinstance(model, WithReference) else model


def _is_chosen(trainable: Any, path: str) -> bool:
    if trainable is None:
        return True
    if callable(trainable):
        return bool(trainable(path))
    patterns: Sequence[str] = [trainable] if isinstance(trainable, str) else trainable
    return any(re.search(pattern, path) for pattern in patterns)


def _same(leaf: Any) -> Any:
    return leaf
