"""Models: the K3 hybrid decoder, its caches, LoRA, checkpoints and tokenizers."""
