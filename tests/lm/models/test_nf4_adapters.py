"""Adapters trained beside a base in NF4, against PEFT and bitsandbytes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import megatrain_jax as mt
from inside import spec_of, store_of
from megatrain_jax import models
from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.engine.checkpoint.given_parameters import saved_arrays
from megatrain_jax._src.engine.state.codec import Nf4
from messages import warns
from peft_curves import PEFT_WARNINGS, batches, curves, make_trainer
from quantised_sizes import BITSANDBYTES, WIDE
from runs import check_same_bits
from workloads import all_resident_bytes

torch = pytest.importorskip("torch", reason='compared with PyTorch: pip install -e ".[torch]"')
bnb: Any = pytest.importorskip("bitsandbytes")
peft: Any = pytest.importorskip("peft")

import transformers  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

from families import make_torch, save  # noqa: E402

pytestmark = PEFT_WARNINGS

CODEC = Nf4()
TARGETS = r"self_attn/(q|v)_proj|mlp"


def base(folder: Any) -> Any:
    """A checkpoint in fp32; what stays in bfloat16 beside NF4 is exact there."""
    model = make_torch("llama", **WIDE)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if x.ndim == 1 or "layers" not in name:
                x.copy_(x.to(torch.bfloat16))
    return save(model, folder)


def nf4(folder: Any, **options: Any) -> mt.Trainer:
    options |= {"precision": mt.Precision(compute=jnp.float32, frozen="nf4")}
    return make_trainer(folder, TARGETS, options, rank=4, alpha=6.0)


def test_adapters_beside_nf4_train_as_those_of_peft_and_bitsandbytes(tmp_path):
    source = base(tmp_path / "base")
    trainer = nf4(source)
    models.save_lora(trainer, tmp_path / "fresh")
    settings = BITSANDBYTES["nf4-nested"] | {"bnb_4bit_compute_dtype": torch.float32}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        source,
        quantization_config=transformers.BitsAndBytesConfig(**settings),
        dtype=torch.float32,
        attn_implementation="eager",
    )
    frozen, exact = trainer.params, load_file(source / "model.safetensors")
    for name, module in theirs.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            weight: Any = module.weight
            # The few scales that bitsandbytes' kernel for CPUs rounds to the farther level.
            nearest = CODEC.encode_leaf(exact[f"{name}.weight"].reshape(-1))[1]
            scales = weight.quant_state.absmax
            scales.copy_(torch.tensor(nearest[: scales.numel()]))
            decoded = bnb.functional.dequantize_4bit(weight.data, weight.quant_state).numpy()
            at = frozen
            for key in name.removeprefix("model.").split("."):
                at = at[int(key) if key.isdigit() else key]
            np.testing.assert_allclose(at["weight"], decoded, rtol=1e-6, atol=1e-8, err_msg=name)
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "fresh", is_trainable=True)
    theirs.train()  # otherwise bitsandbytes computes in bfloat16 on some CPUs
    curve, expected = curves(trainer, theirs, 6)
    np.testing.assert_allclose(curve, expected, rtol=4e-6)
    assert expected[-1] != expected[0]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("started_once_in_test")
def test_a_base_in_nf4_streams_resumes_and_is_counted(tmp_path):
    source = base(tmp_path / "base")
    steps = [batch for batch, _ in zip(batches(), range(4), strict=False)]

    def run(trainer: mt.Trainer, some: Any) -> list[float]:
        return [trainer.read(trainer.step(batch))["loss"] for batch in some]

    least = nf4(source, device_budget="least")
    # With residuals, a backward rounds differently.
    budget = all_resident_bytes(spec_of(least).first.workload)
    trainer = nf4(source, device_budget=budget)
    spec, store = spec_of(trainer), store_of(trainer)
    frozen = [Key(Kind.MASTERS, g) for g in spec.grouping.frozen]
    held = sum(x.nbytes for key in frozen for x in store.host[key])
    assert trainer.plan.frozen_bytes == held
    losses = run(trainer, steps[:2])
    trainer.save(tmp_path / "run")
    wide = make_trainer(source, TARGETS, rank=4, alpha=6.0)
    with warns(UserWarning, "dtypes"):
        wide.restore(tmp_path / "run")
    check_same_bits(wide.params, trainer.params)
    name = ("params", "layers", "1", "mlp", "up_proj", "weight")
    saved = next(x for path, x in saved_arrays(tmp_path / "run").items() if path[:6] == name)
    np.testing.assert_array_equal(saved, trainer.params["layers"][1]["mlp"]["up_proj"]["weight"])
    losses += run(trainer, steps[2:])
    assert least.plan.bytes_in > trainer.plan.bytes_in
    assert run(least, steps) == losses
    check_same_bits(least.params, trainer.params)
    with warns(UserWarning, "`seed`", 1):
        again = nf4(source, seed=1)
    again.restore(tmp_path / "run")
    assert run(again, steps[2:]) == losses[2:]
    check_same_bits(again.params, trainer.params)
    several = nf4(source, mesh=Mesh(jax.devices()[:2], "data"))
    np.testing.assert_allclose(run(several, steps), losses, rtol=2e-6)
    # A base is decoded alike on any number of devices.
    pairs = zip(*map(jax.tree.leaves, (trainer.params, several.params)), strict=True)
    alike = [np.array_equal(one, two) for one, two in pairs if 4 not in one.shape]  # no adapters
    assert all(alike) and len(alike) == 21
