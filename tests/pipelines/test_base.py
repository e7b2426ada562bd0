"""`Pipeline` without files: components, config, the state of calls, callbacks, progress, placement."""

import copy
import threading
from typing import ClassVar

import diffusers
import pytest
import torch
from diffusers.callbacks import PipelineCallback
from torch import nn

import diffusion_core
from diffusion_core import Pipeline, disable_progress_bar, enable_progress_bar
from diffusion_core.models.base import Model
from diffusion_core.progress import is_progress_bar_enabled, progress_bar

from . import tiny


class Net(Model):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)


class Drawer(Pipeline):
    model_cpu_offload_seq = "net"
    _optional_components: ClassVar = ["extra"]
    _callback_tensor_inputs: ClassVar = ["latents", "embeds"]

    def __init__(self, net: Net, words, extra=None, flag: bool = True, scale: float = 0.5) -> None:
        super().__init__()
        self.register_modules(net=net, words=words, extra=extra)

    def __call__(self, steps: int = 3, callback=None, names=None, guidance_scale: float = 7.5, fail_at=None):
        on_step_end = self.step_callback(callback, names)
        latents, embeds = torch.zeros(1, 4), torch.ones(1, 4)
        with self.run(guidance_scale=guidance_scale, num_timesteps=steps):
            for step in self.progress_bar(range(steps)):
                if self.interrupt:
                    continue
                if step == fail_at:
                    raise RuntimeError("out of memory")
                latents = latents + self.guidance_scale
                changed = on_step_end(step, step, latents=latents, embeds=embeds)
                latents, embeds = changed["latents"], changed["embeds"]
        return latents


@pytest.fixture
def pipe() -> Drawer:
    made = Drawer(Net(), words=["a", "b"])
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> list[Drawer]:
    """The pipelines that let go of what a memory mode has brought in, once for each time."""
    found: list[Drawer] = []
    monkeypatch.setattr(Drawer, "maybe_free_model_hooks", lambda self: found.append(self))
    return found


def test_both_names_are_one_class() -> None:
    assert diffusion_core.DiffusionPipeline is diffusion_core.Pipeline


def test_components_and_settings_are_told_apart(pipe: Drawer) -> None:
    assert Drawer.component_arguments() == {"net": True, "words": True, "extra": False}
    assert pipe.parameters == {"flag": True, "scale": 0.5}
    assert pipe.scale == 0.5
    assert list(pipe.components) == ["net", "words", "extra"]
    assert pipe.num_components == 2


def test_config_follows_the_components(pipe: Drawer) -> None:
    assert pipe.config["extra"] == (None, None)
    pipe.extra = Net()
    assert pipe.config["extra"] == (Net.__module__, "Net")
    pipe.net = None
    assert pipe.config["net"] == (None, None)
    assert pipe.config["scale"] == 0.5


def test_entries_are_those_of_the_reference() -> None:
    from transformers import CLIPImageProcessor, CLIPTextConfig, CLIPTextModel

    from diffusion_core.pipelines.components import entry_of

    tiny = CLIPTextConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9)
    assert entry_of(CLIPTextModel(tiny)) == ("transformers", "CLIPTextModel")
    assert entry_of(CLIPImageProcessor()) == ("transformers", "CLIPImageProcessor")
    assert entry_of(torch.compile(CLIPTextModel(tiny))) == ("transformers", "CLIPTextModel")
    assert entry_of(diffusion_core.AutoencoderKL()) == ("diffusers", "AutoencoderKL")
    assert entry_of(None) == (None, None)


def test_repr_names_components_sizes_and_settings(pipe: Drawer) -> None:
    text = repr(pipe)
    for part in ("Drawer(", "net: Net, 20 parameters, float32 on cpu", "words: list", "extra: None", "flag=True"):
        assert part in text


def test_a_copy_has_its_own_runs(pipe: Drawer) -> None:
    with pipe.run(guidance_scale=1.0):
        twin = copy.deepcopy(pipe)
        assert not twin.interrupt
        with pytest.raises(AttributeError):
            _ = twin.guidance_scale
    assert torch.equal(twin(steps=2), pipe(steps=2))


