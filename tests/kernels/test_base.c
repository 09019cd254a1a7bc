/* test_base.c - errors, text helpers, memory, random numbers; dtypes, views, weights' sizes and the arena. */
#include "tests/test.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/format/format.h"
#include "kernels/hash.h"
#include "kernels/tensor.h"

/* Whether f ends the process with abort(), run in a child with its message hidden. */
static bool aborts(void (*f)(void))
{
    fflush(stdout);
    fflush(stderr);
    pid_t child = fork();
    assert_true(child >= 0);
    if (!child) {
        signal(SIGABRT, SIG_DFL);
        if (!freopen("/dev/null", "w", stderr)) _exit(2);
        f();
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

static void errors(void **state)
{
    (void)state;
    struct err e;
    assert_int_equal(err_set(NULL, "nobody listens"), -1);
    assert_int_equal(err_prefix(NULL, "nobody listens"), -1);
    assert_int_equal(err_set(&e, "%s: no such file", "a.txt"), -1);
    assert_string_equal(e.msg, "a.txt: no such file");
    err_set(&e, "%s!", e.msg); /* an argument may be the message itself */
    assert_string_equal(e.msg, "a.txt: no such file!");
    assert_int_equal(err_prefix(&e, "loading %d of %d", 1, 2), -1);
    assert_string_equal(e.msg, "loading 1 of 2: a.txt: no such file!");
    err_set(&e, "%2000d", 7);
    assert_int_equal(strlen(e.msg), sizeof(e.msg) - 1);
    err_prefix(&e, "%2000d", 7);
    assert_int_equal(strlen(e.msg), sizeof(e.msg) - 1);
    err_set(&e, "a\033[31mb\001\nc\td\177");
    assert_string_equal(e.msg, "a?[31mb? c\td?");
    err_set(&e, "name \"%s\"", "a\nmoetrain: error: b"); /* a line feed in quoted text does not begin a second line */
    err_prefix(&e, "%s", "c\nd");
    assert_string_equal(e.msg, "c d: name \"a moetrain: error: b\"");
}

/* What may not reach a terminal, a report or a card: controls, characters that reorder or hide text, invalid UTF-8. */
static void printable(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int bytes;
    } rows[] = {{"a", 1},
                {"\t", 1},
                {"\xc2\xa0", 2},
                {"\xd7\x90", 2},         /* a Hebrew letter */
                {"\xe2\x82\xac", 3},     /* the euro sign */
                {"\xe2\x80\x8d", 3},     /* a joiner of emoji */
                {"\xf0\x9f\x98\x80", 4}, /* an emoji */
                {"\n", 0},
                {"\x1b", 0},
                {"\x7f", 0},
                {"\xc2\x9b", 0},         /* C1 */
                {"\xd8\x9c", 0},         /* U+061C */
                {"\xe2\x80\x8b", 0},     /* U+200B */
                {"\xe2\x80\x8e", 0},     /* U+200E */
                {"\xe2\x80\x8f", 0},     /* U+200F */
                {"\xe2\x80\xa8", 0},     /* U+2028 */
                {"\xe2\x80\xa9", 0},     /* U+2029 */
                {"\xe2\x80\xaa", 0},     /* U+202A */
                {"\xe2\x80\xae", 0},     /* U+202E */
                {"\xe2\x81\xa6", 0},     /* U+2066 */
                {"\xe2\x81\xa9", 0},     /* U+2069 */
                {"\xef\xbb\xbf", 0},     /* U+FEFF */
                {"\xf3\xa0\x81\x81", 0}, /* U+E0041, a tag */
                {"\xc2\xad", 0},         /* U+00AD, a soft hyphen */
                {"\xe3\x85\xa4", 0},     /* U+3164, a filler */
                {"\xef\xb8\x8f", 3},     /* U+FE0F, a variation selector of emoji */
                {"\xed\x9f\xbf", 3},     /* U+D7FF */
                {"\xed\xa0\x80", 0},     /* U+D800, half of a character of UTF-16 */
                {"\xed\xbf\xbf", 0},     /* U+DFFF */
                {"\xf4\x8f\xbf\xbd", 4}, /* U+10FFFD */
                {"\xf4\x90\x80\x80", 0}, /* U+110000 */
                {"\x80", 0},
                {"\xc0\x80", 0},
                {"\xe0\x80\x80", 0},
                {"\xf0\x80\x80\x80", 0},
                {"\xe2\x82", 0},
                {"\xff", 0}};
    char text[32];
    for (int i = 0; i < MT_LEN(rows); i++) {
        if (str_printable(rows[i].text) != rows[i].bytes) fail_msg("row %d", i);
        snprintf(text, sizeof(text), "[%s]", rows[i].text);
        assert_int_equal(!strncmp(str_mask(text) + 1, rows[i].text, strlen(rows[i].text)), rows[i].bytes > 0);
    }
    assert_int_equal(str_codepoint("\xe2\x80\xae", 3), 0x202e);
    assert_int_equal(str_codepoint("\xf3\xa0\x81\x81", 4), 0xe0041);
}

static void formats(void **state)
{
    (void)state;
    struct err e;
    char dst[8], buf[32];
    assert_int_equal(str_format(dst, sizeof(dst), &e, "name", "%d", 1234567), 0);
    assert_string_equal(dst, "1234567");
    assert_int_equal(str_format(dst, sizeof(dst), &e, "name", "%d", 12345678), -1);
    assert_string_equal(e.msg, "name is too long: 8 bytes, at most 7 fit: 1234567...");

    static const struct {
        int64_t n;
        const char *bytes, *count;
    } rows[] = {{0, "0 B", "0"},
                {999, "999 B", "999"},
                {1000, "1000 B", "1.00 k"},
                {1023, "1023 B", "1.02 k"},
                {1024, "1.00 KiB", "1.02 k"},
                {10239, "10.0 KiB", "10.2 k"},
                {99949, "97.6 KiB", "99.9 k"},
                {99960, "97.6 KiB", "100 k"},
                {999499, "976 KiB", "999 k"},
                {999500, "976 KiB", "1.00 M"},
                {1048063, "1023 KiB", "1.05 M"},
                {1048064, "1.00 MiB", "1.05 M"},
                {1320702444, "1.23 GiB", "1.32 G"},
                {13761264768, "12.8 GiB", "13.8 G"},
                {-2048, "-2.00 KiB", "-2.05 k"},
                {INT64_MAX, "8192 PiB", "9223372 T"}};
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        assert_string_equal(str_bytes(buf, rows[i].n), rows[i].bytes);
        assert_string_equal(str_count(buf, rows[i].n), rows[i].count);
    }
    static const struct {
        double s;
        const char *text;
    } times[] = {{0, "0:00"},       {0.6, "0:01"},         {59.4, "0:59"}, {60, "1:00"}, {3599.4, "59:59"},
                 {3723, "1:02:03"}, {360000, "100:00:00"}, {-1, "?"},      {1e300, "?"}, {NAN, "?"}};
    for (int64_t i = 0; i < MT_LEN(times); i++) assert_string_equal(str_seconds(buf, times[i].s), times[i].text);
    for (int64_t n = 0; n < 3; n++) assert_string_equal(str_plural(n), n == 1 ? "" : "s");
}

