from .control import FluxControlPipeline as FluxControlPipeline
from .controlnet import FluxControlNetPipeline as FluxControlNetPipeline
from .fill import FluxFillPipeline as FluxFillPipeline
from .img2img import FluxImg2ImgPipeline as FluxImg2ImgPipeline
from .inpaint import FluxInpaintPipeline as FluxInpaintPipeline
from .kontext import FluxKontextPipeline as FluxKontextPipeline
from .output import FluxPipelineOutput as FluxPipelineOutput
from .pipeline import FluxPipeline as FluxPipeline
