"""From a PyTorch module to a flat, functional list of ATen calls: `capture`, then `lower`, then `kernels`."""
