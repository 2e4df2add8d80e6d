"""The settings of quantised checkpoints."""

import pytest

torch = pytest.importorskip("torch", reason='compared with PyTorch: pip install -e ".[torch]"')


# bitsandbytes' kernel for AVX-512 decodes only rows of whole blocks of 64 right.
WIDE = {"hidden_size": 64, "intermediate_size": 192}


BITSANDBYTES = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-nested": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_quant_storage": torch.bfloat16,
    },
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}
