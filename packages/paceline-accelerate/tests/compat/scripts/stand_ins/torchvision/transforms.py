"""The transforms that the image script uses."""

import random

import numpy as np
import torch
from PIL import Image


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, image):
        for transform in self.transforms:
            image = transform(image)
        return image


class Resize:
    def __init__(self, size):
        self.size = size

    def __call__(self, image):
        return image.resize(self.size, Image.Resampling.NEAREST)


class RandomResizedCrop(Resize):
    def __init__(self, size, scale):
        super().__init__(size)
        self.scale = scale

    def __call__(self, image):
        side = round(min(image.size) * random.uniform(*self.scale) ** 0.5)
        left, top = random.randint(0, image.width - side), random.randint(0, image.height - side)
        return super().__call__(image.crop((left, top, left + side, top + side)))


class ToTensor:
    def __call__(self, image):
        return torch.from_numpy(np.array(image, dtype=np.float32) / 255).permute(2, 0, 1)
