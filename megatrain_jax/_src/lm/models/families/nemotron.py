"""Nemotron 3 and 4, Minitron: layer norms with an offset, and a plain MLP with a squared ReLU."""

from typing import Any

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields
from megatrain_jax._src.lm.models.layers import Layer, PlainMLP


class NemotronLayer(Layer):
    """A layer with a plain MLP."""

    dense = PlainMLP


def _read(fields: Fields) -> dict[str, Any]:
    fields.take("kv_channels", None)  # not read by Transformers
    activation = hf_common.read_activation(fields, "hidden_act", "relu2")
    sizes = hf_common.sizes(fields, eps=1e-5, eps_name="norm_eps", activation=activation)
    return {
        **sizes,
        **hf_common.attention_bias(fields),
        "rope": hf_common.rope(fields, sizes["head_dim"], share=0.5),
        "norm": "layer",
        "norm_offset": 1.0,
        "mlp_bias": fields.flag("mlp_bias", False),
        "init_std": fields.number("initializer_range", 0.0134, least=0),
        "layer": NemotronLayer,
    }


NEMOTRON = Family(model_type="nemotron", architecture="NemotronForCausalLM", read=_read)
