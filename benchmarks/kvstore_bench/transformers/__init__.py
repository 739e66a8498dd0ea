"""Time to first token of prompts that transformers computed before."""
