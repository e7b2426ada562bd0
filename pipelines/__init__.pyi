from .auraflow.pipeline import AuraFlowPipeline as AuraFlowPipeline
from .auto import AutoPipelineForImage2Image as AutoPipelineForImage2Image
from .auto import AutoPipelineForImage2Video as AutoPipelineForImage2Video
from .auto import AutoPipelineForInpainting as AutoPipelineForInpainting
from .auto import AutoPipelineForText2Image as AutoPipelineForText2Image
from .auto import AutoPipelineForText2Video as AutoPipelineForText2Video
from .auto import AutoPipelineForVideo2Video as AutoPipelineForVideo2Video
from .base import DiffusionPipeline as DiffusionPipeline
from .base import Pipeline as Pipeline
from .cogvideo.image2video import CogVideoXImageToVideoPipeline as CogVideoXImageToVideoPipeline
from .cogvideo.output import CogVideoXPipelineOutput as CogVideoXPipelineOutput
from .cogvideo.pipeline import CogVideoXPipeline as CogVideoXPipeline
from .cogvideo.video2video import CogVideoXVideoToVideoPipeline as CogVideoXVideoToVideoPipeline
from .controlnet.img2img import StableDiffusionControlNetImg2ImgPipeline as StableDiffusionControlNetImg2ImgPipeline
from .controlnet.img2img_xl import (
    StableDiffusionXLControlNetImg2ImgPipeline as StableDiffusionXLControlNetImg2ImgPipeline,
)
from .controlnet.inpaint import StableDiffusionControlNetInpaintPipeline as StableDiffusionControlNetInpaintPipeline
from .controlnet.inpaint_xl import (
    StableDiffusionXLControlNetInpaintPipeline as StableDiffusionXLControlNetInpaintPipeline,
)
from .controlnet.pipeline import StableDiffusionControlNetPipeline as StableDiffusionControlNetPipeline
from .controlnet.pipeline_xl import StableDiffusionXLControlNetPipeline as StableDiffusionXLControlNetPipeline
from .ddim import DDIMPipeline as DDIMPipeline
from .ddpm import DDPMPipeline as DDPMPipeline
from .ddpm import ImagePipelineOutput as ImagePipelineOutput
from .description import describe as describe
from .film import FilmOutput as FilmOutput
from .flux.control import FluxControlPipeline as FluxControlPipeline
from .flux.controlnet import FluxControlNetPipeline as FluxControlNetPipeline
from .flux.fill import FluxFillPipeline as FluxFillPipeline
from .flux.img2img import FluxImg2ImgPipeline as FluxImg2ImgPipeline
from .flux.inpaint import FluxInpaintPipeline as FluxInpaintPipeline
from .flux.kontext import FluxKontextPipeline as FluxKontextPipeline
from .flux.output import FluxPipelineOutput as FluxPipelineOutput
from .flux.pipeline import FluxPipeline as FluxPipeline
from .flux.redux import FluxPriorReduxPipeline as FluxPriorReduxPipeline
from .flux.redux import ReduxImageEncoder as ReduxImageEncoder
from .hunyuan_video.output import HunyuanVideoPipelineOutput as HunyuanVideoPipelineOutput
from .hunyuan_video.pipeline import HunyuanVideoPipeline as HunyuanVideoPipeline
from .ltx.condition import LTXConditionPipeline as LTXConditionPipeline
from .ltx.condition import LTXVideoCondition as LTXVideoCondition
from .ltx.image2video import LTXImageToVideoPipeline as LTXImageToVideoPipeline
from .ltx.output import LTXPipelineOutput as LTXPipelineOutput
from .ltx.pipeline import LTXPipeline as LTXPipeline
from .pixart.pipeline import PixArtAlphaPipeline as PixArtAlphaPipeline
from .pixart.pipeline import PixArtSigmaPipeline as PixArtSigmaPipeline
from .quantization import PipelineQuantizationConfig as PipelineQuantizationConfig
from .qwenimage.pipeline import QwenImagePipeline as QwenImagePipeline
from .stable_diffusion.img2img import StableDiffusionImg2ImgPipeline as StableDiffusionImg2ImgPipeline
from .stable_diffusion.inpaint import StableDiffusionInpaintPipeline as StableDiffusionInpaintPipeline
from .stable_diffusion.output import StableDiffusionPipelineOutput as StableDiffusionPipelineOutput
from .stable_diffusion.pipeline import StableDiffusionPipeline as StableDiffusionPipeline
from .stable_diffusion.safety import StableDiffusionSafetyChecker as StableDiffusionSafetyChecker
from .stable_diffusion_3.img2img import StableDiffusion3Img2ImgPipeline as StableDiffusion3Img2ImgPipeline
from .stable_diffusion_3.inpaint import StableDiffusion3InpaintPipeline as StableDiffusion3InpaintPipeline
from .stable_diffusion_3.output import StableDiffusion3PipelineOutput as StableDiffusion3PipelineOutput
from .stable_diffusion_3.pipeline import StableDiffusion3Pipeline as StableDiffusion3Pipeline
from .stable_diffusion_xl.img2img import StableDiffusionXLImg2ImgPipeline as StableDiffusionXLImg2ImgPipeline
from .stable_diffusion_xl.inpaint import StableDiffusionXLInpaintPipeline as StableDiffusionXLInpaintPipeline
from .stable_diffusion_xl.output import StableDiffusionXLPipelineOutput as StableDiffusionXLPipelineOutput
from .stable_diffusion_xl.pipeline import StableDiffusionXLPipeline as StableDiffusionXLPipeline
from .wan.image2video import WanImageToVideoPipeline as WanImageToVideoPipeline
from .wan.output import WanPipelineOutput as WanPipelineOutput
from .wan.pipeline import WanPipeline as WanPipeline
from .wan.video2video import WanVideoToVideoPipeline as WanVideoToVideoPipeline
from .zimage.pipeline import ZImagePipeline as ZImagePipeline
