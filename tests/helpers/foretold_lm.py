"""How small language models write texts on machines of many sizes, and the table of what is known.

    PYTHONPATH=.:tests/helpers python tests/helpers/foretold_lm.py

makes the table, `foretold_lm.json`, anew; see `foretold.py`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path

from flax import nnx

import megatrain_jax as mt
from foretold import Figures, renew
from megatrain_jax import models
from megatrain_jax._src.lm.models.generation.generation_memory import GenerationMemory, plan_of
from megatrain_jax._src.lm.models.generation.weight_source import open_source
from small_decoders import EXPERTS, GEMMA, SMALL

TABLE = Path(__file__).with_suffix(".json")
_MACHINE = mt.Hardware(
    name="small", device_share=1.0, link_bytes_per_s=1e6, memory_bytes_per_s=1e8, flops_per_s=1e9
)
_DECODERS = {
    "plain": dataclasses.replace(SMALL, num_layers=6),
    "windows": dataclasses.replace(GEMMA, windows=(8, None, 8, 8)),
    # Its layers and their caches are large beside everything else.
    "heads": dataclasses.replace(
        SMALL,
        num_layers=8,
        hidden_size=64,
        intermediate_size=512,
        num_heads=8,
        num_kv_heads=8,
        head_dim=64,
        rope=models.Rope(dim=64),
    ),
    "experts": dataclasses.replace(SMALL, experts=EXPERTS, vocab_size=64),
}


@functools.cache
def _room(name: str) -> GenerationMemory:
    model = models.Decoder(_DECODERS[name], rngs=nnx.Rngs(0))
    return GenerationMemory(open_source(model), None)


def _written(name: str, length: int) -> Figures:
    """The forms of decodes of 20 texts, on machines with more and more memory."""
    room = _room(name)
    least = room.needs(length, 1, resident=False, num_pages=len(room.pageable))
    most = room.needs(length, 20, resident=True)
    found: Figures = {"least": least, "most": most, "pageable": len(room.pageable)}
    for number, texts in itertools.product(range(9), (1.2, 4.7)):
        device = round(least * (most / least) ** (number / 8) / 0.9) + 1
        # Half of what is left beside the weights may be for caches.
        host_bytes = room.read_bytes(resident=False) + round(2 * texts * room.cache_bytes(length))
        machine = dataclasses.replace(_MACHINE, device_bytes=device, host_bytes=host_bytes)
        key = f"{number} {texts}"
        try:
            plan = plan_of(room, machine, length, 20)
        except MemoryError:
            found[key] = "refused"
            continue
        found[key] = (
            f"{plan.resident} {plan.num_texts} {plan.weight_bytes} {plan.cache_bytes} "
            f"{plan.paged_bytes} {plan.tokens_per_s:.7g}"
        )
    return found


ROWS: dict[str, Callable[[], Figures]] = {
    f"decode {name} {length}": functools.partial(_written, name, length)
    for name in _DECODERS
    for length in (16, 64)
}


if __name__ == "__main__":
    renew(ROWS, TABLE)
