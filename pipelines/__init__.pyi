from .auto import AutoPipelineForImage2Image as AutoPipelineForImage2Image
from .auto import AutoPipelineForInpainting as AutoPipelineForInpainting
from .auto import AutoPipelineForText2Image as AutoPipelineForText2Image
from .description import describe as describe
from .base import DiffusionPipeline as DiffusionPipeline
from .base import Pipeline as Pipeline
