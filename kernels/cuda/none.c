/* none.c - stands in for the CUDA backend in a build without it. */
#include "kernels/device.h"

const struct ops *ops_cuda(void) { return NULL; }
