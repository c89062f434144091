"""Refusals of `fed.run` before its first round, with their messages."""

import math
import threading
from fractions import Fraction
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

from fastsam import backends, fed
from fastsam.fed.loop.options import Settings
from tests.helpers import oracle
from tests.helpers.fed_input import NOTHING, X, Y, start
from tests.helpers.fed_kinds import model, pairs, run
from tests.helpers.fed_refusals import refusals
from tests.helpers.fed_states import train


def half():
    return oracle.smooth_model().half()


def mixed_model():
    model = oracle.smooth_model()
    model[0].float()
    return model


def frozen_model():
    return oracle.smooth_model().requires_grad_(False)


def poisoned_model():
    model = oracle.smooth_model()
    model[2].bias.data[1] = math.nan
    return model


def sparse():
    return nn.Sequential(nn.Embedding(3, 3, sparse=True), nn.Flatten(), nn.Linear(18, 3))


class Flat(fed.Algorithm):
    own_models = True

    def init_client(self, server: Any) -> Any:
        return {"v": server["w"]}

    def own_model(self, server: Any, client: Any) -> Any:
        return client["v"][0]


class Picky(nn.Linear):
    def forward(self, x):
        raise ValueError("no")


class Holds(nn.Module):
    """A model with something that no deep copy can have."""

    def __init__(self, kind):
        super().__init__()
        self.inner, self.kind = nn.Linear(6, 3), kind

    def forward(self, x):
        return self.inner(x)


def run_augment(augment):
    start(clients=fed.FederatedData([(X, Y)] * 2, (X, Y), 3, augment=augment), shuffle=False)


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def run_batches(loss=cross_entropy, predict=None, **options):
    run(pairs(), loss=fed.BatchLoss(loss, predict), **options)


def run_metrics(**metrics):
    start(metrics=metrics, test=(X, Y), run_dir="run")


def finetune(**options):
    fed.finetune(start(test=(X, Y)), [(X, Y)], **{"test": (X, Y), **options})


def run_columns(algorithm):
    loss = fed.BatchLoss(lambda m, batch: F.cross_entropy(m(batch["x"]), batch["y"]))
    fed.run(model(), [{"x": x, "y": y} for x, y in pairs()], algorithm, rounds=1, loss=loss)


MASKED = np.ma.masked_array(X.numpy(), mask=X.numpy() > 1)


