# pyright: reportMissingImports=false
from .models.autoencoders.asymmetric import AsymmetricAutoencoderKL as AsymmetricAutoencoderKL
from .models.autoencoders.kl import AutoencoderKL as AutoencoderKL
from .models.autoencoders.tiny import AutoencoderTiny as AutoencoderTiny
from .models.auto import AutoModel as AutoModel
from .pipelines.auto import AutoPipelineForImage2Image as AutoPipelineForImage2Image
from .pipelines.auto import AutoPipelineForInpainting as AutoPipelineForInpainting
from .pipelines.auto import AutoPipelineForText2Image as AutoPipelineForText2Image
from .outputs import BaseOutput as BaseOutput
from .config import ConfigMixin as ConfigMixin
from .schedulers.ddim import DDIMScheduler as DDIMScheduler
from .schedulers.ddpm import DDPMScheduler as DDPMScheduler
from .pipelines.description import describe as describe
from .errors import DiffusionCoreError as DiffusionCoreError
from .pipelines.base import DiffusionPipeline as DiffusionPipeline
from .progress import disable_progress_bar as disable_progress_bar
from .progress import enable_progress_bar as enable_progress_bar
from .schedulers.euler_ancestral_discrete import EulerAncestralDiscreteScheduler as EulerAncestralDiscreteScheduler
from .schedulers.euler_discrete import EulerDiscreteScheduler as EulerDiscreteScheduler
from .config import FrozenDict as FrozenDict
from .schedulers.heun_discrete import HeunDiscreteScheduler as HeunDiscreteScheduler
from .schedulers.base import KarrasDiffusionSchedulers as KarrasDiffusionSchedulers
from .schedulers.k_dpm_2_ancestral_discrete import KDPM2AncestralDiscreteScheduler as KDPM2AncestralDiscreteScheduler
from .schedulers.k_dpm_2_discrete import KDPM2DiscreteScheduler as KDPM2DiscreteScheduler
from .schedulers.lms_discrete import LMSDiscreteScheduler as LMSDiscreteScheduler
from .models.base import Model as Model
from .models.base import ModelMixin as ModelMixin
from .pipelines.base import Pipeline as Pipeline
from .schedulers.pndm import PNDMScheduler as PNDMScheduler
from .schedulers.base import Scheduler as Scheduler
from .schedulers.base import SchedulerMixin as SchedulerMixin
from .schedulers.base import SchedulerOutput as SchedulerOutput
from .models.unets.unet_2d_condition import UNet2DConditionModel as UNet2DConditionModel
from .models.unets.unet_2d import UNet2DModel as UNet2DModel

__version__: str
