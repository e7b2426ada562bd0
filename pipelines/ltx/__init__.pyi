from .image2video import LTXImageToVideoPipeline as LTXImageToVideoPipeline
from .output import LTXPipelineOutput as LTXPipelineOutput
from .pipeline import LTXPipeline as LTXPipeline