static void nearest(void **state)
{
    (void)state;
    static const char *const names[] = {"train", "eval", "seq_len", "micro_batch", "grad_accum", "lr", "warmup_steps"};
    static const struct {
        const char *word, *nearest;
    } rows[] = {{"train", "train"},
                {"trian", "train"},
                {"TRAIN", "train"},
                {"seqlen", "seq_len"},
                {"seq-len", "seq_len"},
                {"microbatch", "micro_batch"},
                {"lrr", "lr"},
                {"warmup_step", "warmup_steps"},
                {"grad_acc", "grad_accum"},
                {"rl", "lr"},
                {"", NULL},
                {"x", NULL},
                {"completely_else", NULL}};
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        const char *found = str_nearest(rows[i].word, names, MT_LEN(names));
        if (!rows[i].nearest)
            assert_null(found);
        else
            assert_string_equal(found, rows[i].nearest);
    }
    assert_null(str_nearest("train", names, 0));
    char longer[400];
    memset(longer, 'a', sizeof(longer));
    longer[255] = 0;
    const char *hostile[] = {longer};
    assert_ptr_equal(str_nearest(longer, hostile, 1), longer);
    longer[255] = 'a';
    longer[399] = 0;
    assert_null(str_nearest(longer, hostile, 1));
}

