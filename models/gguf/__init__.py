"""GGUF files: one file with a model's weights, its sizes, its vocabulary and its chat template."""
