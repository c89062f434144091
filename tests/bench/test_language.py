"""SAM for language models: two texts without a network, 4-bit rounding, and a page with the losses of every row."""

from collections.abc import Iterator

import pytest
import torch

from bench import __main__ as command
from bench import language, report
from bench import record as records


def test_rounding_to_4_bits_by_hand() -> None:
    """Each 32 weights of a row have a scale, a seventh of the largest: 0.7 / 7 = 0.1, then 1.4 / 7 = 0.2."""
    row = torch.zeros(2, 64)
    row[0, :4] = torch.tensor([0.7, 0.26, -0.14, 0.04])
    row[0, 32:35] = torch.tensor([-1.4, 0.26, 0.09])
    expected = torch.zeros(2, 64)
    expected[0, :4] = torch.tensor([0.7, 0.3, -0.1, 0.0])
    expected[0, 32:35] = torch.tensor([-1.4, 0.2, 0.0])
    torch.testing.assert_close(language.rounded(row), expected)


def test_only_linear_layers_are_rounded_and_in_a_copy() -> None:
    model = language.CharacterModel()
    copy = language.round_linear_layers(model)
    changed = {
        n for (n, p), q in zip(model.named_parameters(), copy.parameters(), strict=True) if not torch.equal(p, q)
    }
    linear = {f"{n}.weight" for n, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    assert changed == linear and len(linear) == 4 * language.LAYERS + 1


def test_no_paragraph_is_trained_on_and_held_out() -> None:
    for name in ("first", "second"):
        train, held_out = ({*bytes(part.tolist()).split(b"\n\n")} for part in language.split(name))
        assert len(train) > 500 and held_out and not train & held_out


def test_a_missing_text_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    language.texts.cache_clear()
    monkeypatch.setattr(language, "SOURCES", ("argparse", "no_such_module"))
    assert command.main(["language", "--quick", "--rows", "AdamW"]) == command.ABSENT
    message = capsys.readouterr().out
    assert "no_such_module" in message and "pydoc_data.topics, argparse, no_such_module. Install the whole" in message


@pytest.fixture(scope="module", autouse=True)
def short_evaluation() -> Iterator[None]:
    split = language.split
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language, "split", lambda name: (split(name)[0], split(name)[1][:6_500]))
        yield


@pytest.fixture(scope="module")
def adamw() -> dict[str, float]:
    return language.run(language.METHODS["AdamW"], 5e-3, 40, 0)


@pytest.mark.parametrize("name", language.METHODS)
def test_a_method_trains(name: str, adamw: dict[str, float]) -> None:
    """Forty steps are enough for a loss below 3.1, the entropy of the characters, and a seed repeats its bits."""
    losses = language.run(language.METHODS[name], 5e-3, 40, 0)
    assert losses["first"] < 3.1 and losses["second"] < 3.1
    assert (losses == adamw) == (name == "AdamW")


def test_a_page_shows_every_row_next_to_adamw(tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    rows = ["AdamW", "SAM, rho 0.05"]
    assert command.main(["language", "--quick", "--rows", *rows, "--out", str(tmp_path)]) == 0
    record = records.read(tmp_path / "language.json")
    (case,) = record["cases"]
    assert [row["name"] for row in case["rows"]] == rows and len(case["sha256"]["first"]) == 64
    assert case["rate"] == min(language.RATES, key=lambda rate: case["rates"][f"{rate}"])
    page, first = report.short(record), [row["mean"]["first"] for row in case["rows"]]
    assert f"| `AdamW` | 1 | {first[0]:.3f} |" in page
    assert f"| `SAM, rho 0.05` | 2 | {first[1]:.3f}, " in page and f"{first[1] - first[0]:+.3f} ± " in page
    case["rows"].pop(0)
    with pytest.raises(ValueError, match="lacks AdamW"):
        report.short(record)
