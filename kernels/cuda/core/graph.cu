/* graph.cu - recordings of ops: CUDA graphs, captured from the stream. */
#include "kernels/cuda/core/cuda.h"

bool cuda_record_begin(void)
{
    const cudaError_t rc = cudaStreamBeginCapture(cuda.stream, cudaStreamCaptureModeThreadLocal);
    if (rc == cudaErrorNotSupported) return cudaGetLastError(), false;
    CUDA_CHECK(rc);
    return true;
}

void *cuda_record_end(void)
{
    cudaGraph_t graph;
    cudaGraphExec_t recording;
    CUDA_CHECK(cudaStreamEndCapture(cuda.stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&recording, graph, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));
    return recording;
}

void cuda_replay(void *recording) { CUDA_CHECK(cudaGraphLaunch((cudaGraphExec_t)recording, cuda.stream)); }

void cuda_record_free(void *recording) { CUDA_CHECK(cudaGraphExecDestroy((cudaGraphExec_t)recording)); }