def test_unknown_attributes_are_named(pipe: Drawer) -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'nett'.*net, words, extra"):
        _ = pipe.nett


# ---- runs ----


def test_state_reads_and_writes_with_and_without_underscore(pipe: Drawer) -> None:
    assert pipe.interrupt is False
    with pipe.run(guidance_scale=3.0, num_timesteps=2) as run:
        assert pipe.guidance_scale == pipe._guidance_scale == 3.0
        pipe._guidance_scale = 4.0
        assert run.guidance_scale == pipe.guidance_scale == 4.0
        with pipe.run(guidance_scale=9.0):
            assert pipe.guidance_scale == 9.0
        assert pipe.guidance_scale == 4.0
    assert pipe.num_timesteps == 2


def test_a_value_set_before_any_call_does_not_hide_the_calls(pipe: Drawer) -> None:
    pipe._guidance_scale = 1.0
    with pipe.run(guidance_scale=3.0):
        assert pipe.guidance_scale == pipe._guidance_scale == 3.0


def test_interrupt_stops_the_call_and_not_the_next(pipe: Drawer) -> None:
    def stop(pipeline, step, timestep, tensors):
        pipeline._interrupt = step == 1

    assert pipe(steps=5, callback=stop, guidance_scale=1.0)[0, 0] == 2.0
    assert pipe(steps=5, guidance_scale=1.0)[0, 0] == 5.0


def test_a_guidance_scale_changed_by_a_callback_is_used(pipe: Drawer) -> None:
    def halve(pipeline, step, timestep, tensors):
        pipeline._guidance_scale = 0.0

    assert pipe(steps=4, callback=halve, guidance_scale=2.0)[0, 0] == 2.0


def test_threads_do_not_share_state(pipe: Drawer) -> None:
    meet = threading.Barrier(2, timeout=10)
    seen: dict[float, list[float]] = {1.0: [], 2.0: []}

    def call(scale: float) -> None:
        def look(pipeline, step, timestep, tensors):
            meet.wait()
            seen[scale].append(pipeline.guidance_scale)

        pipe(steps=3, callback=look, guidance_scale=scale)

    threads = [threading.Thread(target=call, args=(scale,)) for scale in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {1.0: [1.0] * 3, 2.0: [2.0] * 3}


def test_interrupt_from_another_thread_reaches_all_calls(pipe: Drawer) -> None:
    started, stopped = threading.Barrier(3, timeout=10), threading.Event()
    results: list[float] = []

    def call() -> None:
        def wait(pipeline, step, timestep, tensors):
            if step == 0:
                started.wait()
                assert stopped.wait(10)

        results.append(float(pipe(steps=5, callback=wait, guidance_scale=1.0)[0, 0]))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    started.wait()
    pipe._interrupt = True
    stopped.set()
    for thread in threads:
        thread.join()
    assert results == [1.0, 1.0]


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt(), None])
def test_every_way_out_frees(pipe: Drawer, freed: list[Drawer], error: BaseException | None) -> None:
    def callback(*_):
        if error is not None:
            raise error

    if error is None:
        pipe(callback=callback)
    else:
        with pytest.raises(type(error)):
            pipe(callback=callback)
    assert freed == [pipe]
    pipe(guidance_scale=1.0)  # the pipeline works on
    assert freed == [pipe, pipe]


def test_only_the_last_call_under_way_frees(pipe: Drawer, freed: list[Drawer]) -> None:
    with pipe.run(), pipe.run(), pipe.letting_go():
        pass
    assert freed == [pipe]
    with pipe.letting_go():
        pass
    assert freed == [pipe, pipe]


# ---- callbacks ----


