/* self_test.c - small kernels in PTX that the emulator must run, or refuse for the reason given. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tests/emulator/grid.h"

/* A block of 3 warpgroups: the first executes `first`, the others `second`. */
static const struct test {
    const char *name, *head, *first, *second;
    const char *fault; /* words of the report, NULL: none */
} tests[] = {
    {"504 of 504 registers", ".minnctapersm 1", "dec 40", "inc 232", NULL},
    {"512 of 504 registers", ".minnctapersm 1", "dec 32", "inc 240", "lane has 168 registers and waits for 240"},
    {"two blocks of an SM", ".minnctapersm 2", "dec 40", "inc 104", "lane has 80 registers and waits for 104"},
    {"nobody releases registers", ".minnctapersm 1", "dec 168", "inc 176", "block of 64512 at launch has 0 left"},
    {"launch with the largest number", ".minnctapersm 1", "dec 24", "inc 160", NULL},
    {"no bound of blocks", "", "dec 40", "inc 232", "without .maxntid and .minnctapersm"},
    {"dec raises", ".minnctapersm 1", "dec 176", "inc 232", "setmaxnreg.dec from 168 to 176"},
    {"inc lowers", ".minnctapersm 1", "inc 40", "inc 232", "setmaxnreg.inc from 168 to 40"},
    {"not a multiple of 8", ".minnctapersm 1", "dec 42", "inc 224", "not a multiple of 8"},
    {"too few registers", ".minnctapersm 1", "dec 16", "inc 232", "not a multiple of 8 in 24..256"},
};

/* A warp stores to shared memory, executes `between`, and copies that to global memory in bulk. */
static const struct test copies[] = {
    {"a proxy fence before a bulk copy", "", "fence.proxy.async.shared::cta;", "", NULL},
    {"no proxy fence before a bulk copy", "", "", "", "written without fence.proxy.async"},
    {"a proxy fence before the store", "fence.proxy.async.shared::cta;", "", "", "written without fence.proxy.async"},
};

/* Block 0 writes to global memory, executes `before` and a store of `first` to a flag; block 1 reads the flag with
 * `second` until it is set, executes `after` and reads what was written. */
#define FENCE "fence.acq_rel.gpu;"
#define READ  "ld.global.u32 %r3, [%rd1];"
#define BULK  "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r4], [%rd1], %r6, [%r5];"
static const struct flag_test {
    struct test test;
    const char *before, *after, *read;
} flags[] = {
    {{"release and acquire", "", "release.gpu", "acquire.gpu", NULL}, "", "", READ},
    {{"fences and a relaxed flag", "", "relaxed.gpu", "relaxed.gpu", NULL}, FENCE, FENCE, READ},
    {{"older fences and a volatile flag", "", "volatile", "volatile", NULL}, "membar.gl;", "membar.gl;", READ},
    {{"a fence and an acquire", "", "relaxed.gpu", "acquire.gpu", NULL}, FENCE, "", READ},
    {{"no release", "", "relaxed.gpu", "acquire.gpu", "without an acquire"}, "", "", READ},
    {{"no acquire", "", "release.gpu", "relaxed.gpu", "without an acquire"}, "", "", READ},
    {{"a release for the block", "", "release.cta", "acquire.gpu", "without an acquire"}, "", "", READ},
    {{"no fence before the flag", "", "relaxed.gpu", "relaxed.gpu", "without an acquire"}, "", FENCE, READ},
    {{"no fence after the flag", "", "relaxed.gpu", "relaxed.gpu", "without an acquire"}, FENCE, "", READ},
    {{"a fence for the block", "", "volatile", "volatile", "without an acquire"}, "membar.cta;", "membar.gl;", READ},
    {{"a fence before the write", FENCE, "relaxed.gpu", "acquire.gpu", "without an acquire"}, "", "", READ},
    {{"a bulk copy", "", "release.gpu", "acquire.gpu", NULL}, "", "fence.proxy.async;", BULK},
    {{"a bulk copy without a proxy fence", "", "release.gpu", "acquire.gpu", "without fence.proxy.async"},
     "",
     "",
     BULK},
    {{"a bulk copy without an acquire", "", "release.gpu", "relaxed.gpu", "without an acquire"},
     "",
     "fence.proxy.async;",
     BULK},
};

