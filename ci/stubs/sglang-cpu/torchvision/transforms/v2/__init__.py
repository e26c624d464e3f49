from torchvision import absent
from torchvision.transforms.v2 import functional

__all__ = ["functional"]
__getattr__ = absent(__name__)
