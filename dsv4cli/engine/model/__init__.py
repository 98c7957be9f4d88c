"""The DeepSeek-V4 model as PyTorch modules. They read no files, allocate no caches and sample no tokens."""