def test_a_callback_may_return_nothing_or_what_it_changed(pipe: Drawer) -> None:
    seen = []

    def add(pipeline, step, timestep, tensors):
        seen.append((step, sorted(tensors)))
        return {"latents": tensors["latents"] + 100} if step == 0 else None

    assert pipe(steps=2, callback=add, names=["latents", "embeds"], guidance_scale=1.0)[0, 0] == 102.0
    assert seen == [(0, ["embeds", "latents"]), (1, ["embeds", "latents"])]


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (3, TypeError, "returned int.*or None"),
        ({"latent": 1}, ValueError, r"\['latent'\].*'latents'"),
    ],
)
def test_a_wrong_answer_is_named(pipe: Drawer, returned, error, message) -> None:
    with pytest.raises(error, match=message):
        pipe(callback=lambda *_: returned)


@pytest.mark.parametrize(
    ("callback", "names", "error", "message"),
    [
        (print, ["latent"], ValueError, r"\['latent'\].*Drawer offers \['latents', 'embeds'\]"),
        (print, "latents", TypeError, "pass a list"),
        ("f", None, TypeError, "not callable"),
    ],
)
def test_a_wrong_callback_is_refused_before_the_first_step(pipe: Drawer, callback, names, error, message) -> None:
    with pytest.raises(error, match=message):
        pipe(callback=callback, names=names, fail_at=0)


def test_callback_objects_of_the_reference_work(pipe: Drawer) -> None:
    class Cutoff(PipelineCallback):
        tensor_inputs: ClassVar = ["embeds"]

        def callback_fn(self, pipeline, step_index, timestep, callback_kwargs):
            if step_index == self.config.cutoff_step_index:
                pipeline._guidance_scale = 0.0
            return callback_kwargs

    cutoff = Cutoff(cutoff_step_ratio=None, cutoff_step_index=1)
    assert pipe(steps=4, callback=cutoff, guidance_scale=1.0)[0, 0] == 2.0


# ---- progress ----


def test_progress_bar_settings(capsys: pytest.CaptureFixture[str]) -> None:
    pipe = Drawer(Net(), words=[])
    pipe.set_progress_bar_config(desc="Drawing", leave=True)
    pipe()
    assert "Drawing" in capsys.readouterr().err
    pipe.set_progress_bar_config(disable=True)
    pipe()
    assert capsys.readouterr().err == ""
    with pytest.raises(TypeError, match=r"no option colur; they have.*colour"):
        pipe.set_progress_bar_config(colur="red")
    with pytest.raises(ValueError, match="iterable or a total"):
        pipe.progress_bar()


def test_one_switch_for_all_bars(capsys: pytest.CaptureFixture[str]) -> None:
    disable_progress_bar()
    try:
        assert not is_progress_bar_enabled()
        with progress_bar(total=2, desc="Hidden", disable=False) as bar:
            bar.update()
        assert capsys.readouterr().err == ""
    finally:
        enable_progress_bar()
    assert list(progress_bar(range(3), desc="Shown")) == [0, 1, 2]
    assert "Shown" in capsys.readouterr().err


# ---- placement ----


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.float64,), {}),
        (("cpu", torch.float64), {}),
        ((torch.float64, "cpu"), {}),
        ((torch.device("cpu"),), {"dtype": torch.float64}),
        ((), {"device": "cpu", "dtype": torch.float64, "silence_dtype_warnings": True}),
        (("float64",), {}),
        (("cpu", "torch.float64"), {}),
        ((), {"dtype": "float64"}),
    ],
)
def test_to_takes_device_and_dtype_in_any_order(pipe: Drawer, args, kwargs) -> None:
    words = pipe.words
    assert pipe.to(*args, **kwargs) is pipe
    assert pipe.dtype == torch.float64
    assert pipe.device == torch.device("cpu")
    assert pipe.words is words


