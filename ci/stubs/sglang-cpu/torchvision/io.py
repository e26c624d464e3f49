from torchvision import absent

__getattr__ = absent(__name__)
