/* none.c - replaces the CUDA backend in a build without CUDA. */
#include "kernels/moe_packed.h"

const struct ops *ops_cuda(bool portable, struct err *err)
{
    (void)portable;
    err_set(err, "built without CUDA; to use a GPU, build where nvcc is installed");
    return NULL;
}

void ops_cuda_choose(int n) { (void)n; }

int ops_cuda_sms(int n) { return 0 * n; }

int ops_cuda_count(void) { return 0; }

const struct ops *ops_cuda_table(bool hopper)
{
    (void)hopper;
    return NULL;
}

bool ops_reads_packed(const struct device *dev, const struct proj *experts, int64_t n_row)
{
    (void)dev;
    (void)experts;
    (void)n_row;
    return false;
}

bool ops_prefers_packed(const struct device *dev, const struct proj *experts, int64_t n_row)
{
    return ops_reads_packed(dev, experts, n_row);
}

const char *ops_cuda_built(void) { return "not built in"; }

const char *ops_cuda_found(char text[160])
{
    text[0] = 0;
    return text;
}
