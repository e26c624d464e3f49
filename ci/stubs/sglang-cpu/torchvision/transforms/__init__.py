from enum import Enum

from torchvision import absent
from torchvision.transforms import functional, v2

__all__ = ["InterpolationMode", "functional", "v2"]
__getattr__ = absent(__name__)


class InterpolationMode(Enum):
    """transformers builds a table of these when it is imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
