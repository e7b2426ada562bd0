# pyright: reportMissingImports=false
from .config import ConfigMixin as ConfigMixin
from .config import FrozenDict as FrozenDict
from .errors import DiffusionCoreError as DiffusionCoreError
from .images import VaeImageProcessor as VaeImageProcessor
from .images import load_image as load_image
from .images import make_image_grid as make_image_grid
from .models.auto import AutoModel as AutoModel
from .models.autoencoders.asymmetric import AsymmetricAutoencoderKL as AsymmetricAutoencoderKL
from .models.autoencoders.cogvideox import AutoencoderKLCogVideoX as AutoencoderKLCogVideoX
from .models.autoencoders.hunyuan_video import AutoencoderKLHunyuanVideo as AutoencoderKLHunyuanVideo
from .models.autoencoders.kl import AutoencoderKL as AutoencoderKL
from .models.autoencoders.ltx import AutoencoderKLLTXVideo as AutoencoderKLLTXVideo
from .models.autoencoders.qwenimage import AutoencoderKLQwenImage as AutoencoderKLQwenImage
from .models.autoencoders.tiny import AutoencoderTiny as AutoencoderTiny
from .models.autoencoders.wan import AutoencoderKLWan as AutoencoderKLWan
from .models.base import Model as Model
from .models.base import ModelMixin as ModelMixin
from .models.controlnet import ControlNetModel as ControlNetModel
from .models.controlnet_flux import FluxControlNetModel as FluxControlNetModel
from .models.multi_controlnet import FluxMultiControlNetModel as FluxMultiControlNetModel
from .models.multi_controlnet import MultiControlNetModel as MultiControlNetModel
from .models.quantization import BitsAndBytesConfig as BitsAndBytesConfig
from .models.quantization import GGUFQuantizationConfig as GGUFQuantizationConfig
from .models.quantization import QuantoConfig as QuantoConfig
from .models.quantization import TorchAoConfig as TorchAoConfig
from .models.transformers.auraflow import AuraFlowTransformer2DModel as AuraFlowTransformer2DModel
from .models.transformers.cogvideox import CogVideoXTransformer3DModel as CogVideoXTransformer3DModel
from .models.transformers.flux import FluxTransformer2DModel as FluxTransformer2DModel
from .models.transformers.hunyuan_video import HunyuanVideoTransformer3DModel as HunyuanVideoTransformer3DModel
from .models.transformers.legacy import Transformer2DModel as Transformer2DModel
from .models.transformers.ltx import LTXVideoTransformer3DModel as LTXVideoTransformer3DModel
from .models.transformers.pixart import PixArtTransformer2DModel as PixArtTransformer2DModel
from .models.transformers.qwenimage import QwenImageTransformer2DModel as QwenImageTransformer2DModel
from .models.transformers.sd3 import SD3Transformer2DModel as SD3Transformer2DModel
from .models.transformers.wan import WanTransformer3DModel as WanTransformer3DModel
from .models.unets.unet_2d import UNet2DModel as UNet2DModel
from .models.unets.unet_2d_condition import UNet2DConditionModel as UNet2DConditionModel
from .offload.apply_caches import FasterCacheConfig as FasterCacheConfig
from .offload.apply_caches import SeaCacheConfig as SeaCacheConfig
from .offload.apply_caches import TextKVCacheConfig as TextKVCacheConfig
from .offload.apply_caches import apply_first_block_cache as apply_first_block_cache
from .offload.apply_caches import apply_mag_cache as apply_mag_cache
from .offload.apply_caches import apply_pyramid_attention_broadcast as apply_pyramid_attention_broadcast
from .offload.apply_caches import apply_taylorseer_cache as apply_taylorseer_cache
from .offload.attention import AttentionBackendName as AttentionBackendName
from .offload.attention import attention_backend as attention_backend
from .offload.chain_caches import FLUX_MAG_RATIOS as FLUX_MAG_RATIOS
from .offload.chain_caches import FirstBlockCacheConfig as FirstBlockCacheConfig
from .offload.chain_caches import MagCacheConfig as MagCacheConfig
from .offload.feature_caches import PyramidAttentionBroadcastConfig as PyramidAttentionBroadcastConfig
from .offload.feature_caches import TaylorSeerCacheConfig as TaylorSeerCacheConfig
from .offload.group_offload import apply_group_offloading as apply_group_offloading
from .offload.group_offload import remove_group_offloading as remove_group_offloading
from .offload.runs import cached_run as cached_run
from .outputs import BaseOutput as BaseOutput
from .pipelines.auraflow.pipeline import AuraFlowPipeline as AuraFlowPipeline
from .pipelines.auto import AutoPipelineForImage2Image as AutoPipelineForImage2Image
from .pipelines.auto import AutoPipelineForImage2Video as AutoPipelineForImage2Video
from .pipelines.auto import AutoPipelineForInpainting as AutoPipelineForInpainting
from .pipelines.auto import AutoPipelineForText2Image as AutoPipelineForText2Image
from .pipelines.auto import AutoPipelineForText2Video as AutoPipelineForText2Video
from .pipelines.auto import AutoPipelineForVideo2Video as AutoPipelineForVideo2Video
from .pipelines.base import DiffusionPipeline as DiffusionPipeline
from .pipelines.base import Pipeline as Pipeline
from .pipelines.cogvideo.image2video import CogVideoXImageToVideoPipeline as CogVideoXImageToVideoPipeline
from .pipelines.cogvideo.output import CogVideoXPipelineOutput as CogVideoXPipelineOutput
from .pipelines.cogvideo.pipeline import CogVideoXPipeline as CogVideoXPipeline
from .pipelines.cogvideo.video2video import CogVideoXVideoToVideoPipeline as CogVideoXVideoToVideoPipeline
from .pipelines.controlnet.img2img import (
    StableDiffusionControlNetImg2ImgPipeline as StableDiffusionControlNetImg2ImgPipeline,
)
from .pipelines.controlnet.img2img_xl import (
    StableDiffusionXLControlNetImg2ImgPipeline as StableDiffusionXLControlNetImg2ImgPipeline,
)
from .pipelines.controlnet.inpaint import (
    StableDiffusionControlNetInpaintPipeline as StableDiffusionControlNetInpaintPipeline,
)
from .pipelines.controlnet.inpaint_xl import (
    StableDiffusionXLControlNetInpaintPipeline as StableDiffusionXLControlNetInpaintPipeline,
)
from .pipelines.controlnet.pipeline import StableDiffusionControlNetPipeline as StableDiffusionControlNetPipeline
from .pipelines.controlnet.pipeline_xl import StableDiffusionXLControlNetPipeline as StableDiffusionXLControlNetPipeline
from .pipelines.ddim import DDIMPipeline as DDIMPipeline
from .pipelines.ddpm import DDPMPipeline as DDPMPipeline
from .pipelines.ddpm import ImagePipelineOutput as ImagePipelineOutput
from .pipelines.description import describe as describe
from .pipelines.film import FilmOutput as FilmOutput
from .pipelines.flux.control import FluxControlPipeline as FluxControlPipeline
from .pipelines.flux.controlnet import FluxControlNetPipeline as FluxControlNetPipeline
from .pipelines.flux.fill import FluxFillPipeline as FluxFillPipeline
from .pipelines.flux.img2img import FluxImg2ImgPipeline as FluxImg2ImgPipeline
from .pipelines.flux.inpaint import FluxInpaintPipeline as FluxInpaintPipeline
from .pipelines.flux.kontext import FluxKontextPipeline as FluxKontextPipeline
from .pipelines.flux.output import FluxPipelineOutput as FluxPipelineOutput
from .pipelines.flux.pipeline import FluxPipeline as FluxPipeline
from .pipelines.flux.redux import FluxPriorReduxPipeline as FluxPriorReduxPipeline
from .pipelines.flux.redux import ReduxImageEncoder as ReduxImageEncoder
from .pipelines.ltx.image2video import LTXImageToVideoPipeline as LTXImageToVideoPipeline
from .pipelines.ltx.output import LTXPipelineOutput as LTXPipelineOutput
from .pipelines.ltx.pipeline import LTXPipeline as LTXPipeline
from .pipelines.pixart.pipeline import PixArtAlphaPipeline as PixArtAlphaPipeline
from .pipelines.pixart.pipeline import PixArtSigmaPipeline as PixArtSigmaPipeline
from .pipelines.quantization import PipelineQuantizationConfig as PipelineQuantizationConfig
from .pipelines.qwenimage.pipeline import QwenImagePipeline as QwenImagePipeline
from .pipelines.stable_diffusion.img2img import StableDiffusionImg2ImgPipeline as StableDiffusionImg2ImgPipeline
from .pipelines.stable_diffusion.inpaint import StableDiffusionInpaintPipeline as StableDiffusionInpaintPipeline
from .pipelines.stable_diffusion.output import StableDiffusionPipelineOutput as StableDiffusionPipelineOutput
from .pipelines.stable_diffusion.pipeline import StableDiffusionPipeline as StableDiffusionPipeline
from .pipelines.stable_diffusion.safety import StableDiffusionSafetyChecker as StableDiffusionSafetyChecker
from .pipelines.stable_diffusion_3.img2img import StableDiffusion3Img2ImgPipeline as StableDiffusion3Img2ImgPipeline
from .pipelines.stable_diffusion_3.inpaint import StableDiffusion3InpaintPipeline as StableDiffusion3InpaintPipeline
from .pipelines.stable_diffusion_3.output import StableDiffusion3PipelineOutput as StableDiffusion3PipelineOutput
from .pipelines.stable_diffusion_3.pipeline import StableDiffusion3Pipeline as StableDiffusion3Pipeline
from .pipelines.stable_diffusion_xl.img2img import StableDiffusionXLImg2ImgPipeline as StableDiffusionXLImg2ImgPipeline
from .pipelines.stable_diffusion_xl.inpaint import StableDiffusionXLInpaintPipeline as StableDiffusionXLInpaintPipeline
from .pipelines.stable_diffusion_xl.output import StableDiffusionXLPipelineOutput as StableDiffusionXLPipelineOutput
from .pipelines.stable_diffusion_xl.pipeline import StableDiffusionXLPipeline as StableDiffusionXLPipeline
from .pipelines.wan.image2video import WanImageToVideoPipeline as WanImageToVideoPipeline
from .pipelines.wan.output import WanPipelineOutput as WanPipelineOutput
from .pipelines.wan.pipeline import WanPipeline as WanPipeline
from .pipelines.wan.video2video import WanVideoToVideoPipeline as WanVideoToVideoPipeline
from .precision import set_matmul_precision as set_matmul_precision
from .progress import disable_progress_bar as disable_progress_bar
from .progress import enable_progress_bar as enable_progress_bar
from .randomness import randn_tensor as randn_tensor
from .schedulers.base import KarrasDiffusionSchedulers as KarrasDiffusionSchedulers
from .schedulers.base import Scheduler as Scheduler
from .schedulers.base import SchedulerMixin as SchedulerMixin
from .schedulers.base import SchedulerOutput as SchedulerOutput
from .schedulers.ddim import DDIMScheduler as DDIMScheduler
from .schedulers.ddim_cogvideox import CogVideoXDDIMScheduler as CogVideoXDDIMScheduler
from .schedulers.ddpm import DDPMScheduler as DDPMScheduler
from .schedulers.deis_multistep import DEISMultistepScheduler as DEISMultistepScheduler
from .schedulers.dpm_cogvideox import CogVideoXDPMScheduler as CogVideoXDPMScheduler
from .schedulers.dpmsolver_multistep import DPMSolverMultistepScheduler as DPMSolverMultistepScheduler
from .schedulers.dpmsolver_sde import DPMSolverSDEScheduler as DPMSolverSDEScheduler
from .schedulers.dpmsolver_singlestep import DPMSolverSinglestepScheduler as DPMSolverSinglestepScheduler
from .schedulers.euler_ancestral_discrete import EulerAncestralDiscreteScheduler as EulerAncestralDiscreteScheduler
from .schedulers.euler_discrete import EulerDiscreteScheduler as EulerDiscreteScheduler
from .schedulers.flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler as FlowMatchEulerDiscreteScheduler
from .schedulers.flow_match_heun_discrete import FlowMatchHeunDiscreteScheduler as FlowMatchHeunDiscreteScheduler
from .schedulers.heun_discrete import HeunDiscreteScheduler as HeunDiscreteScheduler
from .schedulers.k_dpm_2_ancestral_discrete import KDPM2AncestralDiscreteScheduler as KDPM2AncestralDiscreteScheduler
from .schedulers.k_dpm_2_discrete import KDPM2DiscreteScheduler as KDPM2DiscreteScheduler
from .schedulers.lcm import LCMScheduler as LCMScheduler
from .schedulers.lms_discrete import LMSDiscreteScheduler as LMSDiscreteScheduler
from .schedulers.pndm import PNDMScheduler as PNDMScheduler
from .schedulers.tcd import TCDScheduler as TCDScheduler
from .schedulers.unipc_multistep import UniPCMultistepScheduler as UniPCMultistepScheduler
from .videos import VideoProcessor as VideoProcessor
from .videos import export_to_gif as export_to_gif
from .videos import export_to_video as export_to_video
from .videos import load_video as load_video

__version__: str
