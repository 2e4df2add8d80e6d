"""The engine: executes the instructions of a schedule.

All dispatches are asynchronous. A step waits for the device only at the schedule's waits, to
enforce the byte budget, and before stages with large temporaries. The engine dispatches
computations, `Transfers` dispatches copies, and the store holds the state.

The values that a step's stages pass to each other live only while it is dispatched.

None of this is state of the run: each step starts anew, and only its metrics outlive it. A value is
dropped after the last stage that reads it; a cotangent is removed by the stage that takes it.
"""

import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax._src.common.activity import progressed
from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.engine.kernels import steps, updates
from megatrain_jax._src.engine.kernels.bound_stage import BackwardMode, BoundStage
from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.kernels.kernel import Kernel
from megatrain_jax._src.engine.program.optimizer.cut import OptimizerCut
from megatrain_jax._src.engine.runtime.store import Slabs, Store
from megatrain_jax._src.engine.runtime.transfers import Transfers
from megatrain_jax._src.engine.schedule.instructions import WAITS, Instruction, Op
from megatrain_jax._src.engine.schedule.schedule import Schedule
from megatrain_jax._src.engine.spec.bound_step import BoundStep
from megatrain_jax._src.engine.spec.step_kernels import begin_kernel, group_kernel, stage_kernel
from megatrain_jax._src.engine.state.layout import GroupLayout


class Dispatched:
    """The tasks that were dispatched and have not been waited for.

    It holds one result per task, which is ready when the task is over::

        dispatched.note_stage(3, cotangent)    # computed by the stage of task 3
        dispatched.note(3, norm)               # computed by a later kernel of the task
        dispatched.wait_for_stage()            # blocks until `cotangent` is there
        dispatched.wait(3)                     # blocks until `norm` is there
    """

    def __init__(self):
        """Starts with no task."""
        self._results: dict[int, jax.Array | None] = {}
        self._stage_result: jax.Array | None = None

    def note(self, task: int, result: jax.Array | None) -> None:
        """Records a task's newest result; None if its kernel returns nothing."""
        self._results[task] = result

    def note_stage(self, task: int, result: jax.Array | None, *, hold: bool = True) -> None:
        """Records a stage's result like `note`, and keeps it until the next stage's result.

        Args:
            task: The stage's task.
            result: See `note`.
            hold: Whether it may be kept that long; False for a gradient, which an update frees.
        """
        self.note(task, result)
        self._stage_result = result if hold else None

    def wait(self, task: int) -> None:
        """Blocks until the device has finished a task, and all earlier ones."""
        result = self._results.get(task)
        if result is not None and result.is_deleted():
            # A later kernel has reused its memory, so that kernel's result is waited for instead.
            later = (x for i, x in self._results.items() if i > task and x is not None)
            result = next((x for x in later if not x.is_deleted()), None)
        if result is not None:
            result.block_until_ready()
        # The device works in order, so all earlier tasks are over too.
        self._results = {i: x for i, x in self._results.items() if i > task}

    def wait_for_stage(self) -> None:
        """Blocks until the device has finished the last stage; later work may continue."""
        if (
            self._stage_result is None or self._stage_result.is_deleted()
        ):  # a later kernel has its memory
            self.wait_for_all()
        else:
            self._stage_result.block_until_ready()

    def forget_stage(self) -> None:
        """Forgets the last stage: until one is recorded, `wait_for_stage` waits for all tasks."""
        self._stage_result = None

    def wait_for_all(self) -> None:
        """Blocks until the device has finished everything recorded."""
        live = (x for x in reversed(self._results.values()) if x is not None and not x.is_deleted())
        if (last := next(live, None)) is not None:
            last.block_until_ready()
        self.clear()

    def clear(self) -> None:
        """Forgets all tasks."""
        self._results.clear()
        self._stage_result = None


