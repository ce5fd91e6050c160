"""GGUF models through llama.cpp's C API. The only package that sees ctypes."""
