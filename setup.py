"""Maps the five top-level folders under one import name; all else is in pyproject.toml."""

from setuptools import find_packages, setup

FOLDERS = {
    "diffusion_core": "diffusion_core",
    "diffusion_core.models": "models",
    "diffusion_core.offload": "offload",
    "diffusion_core.pipelines": "pipelines",
    "diffusion_core.schedulers": "schedulers",
}

setup(
    package_dir=FOLDERS,
    packages=[
        name
        for package, folder in FOLDERS.items()
        for name in (package, *(f"{package}.{inner}" for inner in find_packages(folder)))
    ],
    package_data={"": ["py.typed", "*.pyi", "*.json", "*.txt", "*.safetensors"]},
)
