"""Dense decoders of the Llama and Qwen kind: rotated positions, grouped queries, SiLU, under Hugging Face's names of fields and tensors."""