@dataclasses.dataclass(kw_only=True)
class LiveValues:
    """Live values of a step; rows and cotangents have one entry per microbatch.

    Attributes:
        step: The step.
        rows: Values that stages pass on, by id, beginning with the prologue's. An activation is
            absent while it is in host memory.
        cotangents: Cotangents, by the ids of their values.
        rounded: Number of sums of gradients that were rounded so far, on the device.
        wave: The wave that is computed now.
        means: Loss and metrics, once they are known: means over the microbatches.
        scalars: The result of each group's *reduce*, once dispatched.
        squares: Squared norms of the groups' gradients.
        group_ok: Groups in the order of their gradients, each with `Store.ok` after its gradient.
    """

    step: BoundStep
    rows: list[dict[int, jax.Array]]
    cotangents: list[dict[int, jax.Array]]
    rounded: jax.Array
    wave: int = 0
    means: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    scalars: dict[int, list[jax.Array]] = dataclasses.field(default_factory=dict)
    squares: list[jax.Array] = dataclasses.field(default_factory=list)
    group_ok: list[tuple[int, jax.Array]] = dataclasses.field(default_factory=list)

    @property
    def wave_rows(self) -> list[dict[int, jax.Array]]:
        """The rows of the wave's microbatches."""
        return self.rows[self._wave_slice]

    @property
    def wave_cotangents(self) -> list[dict[int, jax.Array]]:
        """The cotangents of the wave's microbatches."""
        return self.cotangents[self._wave_slice]

    @property
    def _wave_slice(self) -> slice:
        number = self.step.wave_microbatches
        return slice(self.wave * number, (self.wave + 1) * number)


# ---- engine


