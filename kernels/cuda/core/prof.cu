/* prof.cu - the GPU part of kernels/prof.c: marks on the stream, a plain copy, counts of launches and host waits.
 *
 * Marks are CUDA events, created at first use and never freed. Calls are counted by CUPTI, CUDA's profiling interface,
 * which reports every call of the runtime and the driver, those of libraries included. A driver call inside a runtime
 * call is not counted again. libcupti.so comes with the CUDA Toolkit and is opened when counting starts; the program
 * runs without it. */
#include <string.h>

#include "kernels/cuda/core/cuda.h"
#if __has_include(<cupti.h>)
#include <cupti.h>
#define HAVE_CUPTI 1
#else
#define HAVE_CUPTI 0
#endif

/* ---- marks and copies ---- */

static cudaEvent_t events[DEV_MARKS];

void cuda_mark(int slot)
{
    MT_REQUIRE(slot >= 0 && slot < DEV_MARKS, "mark %d", slot);
    if (!events[slot]) CUDA_CHECK(cudaEventCreate(&events[slot]));
    CUDA_CHECK(cudaEventRecord(events[slot], cuda.stream));
}

double cuda_mark_ms(int from, int to)
{
    float ms = 0;
    CUDA_CHECK(cudaEventElapsedTime(&ms, events[from], events[to]));
    return ms;
}

void cuda_copy(void *dst, const void *src, int64_t bytes)
{
    if (bytes) CUDA_CHECK(cudaMemcpyAsync(dst, src, (size_t)bytes, cudaMemcpyDeviceToDevice, cuda.stream));
}

/* ---- calls ---- */

#if HAVE_CUPTI

static struct {
    decltype(cuptiSubscribe) *subscribe;
    decltype(cuptiEnableDomain) *enable_domain;
    decltype(cuptiUnsubscribe) *unsubscribe;
    CUpti_SubscriberHandle subscriber;
    struct dev_calls calls;
} cupti;
static thread_local int depth; /* nesting of calls */

static bool has(const char *text, const char *part) { return strstr(text, part) != NULL; }

/* Classifies calls by function name. Launches: cudaLaunchKernelExC, cuLaunchKernelEx, cudaGraphLaunch, ... Waits:
 * cuda*Synchronize and copies that are not asynchronous. */
static void CUPTIAPI on_call(void *, CUpti_CallbackDomain, CUpti_CallbackId, const void *data)
{
    const CUpti_CallbackData *call = (const CUpti_CallbackData *)data;
    const char *name = call->functionName;
    if (call->callbackSite == CUPTI_API_EXIT) {
        depth--;
        return;
    }
    if (depth++) return;
    if (has(name, "LaunchKernel") || has(name, "LaunchCooperativeKernel") || has(name, "GraphLaunch"))
        cupti.calls.launches++;
    if (has(name, "Synchronize") || (has(name, "Memcpy") && !has(name, "Async"))) cupti.calls.waits++;
}

static bool find_cupti(void)
{
    static const char *const names[] = {"libcupti.so.13", "libcupti.so.12", "libcupti.so",
                                        "/usr/local/cuda/lib64/libcupti.so",
                                        "/usr/local/cuda/extras/CUPTI/lib64/libcupti.so"};
    const struct library_call calls[] = {{"cuptiSubscribe", &cupti.subscribe},
                                         {"cuptiEnableDomain", &cupti.enable_domain},
                                         {"cuptiUnsubscribe", &cupti.unsubscribe}};
    void *library = library_open(names, MT_LEN(names));
    return library && !library_find(library, "libcupti", calls, MT_LEN(calls), NULL);
}

static const char *start_counting(void)
{
    static bool found;
    cupti.calls = (struct dev_calls){};
    if (!found && !(found = find_cupti())) return "libcupti.so not found";
    if (cupti.subscribe(&cupti.subscriber, (CUpti_CallbackFunc)on_call, NULL) != CUPTI_SUCCESS)
        return "another tool holds CUPTI";
    depth = 0;
    if (cupti.enable_domain(1, cupti.subscriber, CUPTI_CB_DOMAIN_RUNTIME_API) == CUPTI_SUCCESS &&
        cupti.enable_domain(1, cupti.subscriber, CUPTI_CB_DOMAIN_DRIVER_API) == CUPTI_SUCCESS)
        return NULL;
    cupti.unsubscribe(cupti.subscriber);
    return "CUPTI refused";
}

void cuda_count_calls(bool on, struct dev_calls *calls)
{
    if (on)
        cupti.calls.missing = start_counting();
    else if (!cupti.calls.missing)
        cupti.unsubscribe(cupti.subscriber);
    *calls = cupti.calls;
}

#else

void cuda_count_calls(bool, struct dev_calls *calls)
{
    *calls = {};
    calls->missing = "built without cupti.h";
}

#endif
