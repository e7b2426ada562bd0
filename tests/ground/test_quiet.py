"""What may show on the screen: this library's log and switch for bars decide, also for what transformers would say."""

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers.utils.logging as theirs
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers import CLIPImageProcessor

import diffusion_core
from diffusion_core.logging import get_verbosity, set_verbosity, transformers_quiet
from tests.pipelines import tiny


@pytest.fixture(autouse=True)
def bars_of_transformers() -> Iterator[None]:
    """Other tests of the process may have switched them off."""
    before = theirs.is_progress_bar_enabled()
    theirs.enable_progress_bar()
    yield
    (theirs.enable_progress_bar if before else theirs.disable_progress_bar)()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a safety checker's image processor, whose class transformers warns of."""
    folder = tmp_path_factory.mktemp("tiny")
    parts = tiny.components(diffusion_core, folder)
    parts["feature_extractor"] = CLIPImageProcessor()
    pipeline = diffusion_core.StableDiffusionPipeline(**parts, requires_safety_checker=False)
    pipeline.save_pretrained(folder / "model")
    return folder / "model"


@pytest.mark.parametrize("ours", [logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR])
def test_transformers_is_a_level_quieter_and_shows_no_bars(ours: int) -> None:
    before, level = get_verbosity(), theirs.get_verbosity()
    set_verbosity(ours)
    try:
        with transformers_quiet():
            assert theirs.get_verbosity() == max(level, ours + 10)
            assert not theirs.is_progress_bar_enabled()
            with transformers_quiet():
                pass
            assert not theirs.is_progress_bar_enabled()
    finally:
        set_verbosity(before)
    assert theirs.get_verbosity() == level and theirs.is_progress_bar_enabled()


@pytest.mark.parametrize("off", [False, True])
def test_bars_of_downloads_are_left_as_they_were(off: bool) -> None:
    (disable_progress_bars if off else enable_progress_bars)()
    try:
        with transformers_quiet():
            pass
        assert are_progress_bars_disabled() is off
    finally:
        enable_progress_bars()


def test_threads_leave_it_as_it_was() -> None:
    level, inside, leave = theirs.get_verbosity(), threading.Event(), threading.Event()

    def work() -> None:
        with transformers_quiet():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=work)
    with transformers_quiet():
        thread.start()
        inside.wait()
    assert not theirs.is_progress_bar_enabled()
    leave.set()
    thread.join()
    assert theirs.get_verbosity() == level and theirs.is_progress_bar_enabled()


def test_an_error_leaves_it_as_it_was() -> None:
    level = theirs.get_verbosity()
    with pytest.raises(RuntimeError), transformers_quiet():
        raise RuntimeError
    assert theirs.get_verbosity() == level and theirs.is_progress_bar_enabled()


PROGRAM = """
import sys
import diffusion_core
diffusion_core.disable_progress_bar()
pipe = diffusion_core.Pipeline.from_pretrained(sys.argv[1])
pipe.save_pretrained(sys.argv[2])
print(pipe.config.feature_extractor[1], "done")
"""


def test_loading_and_saving_say_nothing_when_bars_are_off(checkpoint: Path, tmp_path: Path) -> None:
    """A process of its own, as transformers warns of a class once."""
    command = [sys.executable, "-c", PROGRAM, str(checkpoint), str(tmp_path / "saved")]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["CLIPImageProcessor", "done"]
    assert ran.stderr == ""


def test_the_only_bars_are_ours(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    diffusion_core.Pipeline.from_pretrained(checkpoint).save_pretrained(tmp_path)
    said = capsys.readouterr().err
    assert "Loading components" in said
    assert "model shards" not in said and "Loading weights" not in said


@pytest.mark.parametrize("command", ["info", "generate"])
def test_commands_print_results_alone(checkpoint: Path, tmp_path: Path, command: str) -> None:
    """No bar is drawn where standard error is a file; with -q there are no notices either."""
    arguments = {
        "info": ["info", str(checkpoint)],
        "generate": [
            *("generate", "cat " * 90, "--model", str(checkpoint), "--steps", "1"),
            *("-o", str(tmp_path / "cat.png"), "-q"),
        ],
    }[command]
    ran = subprocess.run(
        [sys.executable, "-m", "diffusion_core.cli", *arguments], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.strip()
