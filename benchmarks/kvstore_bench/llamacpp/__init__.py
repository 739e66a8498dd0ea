"""`make demo-llamacpp`: prompts on a real llama.cpp, without a cache, with kvstore, and with
llama-cpp-python's own disk cache, up to a SIGKILL of everything."""
