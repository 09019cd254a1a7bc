/* gemm.cu - dense matrix products by cuBLASLt.
 *
 * cuBLASLt is column-major: it sees a row-major matrix as its transpose. So c = op(a) op(b) is passed as
 * c^T = op(b)^T op(a)^T, with b as the first operand.
 *
 * The cuBLASLt heuristic chooses the algorithm of a shape once; a table keeps it. The choice depends only on the shape
 * and the alignment of the pointers up to 16 bytes, so a product has the same bits every time. Split-K sums are added
 * in f32 in the workspace, in a fixed order.
 *
 * The number of rows changes with every micro-batch and expert. A heuristic call costs the host 0.2 ms or more (H100,
 * cuBLASLt 13), twenty times the host time of the product itself. So the heuristic is asked for rounded numbers of
 * rows.
 *
 * cuda_portable_product gives the roof of the portable kernels on Hopper, which do not use wgmma. On Hopper cuBLASLt 13
 * still has kernels for Ampere (cutlass_80_tensorop_bf16_s16816gemm). They are told apart by their number of stages,
 * which can be configured; kernels with wgmma choose it themselves. Rates: tests/notebook/deepseek_v4.md. */
#include <cublasLt.h>
#include <math.h>
#include <string.h>

#include "kernels/cuda/core/cuda.h"

enum { TABLE = 1024, PROBES = 8, ALIGN = 16, WORKSPACE = 32 << 20 };

/* ---- the library ---- */

#define LT_CALLS(X)                                                                                                    \
    X(Create)                                                                                                          \
    X(GetStatusString)                                                                                                 \
    X(Matmul)                                                                                                          \
    X(MatmulAlgoCheck)                                                                                                 \
    X(MatmulAlgoConfigSetAttribute)                                                                                    \
    X(MatmulAlgoGetHeuristic)                                                                                          \
    X(MatmulAlgoGetIds)                                                                                                \
    X(MatmulAlgoInit)                                                                                                  \
    X(MatmulDescInit_internal)                                                                                         \
    X(MatmulDescSetAttribute)                                                                                          \
    X(MatmulPreferenceInit_internal)                                                                                   \
    X(MatmulPreferenceSetAttribute)                                                                                    \
    X(MatrixLayoutInit_internal)
#define X(name) decltype(&cublasLt##name) name;
static struct {
    LT_CALLS(X) void *library;
    cublasLtHandle_t handle;
    void *workspace; /* device, WORKSPACE bytes; for products on cuda.stream */
} lt;
#undef X

