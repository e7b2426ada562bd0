from .image2video import WanImageToVideoPipeline as WanImageToVideoPipeline
from .output import WanPipelineOutput as WanPipelineOutput
from .pipeline import WanPipeline as WanPipeline
from .video2video import WanVideoToVideoPipeline as WanVideoToVideoPipeline
