"""A federated round of clients with a small BERT (bench/fed/bert.py) as one program of XLA, by hand in JAX.

The weights are torch's, under the names of transformers and peft. bench/fed/jax_round.py maps the clients, scans the
steps and pads unequal clients. Products are float32, as in torch: without this JAX takes TF32 on a GPU.
Rounds are timed after the first one, in which XLA compiles the program.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import Tensor, nn

from bench.fed import bert
from bench.fed.bert import HEAD, LR, RANK
from bench.fed.jax_round import Data, Parameters, gradient_of, make_round, mean_loss
from bench.fed.workload import Workload

SCALE = 8 / RANK  # factor of an adapter: peft's lora_alpha is 8
EPS = 1e-12  # the constant of LayerNorm in transformers
BETAS, DECAY, ADAM_EPS = (0.9, 0.999), 1e-2, 1e-8  # torch's defaults of AdamW


def train(workload: Workload, rounds: int, tick: Callable[[], None], option: str) -> nn.Module:
    """Train and return the model. `option` is not used."""
    model, data = bert.make_model(workload), bert.clients(workload)
    w, frozen = (weights_of(model, is_trained) for is_trained in (True, False))
    samples, run = samples_of(data, bert.shape(workload)[0]), make_bert_round(workload)
    key = jax.random.key(0)
    with jax.default_matmul_precision("float32"):
        for number in range(rounds):
            w = jax.block_until_ready(run(frozen, w, *samples, jax.random.fold_in(key, number)))
            tick()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.copy_(torch.from_numpy(np.array(w[short(name)])))
    return model


def short(name: str) -> str:
    """Return the name of a parameter without the names of peft's wrappers."""
    for wrapper in ("base_model.model.", "bert.", ".base_layer", ".default"):
        name = name.replace(wrapper, "")
    return name


def weights_of(model: nn.Module, is_trained: bool) -> Parameters:
    """Return the trained parameters of the torch model by their short names, or the frozen ones."""
    pairs = ((short(name), p) for name, p in model.named_parameters() if p.requires_grad is is_trained)
    return {name: jnp.asarray(p.detach().cpu().numpy()) for name, p in pairs}


def samples_of(data: Sequence[dict[str, Tensor]], size: int) -> tuple[Any, Any, Any]:
    """Return words and masks `[clients, samples, 2, words]`, labels and sizes of padded clients."""
    arrays = [{name: tensor.cpu().numpy() for name, tensor in client.items()} for client in data]
    pairs = [(np.stack([c["input_ids"], c["attention_mask"]], 1), c["labels"]) for c in arrays]
    padded = Data(pairs, size)
    return padded.x, padded.y, padded.sizes


def make_bert_round(workload: Workload) -> Callable[..., Parameters]:
    """Return the compiled function of a round: of frozen and trained weights, samples, sizes and a random key."""

    def step(frozen: Parameters, state: Any, batch: Any) -> tuple[Any, None]:
        """Take a step of AdamW. A batch of padding changes nothing."""
        w, m, v, k = state
        gradient = gradient_of(workload.algorithm, partial(loss, frozen))
        g, k = gradient(w, *batch), k + 1
        m = jax.tree.map(lambda a, b: BETAS[0] * a + (1 - BETAS[0]) * b, m, g)
        v = jax.tree.map(lambda a, b: BETAS[1] * a + (1 - BETAS[1]) * b * b, v, g)
        first, second = (1 - beta**k for beta in BETAS)

        def moved(w: Any, m: Any, v: Any) -> Any:
            return w * (1 - LR * DECAY) - LR * (m / first) / (jnp.sqrt(v / second) + ADAM_EPS)

        has_samples = batch[-1].any()
        new = jax.tree.map(moved, w, m, v), m, v, k
        return jax.tree.map(lambda a, b: jnp.where(has_samples, a, b), new, state), None

    def begin(w: Parameters) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, w)
        return w, zeros, zeros, 0.0

    return make_round(workload, step, begin, bert.shape(workload)[0])


def loss(frozen: Parameters, w: Parameters, x: Any, y: Any, weights: Any) -> Any:
    """Return the mean cross-entropy of the texts of a batch whose weight is 1."""
    return mean_loss(logits(frozen | w, x[:, 0], x[:, 1]), y, weights)


def logits(w: Parameters, ids: Any, mask: Any) -> Any:
    """Return the outputs `[texts, classes]` for words and their mask, `[texts, words]`."""
    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][: ids.shape[1]]
    x = norm(w, "embeddings.LayerNorm", x + w["embeddings.token_type_embeddings.weight"][0])
    layer = 0
    while f"encoder.layer.{layer}.output.dense.weight" in w:
        x = encode(w, f"encoder.layer.{layer}", x, mask[:, None, None, :] > 0)
        layer += 1
    return dense(w, "classifier.modules_to_save", jnp.tanh(dense(w, "pooler.dense", x[:, 0])))


def encode(w: Parameters, name: str, x: Any, mask: Any) -> Any:
    """Return the outputs `[texts, words, width]` of a layer; the mask is `[texts, 1, 1, words]`."""
    heads = [dense(w, f"{name}.attention.self.{part}", x) for part in ("query", "key", "value")]
    heads = [y.reshape(*y.shape[:2], -1, HEAD) for y in heads]
    attended = jax.nn.dot_product_attention(*heads, mask=mask).reshape(x.shape)
    x = norm(w, f"{name}.attention.output.LayerNorm", x + dense(w, f"{name}.attention.output.dense", attended))
    inner = jax.nn.gelu(dense(w, f"{name}.intermediate.dense", x), approximate=False)
    return norm(w, f"{name}.output.LayerNorm", x + dense(w, f"{name}.output.dense", inner))


def dense(w: Parameters, name: str, x: Any) -> Any:
    """Return the outputs of a linear layer. The output of an adapter is added if the layer has an adapter."""
    y = x @ w[f"{name}.weight"].T + w[f"{name}.bias"]
    if f"{name}.lora_A.weight" not in w:
        return y
    return y + SCALE * (x @ w[f"{name}.lora_A.weight"].T @ w[f"{name}.lora_B.weight"].T)


def norm(w: Parameters, name: str, x: Any) -> Any:
    """Return normalised rows."""
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + EPS) * w[f"{name}.weight"] + w[f"{name}.bias"]