#define CUBLAS_CHECK(call)                                                                                             \
    do {                                                                                                               \
        const cublasStatus_t cublas_rc = (call);                                                                       \
        if (cublas_rc != CUBLAS_STATUS_SUCCESS)                                                                        \
            die_at(__FILE__, __LINE__, #call, "cuBLASLt: %s", lt.GetStatusString(cublas_rc));                          \
    } while (0)

/* The major version of the headers of this build; other versions have different structures. */
#define TEXT_OF(x) #x
#define TEXT(x)    TEXT_OF(x)
#define MAJOR      TEXT(CUBLAS_VER_MAJOR)
#define SONAME     "libcublasLt.so." MAJOR

int cuda_gemm_find(struct err *err)
{
    static const char *const names[] = {SONAME, "/usr/local/cuda/lib64/" SONAME,
                                        "/usr/local/cuda-" MAJOR "/lib64/" SONAME, MT_CUDA_LIBRARY_DIR "/" SONAME};
#define X(name) {"cublasLt" #name, &lt.name},
    static const struct library_call calls[] = {LT_CALLS(X)};
#undef X
    void *library;
    if (lt.library) return 0;
    if (!(library = library_open(names, MT_LEN(names))))
        return err_set(err,
                       SONAME " was not found: install cuBLAS of CUDA " MAJOR " (it comes with the CUDA Toolkit; "
                              "alone, NVIDIA's package libcublas-" MAJOR "-0; for a wheel, pip install nvidia-cublas), "
                              "or add its folder to LD_LIBRARY_PATH");
    if (library_find(library, SONAME, calls, MT_LEN(calls), err)) return -1;
    lt.library = library;
    return 0;
}

void cuda_gemm_open(void)
{
    CUBLAS_CHECK(lt.Create(&lt.handle));
    CUDA_CHECK(cudaMalloc(&lt.workspace, WORKSPACE));
    /* Filled with NaN: cuBLASLt's split-K sums read parts that it has not written. If a sum used one, it would be
     * NaN. */
    CUDA_CHECK(cudaMemsetAsync(lt.workspace, 0xff, WORKSPACE, cuda.stream));
}

/* ---- products ---- */

/* No padding: compared as bytes. */
struct shape {
    int64_t m, n, k, lda, ldb, ldc;
    int32_t ta, tb, c_f32, align;
};

struct product {
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t a, b, c; /* operands of cuBLASLt: its a is our b, its b our a */
};

static struct choice {
    struct shape shape;
    bool known;
    cublasLtMatmulAlgo_t algo;
} table[TABLE];

/* The first choice of the heuristic among algorithms with a deterministic reduction. */
static cublasLtMatmulAlgo_t best_algorithm(struct product *p, const struct shape *s)
{
    const uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, align = (uint32_t)s->align;
    const uint64_t workspace = WORKSPACE;
    cublasLtMatmulPreferenceOpaque_t wish;
    cublasLtMatmulHeuristicResult_t found;
    int n_found = 0;
    CUBLAS_CHECK(lt.MatmulPreferenceInit_internal(&wish, sizeof(wish)));
    CUBLAS_CHECK(lt.MatmulPreferenceSetAttribute(&wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                                 sizeof(workspace)));
    CUBLAS_CHECK(lt.MatmulPreferenceSetAttribute(&wish, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reduction,
                                                 sizeof(reduction)));
    static const cublasLtMatmulPreferenceAttributes_t aligned[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    for (int i = 0; i < 4; i++) CUBLAS_CHECK(lt.MatmulPreferenceSetAttribute(&wish, aligned[i], &align, sizeof(align)));
    CUBLAS_CHECK(
        lt.MatmulAlgoGetHeuristic(lt.handle, &p->desc, &p->a, &p->b, &p->c, &p->c, &wish, 1, &found, &n_found));
    MT_REQUIRE(n_found == 1 && found.state == CUBLAS_STATUS_SUCCESS,
               "cuBLASLt has no product [%lld, %lld] by %lld (ld %lld, %lld, %lld; %d-byte aligned)", (long long)s->m,
               (long long)s->n, (long long)s->k, (long long)s->lda, (long long)s->ldb, (long long)s->ldc, s->align);
    return found.algo;
}

static void describe(struct product *p, const struct shape *s)
{
    const cublasOperation_t op_a = s->tb ? CUBLAS_OP_T : CUBLAS_OP_N, op_b = s->ta ? CUBLAS_OP_T : CUBLAS_OP_N;
    const uint64_t m = (uint64_t)s->m, n = (uint64_t)s->n, k = (uint64_t)s->k;
    CUBLAS_CHECK(lt.MatmulDescInit_internal(&p->desc, sizeof(p->desc), CUBLAS_COMPUTE_32F, CUDA_R_32F));
    CUBLAS_CHECK(lt.MatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof(op_a)));
    CUBLAS_CHECK(lt.MatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof(op_b)));
    CUBLAS_CHECK(lt.MatrixLayoutInit_internal(&p->a, sizeof(p->a), CUDA_R_16BF, s->tb ? k : n, s->tb ? n : k, s->ldb));
    CUBLAS_CHECK(lt.MatrixLayoutInit_internal(&p->b, sizeof(p->b), CUDA_R_16BF, s->ta ? m : k, s->ta ? k : m, s->lda));
    CUBLAS_CHECK(lt.MatrixLayoutInit_internal(&p->c, sizeof(p->c), s->c_f32 ? CUDA_R_32F : CUDA_R_16BF, n, m, s->ldc));
}

/* The algorithm from the table; a new one replaces an old one when all probed entries are used. */
static const cublasLtMatmulAlgo_t *algorithm_of(const struct shape *s)
{
    uint64_t words[sizeof(*s) / 8], hash = 0;
    memcpy(words, s, sizeof(words));
    for (int64_t i = 0; i < MT_LEN(words); i++) hash = rng_u64(hash, words[i]);
    struct choice *c = NULL;
    for (uint64_t i = 0; i < PROBES; i++) {
        c = &table[(hash + i) % TABLE];
        if (c->known && !memcmp(&c->shape, s, sizeof(*s))) return &c->algo;
        if (!c->known) break;
    }
    struct product p;
    describe(&p, s);
    c->algo = best_algorithm(&p, s);
    c->shape = *s;
    c->known = true;
    return &c->algo;
}

