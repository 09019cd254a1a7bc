/* host_copy.cu - copies between the device and pinned host memory on a second stream, beside the ops.
 *
 * A copy starts when the ops before it are done: the second stream waits for an event of the first. A ticket is an
 * event behind the copy; host_join makes the first stream wait for it. Streams and events are created at first use and
 * never freed.
 * Moves: the bytes once over PCIe. Measured: one H200, pinned, 55 GB/s in either direction. */
#include "kernels/cuda/cuda.h"

static struct {
    cudaStream_t stream;
    cudaEvent_t ready, done[DEV_TICKETS];
    bool used[DEV_TICKETS];
} aside;

static void open_aside(void)
{
    if (aside.stream) return;
    CUDA_CHECK(cudaStreamCreateWithFlags(&aside.stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreateWithFlags(&aside.ready, cudaEventDisableTiming));
    for (int i = 0; i < DEV_TICKETS; i++) CUDA_CHECK(cudaEventCreateWithFlags(&aside.done[i], cudaEventDisableTiming));
}

void cuda_host_copy(void *dst, const void *src, int64_t bytes, int ticket)
{
    MT_REQUIRE(ticket >= 0 && ticket < DEV_TICKETS, "ticket %d", ticket);
    open_aside();
    CUDA_CHECK(cudaEventRecord(aside.ready, cuda.stream));
    CUDA_CHECK(cudaStreamWaitEvent(aside.stream, aside.ready, 0));
    CUDA_CHECK(cudaMemcpyAsync(dst, src, (size_t)bytes, cudaMemcpyDefault, aside.stream));
    CUDA_CHECK(cudaEventRecord(aside.done[ticket], aside.stream));
    aside.used[ticket] = true;
}

void cuda_host_join(int ticket)
{
    MT_REQUIRE(ticket >= 0 && ticket < DEV_TICKETS, "ticket %d", ticket);
    if (aside.used[ticket]) CUDA_CHECK(cudaStreamWaitEvent(cuda.stream, aside.done[ticket], 0));
}