static void negative_alloc(void) { mem_free(mem_alloc(-1)); }
static void overflowing_array(void) { mem_free(mem_array(INT64_MAX / 4, 8)); }

/* Errors of a shortage begin as all others do: "moetrain: error: ". */
static void out_of_memory(void **state)
{
    (void)state;
    char path[256], text[256] = "";
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    print_message("skip: a sanitizer ends a process that asks for so much memory\n");
    skip();
#endif
    snprintf(path, sizeof(path), "%s/stderr", scratch_dir());
    fflush(NULL);
    const pid_t child = fork();
    if (!child) {
        if (!freopen(path, "w", stderr)) _exit(2);
        mem_free(mem_alloc(INT64_MAX / 2));
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(WEXITSTATUS(status), 1);
    FILE *f = fopen(path, "r");
    assert_true(f && fgets(text, sizeof(text), f));
    fclose(f);
    assert_string_equal(text, "moetrain: error: out of memory: the system refused 4096 PiB of host memory\n");
}

/* This program fails when it runs no test. */
static void no_test_is_a_failure(void **state)
{
    (void)state;
    static const struct {
        const char *words;
        int code;
    } rows[] = {{"--only nothing base", 1}, {"--only nothing base file", 1},
                {"--only errors base", 0},  {"--only errors base file", 1},
                {"--skip '*' base", 1},     {"--only errors base none", 2},
                {"--onyl errors base", 2},  {"--only", 2}};
    char self[256] = "", command[512];
    assert_true(readlink("/proc/self/exe", self, sizeof(self) - 1) > 0);
    for (int i = 0; i < MT_LEN(rows); i++) {
        snprintf(command, sizeof(command), "'%s' %s > /dev/null 2>&1", self, rows[i].words);
        const int status = system(command);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != rows[i].code) fail_msg("%s: status %d", rows[i].words, status);
    }
}

static void memory(void **state)
{
    (void)state;
    mem_free(NULL);
    uint8_t *p = mem_array(0, 8);
    assert_non_null(p);
    p = mem_grow(p, 0, 3, 4);
    for (int i = 0; i < 12; i++) assert_int_equal(p[i], 0);
    memset(p, 7, 12);
    p = mem_grow(p, 3, 1000, 4);
    for (int i = 0; i < 4000; i++) assert_int_equal(p[i], i < 12 ? 7 : 0);
    mem_free(p);
    char *s = mem_strdup("text");
    assert_string_equal(s, "text");
    mem_free(s);
    assert_true(aborts(negative_alloc));
    assert_true(aborts(overflowing_array));

    int64_t out;
    assert_true(i64_mul(INT64_MAX, 1, &out) && out == INT64_MAX);
    assert_true(i64_mul(1LL << 31, 1LL << 31, &out) && out == 1LL << 62);
    assert_false(i64_mul(1LL << 32, 1LL << 31, &out));
    assert_false(i64_mul(-1, 1, &out));
    assert_true(i64_mul(0, INT64_MAX, &out) && out == 0);
    assert_true(i64_add(INT64_MAX - 1, 1, &out) && out == INT64_MAX);
    assert_false(i64_add(INT64_MAX, 1, &out));
    assert_false(i64_add(1, -1, &out));
}

/* Fixed values: later versions of the program must repeat a run. */
static void random_values(void **state)
{
    (void)state;
    assert_true(rng_u64(0, 0) == UINT64_C(0x1094db8bb4b47185));
    assert_true(rng_u64(1, 2) == UINT64_C(0x25f5cef17af09fb3));
    assert_true(rng_key(42, "shuffle") == UINT64_C(0x83e5302fcb759afb));
    assert_true(rng_key(42, "shuffle") != rng_key(43, "shuffle"));
    assert_true(rng_key(42, "shuffle") != rng_key(42, "dropout"));
    double before = clock_ms();
    assert_true(clock_ms() >= before);
}

