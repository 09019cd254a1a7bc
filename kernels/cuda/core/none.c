/* none.c - replaces the CUDA backend in a build without CUDA. */
#include "kernels/device.h"

const struct ops *ops_cuda(bool portable, struct err *err)
{
    (void)portable;
    err_set(err, "built without CUDA; to use a GPU, build where nvcc is installed");
    return NULL;
}

void ops_cuda_choose(int n) { (void)n; }

int ops_cuda_sms(int n) { return 0 * n; }

int ops_cuda_count(void) { return 0; }

const char *ops_cuda_built(void) { return "not built in"; }

const char *ops_cuda_found(char text[160])
{
    text[0] = 0;
    return text;
}
