"""llama.cpp checkpoints: GGUF files of architecture deepseek4, read and described."""