/* s with the number of rows rounded up: m, or the inner dimension of a^T b. This dimension is contiguous in no operand,
 * so the leading dimensions remain valid. */
static struct shape round_rows(struct shape s)
{
    int64_t *rows = s.ta ? &s.k : &s.m;
    if (!s.ta || !s.tb) *rows = *rows > 64 ? ceil_div(*rows, 64) * 64 : ceil_div(*rows, 8) * 8;
    return s;
}

static void product_of_nothing(struct tensor c, float beta)
{
    const size_t size = (size_t)dtype_size(c.dtype);
    MT_REQUIRE(beta == 0 || beta == 1, "a product with inner dimension 0 and beta %g: beta must be 0 or 1",
               (double)beta);
    if (beta == 0)
        CUDA_CHECK(cudaMemset2DAsync(c.data, (size_t)c.ld * size, 0, (size_t)c.shape[1] * size, (size_t)c.shape[0],
                                     cuda.stream));
}

/* As cuda_gemm; the algorithm is that of `rows` rows, or for rows 0 that of c's rounded up. */
static void product_by(struct tensor c, struct tensor a, bool ta, struct tensor b, bool tb, float alpha, float beta,
                       int64_t rows)
{
    const int64_t k = a.shape[ta ? 0 : 1];
    MT_REQUIRE(c.ndim == 2 && a.ndim == 2 && b.ndim == 2 && a.shape[ta ? 1 : 0] == c.shape[0] &&
                   b.shape[tb ? 0 : 1] == c.shape[1] && b.shape[tb ? 1 : 0] == k,
               "[%lld, %lld]%s [%lld, %lld]%s into [%lld, %lld]", (long long)a.shape[0], (long long)a.shape[1],
               ta ? "^T" : "", (long long)b.shape[0], (long long)b.shape[1], tb ? "^T" : "", (long long)c.shape[0],
               (long long)c.shape[1]);
    MT_REQUIRE(a.dtype == DT_BF16 && b.dtype == DT_BF16 && (c.dtype == DT_BF16 || c.dtype == DT_F32), "%s %s into %s",
               dtype_name(a.dtype), dtype_name(b.dtype), dtype_name(c.dtype));
    if (!c.shape[0] || !c.shape[1]) return;
    if (!k) {
        product_of_nothing(c, beta);
        return;
    }
    const uintptr_t places = (uintptr_t)a.data | (uintptr_t)b.data | (uintptr_t)c.data | ALIGN;
    const struct shape s = {
        c.shape[0], c.shape[1], k, a.ld, b.ld, c.ld, ta, tb, c.dtype == DT_F32, (int32_t)(places & (~places + 1))};
    struct product p;
    describe(&p, &s);
    struct shape choices[] = {round_rows(s), s}; /* the second if the first one's algorithm does not support s */
    cublasStatus_t rc = CUBLAS_STATUS_NOT_SUPPORTED;
    if (rows) choices[0].m = rows;
    for (int i = 0; i < (rows ? 1 : 2) && (rc == CUBLAS_STATUS_NOT_SUPPORTED || rc == CUBLAS_STATUS_INVALID_VALUE); i++)
        rc = lt.Matmul(lt.handle, &p.desc, &alpha, b.data, &p.a, a.data, &p.b, &beta, c.data, &p.c, c.data, &p.c,
                       algorithm_of(&choices[i]), lt.workspace, WORKSPACE, cuda.stream);
    CUBLAS_CHECK(rc);
}

void cuda_gemm(struct tensor c, struct tensor a, bool ta, struct tensor b, bool tb, float alpha, float beta)
{
    product_by(c, a, ta, b, tb, alpha, beta, 0);
}

void cuda_gemm_rows(const struct device *dev, struct tensor c, struct tensor a, struct tensor b, float alpha,
                    float beta)
{
    product_by(c, a, false, b, true, alpha, beta, choice_rows(dev, 0));
}

/* ---- products without wgmma ---- */