class Engine:
    """Runs steps on the state in a store.

    Attributes:
        store: The run's state. Steps replace it.
        group_ok: Numbers of groups in the order of the last step's gradients, each with the value
            of `store.ok` after its gradient.
        kernels: The run's compiled functions.
    """

    def __init__(self, store: Store, optimizer: OptimizerCut, kernels: KernelCache):
        """Makes an engine for a store that is at rest or still to be filled."""
        self.store, self.optimizer, self.kernels = store, optimizer, kernels
        self.group_ok: list[tuple[int, jax.Array]] = []
        self._transfers = Transfers(store)
        self._numbers_on_devices: dict[int, jax.Array] = {}
        self._messages: list[jax.Array] = []
        self._true = store.placement.put(jnp.array(True), store.placement.small_on_device)
        # `ok` and the step number of the pending updates.
        self._combined_ok, self._combined_step = store.ok, store.step
        self._found: dict[Hashable, Callable] = {}
        self._large: set[Hashable] = set()  # keys of functions with large temporaries
        self._dispatched = Dispatched()
        self._running: Schedule | None = None  # of the steps since the state was last at rest
        self._task_offset = 0  # number of tasks in these steps

    # ---- whole steps

    def train(self, step: BoundStep, batch: Sequence[jax.Array]) -> dict[str, jax.Array]:
        """Dispatches one training step and returns its metrics, maybe before they are ready."""
        schedule = step.schedule
        assert not schedule.left_out
        # A steady step continues from the device state that its own schedule left. A step with a
        # different schedule starts at rest.
        if self._running is not None and self._running != schedule:
            self.flush()
        instructions = schedule.steady if self._running is not None else schedule.cold
        self._transfers.on_disk = step.workload.on_disk
        self._transfers.follow(instructions, schedule.steady)
        self._wake()
        if self.optimizer.skips:
            self.store.ok = self._true  # a skipped step must not make later steps skip
        self._running = schedule
        # The old ones are restored if a number is not finite.
        variables = self.store.variables
        scale = () if self.store.scaling is None else self.store.scaling[:1]
        live, seed, self.store.variables = self._begin(step, batch, scale)
        for cotangents in live.cotangents:
            cotangents[step.program.outputs[0]] = seed
        for instruction in instructions:
            self.obey(instruction, live)
        self._transfers.dispatch()  # offloads after the last computation
        self._task_offset += schedule.num_tasks
        new = list(self.store.variables)
        # From the first microbatch, because state changes once per step.
        for k, i in step.late_state.items():
            new[k] = live.rows[0][i]
        keep = self._find("keep", lambda: steps.keep(self.store.placement))
        new = keep(new, variables, self.store.ok) if new else new
        self.store.variables = new
        self.group_ok = live.group_ok
        end = self.kernels.get(steps.END)
        metrics, self.store.step = end(self._means(live), live.squares, self.store.step)
        if self.store.scaling is not None:
            metrics["loss_scale"] = self.store.scaling[0]
            change = self._find("change scale", steps.change)
            self.store.scaling = change(*self.store.scaling, self.store.ok)
        return metrics

    def evaluate(
        self,
        step: BoundStep,
        batch: Sequence[jax.Array],
        number: int,
        averaged: Sequence[GroupLayout] | None = None,
    ) -> Any:
        """Computes the loss and metrics of one batch, or the arrays of a prediction.

        It changes no state, even if it fails.

        Args:
            step: The bound step of an evaluation.
            batch: Arrays of the batch, on the devices.
            number: The batch's number in its evaluation, from 0: each draws its own random numbers.
            averaged: Layouts with averages as masters, which are then copied in their place; see
                `Store.of_averages`.
        """
        self.flush()
        own = self.store
        if averaged is not None:
            self.store = self._transfers.store = own.of_averages(averaged)
        try:
            return self._evaluated(step, batch, number)
        finally:
            self.store = self._transfers.store = own

    def _evaluated(self, step: BoundStep, batch: Sequence[jax.Array], number: int) -> Any:
        """See `evaluate`; all state is at rest."""
        self._wake()
        try:
            self._transfers.on_disk = step.workload.on_disk
            self._transfers.follow(step.schedule.evaluation)
            placement = self.store.placement
            evaluated = placement.put(np.uint32(number), placement.small_on_device)
            live, _, _ = self._begin(step, batch, evaluated=evaluated)
            for instruction in step.schedule.evaluation:
                self.obey(instruction, live)
            is_loss = step.program.rows is None
            found = self._means(live, weighted=True) if is_loss else self._arrays(live)
        except BaseException:
            self._transfers.abandon()
            self.store.forget_step()
            raise
        finally:
            self._rest()
        return found

    def flush(self) -> None:
        """Applies pending updates and brings all state to rest in pinned host memory."""
        if self._running is not None:
            self._transfers.follow(self._running.flush)
            for instruction in self._running.flush:
                self.obey(instruction, None)
            self._rest()

    def recover(self) -> None:
        """Drops the pending updates of a step that was not finite, and resets `ok`."""
        self.flush()  # updates do nothing while `ok` is false
        self.store.ok = self.store.small(jnp.array(True))

    def abandon(self) -> None:
        """Drops the running schedule and its transfers; the store must be refilled afterwards."""
        self._transfers.abandon()
        self._dispatched.clear()
        self._running, self._task_offset = None, 0

    def set_step(self, step: int) -> None:
        """Sets the number of the next step; all state must be at rest."""
        assert self._running is None
        self.store.step = self.store.small(jnp.array(step, jnp.int32))

    def _rest(self) -> None:
        self._transfers.rest()
        self._running, self._task_offset = None, 0
        self._dispatched.clear()
        self.store.rest()

    def _wake(self) -> None:
        if self._running is None:
            self.store.wake()

    def _begin(
        self,
        step: BoundStep,
        batch: Sequence[jax.Array],
        scale: Sequence[jax.Array] = (),
        **evaluated: jax.Array,
    ) -> tuple[LiveValues, jax.Array, list[jax.Array]]:
        begin = self._find(("begin", step), lambda: begin_kernel(step, self.store.placement))
        rows, seed, variables = begin(
            self.store.variables, list(batch), self.store.key, self.store.step, *scale, **evaluated
        )
        ids, once = step.program.prologue_values, step.kept_once
        live = LiveValues(
            step=step,
            rows=[
                {i: x for i, x in zip(ids, row, strict=True) if not m or i not in once}
                for m, row in enumerate(rows)
            ],
            cotangents=[{} for _ in rows],
            rounded=self._number(0),
        )
        return live, seed, variables

    def _means(self, live: LiveValues, *, weighted: bool = False) -> dict[str, jax.Array]:
        """Means of loss and metrics over the microbatches; computed once per step."""
        if not live.means:
            names, ids = live.step.program.metrics, live.step.program.results
            key = "means", names, weighted
            means = self._find(key, lambda: steps.means(names, weighted=weighted))
            live.means = means([[row[i] for i in ids] for row in live.rows])
            if not weighted and self.store.placement.across:
                live.means = self._over_processes(live.means)
        return live.means

    def _arrays(self, live: LiveValues) -> Any:
        """The arrays of a prediction, with the rows of all microbatches in order."""
        program = live.step.program
        arrays, *others = [[row[i] for i in program.results] for row in live.rows]
        if others:
            sizes = [len(live.rows) * x.shape[0] for x in arrays]
            join = self.kernels.get(steps.joined(list(map(self.store.placement.batch, sizes))))
            arrays = join([arrays, *others])
        return jax.tree.unflatten(program.rows, arrays)

    def _over_processes(self, means: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The means of loss and metrics over processes that each hold all state."""
        placement = self.store.placement
        rows = self.kernels.get(steps.as_rows(placement))(means)
        return placement.own(self.kernels.get(steps.row_means(placement))(placement.joined(rows)))

    def _sum_over_processes(self, group: int) -> None:
        """Sums a group's complete gradient over processes that each hold all state."""
        placement, key = self.store.placement, Key(Kind.GRADIENT, group)
        if placement.across:
            self._transfers.settle(key)
            run = self.kernels.get(steps.summed(placement))
            joined = placement.joined(self.store.on_device.pop(key))
            self.store.on_device[key] = tuple(placement.own(run(joined)))

    def _number(self, of: int) -> jax.Array:
        """A number, such as a group's, as an array on the devices."""
        if of not in self._numbers_on_devices:
            # Once per run: sent with each update, it would be an extra copy.
            placement = self.store.placement
            self._numbers_on_devices[of] = placement.put(np.uint32(of), placement.small_on_device)
        return self._numbers_on_devices[of]

    def _draw(self, group: int, step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array] | None:
        """The arguments of an update that draws random bits; None if the group draws none."""
        store = self.store
        return (store.key, step, self._number(group)) if store.layouts[group].draws else None

    def _numbers(self, live: LiveValues) -> list[jax.Array]:
        """The loss and, if it is scaled, its scale: an optimizer's arguments besides arrays."""
        scaling = self.store.scaling
        return [self._means(live)["loss"], *(() if scaling is None else scaling[:1])]

    # ---- instructions

    def obey(self, instruction: Instruction, live: LiveValues | None) -> None:
        """Executes one instruction of the schedule.

        Transfers are collected until the next computation. A wait dispatches them first if they
        include a fetch, so that it is not delayed; offloads queue behind earlier ones
        anyway.
        """
        progressed()
        # Negative numbers are tasks of the previous step, already in `_task_offset`.
        task = self._task_offset + (instruction.task or 0)
        waits = instruction.op in WAITS
        key = instruction.key
        if key is not None and not waits:
            # An activation moves only within the wave that makes and reads it.
            self._transfers.move(instruction.op, key, task, [] if live is None else live.wave_rows)
            return
        if not waits and self.store.disk is not None:
            self._transfers.bring(_reads(instruction, live))
        elif not waits or self._transfers.fetching:
            self._transfers.dispatch()
        if instruction.op is Op.WAIT:
            self._dispatched.wait(task)
        elif key is not None:
            self._dispatched.wait(task)  # a part can land while its task still computes with it
            self._transfers.wait_for_offload(task, key)
        elif instruction.op is Op.UPDATE:
            self._update(live, _known(instruction.group), task)
        elif live is None:
            raise AssertionError(f"{instruction} outside a step")
        elif instruction.op is Op.ZEROS:
            self._zeros(live.step, _known(instruction.group))
        elif instruction.op is Op.COMBINE:
            self._combine(live)
        elif instruction.op is Op.REDUCE:
            self._reduce(live, _known(instruction.group), task)
        else:
            stage, live.wave = _known(instruction.stage), instruction.wave
            compute = self._forward if instruction.op is Op.FORWARD else self._backward
            compute(live, stage, task)
            for i in live.step.last_read.get(_known(instruction.task), ()):
                self.store.host.pop(Key(Kind.ACTIVATION, i), None)  # left by an earlier offload
                for row in live.wave_rows:
                    row.pop(i, None)

    def _find(self, key: Hashable, make: Callable[[], Kernel]) -> Callable:
        """A kernel's function, by a cheap key, because kernels are slow to make and hash."""
        if key not in self._found:
            kernel = make()
            self._found[key] = self.kernels.get(kernel)
            if self.kernels.has_large_temporaries(kernel):
                self._large.add(key)
        return self._found[key]

    def forget(self, steps: Collection[BoundStep]) -> None:
        """Drops the functions that only these steps use, with the memory of their programs."""
        found = {key: f for key, f in self._found.items() if not _is_of(key, steps)}
        used = {*map(id, found.values())}
        self.kernels.drop({id(f) for f in self._found.values()} - used)
        self._found, self._large = found, self._large & found.keys()

    def _stage_function(
        self,
        op: Op,
        number: int,
        step: BoundStep,
        microbatch: int = 0,
        mode: BackwardMode | None = None,
    ) -> Callable:
        """A stage's compiled function; waits if it has large temporaries, so call it at once."""
        key, placement = (op, number, step, mode), self.store.placement
        function = self._find(key, lambda: stage_kernel(step, op, number, placement, microbatch))
        if key in self._large:
            self._dispatched.wait_for_stage()
        return function

    def _of_group(self, op: Op, number: int, gradient: np.dtype) -> Callable:
        key, store = (op, number, gradient), self.store
        what = self.optimizer, store.layouts, gradient, store.placement
        function = self._find(key, lambda: group_kernel(op, number, *what))
        if key in self._large:
            self._dispatched.wait_for_stage()
            self._dispatched.forget_stage()  # the next large kernel waits for this one
        return function

    def _masters(self, bound: BoundStage) -> list[Slabs]:
        return [self.store.on_device[Key(Kind.MASTERS, g)] for g in bound.groups]

    def _forward(self, live: LiveValues, number: int, task: int) -> None:
        bound = live.step.stages[number]
        keeps, kept = number in live.step.schedule.kept, []
        for row in live.wave_rows:
            run = self._stage_function(Op.FORWARD, number, live.step)
            outputs = run(self._masters(bound), [row[i] for i in bound.stage.inputs])
            if keeps:
                outputs, residuals = outputs
                kept += residuals
            self._keep(live, bound, row, outputs, task)
        if keeps:
            self.store.on_device[Key(Kind.RESIDUALS, number)] = tuple(kept)

    def _backward(self, live: LiveValues, number: int, task: int) -> None:
        bound = live.step.stages[number]
        stage, mode = bound.stage, bound.mode
        assert mode is not None
        keeps = number in live.step.schedule.kept
        kept = self._pop_part(Key(Kind.RESIDUALS, number)) if keeps else ()
        rows, waiting = live.wave_rows, live.wave_cotangents
        each = len(kept) // len(rows)
        sums = {g: self._pop_part(Key(Kind.GRADIENT, g)) for g in bound.accumulated}
        made: dict[int, Slabs] = {}  # the wave's sums in fp32, if sums are stored in bfloat16
        for m, (row, cotangents) in enumerate(zip(rows, waiting, strict=True)):
            part = live.step.part(number, m)
            assert part.mode is not None
            run = self._stage_function(Op.BACKWARD, number, live.step, m, part.mode)
            added_to = made if part.mode.is_partial else sums
            outputs, gradients, back, *more = run(
                self._masters(bound),
                [row[i] for i in stage.inputs],
                *([list(kept[m * each : (m + 1) * each])] if keeps else ()),
                [cotangents.pop(o) for o in bound.arriving],
                # Removed here, because the kernel reuses their memory.
                [added_to.pop(g) for g in part.accumulated],
                [cotangents.pop(i) for i in bound.sent],
                *self._rounding(live, part, made),
            )
            added_to.update(zip(bound.trained, gradients, strict=True))
            live.rounded = more[-1] if more else live.rounded
            if mode.give_outputs:
                self._keep(live, bound, row, outputs, task)
            self._send(bound, cotangents, back)
            # To wait for a kernel, one result is enough, preferably one whose memory no later
            # kernel reuses.
            lasting = [i for i in bound.leaving if i not in live.step.accumulated_cotangents]
            held = [cotangents[i] for i in lasting or bound.leaving]
            self._dispatched.note_stage(task, (held or gradients[0])[0], hold=bool(held))
            del gradients, more
        for g in bound.trained:
            self.store.on_device[Key(Kind.GRADIENT, g)] = sums.pop(g)

    def _keep(self, live: LiveValues, bound: BoundStage, row, outputs, task: int) -> None:
        step = live.step
        kept = step.kept if row is live.rows[0] else step.kept - step.kept_once
        for i, value in zip(bound.stage.outputs, outputs, strict=True):
            if i in kept:
                row[i] = value
        # A stage that only prints has no result.
        self._dispatched.note_stage(task, next(iter(outputs), None))

    def _send(self, bound: BoundStage, cotangents: dict[int, jax.Array], back) -> None:
        for i, cotangent in zip(bound.leaving, back, strict=True):
            if i in cotangents:  # one value at two inputs of this stage
                cotangent = self.kernels.get(steps.ADD)(cotangents[i], cotangent)
            cotangents[i] = cotangent

    def _pop_part(self, key: Key) -> Slabs:
        """A part that a kernel consumes: it may write into its memory at once."""
        self._transfers.settle(key)
        self.store.host.pop(key, None)
        return self.store.on_device.pop(key)

    def _rounding(self, live: LiveValues, bound: BoundStage, made: dict[int, Slabs]) -> tuple:
        """The further arguments of a backward that rounds gradients to bfloat16."""
        groups, store = bound.rounded, self.store
        if not groups:
            return ()
        numbers = [self._number(g) for g in groups]
        of_wave = [made.pop(g) for g in groups if g in made]
        return of_wave, (store.key, store.step, numbers, live.rounded)

    def _zeros(self, step: BoundStep, group: int) -> None:
        dtype = step.gradient_dtypes[group]
        layout, placement = self.store.layouts[group].master, self.store.placement
        key = Op.ZEROS, group, dtype
        make = self._find(key, lambda: steps.zeros(layout, placement, dtype))
        self.store.on_device[Key(Kind.GRADIENT, group)] = make()

    def _reduce(self, live: LiveValues, group: int, task: int) -> None:
        store, reads = self.store, self.optimizer.reduce_reads
        self._sum_over_processes(group)
        gradient = store.on_device[Key(Kind.GRADIENT, group)]
        masters = store.on_device[Key(Kind.MASTERS, group)] if Kind.MASTERS in reads else None
        state = None
        if Kind.OPTIMIZER_STATE in reads:
            state = store.on_device.get(Key(Kind.OPTIMIZER_STATE, group), ())
        run = self._of_group(Op.REDUCE, group, gradient[0].dtype)
        numbers = self._numbers(live)
        scalars, *measured = run(gradient, masters, state, numbers, store.globals, store.ok)
        live.scalars[group] = scalars
        self._note(live, group, *measured)
        self._dispatched.note(task, measured[0])

    def _note(self, live: LiveValues, group: int, square: jax.Array, ok: jax.Array) -> None:
        """Records the squared norm of a group's gradient, and whether all numbers were finite."""
        self.store.ok = ok
        live.squares.append(square)
        live.group_ok.append((group, ok))

    def _combine(self, live: LiveValues) -> None:
        store = self.store
        run = self._find(Op.COMBINE, lambda: updates.combine(self.optimizer, store.placement))
        scalars = [live.scalars.get(g, []) for g in range(len(store.layouts))]
        numbers = self._numbers(live)
        self._messages, store.globals, store.ok = run(numbers, store.globals, scalars, store.ok)
        self._combined_ok, self._combined_step = store.ok, store.step

    def _update(self, live: LiveValues | None, group: int, task: int) -> None:
        cut, store = self.optimizer, self.store
        masters_key, state_key = Key(Kind.MASTERS, group), Key(Kind.OPTIMIZER_STATE, group)
        # Removed here, because the kernel writes the new arrays into their memory.
        masters = self._pop_part(masters_key)
        state = self._pop_part(state_key) if state_key in store.on_device else ()
        if not cut.deferred:
            self._sum_over_processes(group)
        gradient = self._pop_part(Key(Kind.GRADIENT, group))
        run = self._of_group(Op.UPDATE, group, gradient[0].dtype)
        messages = [self._messages[i] for i in cut.messages[group]]
        # A deferred update runs one step after its gradient.
        ok = self._combined_ok if cut.deferred else store.ok
        draw = self._draw(group, self._combined_step if cut.deferred else store.step)
        masters, state, *measured = run(masters, state, gradient, messages, ok, draw)
        if live is not None and not cut.deferred:
            self._note(live, group, *measured)
        store.on_device[masters_key] = masters
        self._dispatched.note(task, (measured or masters)[0])
        if state:
            store.on_device[state_key] = state


def _reads(instruction: Instruction, live: LiveValues | None) -> Iterator[Key]:
    """The parts that a computation may read, of those that can rest on disks."""
    groups: Sequence[int] = ()
    if instruction.op in (Op.UPDATE, Op.REDUCE):
        groups = (_known(instruction.group),)
    elif instruction.stage is not None and live is not None:
        bound = live.step.stages[instruction.stage]
        groups = bound.groups
        for i in bound.stage.inputs:
            yield Key(Kind.ACTIVATION, i)
    for group in groups:
        yield Key(Kind.MASTERS, group)
        yield Key(Kind.GRADIENT, group)
        if instruction.stage is None:
            yield Key(Kind.OPTIMIZER_STATE, group)


def _known(number: int | None) -> int:
    assert number is not None
    return number


def _is_of(key: Hashable, steps: Collection[BoundStep]) -> bool:
    """Whether a function's cheap key names one of these steps."""
    return isinstance(key, tuple) and any(isinstance(x, BoundStep) and x in steps for x in key)