static int bits(uint64_t x) { return __builtin_popcountll(x); }

/* A flipped bit of key or counter flips each output bit with probability 1/2. Outputs of neighbouring keys and counters
 * are uncorrelated. Uniform values have the moments of the uniform distribution. */
static void random_quality(void **state)
{
    (void)state;
    enum { N = 4096 };
    for (int bit = 0; bit < 64; bit++) {
        int64_t by_counter = 0, by_key = 0, one[64] = {0};
        for (uint64_t i = 0; i < N; i++) {
            uint64_t x = rng_u64(99, i), flipped = x ^ rng_u64(99, i ^ 1ull << bit);
            by_counter += bits(flipped);
            by_key += bits(x ^ rng_u64(99 ^ 1ull << bit, i));
            for (int k = 0; k < 64; k++) one[k] += (int64_t)(flipped >> k & 1);
        }
        /* sums of N*64 fair bits: standard deviation 256; of N: 32 */
        assert_true(llabs(by_counter - N * 32) < 6 * 256);
        assert_true(llabs(by_key - N * 32) < 6 * 256);
        for (int k = 0; k < 64; k++) assert_true(llabs(one[k] - N / 2) < 6 * 32);
    }
    double sum = 0, square = 0, serial = 0, cross = 0;
    int64_t n = 200000, bucket[256] = {0};
    for (int64_t i = 0; i < n; i++) {
        double u = rng_uniform(7, (uint64_t)i), v = rng_uniform(7, (uint64_t)i + 1), w = rng_uniform(8, (uint64_t)i);
        assert_true(u >= 0 && u < 1);
        sum += u;
        square += u * u;
        serial += (u - 0.5) * (v - 0.5);
        cross += (u - 0.5) * (w - 0.5);
        bucket[(int)(u * 256)]++;
    }
    double nd = (double)n, chi2 = 0;
    for (int i = 0; i < 256; i++) chi2 += pow((double)bucket[i] - nd / 256, 2) / (nd / 256);
    assert_true(fabs(sum / nd - 0.5) < 5 * sqrt(1.0 / 12 / nd));
    assert_true(fabs(square / nd - 1.0 / 3) < 5 * sqrt(4.0 / 45 / nd));
    assert_true(fabs(serial / nd) < 5 / 12.0 / sqrt(nd));
    assert_true(fabs(cross / nd) < 5 / 12.0 / sqrt(nd));
    assert_true(chi2 > 160 && chi2 < 370); /* 255 degrees of freedom: 255 +- 5 * 22.6; too small a value is wrong too */
}

static void narrow_floats(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 65536; h++) {
        float f = bf16_to_f32((uint16_t)h);
        uint16_t back = f32_to_bf16(f);
        if (isnan(f))
            assert_true(isnan(bf16_to_f32(back)));
        else
            assert_int_equal(back, h);
        float half = f16_to_f32((uint16_t)h);
        uint32_t e = h >> 10 & 31, m = h & 1023;
        double want = e == 31 ? (m ? NAN : INFINITY) : e ? ldexp(1024 + m, (int)e - 25) : ldexp(m, -24);
        if (h & 0x8000) want = -want;
        if (isnan(want))
            assert_true(isnan(half));
        else
            assert_true((double)half == want && !signbit(half) == !signbit(want));
    }
    static const struct {
        uint32_t f32;
        uint16_t bf16;
    } rows[] = {{0x3f808000, 0x3f80}, /* a tie goes to even */
                {0x3f818000, 0x3f82}, {0x3f808001, 0x3f81}, {0x3f807fff, 0x3f80}, {0x7f7fffff, 0x7f80},
                {0x80000001, 0x8000}, {0x00018000, 0x0002}, {0x7f800001, 0x7fc0}, {0xff800001, 0xffc0}};
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        float f;
        memcpy(&f, &rows[i].f32, 4);
        assert_int_equal(f32_to_bf16(f), rows[i].bf16);
    }
}

