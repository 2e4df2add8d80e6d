"""The fields of a Hugging Face configuration, each read as the type it should have.

The file may be anybody's: a string for a number, a null or a size that no machine has is refused
under the field's name, before anything is built from it.
"""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from megatrain_jax._src.common import checks
from megatrain_jax._src.models.tensors import some

# Fields that change neither parameters nor logits.
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
# Bounds far above any model that a machine can still lay out; other integers go up to 2^31 - 1.
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
    """A configuration that knows which of its fields have been read."""

    def __init__(self, values: Mapping[str, Any], ignore: frozenset[str] = frozenset()):
        """Keeps the values, and the names of those that the user says don't matter."""
        self.values, self.ignore = values, ignore
        self._read: set[str] = set(_IGNORED)
        self.family = str(values.get("model_type"))

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """Returns a field, or the default where it is missing.

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
        """Returns an integer, or None where the field is null and null is allowed.

        Raises:
            TypeError: If it is no integer.
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
        """Returns a finite float, or None where the field is null and null is allowed.

        Raises:
            TypeError: If it is no number.
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
            TypeError: If it is no list, or has something else in it.
        """
        values = self.take(name, None)
        if values is not None and not (
            isinstance(values, list | tuple) and all(type(v) is kind for v in values)
        ):
            raise TypeError(checks.refused(name, f"a list of {what}", values))
        return None if values is None else list(values)

    def mapping(self, name: str) -> dict[str, Any]:
        """Returns an object's fields, none if it is missing.

        Raises:
            TypeError: If it is no object.
        """
        values = self.take(name, None)
        values = {} if values is None else values
        if not isinstance(values, Mapping):
            raise TypeError(checks.refused(name, "an object", values))
        return dict(values)

    def neutral(self, **expected: Any) -> None:
        """Refuses fields that are there with another value than the one that does nothing."""
        for name, value in expected.items():
            found = self.take(name, value)
            if found != value and found is not None and name not in self.ignore:
                raise ValueError(
                    f"`{name}` = {shown(found)} in a {self.family} isn't supported; only "
                    f"{value!r} is"
                )

    def finish(self) -> None:
        """Refuses fields that nobody read, unless they are empty or off."""
        unknown = {
            name: value
            for name, value in self.values.items()
            # Off or empty, an unknown option asks for nothing; names with `_` are the writer's own
            # notes.
            if name not in self._read | self.ignore and not name.startswith("_") and value
        }
        if unknown:
            found = [f"`{name}` = {shown(value)}" for name, value in unknown.items()]
            raise ValueError(
                f"a {self.family} isn't known to have these fields, which may change what it "
                f"computes: {some(found)}. Name in `ignore` those that don't."
            )


def as_ignored(ignore: Sequence[str]) -> frozenset[str]:
    """Returns the names of fields that don't matter.

    Raises:
        TypeError: If they are no names, or one name only.
    """
    names = ignore if isinstance(ignore, list | tuple | set | frozenset) else [None]
    if not all(isinstance(name, str) for name in names):
        raise TypeError(checks.refused("ignore", "a list of names of fields", ignore))
    return frozenset(map(str, names))


def shown(value: Any) -> str:
    """Returns a value as text of bounded length, however long or deep it is."""
    return _shown.repr(value)
