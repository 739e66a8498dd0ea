"""The CUDA sources, as package data, and how they are compiled and launched."""