static float values[2 * 3 * 8];
static void too_many_columns(void) { tensor_cols(tensor_2d(values, DT_F32, 6, 8), 4, 5); }
static void too_many_rows(void) { tensor_rows(tensor_2d(values, DT_F32, 6, 8), 6, 1); }
static void huge_tensor(void) { tensor_count(tensor_2d(NULL, DT_F32, 1LL << 32, 1LL << 32)); }

static void views(void **state)
{
    (void)state;
    struct tensor x = tensor_3d(values, DT_F32, 2, 3, 8);
    assert_int_equal(tensor_count(x), 48);
    assert_int_equal(tensor_bytes(x), 192);
    struct tensor c = tensor_cols(x, 2, 4);
    assert_ptr_equal(c.data, values + 2);
    assert_int_equal(c.shape[2], 4);
    assert_int_equal(c.ld, 8);
    struct tensor r = tensor_rows(c, 1, 1);
    assert_ptr_equal(r.data, values + 24 + 2);
    assert_int_equal(r.shape[0], 1);
    r = tensor_rows(tensor_cols(tensor_2d(values, DT_F32, 6, 8), 1, 3), 5, 1);
    assert_ptr_equal(r.data, values + 40 + 1);
    r = tensor_rows(tensor_1d(values, DT_F32, 48), 40, 8);
    assert_ptr_equal(r.data, values + 40);
    assert_int_equal(r.ld, 8);
    assert_null(tensor_rows(tensor_2d(NULL, DT_BF16, 6, 8), 3, 2).data); /* as in a dry run */
    assert_int_equal(tensor_count((struct tensor){0}), 0);
    assert_int_equal(tensor_count(tensor_2d(NULL, DT_F32, 0, 8)), 0);
    assert_true(aborts(too_many_columns));
    assert_true(aborts(too_many_rows));
    assert_true(aborts(huge_tensor));
    for (enum dtype t = DT_F32; t < DT_COUNT; t++) assert_true(dtype_size(t) > 0 && strlen(dtype_name(t)) > 1);
}

static void weights(void **state)
{
    (void)state;
    static const float absmax[1];
    static const uint8_t q8[1];
    struct weight w = {.n_exp = 32, .n_out = 5760, .n_in = 2880, .block = 64};
    static const struct {
        enum weight_format format;
        bool nested;
        int64_t blocks, bytes;
    } rows[] = {
        {WF_F32, false, 0, 32LL * 5760 * 2880 * 4},
        {WF_BF16, false, 0, 32LL * 5760 * 2880 * 2},
        {WF_F16, false, 0, 32LL * 5760 * 2880 * 2},
        {WF_MXFP4, false, 0, 32LL * 5760 * 90 * 17},
        {WF_NVFP4, false, 0, 32LL * 5760 * (180 * 9 + 4)},
        {WF_FP8, false, 0, 32LL * 5760 * (2880 + 45 * 4)}, /* 45 blocks of 64 columns */
        {WF_NF4, false, 259200, 32LL * (8294400 + 259200 * 4) + 64},
        {WF_FP4, true, 259200, 32LL * (8294400 + 259200 + 1013 * 4 + 4) + 64 + 1024},
    };
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        w.format = rows[i].format;
        w.absmax = rows[i].nested ? NULL : absmax;
        w.scale = rows[i].nested ? q8 : NULL;
        assert_int_equal(weight_blocks(&w), rows[i].blocks);
        assert_int_equal(weight_bytes(&w), rows[i].bytes);
        assert_true(strlen(weight_format_name(w.format)) > 2);
    }
    w = (struct weight){.format = WF_NF4, .n_exp = 1, .n_out = 5, .n_in = 13, .block = 64, .absmax = absmax};
    assert_int_equal(weight_blocks(&w), 2); /* 65 elements: the last block and the last byte are partial */
    assert_int_equal(weight_bytes(&w), 33 + 8 + 64);
    assert_int_equal(weight_bytes(&(struct weight){0}), 0);
}

static void full_arena(void)
{
    static char block[1024];
    struct arena a = {.name = "test", .base = block, .cap = 1024};
    arena_push(&a, 1024);
    arena_push(&a, 1);
}

