"""torchvision as it is found (missing, of another torch, without its compiled part), and its ViT-B/32 in federated
rounds."""

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pytest import MonkeyPatch

from fastsam import fed
from fastsam.fed import models
from fastsam.fed.common.import_paths import vision
from fastsam.fed.data import split_data
from fastsam.fed.models import vit
from fastsam.lab import cli
from tests.helpers.small_archives import Hostile, torchvision


def forget_torchvision(monkeypatch: MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)


def test_without_torchvision_the_error_says_what_to_install(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(ImportError, match="'vit_b_32' needs torchvision, which is not installed.*: pip install"):
        models.build("vit_b_32", (3, 224, 224), 10, 0)


@pytest.mark.parametrize(
    "error", ["RuntimeError('operator torchvision::nms does not exist')", "OSError('libcudart.so.99: cannot open')"]
)
def test_a_torchvision_that_cannot_be_imported_at_all(tmp_path: Path, monkeypatch: MonkeyPatch, error: str) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(tmp_path)
    forget_torchvision(monkeypatch)
    words = error.partition("'")[2].rstrip("')")
    with pytest.raises(ImportError, match=f"{words}.*Install the one of this torch"):
        models.build("vit_b_32", (3, 224, 224), 10, 0)


@pytest.mark.parametrize(
    "content", [Hostile(), {"weight": Hostile()}, [torch.ones(1)], {"weight": 1}, {1: torch.ones(1)}, b"PK", b""]
)
def test_weights_that_are_no_tensors_by_name_are_refused_and_run_nothing(tmp_path: Path, content: object) -> None:
    path = tmp_path / "weights.pth"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(
        ValueError, match=r"(?s)weights: .*weights.pth .*expected a file that torch.save\(model.state_dict"
    ):
        vit._load(torch.nn.Linear(1, 1), str(path), [])


# A package that stops where torchvision stops without its compiled part: after some of its modules, at a description of
# an operator.
PARTS = {
    "__init__.py": "from . import extension, descriptions, models",
    "extension.py": "loaded = False",
    "descriptions.py": """
        import torch
        for name in ("nms", "qnms"):
            torch.library.register_fake(f"torchvision::{name}")(lambda dets, scores, iou_threshold: dets)
        """,
    "models.py": "from .extension import loaded",
}
USE = """
    import sys, torch
    from fastsam.fed.common.import_paths import _torchvision, vision
    try:
        _torchvision("torchvision.models", "this")
    except ImportError as error:
        assert "nms does not exist" in str(error)
    else:
        raise SystemExit("it should not import without help")
    half = sys.modules["torchvision.extension"]
    found = vision("torchvision.models", "this")
    assert found is vision("torchvision.models", "this") is sys.modules["torchvision.models"]
    assert sys.modules["torchvision.extension"] is not half
    try:
        torch.ops.torchvision.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    except NotImplementedError:
        print("as it should be")
    """


@pytest.mark.slow  # starts a process
def test_what_the_compiled_part_would_declare_is_declared(tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    for name, text in PARTS.items():
        (tmp_path / "torchvision" / name).write_text(textwrap.dedent(text))
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{textwrap.dedent(USE)}"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert process.stdout.strip() == "as it should be", process.stderr


def test_torchvision_itself_knows_whether_its_operators_work() -> None:
    ops = torchvision("torchvision.ops")
    boxes, scores = torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 1.9]]), torch.tensor([0.5, 0.9])
    if vision("torchvision.extension", "this")._has_ops():
        assert ops.nms(boxes, scores, 0.5).tolist() == [1]
    else:
        with pytest.raises(RuntimeError, match="Couldn't load custom C\\+\\+ ops"):
            ops.nms(boxes, scores, 0.5)


def test_vit_b_32_has_the_published_size() -> None:
    torchvision()
    with torch.device("meta"):
        model = models.build("vit_b_32", (3, 224, 224), 1000, 0)
        small_images = models.build("vit_b_32", (3, 64, 64), 10, 0)
    assert sum(p.numel() for p in model.parameters()) == 88_224_232
    assert len(model.encoder.layers) == 12 and not list(model.buffers())
    assert model.encoder.pos_embedding.shape == (1, 50, 768) and small_images.encoder.pos_embedding.shape == (1, 5, 768)
    assert model.heads.head.out_features == 1000


@pytest.fixture
def two_layers(monkeypatch: MonkeyPatch) -> None:
    """torchvision's own transformer with its patches of 32, narrow and of two layers."""
    library = torchvision("torchvision.models")

    def small_vit(weights: None = None, **options: object) -> torch.nn.Module:
        return library.VisionTransformer(patch_size=32, num_layers=2, num_heads=2, hidden_dim=8, mlp_dim=16, **options)

    monkeypatch.setattr(library, "vit_b_32", small_vit)


def images(classes: int = 5) -> fed.FederatedData:
    x, y = torch.randn(12, 3, 64, 64, generator=torch.Generator().manual_seed(0)), torch.arange(12) % classes
    return split_data(x, y, (x[:4], y[:4]), clients=2, split="iid", classes=classes)


