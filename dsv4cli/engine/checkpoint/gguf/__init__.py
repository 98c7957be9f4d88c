"""The checkpoints of llama.cpp: GGUF files of the architecture deepseek4, read and described."""
