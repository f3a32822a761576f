"""A stand-in for torchvision, which cannot be installed beside the CPU build of torch: four transforms."""
