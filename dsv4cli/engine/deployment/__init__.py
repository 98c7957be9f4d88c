"""Running a model on another engine: which flags its server needs for a model and a cluster, and its process. No torch.

One plan answers both `dsv4 serve --engine` and `dsv4 inspect --for ENGINE --gpus`.
"""
