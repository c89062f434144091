"""The clients and the test set of `fastsam.fed.run`, checked once and put on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fastsam.fed.clients.all_clients import InMemoryClients, PairClients, check_kind
from fastsam.fed.clients.lazy import LazyClientData, LazyClients
from fastsam.fed.clients.packed_samples import MAX_BYTES, PackedSamples, StoredSamples, pack_samples, store_of
from fastsam.fed.clients.pairs import Pair, checked_pair, is_array
from fastsam.fed.clients.population import Population
from fastsam.fed.clients.reading import LARGEST_READ, SampleSource, read, source
from fastsam.fed.clients.samples import ClientDataset, Collate, PairSamples, as_samples


def prepare(
    clients: Any,
    test: Any,
    dtype: torch.dtype,
    device: torch.device,
    takes_batches: bool = False,
    collate: Collate | None = None,
) -> Population:
    """Return the population of a run.

    Arrays become tensors on `device`. Floating-point inputs and targets get the dtype of the model, integer labels
    int64.

    Args:
        clients: the clients, in any form that `fed.run` takes.
        test: the test set, in one of the forms of a client, or None.
        dtype: dtype of the model.
        device: device of the run.
        takes_batches: the loss takes batches, also of pairs.
        collate: function of a list of samples that makes a batch, or None.

    Raises:
        ValueError: no clients, data that a client may not be, x and y of different lengths, a client without
            samples, or NaN or infinity in x.
    """
    test_sizes: list[int] | None = None
    if isinstance(test, ClientTestSets):
        test, test_sizes = test.join(len(clients), dtype, device)
    if isinstance(clients, LazyClients):
        lazy = LazyClientData(clients, takes_batches, collate, dtype, device)
        found_test = _test_samples(_read([], test, collate, dtype, device)[1], takes_batches)
        return Population(lazy, device, found_test, test_sizes=test_sizes)
    if (
        isinstance(clients, (str, bytes, Tensor, dict))
        or not hasattr(clients, "__len__")
        or not hasattr(clients, "__getitem__")
    ):
        kind = "a dict (hand over list(clients.values()))" if isinstance(clients, dict) else type(clients).__name__
        kind += " (hand over list(clients))" if isinstance(clients, Iterator) else ""
        raise ValueError(f"clients must be a sequence of (x, y) pairs or a federated data set, got {kind}")
    if len(clients) == 0:
        raise ValueError("clients is empty; a federated run needs one client at least")
    sources = [clients[i] for i in range(len(clients))]
    test = getattr(clients, "test", None) if test is None else test
    priors = getattr(clients, "priors", None)
    facts: dict[str, Any] = {
        "classes": getattr(clients, "classes", None),
        "priors": None if priors is None else np.asarray(priors),
        "augment": getattr(clients, "augment", None),
        "test_sizes": test_sizes,
    }
    common_store = None if takes_batches or collate is not None else _pack(sources, dtype, device)
    if common_store is not None and (test is None or _is_pair(test)):
        test_samples = None if test is None else PairSamples(checked_pair(test, "the test set", dtype, device))
        return Population(PairClients(StoredSamples(common_store), common_store), device, test_samples, **facts)
    client_samples, test_data = _read(sources, test, collate, dtype, device)
    if not takes_batches and not any(isinstance(one, ClientDataset) for one in (*client_samples, test_data)):
        if common_store is None:
            pairs, store = pack_samples(cast(list[Pair], client_samples))
        else:
            pairs, store = StoredSamples(common_store), common_store
        return Population(PairClients(pairs, store), device, test_data and PairSamples(cast(Pair, test_data)), **facts)
    if facts["augment"] is not None:
        raise ValueError(
            "augment makes inputs x' of pairs (x, y) in memory, with a loss of outputs and y; augment where the "
            "samples are read, or in the model"
        )
    samples = [as_samples(one) for one in client_samples]
    for i, one in enumerate(samples):
        check_kind(one, f"client {i}", samples[0].kinds if i else None, takes_batches)
    return Population(InMemoryClients(samples), device, _test_samples(test_data, takes_batches), **facts)


def _test_samples(test_data: Pair | ClientDataset | None, takes_batches: bool) -> ClientDataset | None:
    if test_data is None:
        return None
    samples = as_samples(test_data)
    check_kind(samples, "the test set", None, takes_batches)
    return samples


def _is_pair(data: Any) -> bool:
    return isinstance(data, (tuple, list)) and len(data) == 2 and all(map(is_array, data))


def _read(
    clients: Sequence[Any],
    test: Any,
    collate: Collate | None,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[list[Pair | ClientDataset], Pair | ClientDataset | None]:
    has_collate = collate is not None
    sources = [(source(one, f"client {i}", has_collate), f"client {i}") for i, one in enumerate(clients)]
    if has_collate and sources and not any(isinstance(one, SampleSource) for one, _ in sources):
        raise ValueError(
            "collate makes a batch of a list of samples, and all clients are tensors of all their samples; leave it "
            "out, or hand over data sets"
        )
    if test is not None:
        sources.append((source(test, "the test set", has_collate), "the test set"))
    share = LARGEST_READ / max(1, sum(len(one) for one, _ in sources if isinstance(one, SampleSource)))
    samples = [read(one, label, collate, dtype, device, share) for one, label in sources]
    return samples[: len(clients)], samples[-1] if test is not None else None


def _pack(pairs: Sequence[Any], dtype: torch.dtype, device: torch.device) -> PackedSamples | None:
    """Return the clients in a store, checked all at once (a second for 100,000 clients).

    Returns None if something is wrong or if the clients differ. Then the clients are checked one by one, which finds
    the client to name.
    """
    if not set(map(type, pairs)) <= {tuple, list} or set(map(len, pairs)) != {2}:
        return None
    columns = list(zip(*pairs, strict=True))
    kinds = set(map(type, chain(*columns)))
    if not all(issubclass(kind, Tensor) for kind in kinds):
        return None
    if any(len({(t.dtype, t.layout, t.device) for t in ts}) > 1 or ts[0].layout != torch.strided for ts in columns):
        return None
    if any(0 in {t.dim() for t in ts} or len({t.shape[1:] for t in ts}) > 1 for ts in columns):
        return None
    sizes, label_sizes = ([t.size(0) for t in ts] for ts in columns)
    if sizes != label_sizes or 0 in sizes or sum(sizes) * sum(ts[0][0].nbytes for ts in columns) > MAX_BYTES:
        return None
    try:
        with torch.no_grad():
            x, y = checked_pair(tuple(map(torch.cat, columns)), "all clients", dtype, device)
    except ValueError:
        return None
    return store_of((x, y), sizes)


class ClientTestSets:
    """Test sets of the clients, in their order, None for a client without one.

        fed.run(..., test=fed.ClientTestSets([(x0, y0), None, ...]))

    Each test set is a pair (x, y) of tensors or arrays, all with samples of one shape. The global model is tested on
    all of them together. Accuracies and metrics of a client are on its own test set, and the records have them client
    by client.

    Raises:
        ValueError: `tests` is not a list, or no client has a test set.
    """

    def __init__(self, tests: Sequence[Any]) -> None:
        if not isinstance(tests, (list, tuple)):
            raise ValueError(
                f"ClientTestSets takes a list of test sets (x, y), or None, one per client; got {type(tests).__name__}"
            )
        if all(one is None for one in tests):
            raise ValueError("ClientTestSets: no client has a test set; leave test= out, or give one of them some")
        self.tests = list(tests)

    def join(self, clients: int, dtype: torch.dtype, device: torch.device) -> tuple[Pair, list[int]]:
        """Return all test sets in one pair, and each client's number of samples. Raises ValueError for a bad one."""
        if len(self.tests) != clients:
            raise ValueError(
                f"ClientTestSets needs a test set, or None, for each of the {clients} clients; got {len(self.tests)}"
            )
        pairs = {
            i: checked_pair(one, f"the test set of client {i}", dtype, device)
            for i, one in enumerate(self.tests)
            if one is not None
        }
        first, kinds = next((i, _kinds(*pair)) for i, pair in pairs.items())
        for i, pair in pairs.items():
            if _kinds(*pair) != kinds:
                raise ValueError(
                    f"the test set of client {i} has samples {_kinds(*pair)}, the test set of client {first} "
                    f"{kinds}; they must be built alike"
                )
        x, y = (torch.cat(parts) for parts in zip(*pairs.values(), strict=True))
        return (x, y), [len(pairs[i][1]) if i in pairs else 0 for i in range(clients)]


def _kinds(x: Tensor, y: Tensor) -> str:
    return ", ".join(f"{name} {t.dtype} {list(t.shape[1:])}" for name, t in (("x", x), ("y", y)))
