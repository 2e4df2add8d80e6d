"""Obeys a schedule: computes, and has state moved between host and device, inside a step.

All dispatches are asynchronous; a step waits for the device only where its schedule says so, to
hold the byte budget. State is kept by part and group, as tuples of slabs.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from megatrain_jax._src.build.bound_step import BoundStage, BoundStep
from megatrain_jax._src.kernels import updates as functions
from megatrain_jax._src.kernels.cache import Templates
from megatrain_jax._src.program.optimizer.cut import OptimizerCut
from megatrain_jax._src.runtime.transfers import Transfers
from megatrain_jax._src.schedule.search import Schedule
from megatrain_jax._src.schedule.tasks import WAITS, Instruction, Op
from megatrain_jax._src.state.groups import GroupLayout
from megatrain_jax._src.state.placement import Placement


@dataclasses.dataclass(kw_only=True)
class _Step:
    """The live values of the step at hand; rows have one entry a microbatch.

    Residuals are by stage, and have one entry a microbatch, too.
    """

    plan: BoundStep
    rows: list[dict[int, jax.Array]]
    cotangents: list[dict[int, jax.Array]]
    residuals: dict[int, list[list[jax.Array]]] = dataclasses.field(default_factory=dict)
    means: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    scalars: dict[int, list[jax.Array]] = dataclasses.field(default_factory=dict)
    squares: list[jax.Array] = dataclasses.field(default_factory=list)
    group_ok: list[tuple[int, jax.Array]] = dataclasses.field(default_factory=list)


class Engine:
    """Holds all state of a run and runs steps on it.

    Attributes:
        moves: Where slabs are.
        host: Its slabs in pinned host memory.
        on_device: Its slabs on the device.
        variables: Non-parameter state of the model.
        globals: Optimizer state that belongs to no group.
        ok: Whether all numbers have been finite so far, or in this step if steps may be skipped;
            updates do nothing where it is false.
        group_ok: For the last step, `ok` after each group's gradient.
        step: Number of the next step, on the device.
        templates: All compiled functions.
        placement: Where its arrays live.
    """

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        optimizer: OptimizerCut,
        templates: Templates,
        placement: Placement,
        key: jax.Array,
    ):
        """Starts without state: fill `host`, `variables` and `globals`, which rest on the host."""
        self.layouts, self.optimizer = tuple(layouts), optimizer
        self.templates = templates
        self.placement = placement
        self.transfers = Transfers(placement)
        self.host, self.on_device = self.transfers.host, self.transfers.on_device
        self.variables: list[jax.Array] = []
        self.globals: list[jax.Array] = []
        self.messages: list[jax.Array] = []
        self.group_ok: list[tuple[int, jax.Array]] = []
        self.ok = jax.device_put(jnp.array(True), self.placement.small_at_rest)
        self.step = jax.device_put(jnp.array(0, jnp.int32), self.placement.small_at_rest)
        self.key = jax.device_put(key, self.placement.small_at_rest)
        self._true = jax.device_put(jnp.array(True), placement.small_on_device)
        self._combined_ok = self.ok  # of the step whose updates are pending
        self._found: dict[tuple[Op, int, BoundStep | None], Callable] = {}
        self._tokens: dict[int, jax.Array] = {}
        self._running: Schedule | None = None  # of the lists since the state was last at rest
        self._begun = 0  # tasks of those lists

    # ---- whole steps

    def train(self, plan: BoundStep, batch: Sequence[jax.Array]) -> dict[str, jax.Array]:
        """Dispatches one training step and returns its metrics, which may not be ready yet."""
        schedule = plan.schedule
        if self._running is not None and self._running != schedule:
            self.flush()
        instructions = schedule.steady if self._running is not None else schedule.cold
        self._wake()
        if self.optimizer.skips:
            self.ok = self._true
        self._running = schedule
        variables = self.variables
        step, seed, self.variables = self._begin(plan, batch)
        for cotangents in step.cotangents:
            cotangents[plan.program.outputs[0]] = seed
        for instruction in instructions:
            self.obey(instruction, step)
        self.transfers.dispatch()
        self._begun += schedule.num_tasks
        new = list(self.variables)
        for k, i in plan.late_state.items():
            new[k] = step.rows[0][i]
        if new:
            keep = self.templates.get("keep", functions.keep)
            new = keep(new, variables, self.ok)
        self.variables = new
        self.group_ok = step.group_ok
        end = self.templates.get("end", functions.end)
        metrics, self.step = end(self._means(step), step.squares, self.step)
        return metrics

    def evaluate(self, plan: BoundStep, batch: Sequence[jax.Array]) -> dict[str, jax.Array]:
        """Computes the loss and metrics of one batch; changes nothing, also where it fails."""
        self.flush()
        self._wake()
        try:
            step, _, _ = self._begin(plan, batch)
            for instruction in plan.schedule.evaluation:
                self.obey(instruction, step)
            means = self._means(step, weighted=True)
        except BaseException:
            self.transfers.abandon()
            raise
        finally:
            self._rest()
        return means

    def flush(self) -> None:
        """Applies pending updates and brings all state to rest in pinned host memory."""
        if self._running is not None:
            for instruction in self._running.flush:
                self.obey(instruction, None)
            self._rest()

    def recover(self) -> None:
        """Drops what a step with a number that is not finite left pending, and starts afresh."""
        self.flush()  # updates do nothing while `ok` is false
        self.ok = jax.device_put(jnp.array(True), self.placement.small_at_rest)

    def drop(self) -> None:
        """Drops all slabs and what runs, also of a step that was cut off, to be filled anew."""
        self.transfers.abandon()
        self.host.clear()
        self._tokens.clear()
        self._running, self._begun = None, 0
        self.ok = jax.device_put(jnp.array(True), self.placement.small_at_rest)

    def set_step(self, step: int) -> None:
        """Sets the number of the next step; all state is at rest."""
        assert self._running is None
        self.step = jax.device_put(jnp.array(step, jnp.int32), self.placement.small_at_rest)

    def _rest(self) -> None:
        self.transfers.rest()
        self._running, self._begun = None, 0
        self._tokens.clear()
        self._move_small(self.placement.small_at_rest)
        jax.block_until_ready([self.variables, self.globals])

    def _wake(self) -> None:
        if self._running is None:
            self._move_small(self.placement.small_on_device)

    def _move_small(self, sharding: jax.sharding.Sharding) -> None:
        small = (self.variables, self.globals, self.ok, self.step, self.key)
        moved = jax.device_put(small, sharding)
        self.variables, self.globals, self.ok, self.step, self.key = moved

    def _begin(
        self, plan: BoundStep, batch: Sequence[jax.Array]
    ) -> tuple[_Step, jax.Array, list[jax.Array]]:
        begin = self.templates.get(
            ("begin", plan.key),
            lambda: functions.begin(plan.program, plan.microbatches, len(plan.metrics)),
        )
        rows, seed, variables = begin(self.variables, list(batch), self.key, self.step)
        ids = plan.program.prologue_values
        step = _Step(
            plan=plan,
            rows=[dict(zip(ids, row, strict=True)) for row in rows],
            cotangents=[{} for _ in rows],
        )
        return step, seed, variables

    def _means(self, step: _Step, *, weighted: bool = False) -> dict[str, jax.Array]:
        """Means of loss and metrics over the microbatches; computed once a step."""
        if not step.means:
            names = step.plan.metrics
            ids = step.plan.program.outputs[: 1 + len(names)]
            means = self.templates.get(
                ("means", names, weighted), lambda: functions.mean_metrics(names, weighted=weighted)
            )
            step.means = means([[row[i] for i in ids] for row in step.rows])
        return step.means

    # ---- instructions

    def obey(self, instruction: Instruction, step: _Step | None) -> None:
        """Carries out one instruction of the schedule.

        What moves is gathered until something is computed. A wait would hold up what is to be
        fetched, but not what is to leave: that has others to leave before it.
        """
        task = self._begun + (instruction.task or 0)
        waits = instruction.op in WAITS
        if instruction.part is not None and not waits:
            rows = [] if step is None else step.rows
            self.transfers.move(
                instruction.op, (instruction.part, _known(instruction.group)), task, rows
            )
            return
        if not waits or self.transfers.fetching:
            self.transfers.dispatch()
        if instruction.op is Op.WAIT:
            self._wait(task)
        elif instruction.op is Op.LAND:
            self._wait(task)  # a part can land while its task still computes with it
            self.transfers.wait_landed(task, (str(instruction.part), _known(instruction.group)))
        elif instruction.op is Op.UPDATE:
            self._update(step, _known(instruction.group), task)
        elif instruction.op is Op.ZEROS:
            self._zeros(_known(instruction.group))
        elif step is None:
            raise AssertionError(f"{instruction} outside a step")
        elif instruction.op is Op.COMBINE:
            self._combine(step)
        elif instruction.op is Op.REDUCE:
            self._reduce(step, _known(instruction.group), task)
        else:
            stage = _known(instruction.stage)
            compute = self._forward if instruction.op is Op.FORWARD else self._backward
            compute(step, stage, task)
            for i in step.plan.last_read.get((instruction.op, stage), ()):
                self.host.pop(("A", i), None)
                for row in step.rows:
                    row.pop(i, None)

    def _wait(self, task: int) -> None:
        token = self._tokens.get(task)
        if token is not None and not token.is_deleted():
            token.block_until_ready()
        # The device works in order: what came before this task is over, too.
        self._tokens = {i: token for i, token in self._tokens.items() if i > task}

    def _find(self, op: Op, number: int, plan: BoundStep | None = None) -> Callable:
        """The function of a stage's or group's instruction; templates' keys take long to hash."""
        key = op, number, plan
        if key not in self._found:
            self._found[key] = self._look_up(op, number, plan)
        return self._found[key]

    def _look_up(self, op: Op, number: int, plan: BoundStep | None) -> Callable:
        templates = self.templates
        if plan is None:
            get = templates.reduce if op is Op.REDUCE else templates.update
            return get(self.optimizer, self.layouts[number], number)
        keeps = number in plan.schedule.kept
        if op is Op.FORWARD:
            get = templates.forward_keeping if keeps else templates.forward
        else:
            get = templates.backward_of_kept if keeps else templates.backward
        return get(plan.stages[number])

    def _masters(self, bound: BoundStage) -> list[jax.Array]:
        return [self.on_device["P", g][0] for g in bound.groups]

    def _forward(self, step: _Step, number: int, task: int) -> None:
        bound = step.plan.stages[number]
        run = self._find(Op.FORWARD, number, step.plan)
        if keeps := number in step.plan.schedule.kept:
            step.residuals[number] = []
        for row in step.rows:
            outputs = run(self._masters(bound), [row[i] for i in bound.stage.inputs])
            if keeps:
                outputs, residuals = outputs
                step.residuals[number].append(residuals)
            self._keep(step, bound, row, outputs, task)

    def _backward(self, step: _Step, number: int, task: int) -> None:
        bound = step.plan.stages[number]
        stage, mode = bound.stage, bound.mode
        assert mode is not None
        keeps = number in step.plan.schedule.kept
        run = self._find(Op.BACKWARD, number, step.plan)
        kept = step.residuals.pop(number, [[]] * len(step.rows))
        arriving = [o for o, a in zip(stage.outputs, mode.arriving, strict=True) if a]
        accumulated = [g for g, a in zip(bound.groups, mode.accumulate, strict=True) if a]
        for row, cotangents, residuals in zip(step.rows, step.cotangents, kept, strict=True):
            outputs, gradients, back = run(
                self._masters(bound),
                [row[i] for i in stage.inputs],
                *([residuals] if keeps else ()),
                [cotangents.pop(o) for o in arriving],
                [self._take_gradient(g) for g in accumulated],
                [cotangents.pop(i) for i in bound.sent],
            )
            for g, gradient in zip(bound.trained, gradients, strict=True):
                self.on_device["G", g] = (gradient,)
            self._tokens[task] = (back or gradients)[0]
            if mode.give_outputs:
                self._keep(step, bound, row, outputs, task)
            self._send(bound, cotangents, back)

    def _keep(self, step: _Step, bound: BoundStage, row, outputs, task: int) -> None:
        plan = step.plan
        kept = plan.kept if row is step.rows[0] else plan.kept - plan.kept_once
        for i, value in zip(bound.stage.outputs, outputs, strict=True):
            if i in kept:
                row[i] = value
        self._tokens[task] = outputs[0]

    def _send(self, bound: BoundStage, cotangents: dict[int, jax.Array], back) -> None:
        active = [i for i, a in zip(bound.stage.inputs, bound.stage.active, strict=True) if a]
        for i, cotangent in zip(active, back, strict=True):
            if i in cotangents:  # one value at two inputs of this stage
                cotangent = self.templates.get("add", lambda: jnp.add)(cotangents[i], cotangent)
            cotangents[i] = cotangent

    def _take_gradient(self, group: int) -> jax.Array:
        self.host.pop(("G", group), None)
        (gradient,) = self.on_device.pop(("G", group))
        return gradient

    def _zeros(self, group: int) -> None:
        size = self.layouts[group].master.size
        make = self.templates.get(
            ("zeros", size),
            lambda: lambda: jnp.zeros(size, jnp.float32),
            out_shardings=self.placement.slabs_on_device,
        )
        self.on_device["G", group] = (make(),)

    def _reduce(self, step: _Step, group: int, task: int) -> None:
        run, reads = self._find(Op.REDUCE, group), self.optimizer.reduce_reads
        (gradient,) = self.on_device["G", group]
        masters = self.on_device["P", group][0] if "P" in reads else None
        state = self.on_device.get(("O", group), ()) if "O" in reads else None
        loss = self._means(step)["loss"]
        scalars, *measured = run(gradient, masters, state, loss, self.globals, self.ok)
        step.scalars[group] = scalars
        self._note(step, group, *measured)
        self._tokens[task] = measured[0]

    def _note(self, step: _Step, group: int, square: jax.Array, ok: jax.Array) -> None:
        """What is known of a group's gradient: its squared norm, and whether all was finite."""
        self.ok = ok
        step.squares.append(square)
        step.group_ok.append((group, ok))

    def _combine(self, step: _Step) -> None:
        cut = self.optimizer
        run = self.templates.get(
            "combine",
            lambda: functions.combine(cut.combine, cut.reduce, cut.num_messages, cut.guarded),
        )
        scalars = [step.scalars.get(g, []) for g in range(len(self.layouts))]
        loss = self._means(step)["loss"]
        self.messages, self.globals, self.ok = run(loss, self.globals, scalars, self.ok)
        self._combined_ok = self.ok

    def _update(self, step: _Step | None, group: int, task: int) -> None:
        cut, run = self.optimizer, self._find(Op.UPDATE, group)
        (masters,) = self.on_device.pop(("P", group))
        state = self.on_device.pop(("O", group), ())
        gradient = self._take_gradient(group)
        messages = [self.messages[i] for i in cut.messages[group]]
        self.host.pop(("P", group), None)  # stale from here on
        self.host.pop(("O", group), None)
        # In another step than its gradients, if updates are deferred.
        ok = self._combined_ok if cut.deferred else self.ok
        masters, state, *measured = run(masters, state, gradient, messages, ok)
        if step is not None and not cut.deferred:
            self._note(step, group, *measured)
        self.on_device["P", group] = (masters,)
        self._tokens[task] = masters
        if state:
            self.on_device["O", group] = tuple(state)


def _known(number: int | None) -> int:
    assert number is not None
    return number