static void arenas(void **state)
{
    (void)state;
    static _Alignas(256) char block[2048];
    struct arena real = {.name = "test", .base = block, .cap = sizeof(block)}, plan = arena_measure("plan");
    struct arena *both[] = {&real, &plan};
    for (int i = 0; i < 2; i++) {
        struct arena *a = both[i];
        char *base = a->base;
        struct tensor x = arena_tensor_1d(a, DT_U8, 1), y = arena_tensor_2d(a, DT_F32, 3, 5);
        assert_ptr_equal(x.data, base);
        assert_ptr_equal(y.data, base ? base + 256 : NULL);
        assert_int_equal(y.ndim, 2);
        int64_t mark = arena_mark(a);
        assert_int_equal(mark, 512);
        struct tensor z = arena_tensor_3d(a, DT_BF16, 2, 3, 64);
        assert_ptr_equal(z.data, base ? base + 512 : NULL);
        assert_int_equal(a->used, 1280);
        arena_release(a, mark);
        assert_int_equal(a->used, 512);
        arena_push(a, 0);
        assert_int_equal(a->used, 512);
        assert_int_equal(a->peak, 1280);
    }
    assert_true(aborts(full_arena));
}

/* Cases 1 and 2 of RFC 4231; the comparison of MACs reads every byte. */
static void hmac(void **state)
{
    static const struct {
        const char *key, *text;
        uint8_t first[4], last;
    } rows[] = {
        {"\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b",
         "Hi There",
         {0xb0, 0x34, 0x4c, 0x61},
         0xf7},
        {"Jefe", "what do ya want for nothing?", {0x5b, 0xdc, 0xc1, 0x46}, 0x43},
    };
    (void)state;
    for (int i = 0; i < MT_LEN(rows); i++) {
        const int64_t key_bytes = (int64_t)strlen(rows[i].key);
        uint8_t mac[HASH_MAC], other[HASH_MAC];
        struct hash h;
        hash_mac_init(&h, rows[i].key, key_bytes);
        hash_add(&h, rows[i].text, (int64_t)strlen(rows[i].text));
        hash_mac_end(&h, rows[i].key, key_bytes, mac);
        assert_memory_equal(mac, rows[i].first, 4);
        assert_int_equal(mac[HASH_MAC - 1], rows[i].last);
        for (int b = 0; b < HASH_MAC; b++) {
            memcpy(other, mac, sizeof(mac));
            assert_true(hash_mac_equal(mac, other));
            other[b] ^= 1;
            assert_false(hash_mac_equal(mac, other));
        }
    }
}

/* The sum of parts is that of the whole, wherever it is divided and whether or not the data are aligned. Every change
 * of one bit, pairs of sign bits, and exchanged words and blocks change it. */
static void sums(void **state)
{
    (void)state;
    enum { BYTES = 3 << 20 };
    uint8_t *data = mem_alloc(BYTES + 8);
    for (int64_t i = 0; i < BYTES + 8; i++) data[i] = (uint8_t)(rng_u64(1, (uint64_t)i) >> 56);
    const hash_sum whole = hash_sum_of(0, data, BYTES, 1);
    assert_true(whole == hash_sum_of(0, data, BYTES, 3));
    for (int64_t i = 0; i < 200; i++) {
        const int64_t at = i < 40 ? i : (int64_t)(rng_u64(2, (uint64_t)i) % BYTES),
                      n = MT_MIN(BYTES - at, i % 9 * 1111);
        uint8_t *copy = mem_alloc(BYTES - at + 8);
        memcpy(copy + i % 8, data + at, (size_t)(BYTES - at));
        assert_true(whole == hash_sum_of(0, data, at, 2) + hash_sum_of(at, copy + i % 8, n, 1) +
                                 hash_sum_of(at + n, copy + i % 8 + n, BYTES - at - n, 2));
        mem_free(copy);
        const int64_t other = (at + 8 * (i + 1)) % BYTES;
        data[at] ^= (uint8_t)(1 << i % 8);
        assert_true(whole != hash_sum_of(0, data, BYTES, 2));
        data[other] ^= (uint8_t)(1 << i % 8); /* the same bit of another word */
        assert_true(whole != hash_sum_of(0, data, BYTES, 2));
        data[at] ^= (uint8_t)(1 << i % 8);
        data[other] ^= (uint8_t)(1 << i % 8);
    }
    for (int64_t size = 8; size <= 1 << 20; size *= 2) {
        uint8_t *copy = mem_alloc(BYTES);
        memcpy(copy, data + size, (size_t)size);
        memcpy(copy + size, data, (size_t)size);
        memcpy(copy + 2 * size, data + 2 * size, (size_t)(BYTES - 2 * size));
        assert_true(whole != hash_sum_of(0, copy, BYTES, 2));
        mem_free(copy);
    }
    assert_true(hash_sum_of(0, data, 0, 1) == 0);
    mem_free(data);
}

