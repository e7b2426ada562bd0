# pyright: reportMissingImports=false
from .config import ConfigMixin as ConfigMixin
from .config import FrozenDict as FrozenDict
from .errors import DiffusionCoreError as DiffusionCoreError
from .models.autoencoders.asymmetric import AsymmetricAutoencoderKL as AsymmetricAutoencoderKL
from .models.autoencoders.kl import AutoencoderKL as AutoencoderKL
from .models.autoencoders.tiny import AutoencoderTiny as AutoencoderTiny
from .models.base import Model as Model
from .models.base import ModelMixin as ModelMixin
from .models.unets.unet_2d import UNet2DModel as UNet2DModel
from .models.unets.unet_2d_condition import UNet2DConditionModel as UNet2DConditionModel
from .outputs import BaseOutput as BaseOutput
from .pipelines.auto import AutoPipelineForImage2Image as AutoPipelineForImage2Image
from .pipelines.auto import AutoPipelineForInpainting as AutoPipelineForInpainting
from .pipelines.auto import AutoPipelineForText2Image as AutoPipelineForText2Image
from .pipelines.base import DiffusionPipeline as DiffusionPipeline
from .pipelines.base import Pipeline as Pipeline
from .progress import disable_progress_bar as disable_progress_bar
from .progress import enable_progress_bar as enable_progress_bar
from .schedulers.base import KarrasDiffusionSchedulers as KarrasDiffusionSchedulers
from .schedulers.base import Scheduler as Scheduler
from .schedulers.base import SchedulerMixin as SchedulerMixin
from .schedulers.base import SchedulerOutput as SchedulerOutput
from .schedulers.ddim import DDIMScheduler as DDIMScheduler
from .schedulers.ddpm import DDPMScheduler as DDPMScheduler
from .schedulers.euler_ancestral_discrete import EulerAncestralDiscreteScheduler as EulerAncestralDiscreteScheduler
from .schedulers.euler_discrete import EulerDiscreteScheduler as EulerDiscreteScheduler
from .schedulers.heun_discrete import HeunDiscreteScheduler as HeunDiscreteScheduler
from .schedulers.k_dpm_2_ancestral_discrete import KDPM2AncestralDiscreteScheduler as KDPM2AncestralDiscreteScheduler
from .schedulers.k_dpm_2_discrete import KDPM2DiscreteScheduler as KDPM2DiscreteScheduler
from .schedulers.lms_discrete import LMSDiscreteScheduler as LMSDiscreteScheduler
from .schedulers.pndm import PNDMScheduler as PNDMScheduler

__version__: str
