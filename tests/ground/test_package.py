"""The package as users get it: public names, the cost of importing, the wheel."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import diffusion_core

ROOT = Path(__file__).resolve().parents[2]
NAMES = ROOT / "tests" / "public_names.txt"


def run(code: str, **environment: str) -> str:
    """Run code in a fresh interpreter, away from this folder, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_public_names_are_frozen():
    """A name that comes or goes is a decision: change `tests/public_names.txt` with it."""
    assert sorted(diffusion_core.__all__) == NAMES.read_text().split()


def test_every_public_name_resolves():
    for name in diffusion_core.__all__:
        assert getattr(diffusion_core, name) is not None, name


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="NoSuchThing"):
        _ = diffusion_core.NoSuchThing


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import diffusion_core", ["torch", "transformers", "PIL", "accelerate", "numpy", "huggingface_hub"]),
        ("from diffusion_core import DDIMScheduler", ["transformers", "PIL", "accelerate", "scipy"]),
        ("from diffusion_core import UNet2DConditionModel", ["transformers", "PIL", "accelerate", "scipy"]),
        ("from diffusion_core import StableDiffusionPipeline", ["transformers", "accelerate", "scipy", "typer"]),
    ],
)
def test_importing_is_cheap(statement: str, absent: list[str]):
    loaded = set(json.loads(run(f"{statement}\nimport sys, json; print(json.dumps(sorted(sys.modules)))")))
    assert not loaded & set(absent)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(folder.glob("*.tar.gz")), "no sdist"
    return next(folder.glob("*.whl"))


def test_wheel_holds_all_packages_and_nothing_generic(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    roots = {name.split("/")[0] for name in names}
    assert {root for root in roots if not root.endswith(".dist-info")} == {"diffusion_core"}
    for folder in ("models", "offload", "pipelines", "schedulers"):
        sources = {path.relative_to(ROOT / folder).as_posix() for path in (ROOT / folder).rglob("*.py")}
        packed = {name.removeprefix(f"diffusion_core/{folder}/") for name in names if f"/{folder}/" in name}
        assert sources <= packed, sources - packed
    assert "diffusion_core/py.typed" in names
    assert "diffusion_core/models/__init__.pyi" in names


def test_wheel_imports_in_an_empty_environment(wheel: Path, tmp_path: Path):
    """Installed without dependencies but the lazy loader, the package imports and lists its names."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    lazy = [python, "-m", "pip", "install", "-q", "lazy-loader"]
    subprocess.run(lazy, check=True, capture_output=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", str(wheel)], check=True, capture_output=True)
    code = "import diffusion_core as core; print(len(core.__all__), core.__version__, core.__file__)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    count, version, place = done.stdout.split()
    assert int(count) == len(diffusion_core.__all__)
    assert version == diffusion_core.__version__
    assert str(tmp_path) in place


def test_the_product_never_imports_the_oracle():
    sources = [
        path
        for folder in ("diffusion_core", "models", "offload", "pipelines", "schedulers")
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert len(sources) > 50
    for path in sources:
        lines = path.read_text().splitlines()
        assert not [line for line in lines if line.strip().startswith(("import diffusers", "from diffusers"))], path
