"""The models whose outputs, or features, local steps compare: the trained one, and teachers beside it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastsam.fed.executors.base import Setup, Task
from fastsam.fed.executors.kernel_calls import Form
from fastsam.fed.step.model_copy import Replica
from fastsam.fed.step.teacher import Heard, Teacher


class Taught:
    """The teachers of a row: models of their own, made when the first step with one comes."""

    def __init__(self, setup: Setup, form: Form, own: Replica) -> None:
        self.setup, self.form, self.own = setup, form, Heard(own.module)
        self.replicas: list[Replica] = []
        self.others: list[Heard] = []
        self._loaded: list[tuple[Tensor, int, Sequence[Tensor]]] = []

    def listen_(self, teacher: Teacher, task: Task, buffers: Sequence[Tensor]) -> None:
        """Takes the teachers' weights, and the buffers with which the client begins; what is there already is not
        copied again."""
        self.own.attend_(teacher)
        for place, weights in enumerate(teacher.rows):
            row = task.row if weights.dim() == 2 else 0
            if place == len(self.replicas):
                self._join_in()
            at = self._loaded[place : place + 1]
            if not at or at[0][0] is not weights or at[0][1] != row or at[0][2] is not buffers:
                self.replicas[place].load_(weights[row] if weights.dim() == 2 else weights, buffers)
                self._loaded[place : place + 1] = [(weights, row, buffers)]
            self.others[place].attend_(teacher)

    def _join_in(self) -> None:
        replica = Replica(self.setup.model, self.setup.layout, self.form.field(f"teacher {len(self.replicas)}")[0])
        replica.module.eval()
        self.replicas.append(replica)
        self.others.append(Heard(replica.module))
