"""Loss, accuracy and metrics of the global model on the test set, and their spread over clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastsam.fed.clients.batch_loss import BatchLoss, PairLoss
from fastsam.fed.clients.labels import CORRECT, UNLABELLED, accuracy_of, verdicts
from fastsam.fed.clients.loss_kind import LossKind, kind_of
from fastsam.fed.clients.population import IGNORED, Loss, Population
from fastsam.fed.clients.set_loss import SetLoss, join_batches
from fastsam.fed.common import seeds
from fastsam.fed.data.dealing import draw
from fastsam.fed.measures.metrics import Metric

VALIDATION = ("prior", "shared", "iid")
CLIENT_SETS = "own"  # the clients have their own test sets, whatever the option is
_SPREAD = ("mean", "std", "min", "max")
KEYS = ("test_loss", "test_accuracy", *(f"client_accuracy_{k}" for k in _SPREAD))
KEYS += ("client_worst", "client_best")

_BATCH = 512


def client_slices(mode: str, population: Population, seed: int, unlabelled: int = IGNORED) -> list[np.ndarray] | None:
    """Return the indices of each client's test samples, or None for "shared", where every client has all of them.

    The FedSAM paper reports accuracy over clients and does not describe their test sets. Here they are functions of the
    seed:

    "prior": each client draws `floor(test / clients)` test samples (at least one) with its class distribution. That is
    the prior of the split, or the classes of its training labels. The split uses the same routine: the test set in
    random order, sample by sample, where a class that has run out begins again. A client without a class in the test
    set has no sample and does not count. Samples with the label `unlabelled` are drawn for no client.

    "iid": the test set, shuffled and cut into equal slices.
    """
    if mode == "shared" or not population.test_size:
        return None
    if population.test_sizes is not None:
        ends = np.cumsum(population.test_sizes)
        return [np.arange(end - n, end) for end, n in zip(ends, population.test_sizes, strict=True)]
    clients = len(population.clients)
    rng = np.random.RandomState(seeds.derive(seed, "validation") % 2**32)
    if mode == "iid":
        # With fewer test samples than clients the shuffled set is used again, so that every client has a sample.
        count = population.test_size
        return np.array_split(np.resize(rng.permutation(count), max(count, clients)), clients)
    assert population.test_labels is not None
    labels = _integers(population.test_labels)
    priors = population.priors if population.priors is not None else _class_frequencies(population)
    order = rng.permutation(len(labels))
    order = order[labels[order] != unlabelled]
    if not len(order):
        return [order] * clients
    frequencies = np.bincount(labels[order], minlength=priors.shape[1]).astype(np.float64)
    has_samples = (priors * (frequencies > 0)).sum(axis=1) > 0
    sizes = np.where(has_samples, max(1, len(order) // clients), 0)
    slices = draw(labels[order], np.where(has_samples[:, None], priors, frequencies), sizes, rng, "reset")
    return [order[t] for t in slices]


def _class_frequencies(population: Population) -> np.ndarray:
    """Return each client's own class frequencies, `[clients, classes]`."""
    client_labels, test = population.clients.labels_together(), population.test_labels
    assert client_labels is not None and test is not None
    labels, number = _integers(client_labels[0]), len(client_labels[1])
    classes = 1 + max(int(labels.max()), int(_integers(test).max()))
    clients = np.repeat(np.arange(number), client_labels[1])
    is_known = labels >= 0
    counts = np.bincount(clients[is_known] * classes + labels[is_known], minlength=number * classes)
    counts = counts.reshape(-1, classes).astype(np.float64)
    return counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)


def _integers(y: Tensor) -> np.ndarray:
    """Return labels as int64 `[n]`, also labels of two classes that are bool or floating-point."""
    return y.flatten().long().cpu().numpy()


def _two_classes(population: Population) -> bool:
    """Return True if every sample has one label, 0 or 1 (or a bool)."""
    client_labels, test = population.clients.labels_together(), population.test_labels
    if client_labels is None or test is None or test.numel() != population.test_size:
        return False
    if list(client_labels[1]) != list(population.clients.sizes):
        return False
    return all(bool(((y == 0) | (y == 1)).all()) for y in (client_labels[0], test))


def _known_labels(population: Population) -> bool:
    """Return True if the classes of each client and of the test set are known before a batch is made."""
    has_labels = population.priors is not None or population.clients.labels is not None
    return has_labels and population.test_labels is not None


def statistics(name: str, values: Sequence[float]) -> dict[str, Any]:
    """Return the statistics of a value over clients, by their keys in a record (`client_accuracy_mean` for the name
    "accuracy", and so on with `_std`, `_min` and `_max`)."""
    array = np.array(values)
    moments = zip(_SPREAD, (array.mean(), array.std(), array.min(), array.max()), strict=True)
    return {f"client_{name}_{k}": float(v) for k, v in moments}


