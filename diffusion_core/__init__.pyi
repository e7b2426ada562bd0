# pyright: reportMissingImports=false
from .models.autoencoders.asymmetric import AsymmetricAutoencoderKL as AsymmetricAutoencoderKL
from .pipelines.auto import AutoPipelineForImage2Image as AutoPipelineForImage2Image
from .pipelines.auto import AutoPipelineForInpainting as AutoPipelineForInpainting
from .pipelines.auto import AutoPipelineForText2Image as AutoPipelineForText2Image
from .models.autoencoders.kl import AutoencoderKL as AutoencoderKL
from .models.autoencoders.tiny import AutoencoderTiny as AutoencoderTiny
from .outputs import BaseOutput as BaseOutput
from .config import ConfigMixin as ConfigMixin
from .errors import DiffusionCoreError as DiffusionCoreError
from .pipelines.base import DiffusionPipeline as DiffusionPipeline
from .config import FrozenDict as FrozenDict
from .pipelines.base import Pipeline as Pipeline
from .progress import disable_progress_bar as disable_progress_bar
from .progress import enable_progress_bar as enable_progress_bar

__version__: str
