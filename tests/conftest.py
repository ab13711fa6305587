"""Settings that all tests share."""

import torch

torch.set_num_threads(1)
