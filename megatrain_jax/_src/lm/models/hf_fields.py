"""The fields of a Hugging Face configuration, read with type checks.

The file is untrusted: a string instead of a number, a null, or a size that no machine can
hold is refused under the field's name, before anything is built from it.
"""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models.tensors import some

# Fields that affect neither parameters nor logits.
_IGNORED = frozenset(
    """
    architectures auto_map bos_token_id cache_implementation chunk_size_feed_forward dtype
    eos_token_id finetuning_task id2label initializer_range is_llama_config label2id max_length
    max_window_layers max_sequence_length min_length model_type name_or_path num_labels
    num_return_sequences output_attentions original_max_position_embeddings output_hidden_states
    output_router_logits pad_token_id prefix problem_type return_dict return_dict_in_generate
    sep_token_id sliding_window_size task_specific_params temperature tokenizer_class top_k top_p
    torch_dtype torchscript transformers_version typical_p unsloth_fixed unsloth_version use_cache
    attn_implementation max_position_embeddings
    """.split()
)
_REQUIRED = object()
# Bounds far above any real model; all further integers may be up to 2^31 - 1.
_MOST = {
    "num_hidden_layers": 2**10,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "moe_intermediate_size": 2**22,
    "vocab_size": 2**24,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "num_experts": 2**14,
    "num_local_experts": 2**14,
}
_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 60


class Fields:
    """A configuration that tracks which of its fields have been read."""

    def __init__(self, values: Mapping[str, Any], ignore: frozenset[str] = frozenset()):
        """Keeps the values, and the names of fields that the user wants ignored."""
        self.values, self.ignore = values, ignore
        self._read: set[str] = set(_IGNORED)
        self.family = str(values.get("model_type"))

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """Returns a field, or the default if it is missing.

        Raises:
            ValueError: If it is missing and has no default.
        """
        self._read.add(name)
        if default is _REQUIRED and self.values.get(name) is None:
            raise ValueError(f"the configuration of this {self.family} has no `{name}`")
        return self.values.get(name, default)

    def integer(
        self, name: str, default: Any = _REQUIRED, *, least: int = 1, null: bool = False
    ) -> Any:
        """Returns an integer, or None if the field is null and null is allowed.

        Raises:
            TypeError: If it is not an integer.
            ValueError: If it is out of bounds.
        """
        value = self.take(name, default)
        if value is None and (null or default is None):
            return None
        return checks.integer(name, value, least=least, most=_MOST.get(name, 2**31 - 1))

    def number(
        self,
        name: str,
        default: Any = _REQUIRED,
        *,
        above: float | None = None,
        least: float | None = None,
        null: bool = False,
    ) -> Any:
        """Returns a finite float, or None if the field is null and null is allowed.

        Raises:
            TypeError: If it is not a number.
            ValueError: If it is not finite or out of bounds.
        """
        value = self.take(name, default)
        if value is None and (null or default is None):
            return None
        return checks.number(name, value, above=above, least=least)

    def flag(self, name: str, default: bool) -> bool:
        """Returns true or false.

        Raises:
            TypeError: If it is neither.
        """
        return checks.boolean(name, self.take(name, default))

    def listed(self, name: str, kind: type, what: str) -> list[Any] | None:
        """Returns a list of values of one type, or None if it is missing.

        Raises:
            TypeError: If it is not a list, or has values of a different type.
        """
        values = self.take(name, None)
        if values is not None and not (
            isinstance(values, list | tuple) and all(type(v) is kind for v in values)
        ):
            raise TypeError(checks.refused(name, f"a list of {what}", values))
        return None if values is None else list(values)

    def mapping(self, name: str) -> dict[str, Any]:
        """Returns an object's fields, {} if it is missing.

        Raises:
            TypeError: If it is not an object.
        """
        values = self.take(name, None)
        values = {} if values is None else values
        if not isinstance(values, Mapping):
            raise TypeError(checks.refused(name, "an object", values))
        return dict(values)

    def neutral(self, **expected: Any) -> None:
        """Refuses fields with any value but the one that has no effect."""
        for name, value in expected.items():
            found = self.take(name, value)
            if found != value and found is not None and name not in self.ignore:
                raise ValueError(
                    f"`{name}` = {shown(found)} in a {self.family} isn't supported; only "
                    f"{value!r} is"
                )

    def finish(self) -> None:
        """Refuses fields that have not been read, unless they are empty or off."""
        unknown = {
            name: value
            for name, value in self.values.items()
            # An unknown option that is empty or off has no effect; names with `_` are the writer's
            # notes.
            if name not in self._read | self.ignore and not name.startswith("_") and value
        }
        if unknown:
            found = [f"`{name}` = {shown(value)}" for name, value in unknown.items()]
            raise ValueError(
                f"a {self.family} isn't known to have these fields, which may change what it "
                f"computes: {some(found)}. Name fields without an effect in `ignore`."
            )


def as_ignored(ignore: Sequence[str]) -> frozenset[str]:
    """Returns the names of fields to ignore.

    Raises:
        TypeError: If they are not names, or only one name.
    """
    names = ignore if isinstance(ignore, list | tuple | set | frozenset) else [None]
    if not all(isinstance(name, str) for name in names):
        raise TypeError(checks.refused("ignore", "a list of names of fields", ignore))
    return frozenset(map(str, names))


def shown(value: Any) -> str:
    """Returns a value as text of bounded length, however long or deep it is."""
    return _shown.repr(value)