def _extremes(values: Mapping[int, float]) -> dict[str, int]:
    """Return the first clients with the smallest and the largest value, or nothing without clients."""
    if not values:
        return {}
    return {"client_worst": min(values, key=values.__getitem__), "client_best": max(values, key=values.__getitem__)}


class Evaluator:
    """One pass over the test set per call, in eval mode.

    Args:
        classifies: outputs are one per class, so there is an accuracy.
        mode: value of `client_test_split`.
        metrics: functions by name, over all test samples and over each client's.
        batch_size: batch size of a test set whose samples come in batches.
        kind: the kind of the loss; None: `kind_of(loss)`.

    Raises:
        ValueError: there are metrics and no test set.
    """

    def __init__(
        self,
        loss: Loss,
        population: Population,
        classifies: bool,
        mode: str,
        seed: int,
        metrics: Mapping[str, Metric] | None = None,
        batch_size: int = _BATCH,
        kind: LossKind | None = None,
    ) -> None:
        self.loss = loss if isinstance(loss, BatchLoss) else PairLoss(loss)
        self.kind = kind_of(loss) if kind is None else kind
        self.test, self.count, self.metrics = population.test, population.test_size, dict(metrics or {})
        if self.metrics and not self.count:
            raise ValueError(
                f"metrics ({', '.join(self.metrics)}) are of the test set, and there is none; hand over test=(x, y)"
            )
        if self.metrics and not self.loss.predicts:
            raise ValueError(
                f"metrics ({', '.join(self.metrics)}) are of outputs and labels, which a loss of a whole batch does "
                "not give; say fed.BatchLoss(loss, predict) with predict(model, batch) -> (outputs, labels)"
            )
        self.classifies = classifies and self.count > 0
        self.batch_size = batch_size if population.batch_reason else _BATCH
        # Class distributions need labels that are classes. Equal parts of the test set need nothing. The same holds for
        # test sets of clients.
        mode = mode if population.test_sizes is None else CLIENT_SETS
        has_slices = self.classifies or (bool(self.metrics) and (mode != "prior" or _two_classes(population)))
        has_slices = has_slices and (mode != "prior" or _known_labels(population))
        self.mode = mode if has_slices else None
        self._slices = client_slices(mode, population, seed, self.kind.unlabelled) if has_slices else None
        self._of_outputs = self.loss.of_outputs if isinstance(self.loss, PairLoss) else None
        parts = self._slices or []
        self.num_clients = len(population.clients)
        # The accuracy of each client in the last evaluation, without clients that have no test sample with a label.
        self.client_accuracies: Mapping[int, float] | None = None
        # Clients with their own test samples, all these samples, and the first index of each client's.
        self._tested_clients = [i for i, part in enumerate(parts) if len(part)]
        self._samples = np.concatenate([*parts, np.empty(0, np.int64)])
        self._begins = np.cumsum([0, *(len(parts[i]) for i in self._tested_clients)])[:-1]
        keys = (key for name in self.metrics for key in (f"test_{name}", *(f"client_{name}_{k}" for k in _SPREAD)))
        list_keys = (f"client_{name}_each" for name in ("accuracy", *self.metrics) if self.mode == CLIENT_SETS)
        self._keys = (*KEYS, *keys, *list_keys)

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> dict[str, Any]:
        """Return the values of `KEYS` and the metrics of the test set and the clients; None for missing values.

        Every metric has `test_NAME` and `client_NAME_mean`, `_std`, `_min` and `_max`. With test sets of the clients
        there are also `client_accuracy_each` and `client_NAME_each`, which are lists by client. Accuracies are in 0..1,
        over the samples that have a label.
        Standard deviations treat the clients as the whole population. client_worst and client_best are the first
        clients with the smallest and the largest accuracy, None if all clients have the same test samples.
        """
        values = self.empty_record()
        if self.test is None:
            return values
        loss, judged, outputs, labels = SetLoss(self._of_outputs, self.kind), [], [], []
        model.eval()
        for batch, samples in self.test.batches(self.batch_size):
            output, y = self._add(loss, model, batch, samples)
            if self.classifies:
                judged.append(verdicts(output, y, self.kind.unlabelled))
            if self.metrics:
                outputs.append(output)
                labels.append(y)
        values["test_loss"] = loss.value()
        if self.classifies:
            values |= self._accuracies(torch.cat(judged).cpu().numpy())
        if self.metrics:
            values |= self._metric_values(join_batches(outputs), join_batches(labels, IGNORED))
        return values

    def _add(self, loss: SetLoss, model: nn.Module, batch: Any, samples: int) -> tuple[Any, Any]:
        """Add a batch to the loss of the test set, and return outputs and labels, None if they are not needed."""
        if isinstance(self.loss, PairLoss):
            pair = self.loss.outputs_and_labels(model, batch)
            loss.add(*pair, samples)
            return pair
        value, *pair = self.loss.evaluate(model, batch, self.classifies or bool(self.metrics))
        loss.add_mean(value, samples)
        return pair

    def accuracy_of_client(self, model: nn.Module, client: int) -> float | None:
        """Return the accuracy of a model on the client's own test samples, in 0..1, or None without a label."""
        assert self.classifies
        return self._values_of_client(model, client, {}).get("accuracy")

    @torch.no_grad()
    def _values_of_client(self, model: nn.Module, client: int, metrics: Mapping[str, Metric]) -> dict[str, float]:
        """Return the accuracy and the metrics of a model on the client's own test samples, as far as they exist."""
        assert self.test is not None
        indices = self._samples_of(client)
        if not len(indices):
            return {}
        model.eval()
        judged, outputs, labels = [], [], []
        for part in torch.from_numpy(indices).split(self.batch_size):
            output, y = self.loss.outputs_and_labels(model, self.test.take(part, int(part[0])))
            if self.classifies:
                judged.append(verdicts(output, y, self.kind.unlabelled))
            if metrics:
                outputs.append(output)
                labels.append(y)
        accuracy = accuracy_of(torch.cat(judged)) if judged else None
        values = {} if accuracy is None else {"accuracy": accuracy}
        if metrics:
            pair = join_batches(outputs), join_batches(labels, IGNORED)
            values |= {name: metric(*pair) for name, metric in metrics.items()}
        return values

    def own_model_record(self, models: Iterable[nn.Module]) -> dict[str, Any]:
        """Return the accuracies and the metrics over the clients of their `models`. A model is used before the next
        one is made."""
        if not self.classifies and (self.mode is None or not self.metrics):
            return {}
        columns: dict[str, dict[int, float]] = {}
        for i, model in enumerate(models):
            for name, value in self._values_of_client(model, i, self.metrics).items():
                columns.setdefault(name, {})[i] = value
        self.client_accuracies = columns.get("accuracy", {})
        record: dict[str, Any] = _extremes(self.client_accuracies)
        for name, values in columns.items():
            record |= statistics(name, [*values.values()])
            record |= self._by_client(name, values) if self.mode == CLIENT_SETS else {}
        return record

    def empty_record(self) -> dict[str, Any]:
        """Return the values of a round without evaluation."""
        return dict.fromkeys(self._keys)

    def _accuracies(self, judged: np.ndarray) -> dict[str, Any]:
        """Return the accuracies of the global model. `judged` are the verdicts on the samples of the test set."""
        accuracy = accuracy_of(torch.from_numpy(judged))
        self.client_accuracies = {} if accuracy is None else dict.fromkeys(range(self.num_clients), accuracy)
        if accuracy is None or self._slices is None:
            return {"test_accuracy": accuracy} | ({} if accuracy is None else self._spread("accuracy", accuracy, {}))
        values: dict[int, float] = {}
        if self._tested_clients:
            parts = judged[self._samples]
            right, labelled = (
                np.add.reduceat(counts, self._begins, dtype=np.int64)
                for counts in (parts == CORRECT, parts != UNLABELLED)
            )
            values = {i: float(a / n) for i, a, n in zip(self._tested_clients, right, labelled, strict=True) if n}
        self.client_accuracies = values
        return {"test_accuracy": accuracy} | self._spread("accuracy", accuracy, values) | _extremes(values)

    def _metric_values(self, outputs: Tensor, labels: Tensor) -> dict[str, Any]:
        record: dict[str, Any] = {}
        for name, metric in self.metrics.items():
            value = record[f"test_{name}"] = metric(outputs, labels)
            values = {}
            for i in self._tested_clients:
                part = torch.from_numpy(self._samples_of(i)).to(labels.device)
                values[i] = metric(outputs[part], labels[part])
            record |= self._spread(name, value, values)
        return record

    def _samples_of(self, client: int) -> np.ndarray:
        """Return the indices of a client's test samples."""
        return np.arange(self.count) if self._slices is None else self._slices[client]

    def _spread(self, name: str, value: float, clients: Mapping[int, float]) -> dict[str, Any]:
        """Return the statistics over the clients, or of the common value if all have the same samples."""
        if self.mode is None or (self._slices is not None and not clients):
            return {}
        record = statistics(name, [*clients.values()] if self._slices is not None else [value])
        if self.mode == CLIENT_SETS:
            record |= self._by_client(name, clients)
        return record

    def _by_client(self, name: str, values: Mapping[int, float]) -> dict[str, Any]:
        """Return the value of every client, None for a client without one."""
        return {f"client_{name}_each": [values.get(i) for i in range(self.num_clients)]}