/* Returns 0 if the kernel ends as expected. During the run stderr goes to a file, from which the report is read. */
static int run(const struct test *t, const char *text, int bytes, uint32_t blocks, uint32_t threads)
{
    const uint32_t grid[3] = {blocks, 1, 1}, block[3] = {threads, 1, 1};
    char report[4096];
    FILE *f = tmpfile();
    const int screen = dup(2);
    if (!f || screen < 0) return -1;
    dup2(fileno(f), 2);
    const int status = grid_run(module_kernel(module_new(text, bytes), "k"), grid, block, NULL, 0, true);
    dup2(screen, 2);
    close(screen);
    rewind(f);
    report[fread(report, 1, sizeof(report) - 1, f)] = 0;
    fclose(f);
    const bool right = t->fault ? status == -1 && strstr(report, t->fault) : status == 0 && !*report;
    printf("%s: %s\n%s", t->name, right ? "passed" : "FAILED", right ? "" : report);
    return right ? 0 : -1;
}

static int run_registers(const struct test *t)
{
    char text[1024];
    const int bytes =
        snprintf(text, sizeof(text),
                 "\n.visible .entry k()\n.maxntid 384, 1, 1\n%s\n{\n.reg .pred %%p<2>;\n.reg .b32 %%r<2>;\n"
                 "mov.u32 %%r1, %%tid.x;\nsetp.gt.u32 %%p1, %%r1, 127;\n@%%p1 bra OTHERS;\n"
                 "setmaxnreg.%.3s.sync.aligned.u32 %s;\nret;\n"
                 "OTHERS:\nsetmaxnreg.%.3s.sync.aligned.u32 %s;\nret;\n}\n",
                 t->head, t->first, t->first + 4, t->second, t->second + 4);
    return run(t, text, bytes, 1, 384);
}

static int run_copy(const struct test *t)
{
    char text[1024];
    const int bytes = snprintf(text, sizeof(text),
                               "\n.visible .global .align 16 .b8 to[16];\n.visible .entry k()\n{\n"
                               ".reg .b32 %%r<3>;\n.reg .b64 %%rd<2>;\n.shared .align 16 .b8 from[16];\n"
                               "mov.u32 %%r1, from;\nmov.u32 %%r2, 16;\n%s\nst.shared.u32 [%%r1], %%r2;\n%s\n"
                               "mov.u64 %%rd1, to;\n"
                               "cp.async.bulk.global.shared::cta.bulk_group [%%rd1], [%%r1], %%r2;\nret;\n}\n",
                               t->head, t->first);
    return run(t, text, bytes, 1, 32);
}

static int run_flag(const struct flag_test *f)
{
    char text[2048];
    const int bytes =
        snprintf(text, sizeof(text),
                 "\n.visible .global .align 16 .b8 data[16];\n.visible .global .align 4 .b8 flag[4];\n"
                 ".visible .entry k()\n{\n.reg .pred %%p<2>;\n.reg .b32 %%r<7>;\n.reg .b64 %%rd<3>;\n"
                 ".shared .align 16 .b8 to[16];\n.shared .align 8 .b8 bar[8];\n"
                 "mov.u64 %%rd1, data;\nmov.u64 %%rd2, flag;\nmov.u32 %%r2, 1;\nmov.u32 %%r6, 16;\n"
                 "mov.u32 %%r4, to;\nmov.u32 %%r5, bar;\nmov.u32 %%r1, %%ctaid.x;\n"
                 "setp.ne.u32 %%p1, %%r1, 0;\n@%%p1 bra READER;\n%s\nst.global.u32 [%%rd1], %%r2;\n%s\n"
                 "st.%s.global.u32 [%%rd2], %%r2;\nret;\nREADER:\nmbarrier.init.shared::cta.b64 [%%r5], %%r2;\n"
                 "AGAIN:\nld.%s.global.u32 %%r3, [%%rd2];\nsetp.ne.u32 %%p1, %%r3, %%r2;\n@%%p1 bra AGAIN;\n"
                 "%s\n%s\nret;\n}\n",
                 f->test.head, f->before, f->test.first, f->test.second, f->after, f->read);
    return run(&f->test, text, bytes, 2, 1);
}

int main(void)
{
    int status = 0;
    for (unsigned k = 0; k < sizeof(tests) / sizeof(*tests); k++) status |= run_registers(&tests[k]);
    for (unsigned k = 0; k < sizeof(copies) / sizeof(*copies); k++) status |= run_copy(&copies[k]);
    for (unsigned k = 0; k < sizeof(flags) / sizeof(*flags); k++) status |= run_flag(&flags[k]);
    return status ? 1 : 0;
}
