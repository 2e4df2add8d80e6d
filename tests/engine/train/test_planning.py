"""What a plan costs: counted in calls of Python functions, which no machine's load changes."""

import cProfile
import dataclasses
import gc
import pstats
import threading
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import core
from jax.sharding import AbstractMesh

import megatrain_jax as mt
from megatrain_jax._src.engine.program import jaxpr as jx
from messages import refuses

SIZES = (8, 16, 32)


def with_dropout(num_layers):
    def build():
        rngs = nnx.Rngs(0)
        layers = []
        for _ in range(num_layers):
            layers += [nnx.Linear(4, 4, dtype=jnp.bfloat16, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)]
        return nnx.Sequential(*layers)

    return build


def stacked(num_layers):
    def build():
        return {"layers": jnp.zeros((num_layers, 4, 4))}

    return build


def scanned(model, x):
    return jax.lax.scan(lambda x, w: (x @ w, None), x, model["layers"])[0]


def called(model, x):
    return model(x)


def num_calls(model, apply, optimizer):
    profile = cProfile.Profile()
    batch = jax.ShapeDtypeStruct((2, 4), jnp.bfloat16)
    with profile:
        mt.plan(model, lambda model, x: apply(model, x).mean(), optimizer, batch)
    rows = pstats.Stats(profile).stats.items()  # pyright: ignore[reportAttributeAccessIssue]
    return sum(calls for _, (_, calls, *_) in rows)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "make, apply", [(with_dropout, called), (stacked, scanned)], ids=["nnx", "scan"]
)
def test_planning_takes_time_in_proportion_to_the_layers(make, apply):
    # A deferred update couples all groups, which is where most could grow faster.
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    num_calls(make(2), apply, optimizer)  # what JAX does once
    calls = [num_calls(make(size), apply, optimizer) for size in SIZES]
    more = calls[1] - calls[0], calls[2] - calls[1]
    assert more[1] <= 2.2 * more[0], calls


def test_only_threads_that_trace_here_get_short_errors(monkeypatch):
    asked = []

    def of_jax(tracer):
        asked.append(threading.current_thread().name)
        raise AttributeError("long")

    def asks(x):
        assert getattr(x, "sharding", None) is None
        return x

    monkeypatch.setattr(core.Tracer, "sharding", property(of_jax))
    before = core.Tracer.sharding

    def inside(x):
        other = threading.Thread(target=jax.make_jaxpr(asks), args=(1.0,), name="other")
        other.start()
        other.join()
        jx.trace(asks, x)  # a trace within a trace
        return asks(x)

    jx.trace(inside, jnp.ones(2))
    assert asked == ["other"] and core.Tracer.sharding is before
    jax.make_jaxpr(lambda x: asks(x))(1.0)  # not remembered from the other thread
    assert asked == ["other", threading.current_thread().name]


def test_hosts_have_links_and_memory_of_their_own_and_share_a_network():
    model, batch = stacked(4), jax.ShapeDtypeStruct((8, 4), jnp.float32)
    given = (model, lambda model, x: scanned(model, x).mean(), optax.adamw(1e-3), batch)
    peers = 1e4
    host = mt.Hardware(
        name="host",
        host_bytes=2**40,
        device_bytes=2**34,
        link_bytes_per_s=4e3,
        host_bytes_per_s=6e3,
        peer_bytes_per_s=peers,
        flops_per_s=1e15,
    )
    options: dict[str, Any] = {"device_budget": "minimum"}
    two = mt.plan(*given, hardware=host, num_gpus=2, hosts=2, **options)
    # One host whose memory serves four GPUs as fast as two memories serve two each.
    double = dataclasses.replace(host, host_bytes_per_s=2 * host.host_bytes_per_s)
    one = mt.plan(*given, hardware=double, num_gpus=4, **options)
    assert (two.num_devices, two.num_hosts, two.devices_per_host) == (4, 2, 2)
    assert two.seconds_per_step == one.seconds_per_step
    assert (two.seconds_in, two.seconds_compute) == (one.seconds_in, one.seconds_compute)
    assert two.network_bytes == two.collective_bytes == one.collective_bytes > 0
    assert two.seconds_network == 0 and one.network_bytes == 0
    assert (two.seconds_host, two.num_processes) == (one.seconds_host, 2)
    # A network is felt where it is slower than the GPUs' own connections.
    for network, rate in (("80kb/s", peers), ("0.4kbps", 50.0), (50, 50.0), ("2x25B/s", 50.0)):
        slow = mt.plan(*given, hardware=host, num_gpus=2, hosts=2, network=network, **options)
        peered = dataclasses.replace(double, peer_bytes_per_s=rate)
        same = mt.plan(*given, hardware=peered, num_gpus=4, **options)
        assert slow.seconds_per_step == same.seconds_per_step
        assert slow.seconds_collectives == same.seconds_collectives
    assert slow.seconds_network == slow.seconds_collectives
    assert slow.seconds_per_step and slow.seconds_per_step > (two.seconds_per_step or 0.0)
    # A mesh counts the GPUs of all hosts; without one, each has one GPU.
    mesh = AbstractMesh((4,), ("data",))
    assert mt.plan(*given, hardware=host, mesh=mesh, hosts=2, **options) == two
    assert mt.plan(*given, hardware=host, hosts=2, **options).num_devices == 2
    for wrong, *named in (
        ({"hosts": 3, "mesh": mesh}, "`mesh`", "4 devices", "3 hosts"),
        ({"hosts": 0}, "`hosts`", 0),
        ({"network": "400Gb/s"}, "`network`", "`hosts`"),
        ({"hosts": 2, "network": "400"}, "`network`", "'400'", "400Gb/s"),
        ({"hosts": 2, "network": "0Gb/s"}, "`network`", "'0Gb/s'"),
        ({"hosts": 2, "hardware": None}, "`hosts`", "`hardware`"),
    ):
        with refuses(ValueError, *named):
            mt.plan(*given, **{"hardware": host, **options, **wrong})