def test_to_moves_every_module_and_reports_where(pipe: Drawer) -> None:
    pipe.extra = Net()
    pipe.to("meta")
    assert pipe.net.layer.weight.is_meta
    assert pipe.extra.layer.weight.is_meta


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((), {}, TypeError, "needs a device, a dtype"),
        (("cpu", "cpu"), {}, ValueError, "more than one device"),
        ((torch.float16,), {"dtype": torch.float32}, ValueError, "more than one dtype"),
        (("nonsense",), {}, ValueError, "'nonsense' cannot be used here"),
        ((torch.int8,), {}, TypeError, "floating point dtype"),
        ((), {"dtype": "float63"}, ValueError, "is no dtype of torch"),
        ((torch.float8_e4m3fn,), {}, ValueError, r"enable_layerwise_casting\(storage_dtype=torch.float8_e4m3fn\)"),
        ((1.5,), {}, TypeError, "not float"),
        (("cpu",), {"colour": 1}, TypeError, "'colour'"),
    ],
)
def test_to_refuses_what_makes_no_sense(pipe: Drawer, args, kwargs, error, message) -> None:
    with pytest.raises(error, match=message):
        pipe.to(*args, **kwargs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without this device")
def test_to_an_absent_device_changes_nothing(pipe: Drawer) -> None:
    with pytest.raises(ValueError, match="'cuda' cannot be used here"):
        pipe.to("cuda", torch.float16)
    assert pipe.dtype == torch.float32


def test_a_pipeline_without_modules_has_a_device_and_a_dtype() -> None:
    bare = Drawer(None, words=[])
    assert (bare.device, bare.dtype) == (torch.device("cpu"), torch.float32)


# ---- from_pipe ----


class Redrawer(Drawer):
    def __init__(self, net: Net, words, extra=None, flag: bool = True, strength: float = 0.8) -> None:
        super().__init__(net, words, extra)


class Cutter(Pipeline):
    def __init__(self, net: Net, knife) -> None:
        super().__init__()
        self.register_modules(net=net, knife=knife)


def test_from_pipe_shares_and_leaves_its_source_alone(pipe: Drawer) -> None:
    pipe.to(torch.bfloat16)
    before = {name: id(part) for name, part in pipe.components.items()}
    made = Redrawer.from_pipe(pipe, extra=Net(), torch_dtype=torch.bfloat16)
    assert made.net is pipe.net
    assert (made.dtype, pipe.dtype) == (torch.bfloat16, torch.bfloat16)
    assert {name: id(part) for name, part in pipe.components.items()} == before
    assert made.parameters == {"flag": True, "strength": 0.8}
    back = Drawer.from_pipe(made)
    assert back.config["scale"] == 0.5  # kept on the way through a class that does not know it
    assert type(Pipeline.from_pipe(pipe)) is Drawer


def test_from_pipe_refuses(pipe: Drawer) -> None:
    with pytest.raises(ValueError, match="Cutter needs knife"):
        Cutter.from_pipe(pipe)
    with pytest.raises(TypeError, match="no 'strenght'; did you mean strength"):
        Redrawer.from_pipe(pipe, strenght=1)
    with pytest.raises(ValueError, match="would change the components"):
        Redrawer.from_pipe(pipe, torch_dtype=torch.float16)
    with pytest.raises(TypeError, match="not a Net"):
        Drawer.from_pipe(pipe.net)


def test_the_reference_casts_what_it_shares() -> None:
    """Why `from_pipe` differs: the reference turns the source's weights into float32 (see docs/differences.md)."""
    net = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(32,),
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
    ).to(torch.bfloat16)
    source = diffusers.DDPMPipeline(net, diffusers.DDPMScheduler())
    diffusers.DDIMPipeline.from_pipe(source)
    assert source.unet.dtype == torch.float32


def test_switches_of_the_autoencoder(pipe: Drawer) -> None:
    with pytest.raises(ValueError, match="its vae is None"):
        pipe.enable_vae_tiling()
    vae = tiny.vae(diffusion_core)
    pipe.register_modules(vae=vae)
    pipe.enable_vae_slicing()
    pipe.enable_vae_tiling()
    assert (vae.use_slicing, vae.use_tiling) == (True, True)
    pipe.disable_vae_slicing()
    pipe.disable_vae_tiling()
    assert (vae.use_slicing, vae.use_tiling) == (False, False)
