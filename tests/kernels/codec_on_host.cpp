// The kernels of codec.cu as plain C++: FOR_THREADS and FOR_LANES are loops.
#include "codec.cu"