static void libraries(void **state)
{
    (void)state;
    static const char *const names[] = {"libnowhere.so.1", "libm.so.6"};
    double (*cosine)(double) = NULL;
    void (*missing)(void) = NULL;
    const struct library_call calls[] = {{"cos", &cosine}, {"no_such_call", &missing}};
    struct err e;
    assert_null(library_open(names, 1));
    void *library = library_open(names, 2);
    assert_non_null(library);
    assert_int_equal(library_find(library, "libm", calls, 1, &e), 0);
    assert_true(cosine(0) == 1);
    assert_int_equal(library_find(library, "libm", calls, 2, &e), -1);
    assert_string_equal(e.msg, "libm is too old: it lacks no_such_call");
}

/* PREFIX/bin/moetrain finds PREFIX/lib/python3.11/site-packages/nvidia/cu13/lib/NAME, not names with a folder. */
static void libraries_of_an_environment(void **state)
{
    (void)state;
    static const char *const folders[] = {"",
                                          "/bin",
                                          "/lib",
                                          "/lib/python3.11",
                                          "/lib/python3.11/site-packages",
                                          "/lib/python3.11/site-packages/nvidia",
                                          "/lib/python3.11/site-packages/nvidia/cu13",
                                          "/lib/python3.11/site-packages/nvidia/cu13/lib"};
    char root[] = "/tmp/moetrain-env-XXXXXX", path[MT_PATH], executable[MT_PATH], found[MT_PATH];
    assert_non_null(mkdtemp(root));
    for (int i = 1; i < MT_LEN(folders); i++) {
        snprintf(path, sizeof(path), "%s%s", root, folders[i]);
        assert_int_equal(mkdir(path, 0777), 0);
    }
    snprintf(executable, sizeof(executable), "%s/bin/moetrain", root);
    assert_false(library_beside(found, executable, "libx.so.1"));
    strcat(path, "/libx.so.1");
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fclose(f);
    assert_true(library_beside(found, executable, "libx.so.1"));
    assert_non_null(strstr(found, "/bin/../lib/python3.11/site-packages/nvidia/cu13/lib/libx.so.1"));
    assert_false(library_beside(found, executable, "/usr/lib/libx.so.1"));
    assert_false(library_beside(found, "moetrain", "libx.so.1"));
    unlink(path);
    for (int i = MT_LEN(folders) - 1; i >= 0; i--) {
        snprintf(path, sizeof(path), "%s%s", root, folders[i]);
        rmdir(path);
    }
}

int test_base(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(printable),
        cmocka_unit_test(out_of_memory),
        cmocka_unit_test(errors),
        cmocka_unit_test(formats),
        cmocka_unit_test(nearest),
        cmocka_unit_test(memory),
        cmocka_unit_test(random_values),
        cmocka_unit_test(random_quality),
        cmocka_unit_test(narrow_floats),
        cmocka_unit_test(views),
        cmocka_unit_test(weights),
        cmocka_unit_test(arenas),
        cmocka_unit_test(hmac),
        cmocka_unit_test(libraries),
        cmocka_unit_test(libraries_of_an_environment),
        cmocka_unit_test(no_test_is_a_failure),
        cmocka_unit_test(sums),
    };
    return cmocka_run_group_tests_name("base", tests, NULL, NULL);
}