def train(executor: str, slots: int | None = None, **options: float) -> fed.Result:
    model = models.build("vit_b_32", (3, 64, 64), 5, 0, **options)
    options = {"rounds": 2, "participation": 1.0, "lr": 0.1, "batch_size": 6, "executor": executor, "slots": slots}
    return fed.run(model, images(), fed.FedSAM(rho=0.05), **options)


@pytest.mark.slow
def test_its_attention_in_federated_rounds_on_every_executor(two_layers: None) -> None:
    run_1, *other_runs = (train(executor) for executor in ("sequential", "threads", "vmap"))
    start = models.build("vit_b_32", (3, 64, 64), 5, 0)
    for name, value in run_1.model.state_dict().items():
        assert torch.isfinite(value).all() and not torch.equal(value, start.state_dict()[name]), name
        for run in other_runs:
            torch.testing.assert_close(run.model.state_dict()[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("option", [pytest.param("dropout", marks=pytest.mark.slow), "attention_dropout"])
def test_its_dropout_is_each_clients_own(two_layers: None, option: str) -> None:
    plain, threaded_state = (
        train(executor, **{option: 0.2}).model.state_dict() for executor in ("sequential", "threads")
    )
    assert all(torch.equal(value, threaded_state[name]) for name, value in plain.items())
    one, several = (train("vmap", slots, **{option: 0.2}).model.state_dict() for slots in (1, 3))
    for name, value in one.items():
        torch.testing.assert_close(several[name], value, rtol=1e-3, atol=1e-5)


def test_its_weights_from_a_file(tmp_path: Path, two_layers: None) -> None:
    model = models.build("vit_b_32", (3, 64, 64), 1000, 0)
    torch.save(model.state_dict(), tmp_path / "own.pth")
    loaded_model = models.build("vit_b_32", (3, 64, 64), 65, 1, weights=str(tmp_path / "own.pth"))
    for name, value in loaded_model.state_dict().items():
        assert name.startswith("heads.") or torch.equal(value, model.state_dict()[name]), name
    assert loaded_model(torch.zeros(1, 3, 64, 64)).shape == (1, 65)
    torch.save({"conv_proj.weight": model.conv_proj.weight}, tmp_path / "part.pth")
    with pytest.raises(ValueError, match="is not a state dictionary of torchvision's vit_b_32"):
        models.build("vit_b_32", (3, 64, 64), 65, 1, weights=str(tmp_path / "part.pth"))
    with pytest.raises(ValueError, match="(?s)own.pth does not fit the model: .*pos_embedding"):
        models.build("vit_b_32", (3, 32, 32), 65, 1, weights=str(tmp_path / "own.pth"))
    with pytest.raises(FileNotFoundError, match="nor one of IMAGENET1K_V1"):
        models.build("vit_b_32", (3, 64, 64), 65, 1, weights="none.pth")


def test_published_weights_that_cannot_be_fetched(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    published_weights = torchvision("torchvision.models").ViT_B_32_Weights.IMAGENET1K_V1
    monkeypatch.setattr(published_weights.value, "url", "http://127.0.0.1:9/vit_b_32-d86f8d99.pth")
    message = r"IMAGENET1K_V1 could not be fetched from http://127.0.0.1:9/.*pth \(.*\); .* weights = '<file>'"
    with torch.device("meta"), pytest.raises(ConnectionError, match=message):
        models.build("vit_b_32", (3, 224, 224), 10, 0, weights="IMAGENET1K_V1")
    with torch.device("meta"), pytest.raises(ValueError, match="'image_size' expected value 224 but got 64"):
        models.build("vit_b_32", (3, 64, 64), 10, 0, weights="IMAGENET1K_V1")


@pytest.mark.slow
def test_the_whole_vit_b_32_on_the_command_line(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """One round of two clients with all 12 layers, from weights in a file, on images of OfficeHome's layout."""
    torchvision()
    monkeypatch.chdir(tmp_path)
    classes = [f"class_{k:02}" for k in range(65)]
    rng = np.random.default_rng(0)
    for domain, count in (("Art", 65), ("Clipart", 2), ("Product", 2), ("Real World", 2)):
        for name in classes[:count]:
            folder = Path("data/officehome", domain, name)
            folder.mkdir(parents=True)
            Image.fromarray(rng.integers(0, 256, (40, 48, 3), dtype=np.uint8)).save(folder / "1.png")
    torch.save(models.build("vit_b_32", (3, 32, 32), 1000, 0).state_dict(), "own.pth")
    Path("exp.toml").write_text(
        "data = 'officehome'\ndata_options = {size = 32}\nheld_out = 'Art'\nmodel = 'vit_b_32'\nrounds = 1\nlr = 0.01\n"
        "participation = 0.67\nclient_test_split = 'shared'\n"
        "algorithm = 'fedsam'\nmodel_options = {weights = 'own.pth'}\n"
    )
    assert cli.main(["run", "exp.toml", "--run-dir", "run"]) == 0
    assert Path("run/model.safetensors").stat().st_size > 4 * 87_000_000
