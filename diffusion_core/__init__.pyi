# pyright: reportMissingImports=false
from .models.autoencoders.asymmetric import AsymmetricAutoencoderKL as AsymmetricAutoencoderKL
from .models.autoencoders.kl import AutoencoderKL as AutoencoderKL
from .models.autoencoders.tiny import AutoencoderTiny as AutoencoderTiny
from .pipelines.auto import AutoPipelineForImage2Image as AutoPipelineForImage2Image
from .pipelines.auto import AutoPipelineForInpainting as AutoPipelineForInpainting
from .pipelines.auto import AutoPipelineForText2Image as AutoPipelineForText2Image
from .outputs import BaseOutput as BaseOutput
from .config import ConfigMixin as ConfigMixin
from .errors import DiffusionCoreError as DiffusionCoreError
from .pipelines.base import DiffusionPipeline as DiffusionPipeline
from .progress import disable_progress_bar as disable_progress_bar
from .progress import enable_progress_bar as enable_progress_bar
from .config import FrozenDict as FrozenDict
from .models.base import Model as Model
from .models.base import ModelMixin as ModelMixin
from .pipelines.base import Pipeline as Pipeline

__version__: str