/* The algorithm of number id for bf16, with this tile and number of stages; false: it does not support them. */
static bool configure(cublasLtMatmulAlgo_t *algo, struct product *p, int id, uint32_t tile, uint32_t stages)
{
    cublasLtMatmulHeuristicResult_t found;
    const cudaDataType_t x = CUDA_R_16BF;
    CUBLAS_CHECK(lt.MatmulAlgoInit(lt.handle, CUBLAS_COMPUTE_32F, CUDA_R_32F, x, x, x, x, id, algo));
    CUBLAS_CHECK(lt.MatmulAlgoConfigSetAttribute(algo, CUBLASLT_ALGO_CONFIG_TILE_ID, &tile, sizeof(tile)));
    CUBLAS_CHECK(lt.MatmulAlgoConfigSetAttribute(algo, CUBLASLT_ALGO_CONFIG_STAGES_ID, &stages, sizeof(stages)));
    const cublasStatus_t rc = lt.MatmulAlgoCheck(lt.handle, &p->desc, &p->a, &p->b, &p->c, &p->c, algo, &found);
    return rc == CUBLAS_STATUS_SUCCESS && found.workspaceSize <= WORKSPACE;
}

static bool multiply(struct product *p, const cublasLtMatmulAlgo_t *algo, struct tensor y, struct tensor x,
                     struct tensor w)
{
    const float one = 1, zero = 0;
    return lt.Matmul(lt.handle, &p->desc, &one, w.data, &p->a, x.data, &p->b, &zero, y.data, &p->c, y.data, &p->c, algo,
                     lt.workspace, WORKSPACE, cuda.stream) == CUBLAS_STATUS_SUCCESS;
}

/* The mean time of several products after a first one; infinite if cuBLASLt refuses the algorithm. */
static double product_ms(struct product *p, const cublasLtMatmulAlgo_t *algo, struct tensor y, struct tensor x,
                         struct tensor w)
{
    enum { TIMED = 4 };
    if (!multiply(p, algo, y, x, w)) return INFINITY;
    cuda_mark(0);
    for (int i = 0; i < TIMED; i++)
        if (!multiply(p, algo, y, x, w)) return INFINITY;
    cuda_mark(1);
    CUDA_CHECK(cudaStreamSynchronize(cuda.stream));
    return cuda_mark_ms(0, 1) / TIMED;
}

/* The fastest algorithm with the largest tiles and a configured number of stages; its ms, infinite without one. */
static double fastest_without_wgmma(cublasLtMatmulAlgo_t *best, struct product *p, struct tensor y, struct tensor x,
                                    struct tensor w)
{
    enum { IDS = 256, FIRST = CUBLASLT_MATMUL_STAGES_32x1, LAST = CUBLASLT_MATMUL_STAGES_64x6 };
    static const uint32_t tiles[] = {CUBLASLT_MATMUL_TILE_128x128, CUBLASLT_MATMUL_TILE_128x256,
                                     CUBLASLT_MATMUL_TILE_256x128};
    const cudaDataType_t type = CUDA_R_16BF;
    int ids[IDS], n = 0;
    double best_ms = INFINITY;
    CUBLAS_CHECK(lt.MatmulAlgoGetIds(lt.handle, CUBLAS_COMPUTE_32F, CUDA_R_32F, type, type, type, type, IDS, ids, &n));
    for (int i = 0; i < n; i++) {
        for (int64_t t = 0; t < MT_LEN(tiles); t++) {
            for (uint32_t stages = FIRST; stages <= LAST; stages++) {
                cublasLtMatmulAlgo_t algo;
                if (!configure(&algo, p, ids[i], tiles[t], stages)) continue;
                const double ms = product_ms(p, &algo, y, x, w);
                if (ms < best_ms) *best = algo;
                best_ms = MT_MIN(best_ms, ms);
            }
        }
    }
    return best_ms;
}

bool cuda_portable_product(struct tensor y, struct tensor x, struct tensor w)
{
    static cublasLtMatmulAlgo_t algo; /* for the shape of the first call: all calls have that shape */
    static bool searched, found;
    struct product p;
    const struct shape s = {y.shape[0], y.shape[1], x.shape[1], x.ld, w.ld, y.ld, false, true, false, ALIGN};
    if (cuda.arch == choice_arch(cuda.capability)) return false;
    describe(&p, &s);
    if (!searched) found = fastest_without_wgmma(&algo, &p, y, x, w) < INFINITY;
    searched = true;
    return found && multiply(&p, &algo, y, x, w);
}
