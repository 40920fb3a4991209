"""What all tests share."""

import torch

# Tiny tensors: a second thread costs more than it gives, and results depend on the thread count.
torch.set_num_threads(1)