test_refused = refusals(
    # algorithms that pool or map inputs say what they need
    (lambda: run_columns(fed.Centralised_SGD()), 'pools pairs of tensors'),
    (lambda: run_columns(fed.FedRobust()), 'map of the inputs'),
    # another word is refused
    (lambda: train(fed.SCAFFOLD(), client_state="disk"),
     "client_state must be one of 'auto', 'host', 'device', got 'disk'"),
    # keywords
    (lambda: start(rounds=0), 'rounds must be an integer >= 1, got 0'),
    (lambda: start(rounds=2.5), 'rounds must be an integer >= 1, got 2.5'),
    (lambda: start(rounds=True), 'rounds'),
    (lambda: start(local_epochs=0), 'local_epochs'),
    (lambda: start(batch_size=0), 'batch_size must be an integer >= 1, got 0'),
    (lambda: start(eval_every=0), 'eval_every'),
    (lambda: start(checkpoint_every=0), 'checkpoint_every'),
    (lambda: start(lr=-0.1), 'lr must be a finite number > 0, got -0.1'),
    (lambda: start(lr=math.nan), 'lr.*nan'),
    (lambda: start(lr="fast"), "lr = 'fast': 'fast' is not known; names are round"),
    (lambda: start(lr_decay=0.0), 'lr_decay'),
    (lambda: start(momentum=-0.9), 'momentum'),
    (lambda: start(weight_decay=-0.001), 'weight_decay'),
    (lambda: start(weight_decay=math.inf), 'weight_decay'),
    (lambda: start(server_lr=-1), 'server_lr'),
    (lambda: start(clip_norm=0.0), 'clip_norm'),
    (lambda: start(clip_scope="all"), "clip_scope must be one of 'full', 'linear', got 'all'"),
    (lambda: start(participation=0.0), 'participation must be a finite number > 0 and <= 1, got 0.0'),
    (lambda: start(participation=1.5), 'participation.*1.5'),
    (lambda: start(participation=1.5, sampler=lambda t, g: [0]), 'participation'),
    (lambda: start(sampler="uniform"), "'bernoulli', 'fixed', 'shuffled', 'simulator' or a callable.*'uniform'"),
    (lambda: start(weighting="size"), "'uniform', 'samples', a list .*, got 'size'"),
    (lambda: start(available=[0]),
     'available must be a function of the round that returns client ids or a mask .*, got .0.'),
    (lambda: start(client_test_split="none"), "'prior', 'shared', 'iid', got 'none'"),
    (lambda: start(buffers="drop"), "None, 'average', 'keep', 'local', got 'drop'"),
    (lambda: start(executor="warp"), "executor must be one of .*'sequential'.*got 'warp'"),
    (lambda: start(backend="cuda"), 'backend must be one of'),
    (lambda: start(device="abacus"), "device must be 'cpu', 'cuda' or 'cuda:N', got 'abacus'"),
    (lambda: start(device="meta"), 'device must be'),
    (lambda: start(device="cuda:99"), "'cuda:99' is not there"),
    (lambda: start(target=80), r"target \(.*accuracy in 0..1 .*\) must be a finite number > 0 and <= 1, got 80"),
    (lambda: start(seed=1.5), 'seed must be an integer'),
    (lambda: start(shuffle="yes"), 'shuffle'),
    # clients
    (lambda: start(clients=[]), 'clients is empty'),
    (lambda: start(clients=X), 'sequence of .x, y. pairs.*Tensor'),
    (lambda: start(clients=((X, Y) for _ in range(3))), r"got generator .hand over list\(clients\)"),
    (lambda: start(clients={"a": (X, Y)}), r"got a dict .hand over list\(clients.values\(\)\)"),
    (lambda: start(clients=5), 'got int'),
    (lambda: start(clients=[(X, Y), X]), 'client 1 must be a pair .*got Tensor'),
    (lambda: start(clients=[(X, Y), (X, Y, Y)]), 'client 1 must be a pair'),
    (lambda: start(clients=[(X, Y), (X, Y[:4])]), 'client 1: x has 6 samples and y 4'),
    (lambda: start(clients=[(X, Y), (X[:0], Y[:0])]), 'client 1 has no samples'),
    (lambda: start(clients=[(X, Y), (X, Y + 1)]),
     r"client 1: labels must be in 0..2 \(the model has 3 outputs\), got 3"),
    (lambda: start(clients=[(X, Y), (X, Y - 1)]), 'client 1: labels.*got -1'),
    (lambda: start(clients=[(X, Y), (X / 0, Y)]), 'client 1: x holds NaN or infinity'),
    (lambda: start(clients=[(X, Y), ("pictures", Y)]),
     'x of client 1 must be a tensor or an array of numbers|x of client 1 must be a dense'),
    (lambda: start(clients=[(X, torch.tensor(1))]), 'y of client 0 must be'),
    (lambda: start(clients=[(X, Y), (X, NOTHING)]),
     'client 1: all labels are -100, which the loss ignores; leave it out or give it labels'),
    (lambda: start(clients=[(X.long(), Y)]),
     'trial step on client 0 .x torch.int64.*: no floating-point inputs, which are not converted'),
    (lambda: start(clients=[(X[:, :4], Y)]),
     r"trial step on client 0 .*\[6, 4\].* failed: RuntimeError: mat1 and mat2"),
    (lambda: start(clients=[(X, Y), (X[:5, :4], Y[:5])]),
     r"work on client 0, but not on client 1 \(x torch.float32 \[5, 4\], y .*: RuntimeError"),
    (lambda: start(clients=[(X, Y), (X[:5].long(), Y[:5])]),
     r"work on client 0, but not on client 1 \(x torch.int64 \[5, 6\]: no floating"),
    (lambda: start(clients=[(X, Y), (X[:5], Y[:5].float())]), 'work on client 0, but not on client 1.*y torch.float32'),
    (lambda: start(clients=[(X, Y.float())]), 'trial step on client 0.*y torch.float32'),
    # test sets
    (lambda: start(test=(X, Y[:3])), 'the test set: x has 6 samples and y 3'),
    (lambda: start(test=(X[:0], Y[:0])), 'the test set has no samples'),
    (lambda: start(test=(X, Y + 3)), 'the test set: labels must be in 0..2'),
    (lambda: start(test=X), 'the test set must be a pair'),
    (lambda: start(test=(X, NOTHING)), 'the test set: all labels are -100, which the loss ignores'),
    (lambda: start(test=(X, Y.float())), r"but not on the test set \(.*y torch.float32 \[6\]\): RuntimeError"),
    (lambda: start(test=(X, Y[:, None])), r"but not on the test set \(.*y torch.int64 \[6, 1\]\): RuntimeError"),
    # models and losses
    (lambda: start(model=3), 'torch.nn.Module, got int'),
    (lambda: start(model=half()), r"float32 or float64.*float16.*model.float\(\)"),
    (lambda: start(model=mixed_model()), 'torch.float32, torch.float64'),
    (lambda: start(model=frozen_model()), 'no trainable parameters'),
    (lambda: start(model=nn.LazyLinear(3)), 'lazy parameters'),
    (lambda: start(model=poisoned_model()), "'2.bias' holds NaN"),
    (lambda: start(model=nn.Linear(6, 3), loss=lambda out, y: F.cross_entropy(out, y, reduction="none")),
     r"must be a scalar tensor.*\[6\]"),
    (lambda: start(model=nn.Linear(6, 3), loss=nn.CrossEntropyLoss), r"got <class .*write CrossEntropyLoss\(\)"),
    (lambda: start(model=nn.Linear(6, 3), loss=lambda out, y: 0.5), 'must be a scalar tensor.*float'),
    (lambda: start(model=nn.Linear(6, 3), loss=lambda out, y: torch.tensor(1.0)), 'does not depend on the model'),
    # sparse gradients
    (lambda: start(model=sparse(), clients=[(torch.randint(0, 3, (6, 6)), Y)]), 'sparse gradients'),
    # a model without values
    (lambda: start(oracle.smooth_model(torch.float32).to("meta")),
     "parameters without values .on the device 'meta'.*to_empty"),
    # no backend serves a device without memory
    (lambda: backends.select("auto", torch.device("meta"), torch.float32),
     "cannot serve torch.float32 on meta: no backend serves the device 'meta'", RuntimeError),
    # steps or epochs
    (lambda: start(local_steps=3, local_epochs=2),
     'local_steps=3 needs .* but the run has local_epochs=2. Name one of the two'),
    # an option that run does not have
    (lambda: start(learning_rate=1), r"run\(\) has no option 'learning_rate' \(did you mean 'lr'\?\)", TypeError),
    (lambda: start(lerning_rate=1), r"run\(\) has no option 'lerning_rate' \(did you mean 'lr'\?\)", TypeError),
    (lambda: start(clients_per_round=5), r"no option 'clients_per_round' \(did you mean 'cohort'", TypeError),
    (lambda: start(num_rounds=5), "did you mean 'rounds'", TypeError),
    (lambda: start(epochs=5), "did you mean 'local_epochs'", TypeError),
    (lambda: start(noise_multiplier=1.0), r"write privacy=fed.Privacy\(noise_multiplier=...\)", TypeError),
    (lambda: start(every=2), r"write measures=fed.NamedMeasures\(\[...\], every=...\)", TypeError),
    (lambda: start(rho=0.1), r"run\(\) has no option 'rho': write fed.FedSAM\(rho=...\)", TypeError),
    (lambda: start(rh0=0.1), r"no option 'rh0' \(did you mean 'rho'\?\): write fed.FedSAM\(rho=...\)", TypeError),
    (lambda: start(noise_multplier=1.0), r"write privacy=fed.Privacy\(noise_multiplier=...\)", TypeError),
    (lambda: fed.SAM(rh0=0.1), r"SAM has no option 'rh0' \(did you mean 'rho'\?\)", TypeError),
    (lambda: fed.Privacy(noise_multplier=1), "Privacy has no .* .did you mean 'noise_multiplier'", TypeError),
    (lambda: fed.TopK(shar=0.1), "TopK has no option 'shar' .did you mean 'share'", TypeError),
    (lambda: fed.NamedMeasures(["train"], evry=2), "NamedMeasures has no .* .did you mean 'every'", TypeError),
    # a name in place of the model
    (lambda: start(model="resnet"),
     r"model must be a torch.nn.Module, got 'resnet'. Make one: .*build\('resnet', in_shape, classes, seed\)"),
    # names in place of algorithms
    (lambda: start(algorithm="fedsam"), r"got the name 'fedsam': write fed.FedSAM\(\)"),
    (lambda: start(algorithm="FedLESAM-D"), r"write fed.FedLESAM_D\(\)"),
    (lambda: start(algorithm="fedsan"), "did you mean 'FedSAM'"),
    # a wrong value of an own algorithm
    (lambda: start(algorithm=Flat()),
     r"own_model must return the weights of one client, without rows: torch.float32 \[\d+\].*got torch.float32 \[\]"),
    # masked arrays
    (lambda: start(clients=[(MASKED, Y)]), 'is a masked array of numpy, and training would read what is masked'),
    (lambda: start(clients=[((MASKED,), Y)]), 'is a masked array of numpy, and training would read what is masked'),
    # numbers that no float holds
    (lambda: fed.FedAdam(tau=10 ** 400), 'tau .*must be a finite number >=? 0, got (int|Fraction): '),
    (lambda: fed.MoFedSAM(rho=10 ** 400), 'rho .*must be a finite number >=? 0, got (int|Fraction): '),
    (lambda: fed.FedDyn(phi=Fraction(10 ** 400)), 'phi .*must be a finite number >=? 0, got (int|Fraction): '),
    # rates that grow beyond all floats
    (lambda: Settings(rounds=3, lr_decay=1e+200),
     r"lr \* lr_decay\*\*2 must be a finite number, got 0.1 \* 1e\+200\*\*2"),
    (lambda: start(algorithm=fed.FedDyn(phi=1e-300, phi_decay=1e+200), rounds=3),
     r"FedDyn.local_step failed in round 3, .*phi \* phi_decay\*\*2 must be a finite number"),
    # parameters that cannot stay with clients
    (lambda: start(local_parameters="head.*"),
     "local_parameters: 'head.*' matches no trainable parameter .* 0.weight, 0.bias, 2.weight, 2.bias"),
    (lambda: start(local_parameters=["2", "1"]), "local_parameters: '1' matches no trainable parameter"),
    (lambda: start(local_parameters="*"),
     'are all parameters of the model, and nothing would be learnt together'),
    (lambda: start(local_parameters=[]),
     "local_parameters must be a parameter's name or a pattern .*, or a list of them; got ..$"),
    (lambda: start(optimizer_state="saved"), "optimizer_state must be one of 'reset', 'keep', got 'saved'"),
    (lambda: start(optimizer_state="keep", algorithm=fed.Centralised_SGD()),
     "optimizer_state='keep' needs clients, but Centralised_SGD has none"),
    (lambda: start(optimizer_state="keep", algorithm=fed.FedRep(head="2")),
     "optimizer_state='keep' needs one path of local steps .* FedRep has phases"),
    (lambda: start(optimizer_state="keep", privacy=fed.Privacy(clip=1.0, noise_multiplier=1.0)),
     "noise_multiplier=1 needs clients that keep nothing, but the run has optimizer_state='keep'"),
    (lambda: start(local_parameters="2", algorithm=fed.Centralised_SGD()),
     "local_parameters='2' needs clients, but Centralised_SGD has none"),
    (lambda: start(local_parameters="2", aggregation="median"),
     "but aggregation='median' compares whole models"),
    # a run without them has no models of clients
    (lambda: start().client_model(0), 'clients have their own models if parameters stay with them'),
    # a client that the run does not have
    (lambda: start(local_parameters="0").client_model(99), 'client must be'),
    (lambda: start(local_parameters="0").client_model(-1), 'client must be'),
    (lambda: start(local_parameters="0").client_model("0"), 'client must be'),
    (lambda: start(local_parameters="0").client_model(True), 'client must be'),
    # a wrong rate is refused before the run
    (lambda: Settings(rounds=3, lr="linear(0.1, 0, 3)"), 'lr in round 3 must be a finite number > 0, got 0.0'),
    (lambda: Settings(rounds=3, lr=lambda t: 0.1 if t < 2 else math.nan),
     'lr in round 3 must be a finite number > 0, got nan'),
    (lambda: Settings(rounds=3, lr=lambda t: [0.1][t]), 'lr failed in round 2: IndexError: list index out of range'),
    (lambda: Settings(rounds=3, lr="0.1*lr"), r"lr = '0.1\*lr': 'lr' has no value here; names are round"),
    (lambda: Settings(rounds=3, lr="0.1/round", lr_decay=0.9),
     "lr_decay=0.9 needs a learning rate that is a number, but the run has lr='0.1/round'"),
    (lambda: Settings(rounds=3, server_lr="1 - round"), 'server_lr in round 2 must be a finite number >= 0, got -1.0'),
    (lambda: Settings(rounds=3, server_lr="cos(round)"), r"server_lr = 'cos\(round\)': .* is not known"),
    # invalid schedules
    (lambda: fed.TorchSchedule(0.1, 5), 'takes a function from an optimizer to its scheduler, got 5'),
    (lambda: fed.TorchSchedule(0.1, lambda opt: 5), 'takes a function that makes a scheduler of torch, got 5 from it'),
    (lambda: fed.TorchSchedule(-1, ExponentialLR), 'lr must be a finite number >= 0, got -1'),
    (lambda: Settings(lr=fed.TorchSchedule(0.1, ReduceLROnPlateau)), 'lr failed in round 1: TypeError'),
    # an augmentation that returns something else
    (lambda: run_augment(lambda x, g: x[:2]),
     r"with the shape and dtype of its input, torch.float32 \[6, 6\], got torch.float32 \[2, 6\] on cpu"),
    (lambda: run_augment(lambda x, g: x.double()), 'got torch.float64'),
    (lambda: run_augment(lambda x, g: None), 'got NoneType'),
    (lambda: run_augment(lambda x: x),
     'augment failed on a batch .*: TypeError: .* takes 1 positional argument but 2 were given'),
    (lambda: run_augment(lambda x, g: x.add_(1)), 'augment wrote into the batch that it was given'),
    # an error of the model
    (lambda: start(Picky(6, 3)), r"a trial step on client 0 \(x .*\) failed: ValueError: no"),
    # losses of a batch
    (lambda: run_batches(lambda m, batch: m(batch[0])), r"must be a scalar tensor .*\[4, 3\]"),
    (lambda: run_batches(lambda m, batch: batch[2]), r"trial step on client 3 .0 torch.float32 \[4, 6\], 1 .*failed"),
    (lambda: run_batches(lambda m, batch: torch.ones(())), "does not depend on the model's trainable parameters"),
    (lambda: run_batches(metrics={"first": lambda out, y: 0.0}), "say fed.BatchLoss.loss, predict"),
    (lambda: run_batches(predict=lambda m, batch: m(batch[0])), r"predict.* must return two tensors"),
    (lambda: run_batches(measures=["sharpness"]), "sharpness read the loss over pairs"),
    (lambda: run_batches(test=[{"a": 1.0}] * 3), "not on the test set .a torch.float32"),
    (lambda: fed.BatchLoss(None), "BatchLoss: loss must be a function"),
    (lambda: fed.BatchLoss(3), "BatchLoss: loss must be a function"),
    (lambda: fed.BatchLoss(nn.Linear), "BatchLoss: loss must be a function"),
    (lambda: fed.BatchLoss(min, 3), "BatchLoss: predict must be a function"),
    # metrics
    (lambda: start(metrics=["binary_accuracy"], test=(X, Y), run_dir="run"),
     r"must be a dict of functions .* got \['binary_accuracy'\]"),
    (lambda: start(metrics={"mine": F.l1_loss}, run_dir="run"), "metrics .*test set"),
    (lambda: run_metrics(mine="binary_accuracy"), "'mine' must be a function .* got 'binary_accuracy'"),
    (lambda: run_metrics(accuracy=F.l1_loss), "'accuracy'.*another name"),
    (lambda: run_metrics(**{"a b": F.l1_loss}), "'a b'.*identifier"),
    (lambda: run_metrics(mine=3), "'mine' must be .*function.*got 3"),
    (lambda: run_metrics(mine=Picky), r"'mine' .*write Picky\(\)"),
    (lambda: run_metrics(mine=lambda out, y: out), r"metric 'mine' .*one number.*\[6, 3\]"),
    (lambda: run_metrics(mine=lambda out, y: "good"), "metric 'mine' .*one number.*'good'"),
    (lambda: run_metrics(mine=lambda out, y: {}["nothing there"]), "metric 'mine' .*failed.*KeyError.*nothing there"),
    # callbacks
    (lambda: start(callbacks=fed.Callback(), run_dir="run"),
     "callbacks must be a list of objects with one of on_start, on_evaluation, on_round, on_end, got Callback"),
    (lambda: start(callbacks=[fed.Callback], run_dir="run"),
     r"callbacks must hold instances: write Callback\(...\), not Callback"),
    (lambda: start(callbacks=[print], run_dir="run"),
     "callbacks must hold objects with one of on_start, .*; got <built-in function print>"),
    # excluded clients and uploads
    (lambda: start(max_excluded=1.5), "max_excluded"),
    (lambda: start(privacy={"clip": 0.0}), "clip .* > 0, got 0.0"),
    # formats of the memory
    (lambda: start(memory_format="nhwc"), "memory_format must be .*'auto', 'preserve', 'channels_last'.* got 'nhwc'"),
    # errors that would otherwise come after a round
    (lambda: start(run_dir=5), "run_dir must be a path, got 5"),
    (lambda: start(resume=True), "resume=True continues what is in run_dir; name the directory"),
    (lambda: start(resume="yes", run_dir="new"), "resume must be one of True, False, got 'yes'"),
    (lambda: start(progress=5), "progress must be a function of a round's record, True or False .*, got 5"),
    (lambda: start(loss="mse_los"),
     r"loss must be the name .* or a function loss\(model\(x\), y\) .*got 'mse_los' .did you mean 'mse_loss'"),
    (lambda: start(loss=5), r"loss must be a function loss\(model\(x\), y\) .*got 5"),
    (lambda: start(batch_size=10**20),
     "batch_size must be an integer >= 1 that fits 64 bits, got 100000000000000000000"),
    (lambda: start(seed=2**63), "seed must be an integer that fits 64 bits"),
    (lambda: start(test=(X[:, :4], Y)), r"not on the test set \(x torch.float32 \[6, 4\], y .*\): RuntimeError"),
    (lambda: start(lr=-1, run_dir="run"), "lr"),
    (lambda: start(nn.Linear(5, 3), run_dir="run"), "trial step"),
    (lambda: start(config={"loss": F.cross_entropy}, run_dir="run"), "config must hold what JSON can"),
    # fine-tuning
    (lambda: finetune(epochs=0), "epochs must be an integer >= 1, got 0"),
    (lambda: finetune(test=None), "needs a test set"),
    # a model that cannot be copied
    (lambda: start(Holds(threading.Lock())),
     'the model cannot be copied .*: (TypeError: cannot pickle|RuntimeError: Only)'),
    (lambda: start(Holds(torch.ones(2, requires_grad=True) * 2)),
     'the model cannot be copied .*: (TypeError: cannot pickle|RuntimeError: Only)'),
)  # fmt: skip
