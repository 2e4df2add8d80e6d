"""Obeys a schedule: the only place that moves state between host and device inside a step.

All dispatches are asynchronous; a step waits for the device only where its schedule says so, to
hold the byte budget. State is kept by part and group, as tuples of slabs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from megatrain_jax.memory.groups import GroupLayout
from megatrain_jax.memory.pool import device, pinned
from megatrain_jax.optim import OptimizerCut
from megatrain_jax.stream import functions, template
from megatrain_jax.stream.schedule import Record
from megatrain_jax.stream.steps import BoundStage, StepPlan
from megatrain_jax.stream.template import Templates

Slabs = tuple[jax.Array, ...]


class Engine:
    """Holds all state of a run and runs steps on it.

    Attributes:
        host: Slabs in pinned host memory by ("P" | "O" | "G", group).
        on_device: Slabs on the device by the same keys.
        variables: Non-parameter state of the model.
        globals: Optimizer state that belongs to no group.
        ok: Whether all numbers have been finite so far; updates do nothing once it is false.
        step: Number of the next step, on the device.
        templates: All compiled functions.
    """

    def __init__(self, layouts: Sequence[GroupLayout], optimizer: OptimizerCut, key: jax.Array):
        """Starts without state: fill `host`, `variables` and `globals`, which rest on the host."""
        self.layouts, self.optimizer = tuple(layouts), optimizer
        self.templates = Templates()
        self.host: dict[tuple[str, int], Slabs] = {}
        self.on_device: dict[tuple[str, int], Slabs] = {}
        self.variables: list[jax.Array] = []
        self.globals: list[jax.Array] = []
        self.messages: list[jax.Array] = []
        self.ok = jax.device_put(jnp.array(True), pinned())
        self.step = jax.device_put(jnp.array(0, jnp.int32), pinned())
        self.key = jax.device_put(key, pinned())
        self._leaving: dict[int, list[tuple[Slabs, Slabs]]] = {}
        self._tokens: dict[int, Any] = {}
        self._plan: StepPlan | None = None
        self._begun = 0
        self._laps = 0
        self._reset_step([])

    def _reset_step(self, rows: list[dict[int, jax.Array]]) -> None:
        self.values = rows
        self.cotangents: list[dict[int, jax.Array]] = [{} for _ in rows]
        self.scalars: dict[int, list[jax.Array]] = {}
        self.squares: list[jax.Array] = []
        self.group_ok: list[tuple[int, jax.Array]] = []
        self.means: dict[str, jax.Array] = {}

    # ---- whole steps

    def train(self, plan: StepPlan, batch: Sequence[jax.Array]) -> dict[str, jax.Array]:
        """Dispatches one training step and returns its metrics, which may not be ready yet."""
        if self._plan is not None and self._plan.schedule != plan.schedule:
            self.flush()
        self._wake()
        cold = self._laps == 0
        self._plan = plan
        seed = self._begin(plan, batch)
        for cotangents in self.cotangents:
            cotangents[plan.program.outputs[0]] = seed
        for record in plan.schedule.cold if cold else plan.schedule.steady:
            self.obey(record)
        self._laps += 1
        self._begun += plan.schedule.num_items
        late = plan.program.outputs[1 + len(plan.metrics) :]
        row = self.values[-1]
        self.variables = [row.get(i, v) for i, v in zip(late, self.variables, strict=True)]
        finish = self.templates.get("end", functions.end)
        metrics, self.step = finish(self._mean(), self.squares, self.step)
        return metrics

    def evaluate(self, plan: StepPlan, batch: Sequence[jax.Array]) -> dict[str, jax.Array]:
        """Computes the loss and metrics of one batch; changes nothing."""
        self.flush()
        self._wake()
        self._plan = plan
        self._begin(plan, batch, keep_variables=True)
        for record in plan.schedule.evaluation:
            self.obey(record)
        metrics = self._mean()
        self._rest()
        return metrics

    def flush(self) -> None:
        """Applies pending updates and brings all state to rest in pinned host memory."""
        if self._laps:
            assert self._plan is not None
            for record in self._plan.schedule.flush:
                self.obey(record)
            self._rest()

    def recover(self) -> None:
        """Drops what a step with a number that is not finite left pending, and starts afresh."""
        self.flush()  # updates do nothing while `ok` is false
        self.ok = jax.device_put(jnp.array(True), pinned())

    def _rest(self) -> None:
        assert not self.on_device
        self._laps = self._begun = 0
        self._leaving.clear()
        self._tokens.clear()
        self._plan = None
        self._reset_step([])
        self._move_small(pinned())
        jax.block_until_ready([self.variables, self.globals, self.host])

    def _wake(self) -> None:
        if not self._laps:
            self._move_small(device())

    def _move_small(self, sharding: jax.sharding.Sharding) -> None:
        small = (self.variables, self.globals, self.ok, self.step, self.key)
        moved = jax.device_put(small, sharding)
        self.variables, self.globals, self.ok, self.step, self.key = moved

    def _begin(self, plan: StepPlan, batch, keep_variables: bool = False) -> jax.Array:
        begin = self.templates.get(
            ("begin", plan.key),
            lambda: functions.begin(plan.program, plan.microbatches, len(plan.metrics)),
        )
        rows, seed, variables = begin(self.variables, list(batch), self.key, self.step)
        if not keep_variables:
            self.variables = variables
        ids = plan.program.prologue_values
        self._reset_step([dict(zip(ids, row, strict=True)) for row in rows])
        return seed

    def _mean(self) -> dict[str, jax.Array]:
        """Means of loss and metrics over the microbatches; computed once a step."""
        plan = self._plan
        assert plan is not None
        if not self.means:
            ids = plan.program.outputs[: 1 + len(plan.metrics)]
            rows = [[row[i] for i in ids] for row in self.values]
            mean = self.templates.get(
                ("mean", plan.metrics), lambda: functions.mean_metrics(plan.metrics)
            )
            self.means = mean(rows)
        return self.means

    # ---- records

    def obey(self, record: Record) -> None:
        """Carries out one record of the schedule."""
        handler: Callable[[Record], None] = getattr(self, f"_{record.op.value}")
        handler(record)

    def _fetch(self, record: Record) -> None:
        key = (record.part, record.group)
        self.on_device[key] = tuple(jax.device_put(self.host[key], device()))

    def _offload(self, record: Record) -> None:
        key = (record.part, record.group)
        source = self.on_device.pop(key)
        self.host[key] = tuple(jax.device_put(source, pinned()))
        self._leaving.setdefault(self._begun + record.item, []).append((source, self.host[key]))

    def _release(self, record: Record) -> None:
        del self.on_device[record.part, record.group]
        self._leaving.setdefault(self._begun + record.item, [])

    def _wait(self, record: Record) -> None:
        item = self._begun + record.item
        for _, landed in self._leaving.pop(item, ()):
            jax.block_until_ready(landed)
        token = self._tokens.pop(item, None)
        if token is not None and not token.is_deleted():
            token.block_until_ready()

    def _forward(self, record: Record) -> None:
        bound = self._bound(record)
        run = self.templates.get(
            ("forward", bound.key), lambda: template.forward(bound.stage, bound.binding)
        )
        slabs = [self.on_device["P", g][0] for g in bound.groups]
        for row in self.values:
            self._keep(bound, row, run(slabs, [row[i] for i in bound.stage.inputs]), record)
        self._forget(record)

    def _backward(self, record: Record) -> None:
        bound = self._bound(record)
        stage, mode = bound.stage, bound.mode
        run = self.templates.get(
            ("backward", bound.key, stage.active, mode),
            lambda: template.backward(stage, bound.binding, mode),
            donate_argnums=(3, 4),
        )
        slabs = [self.on_device["P", g][0] for g in bound.groups]
        arriving = [o for o, a in zip(stage.outputs, mode.arriving, strict=True) if a]
        for row, cotangents in zip(self.values, self.cotangents, strict=True):
            accumulated = [g for g, a in zip(bound.groups, mode.accumulate, strict=True) if a]
            earlier = [self._take_gradient(g) for g in accumulated]
            inputs = [row[i] for i in stage.inputs]
            given = [cotangents.pop(o) for o in arriving]
            sent = [cotangents.pop(i) for i in bound.sent]
            outputs, gradients, back = run(slabs, inputs, given, earlier, sent)
            for g, gradient in zip(bound.groups, gradients, strict=True):
                self.on_device["G", g] = (gradient,)
            if mode.give_outputs:
                self._keep(bound, row, outputs, record)
            self._send(bound, cotangents, back)
            self._tokens[self._begun + record.item] = (back or gradients)[0]
        self._forget(record)

    def _take_gradient(self, group: int) -> jax.Array:
        self.host.pop(("G", group), None)
        (gradient,) = self.on_device.pop(("G", group))
        return gradient

    def _send(self, bound: BoundStage, cotangents: dict[int, jax.Array], back) -> None:
        active = [i for i, a in zip(bound.stage.inputs, bound.stage.active, strict=True) if a]
        for i, cotangent in zip(active, back, strict=True):
            if i in cotangents:  # one value at two inputs of this stage
                add = self.templates.get("add", lambda: jnp.add)
                cotangent = add(cotangents[i], cotangent)
            cotangents[i] = cotangent

    def _zeros(self, record: Record) -> None:
        size = self.layouts[record.group].gradient.size
        make = self.templates.get(
            ("zeros", size), lambda: lambda: jnp.zeros(size, jnp.float32), out_shardings=device()
        )
        self.on_device["G", record.group] = (make(),)

    def _reduce(self, record: Record) -> None:
        g, cut = record.group, self.optimizer
        layout, part = self.layouts[g], cut.reduce[g]
        run = self.templates.get(
            ("reduce", part.key, layout),
            lambda: functions.reduce(part, layout, cut.reduce_reads, cut.guarded),
        )
        masters = self.on_device["P", g][0] if "P" in cut.reduce_reads else None
        state = self.on_device.get(("O", g), ()) if "O" in cut.reduce_reads else None
        (gradient,) = self.on_device["G", g]
        self.scalars[g], square, self.ok = run(
            gradient, masters, state, self._mean()["loss"], self.globals, self.ok
        )
        self.squares.append(square)
        self.group_ok.append((g, self.ok))
        self._tokens[self._begun + record.item] = square

    def _combine(self, record: Record) -> None:
        cut = self.optimizer
        run = self.templates.get(
            "combine", lambda: functions.combine(cut.combine, cut.num_messages, cut.guarded)
        )
        scalars = [x for g in range(len(self.layouts)) for x in self.scalars.get(g, ())]
        loss = self._mean()["loss"]
        self.messages, self.globals, self.ok = run(loss, self.globals, scalars, self.ok)

    def _update(self, record: Record) -> None:
        g, cut = record.group, self.optimizer
        layout, part = self.layouts[g], cut.apply[g]
        run = self.templates.get(
            ("update", part.key, layout),
            lambda: functions.update(part, layout, cut.guarded),
            donate_argnums=(0, 1),
        )
        (masters,) = self.on_device["P", g]
        state = self.on_device.get(("O", g), ())
        gradient = self._take_gradient(g)
        messages = [self.messages[i] for i in cut.messages[g]]
        self.host.pop(("P", g), None)
        self.host.pop(("O", g), None)
        masters, state = run(masters, state, gradient, messages, self.ok)
        self.on_device["P", g] = (masters,)
        if state:
            self.on_device["O", g] = tuple(state)

    def _bound(self, record: Record) -> BoundStage:
        assert self._plan is not None
        return self._plan.stages[record.stage]

    def _keep(self, bound: BoundStage, row, outputs, record: Record) -> None:
        for i, value in zip(bound.stage.outputs, outputs, strict=True):
            if i in self._plan.kept:
                row[i] = value
        if outputs:
            self._tokens[self._begun + record.item] = outputs[0]

    def _forget(self, record: Record) -> None:
        for i in self._plan.last_read.get((record.op, record.stage), ()):
            for row in self.values:
                row.pop(i, None)
