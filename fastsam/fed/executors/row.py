"""One row of the arena: a replica of the model and its buffers, in which one client after the other takes its local
steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastsam.fed.executors.base import ClientError, Setup, Task, to_device
from fastsam.fed.executors.gradient_passes import Gradients, Passes
from fastsam.fed.executors.kernel_calls import Form, Rows
from fastsam.fed.executors.mixed import Beside
from fastsam.fed.executors.phases import repeated, together
from fastsam.fed.executors.randomness import PassRandomness
from fastsam.fed.executors.step_vectors import check_vectors
from fastsam.fed.executors.taught import Taught
from fastsam.fed.step.constants import Constants
from fastsam.fed.step.input_map import InputMap
from fastsam.fed.step.local_update import ClientResults, Direction, LocalUpdate, Snapshot
from fastsam.fed.step.model_copy import Replica, buffer_displacement


class Row:
    """Two buffers: `z`, which the model's parameters view, and `w`, the unperturbed weights, for steps that perturb by
    a gradient.

    Perturbing writes `z = w + eps`, updating writes the new `w` into both: no pass only restores, no `eps` is stored,
    and nothing is rounded twice. Without such a perturbation `z` is the only buffer. A constant perturbation p is a
    shift of the whole round: the row starts at `w^t + p`, takes ordinary steps there, and p is taken out of the terms
    that are meant at `w` (ALGORITHMS: the constant half is folded into q where clipping allows, else passed as
    `shift`). Gradients are read where autograd left them; a parameter without a gradient in a pass is left out of the
    calls that use it. Nothing in a step waits for the device.

    Use: `open_(task, ...)`, then `step_()` until it returns False, then `close()`.
    """

    task: Task
    given: Task  # the task of all phases, with its samples opened
    carried: ClientResults | None  # the results of phases before, from which this one goes on
    done: tuple[ClientResults, ...]  # the results of other models
    losses: list[Tensor]
    snapshots: dict[int, Snapshot]
    eps: Tensor | None
    gradient: Tensor | None
    norms: Tensor | None
    map: InputMap | None
    beside: Beside | None
    batches: Iterator[tuple[Any, Any]]

    def __init__(self, setup: Setup, random: PassRandomness | None = None) -> None:
        self.setup, self.rows = setup, Rows(setup, 1)
        self.form = Form(self.rows, slice(0, 1))
        self.z = self.form.z
        self.replica = Replica(setup.model, setup.layout, self.z[0])
        self.passes = Passes(self.replica, setup.layout, setup.loss)
        self.random = PassRandomness(setup.device) if random is None else random
        self._run = self._run_perturbed = self.passes.run
        self._teacher = Taught(setup, self.form, self.replica)
        self._filled: tuple[float, ...] = ()
        self._known: tuple[Constants | None, float] = None, 0.0
        self._checked: LocalUpdate | None = None
        self._kind = self.form.kind
        self._step: Callable[[int, Any, Any], Tensor] = self._plain_step
        self._sized: tuple[int | None, ...] = ()
        self._only: tuple[int, ...] | None = None
        self._beside: Beside | None = None
        self.replica.module.train()

    # --- a client's round ---

    def open_(self, task: Task, start: Tensor, buffers: Sequence[Tensor]) -> None:
        """Begins a task from the weights `start` (`[row_size]`; its step may have its own) and the model's `buffers`.

        Raises ValueError for vectors that do not fit."""
        step = task.step
        if step is not self._checked:
            check_vectors(step, start)
            self._checked = step
        own, buffers = None if step.start is None else task.vector("start"), task.buffers(buffers)
        self.task = self.given = task
        self.start, self.buffers = start if own is None else own, buffers
        self.k, self.extra_backward_passes, self.losses, self.snapshots, self.done = 0, 0, [], {}, ()
        self.carried = self.eps = self.gradient = self.norms = self.map = self.beside = None
        if task.work.samples is not None:
            with self.client_errors():
                task.open_()
        for own, new in zip(self.replica.buffers, buffers, strict=True):
            own.copy_(new)
        self._begin(step)
        if not step.constants.is_plain:
            self._begin_extras(step)
        if self.form.kind.constant and (e := task.vector("direction_vector")) is not None:
            self.form.shift_(e)
        self._measure(self.task)
        self.batches = self._batches(self.task)
        self.random.begin(task.pass_seed(0))

    def _begin_extras(self, step: LocalUpdate) -> None:
        """Begin the parts of a local update that are not steps: its number of epochs, gradients at the start, a map of
        the inputs."""
        if step.epochs is not None:
            self.task = replace(self.task.phase(step), snapshots=self.task.snapshots)
        if step.full_gradient or step.pilot is not None:
            with self.client_errors():
                self._first_gradient()
        if step.pilot is not None:
            assert self.gradient is not None and self.norms is not None  # found just now
            self.form.radius_(step.pilot, self.norms, self.gradient)
        if step.input_map is not None:
            task = self.task
            self.map = step.input_map.of_row(task.row).begin(self.passes.mappable(task.x[:1]))

    def step_(self) -> bool:
        """One local step. False when there was none left. Raises ClientError when the model or the loss raises."""
        try:  # not `client_errors`: a context manager costs as much as a kernel call
            batch = next(self.batches, None)
            if batch is None:
                if self.task.step.then is None:
                    return False
                self._next_phase(self.task.step.then)
                batch = next(self.batches)
            self.pace_()
            self._take(self.k, *batch)
        except ClientError:
            raise
        except Exception as error:
            raise self._failure(error) from error
        self.k += 1
        return True

    @contextmanager
    def client_errors(self) -> Iterator[None]:
        """Raise an error of the model or the loss as a ClientError with its place."""
        try:
            yield
        except ClientError:
            raise
        except Exception as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> ClientError:
        return ClientError.of([self.task.client], self.task.round, self.k, error)

    def close(self) -> ClientResults:
        """Return the results of the client in new memory."""
        results = self._ends()
        for before in reversed(self.done):
            results = replace(before, then=results)
        return results

    def _ends(self) -> ClientResults:
        """Return the results of this model so far."""
        task, step = self.task, self.task.step
        results = ClientResults(
            client_ids=(task.client,),
            delta=self.z - (self.form.field("begin") if step.direction is Direction.CONSTANT else self.start),
            num_steps=(self.k,),
            backward_passes=(self.k * step.backward_passes + self.extra_backward_passes,),
            losses=(torch.stack(self.losses) * self.sizes).sum(0, keepdim=True),  # the product is float64: sizes are
            num_samples=(task.seen,),
            buffers=buffer_displacement(self.replica.buffers, self.buffers)[None] if self.replica.buffers else None,
            snapshots=(self.snapshots,),
        )
        if step.dual is not None:
            eps = None if self.eps is None else self.eps.clone()
            results = replace(results, dual=self.form.field("dual").clone(), eps=eps)
        return results if step.constants.is_plain and self.carried is None else self._with_extras(results)

    def _with_extras(self, results: ClientResults) -> ClientResults:
        """Add the results of the parts that are not steps, of a second model, and of the phases before."""
        results = replace(results, gradient=self.gradient, norms=self.norms)
        if self.map is not None:
            ascents = self.k * (self.map.steps - 1)
            passes = (results.backward_passes[0] + ascents,)
            results = replace(results, input_map=self.map.as_row(), backward_passes=passes)
        envelope = self.task.step.envelope
        if envelope is not None:
            results = replace(
                results,
                delta=self.form.field("anchor") - self.start,
                inner=results.delta,
                num_samples=(self.task.seen * envelope.steps,),
            )
        if self.beside is not None:
            inner = self.beside.form.z - self.beside.start
            results = replace(results, backward_passes=(2 * self.k,), inner=inner, alpha=self.beside.alpha)
        return results if self.carried is None else together(self.carried, results)

    def _next_phase(self, step: LocalUpdate) -> None:
        """Begin a further phase, from the end of this one or with another model."""
        results, task, goes_on = self._ends(), self.task, step.start is None
        begin, first = self.z[0].clone(), self.start
        if goes_on:
            self.carried, self.task = results, self.given.phase(step, task.begun + task.epochs, task.passed + self.k)
        else:
            self.done, self.carried, self.task = (*self.done, results), None, self.given.phase(step)
            own = self.task.vector("start")
            assert own is not None
            begin = first = own
            for buffer, value in zip(self.replica.buffers, self.buffers, strict=True):
                buffer.copy_(value)
        self.k, self.losses, self.snapshots, self.extra_backward_passes = 0, [], {}, 0
        self.start = begin
        self._begin(step)
        self.start = first  # displacements are measured from where the model began
        self._measure(self.task)
        self.batches = self._batches(self.task)

    # --- its beginning ---

    def _begin(self, step: LocalUpdate) -> None:
        """Write the numbers of the step, and let its kernels read its vectors."""
        if self._known[0] is not step.constants or self._known[1] != self.task.work.lr or self._kind.rewrites:
            self._fill(step, self.task.work.lr)
        if step.teacher is not None:
            self._teacher.listen_(step.teacher, self.task, self.buffers)
        self.form.arrange(self._kind)
        self.form.begin_(self.start)
        if step.constants.vectors:
            self._read_vectors(step)

    def _read_vectors(self, step: LocalUpdate) -> None:
        """Put the vectors of the step where its kernels read them; vectors that are only read stay where they are."""
        form = self.form
        q, mu, s = (self.task.vector(name) for name in ("gradient_offset", "dual", "server_perturbation"))
        if q is not None:
            form.q = q[None]
        if step.envelope is not None and q is not None:
            form.q = form.field("gradient_offset").copy_(q)
            form.field("anchor").copy_(self.start)
        if mu is not None and s is not None:
            form.field("dual")[0].copy_(mu)
            form.s = s[None]
        self.beside, v = None, self.task.vector("beside")
        if step.mixture is not None and v is not None:
            self.beside = self._beside = self._beside or Beside(self.setup)
            self.beside.begin_(v, step.mixture, self.task.row)
        if form.kind.vectors:
            form.vectors = {name: v[None] for name in form.kind.vectors if (v := self.task.vector(name)) is not None}

    def _fill(self, step: LocalUpdate, lr: float) -> None:
        numbers = self.rows.numbers(step, lr)
        if self._filled != numbers:
            self.rows.hparams[0, 0] = to_device(torch.tensor(numbers, dtype=torch.float64), self.z.device)
        self._known, self._kind = (step.constants, lr), step.constants.variant
        self._filled = () if self._kind.rewrites else numbers
        self._run = self.passes.run if step.teacher is None else self._run_taught
        untaught = step.teacher is None or step.teacher.perturbs
        self._run_perturbed = self.passes.run if untaught else self._run_taught
        if self._kind.two_passes:
            self._step = self._sharp_step
        elif step.mixture is not None:
            self._step = self._mixed_step
        else:
            self._step = self._walking_step if self._kind.walks else self._plain_step
        if step.only is not self._only:
            self._only = step.only
            for place, p in enumerate(self.replica.parameters):
                p.requires_grad_(step.only is None or place in step.only)

    def _batches(self, task: Task) -> Iterator[tuple[Any, Any]]:
        """Yield the batches of the local steps, in order."""
        envelope = task.step.envelope
        return task.batches() if envelope is None else repeated(task, envelope, self.form)

    def _measure(self, task: Task) -> None:
        """Compute the number of steps, and of samples in each."""
        work, envelope = task.work, task.step.envelope
        times = 1 if envelope is None else envelope.steps
        # All other constants are equal for all clients of a run.
        shape = (task.samples, work.batch_size, task.epochs, work.steps, times)
        if self._sized != shape:
            self._sized, sizes = shape, [n for n in task.batch_sizes() for _ in range(times)]
            self.last, self.sizes = len(sizes) - 1, to_device(torch.tensor(sizes, dtype=torch.float64), self.z.device)

    def _first_gradient(self) -> None:
        """The gradient at the start, over all samples or a pilot's batches."""
        task, pilot = self.task, self.task.step.pilot
        self.gradient = torch.zeros_like(self.z)
        if pilot is None:
            self.extra_backward_passes += self.passes.mean_gradient(task.whole(), self.gradient[0])
            return
        self.norms = torch.zeros(1, dtype=torch.float64, device=self.z.device)
        self.extra_backward_passes += self.passes.mean_gradient(task.first(pilot.batches), self.gradient[0], self.norms)

    # --- a step ---

    def pace_(self) -> None:
        """The learning rate and the radius of the next step, where it has its own."""
        if self._kind.paced:
            self.form.pace_([self.task.pace(self.k, self.last + 1)])

    def _take(self, k: int, x: Any, y: Any) -> None:
        if k in self.task.snapshots:
            self._keep(k)
        self.losses.append(self._step(k, x, y))

    def _plain_step(self, k: int, x: Any, y: Any) -> Tensor:
        loss, gradients = self._pass(k, x, y)
        self.form.update_(gradients, None)
        return loss

    def _mixed_step(self, k: int, x: Any, y: Any) -> Tensor:
        # BatchNorm's statistics are updated only in the pass at the shared weights.
        kept = self.replica.copy_of_buffers()
        assert self.beside is not None  # _read_vectors() saw to it
        self.beside.step_(k == 0, self.form, lambda: self._pass(k, x, y)[1])
        for buffer, value in zip(self.replica.buffers, kept, strict=True):
            buffer.copy_(value)
        return self._plain_step(k, x, y)

    def _walking_step(self, k: int, x: Any, y: Any) -> Tensor:
        self.form.walk_()
        if k in self.task.snapshots:
            w = self.snapshots[k].w
            self.snapshots[k] = Snapshot(w, self.z[0] - w)
        return self._plain_step(k, x, y)

    def _pass(self, k: int, x: Any, y: Any, perturbed: bool = False) -> tuple[Tensor, Gradients]:
        """One forward and backward pass (with a map of the inputs: its ascent too). perturbed: the second one of a
        step."""
        if self.random.draws:
            self.random.seed(self.task.pass_seed(k))
        if self.map is None:
            return self._run_perturbed(x, y) if perturbed else self._run(x, y)
        loss, gradients, self.map = self.passes.run_mapped(x, y, self.map)
        return loss, gradients

    def _run_taught(self, x: Tensor, y: Tensor) -> tuple[Tensor, Gradients]:
        teacher = self.task.step.teacher
        assert teacher is not None  # _fill() saw to it
        return self.passes.run_taught(x, y, teacher, self._teacher.own, self._teacher.others)

    def _sharp_step(self, k: int, x: Any, y: Any) -> Tensor:
        loss, first = self._pass(k, x, y)
        if self.task.step.dual is not None and k == self.last:
            self.eps = self.form.field("eps").zero_()
        self.form.perturb_(first, self.eps)
        if k in self.task.snapshots:
            w = self.snapshots[k].w
            self.snapshots[k] = Snapshot(w, self.z[0] - w)
        # BatchNorm statistics are updated only in passes at the unperturbed weights.
        kept = self.replica.copy_of_buffers()
        _, second = self._pass(k, x, y, perturbed=True)
        for buffer, value in zip(self.replica.buffers, kept, strict=True):
            buffer.copy_(value)
        self.form.update_(second, first)
        return loss

    def _keep(self, k: int) -> None:
        """Copy the row before step k, for measures along the path."""
        p = self.form.field("p")[0] if self.form.kind.constant else None
        self.snapshots[k] = Snapshot(
            (self.z[0] if p is None else self.z[0] - p).clone(), None if p is None else p.clone()
        )