def test_hardware_is_known_by_name_with_its_host_and_number_of_gpus():
    batch = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    given = (stacked(4), lambda model, x: scanned(model, x).mean(), optax.adamw(1e-3), batch)
    machine = dataclasses.replace(mt.card("RTX 4090"), host_bytes=3 * 2**29)
    mesh = AbstractMesh((2,), ("data",))
    expected = mt.plan(*given, hardware=machine, mesh=mesh)
    assert mt.plan(*given, hardware="rtx_4090", host_gib=1.5, num_gpus=2) == expected
    names = {
        mt.card("RTX 4090"): ("RTX 4090", "rtx-4090", "GeForce RTX 4090", "4090", "RTX 4090 24GB"),
        mt.card("A100"): ("a100", "A100-80G", "NVIDIA A100-SXM4-80GB", "A100 80 GiB"),
        mt.card("A100 40GB"): ("A100 40GB", "a100_40gb", "A100-PCIE-40GB"),
        mt.card("A6000"): ("A6000", "RTX A6000", "rtx a6000 48gb"),
        mt.card("T4"): ("t4", "Tesla T4", "NVIDIA T4 16GB"),
        mt.card("V100"): ("v100", "V100 32GB", "Tesla V100-SXM2-32GB"),
        mt.card("V100 16GB"): ("V100 16GB", "Tesla V100-SXM2-16GB"),
        mt.card("L4"): ("L4", "nvidia l4"),
        mt.card("L40S"): ("l40s",),
        mt.card("A10G"): ("A10G", "A10G 24GB"),
        mt.card("RTX 3060"): ("RTX3060", "rtx 3060 12 GB"),
        mt.card("RTX 2080 Ti"): (
            "RTX 2080 Ti",
            "2080ti",
            "NVIDIA GeForce RTX 2080 Ti",
            "2080 Ti 11GB",
        ),
        mt.card("RTX 2080"): ("RTX 2080", "rtx 2080 8gb"),
        mt.card("P100"): ("P100", "Tesla P100-PCIE-16GB", "p100 16gb"),
        mt.card("HGX H100"): ("hgx-h100",),
        mt.card("H100"): ("H100 80GB", "H100 80GB HBM3"),
    }
    for machine, written in names.items():
        # The name that a plan prints is one of them.
        for name in (*written, machine.name):
            assert mt.card(name) == machine, name
    nearest = {"RTX 4070": "RTX 4090", "A100 60GB": "A100 80GB", "B300": "B200"}
    nearest |= {"RTX 2070 Super": "RTX 2070", "RTX 3060 Ti": "RTX 3060"}
    for name, near in nearest.items():
        with refuses(ValueError, f"'{name}'", "mean") as error:
            mt.card(name)
        # Three names at most, not the whole list.
        assert near in str(error.value) and str(error.value).count(" or ") < 3
    for name in ("T4 x2", "T4x2", "2x T4", "2 × T4"):
        with refuses(ValueError, f"'{name}'", 2, "'T4'", "num_gpus=2"):
            mt.card(name)
    with refuses(ValueError, "'P200'", "mean P100"):
        mt.card("8x P200")
    with refuses(ValueError, "'Voodoo'", "A10G", "A100"):
        mt.card("Voodoo")
    with refuses(TypeError, "`name`", 4090):
        mt.card(4090)  # type: ignore[arg-type]


def test_no_garbage_is_looked_for_while_a_plan_is_made():
    looked_for = []

    def loss_fn(model, x):
        looked_for.append(gc.isenabled())
        return scanned(model, x).mean()

    batch = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    mt.plan(stacked(4), loss_fn, optax.adamw(1e-3), batch)
    assert looked_for and not any(looked_for) and gc.isenabled()
    with pytest.raises(ValueError, match="optimizer"):
        mt.plan(stacked(4), loss_fn, optax.lbfgs(), batch)
    assert gc.isenabled()
    gc.disable()
    try:
        mt.plan(stacked(4), loss_fn, optax.adamw(1e-3), batch)
        assert not gc.isenabled()
    finally:
        gc.enable()
