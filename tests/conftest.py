"""One thread: the machine's cores are shared, and the tests' tensors are small."""

import torch

torch.set_num_threads(1)
