"""A transformer on padded text: samples of variable length, a collate that pads, a loss of the whole batch.

    python examples/text.py

Six clients write, each of some topics only, in words that mostly belong to a topic; a classifier learns the topic of a
text. The texts are drawn here, so that nothing is downloaded: put your own data set, tokenizer and model in their
place.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsam import fed

WORDS, TOPICS, MAX_LENGTH, PADDING = 64, 4, 24, 0
Sample = dict[str, Tensor]


def write(texts: int, topics: list[int], seed: int) -> list[Sample]:
    """Write texts of 5 to 24 tokens. Half of the tokens are words of the topic, half are any words."""
    g = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(texts):
        topic = topics[int(torch.randint(len(topics), (), generator=g))]
        length = int(torch.randint(5, MAX_LENGTH + 1, (), generator=g))
        topic_words = 1 + topic * 15 + torch.randint(15, (length,), generator=g)
        common = torch.randint(1, WORDS, (length,), generator=g)
        tokens = torch.where(torch.rand(length, generator=g) < 0.5, topic_words, common)
        samples.append({"tokens": tokens, "topic": torch.tensor(topic)})
    return samples


def pad(samples: list[Sample]) -> dict[str, Tensor]:
    """Return a batch: tokens [n, longest], filled up with `PADDING`, and topics [n]."""
    tokens = nn.utils.rnn.pad_sequence([s["tokens"] for s in samples], batch_first=True, padding_value=PADDING)
    return {"tokens": tokens, "topic": torch.stack([s["topic"] for s in samples])}


class Classifier(nn.Module):
    """Embeddings, one layer of a transformer that does not see the padding, the mean over the words, a head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width, padding_idx=PADDING)
        self.places = nn.Embedding(MAX_LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, TOPICS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [n, TOPICS] of tokens [n, length] int64."""
        padding = tokens == PADDING
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.encoder(self.words(tokens) + self.places(places), src_key_padding_mask=padding)
        mask = (~padding).unsqueeze(-1).to(hidden.dtype)
        logits: Tensor = self.head((hidden * mask).sum(1) / mask.sum(1))
        return logits


def predict(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return model(batch["tokens"]), batch["topic"]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(*predict(model, batch))


def train(rounds: int = 30, texts: int = 48) -> fed.Result:
    """Return the federated run of six clients with `texts` texts each."""
    torch.manual_seed(0)
    clients = [write(texts, [i % TOPICS, (i + 1) % TOPICS], seed=i) for i in range(6)]
    return fed.run(
        Classifier(), clients, fed.FedSAM(rho=0.05), rounds=rounds, participation=1.0, batch_size=8, lr=0.1,
        collate=pad, loss=fed.BatchLoss(loss, predict), test=write(200, list(range(TOPICS)), seed=99),
        client_test_split="iid",
    )  # fmt: skip


if __name__ == "__main__":
    last = train().history[-1]
    print(f"test accuracy {last['test_accuracy']:.3f}, loss {last['test_loss']:.3f}")
