/* comm_none.c - replaces comm_nccl.cu in a build without NCCL's header. */
#include "kernels/comm/comm.h"

static int no_nccl(char id[64], struct err *err)
{
    (void)id;
    return err_set(err,
                   "this program was built without NCCL, which several GPUs need: build it where nccl.h is installed "
                   "(apt-get install libnccl-dev)");
}

const struct comm_ops cuda_comm = {.gpu_id = no_nccl};
