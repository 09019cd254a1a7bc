/* host_copy.cu - copies between the device and pinned host memory on other streams, beside the ops.
 *
 * A copy that must follow earlier ops waits in its stream for an event recorded after them. A ticket is a stream and an
 * event after its last copy; host_join makes the ops' stream wait for that event. As each ticket has a stream, small
 * copies do not wait for large ones of other tickets. Streams and events are created at first use and never freed.
 * Bound: the bytes once over PCIe. */
#include "kernels/cuda/core/cuda.h"

static struct {
    cudaStream_t stream[DEV_TICKETS];
    cudaEvent_t ready, done[DEV_TICKETS];
} aside;

static void open_ticket(int ticket)
{
    MT_REQUIRE(ticket >= 0 && ticket < DEV_TICKETS, "ticket %d", ticket);
    if (aside.stream[ticket]) return;
    CUDA_CHECK(cudaStreamCreateWithFlags(&aside.stream[ticket], cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreateWithFlags(&aside.done[ticket], cudaEventDisableTiming));
    if (!aside.ready) CUDA_CHECK(cudaEventCreateWithFlags(&aside.ready, cudaEventDisableTiming));
}

void cuda_host_copy(void *dst, const void *src, int64_t bytes, int ticket, bool after_ops)
{
    open_ticket(ticket);
    if (after_ops) {
        CUDA_CHECK(cudaEventRecord(aside.ready, cuda.stream));
        CUDA_CHECK(cudaStreamWaitEvent(aside.stream[ticket], aside.ready, 0));
    }
    CUDA_CHECK(cudaMemcpyAsync(dst, src, (size_t)bytes, cudaMemcpyDefault, aside.stream[ticket]));
    CUDA_CHECK(cudaEventRecord(aside.done[ticket], aside.stream[ticket]));
}

void cuda_host_join(int ticket)
{
    MT_REQUIRE(ticket >= 0 && ticket < DEV_TICKETS, "ticket %d", ticket);
    if (aside.stream[ticket]) CUDA_CHECK(cudaStreamWaitEvent(cuda.stream, aside.done[ticket], 0));
}
