/* test_file.c - mapped files, lines of plain and gzip text, atomic writes, directories, checksums. */
#include "tests/test.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "data/file/file.h"

/* DIR/name; in one of four static buffers. */
static const char *in(const char *dir, const char *name)
{
    static char path[4][512];
    static int next;
    char *p = path[next++ % 4];
    snprintf(p, sizeof(path[0]), "%s/%s", dir, name);
    return p;
}

static void write_file(const char *path, const void *data, int64_t size)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, (size_t)size, f), size);
    assert_int_equal(fclose(f), 0);
}

static void assert_content(const char *path, const char *want)
{
    struct err err;
    int64_t size;
    char *text = file_read(path, 1 << 20, &size, &err);
    assert_non_null(text);
    assert_string_equal(text, want);
    assert_int_equal(size, strlen(want));
    mem_free(text);
}

static void maps(void **state)
{
    (void)state;
    const char *dir = scratch_dir();
    struct file_map map;
    struct err err;
    write_file(in(dir, "a"), "hello", 5);
    assert_int_equal(file_map_open(&map, in(dir, "a"), &err), 0);
    assert_int_equal(map.size, 5);
    file_map_drop(&map, 0, 5);
    file_map_drop(&map, 3, 3); /* outside the file: no effect */
    file_map_drop(&map, INT64_MAX, 1);
    assert_memory_equal(map.data, "hello", 5); /* dropped pages are read again */
    file_map_close(&map);
    file_map_close(&map);
    write_file(in(dir, "empty"), "", 0);
    assert_int_equal(file_map_open(&map, in(dir, "empty"), &err), 0);
    assert_true(!map.data && !map.size);
    file_map_drop(&map, 0, 0);
    file_map_close(&map);
    assert_int_equal(file_map_open(&map, in(dir, "none"), &err), -1);
    assert_non_null(strstr(err.msg, "/none: cannot open: No such file"));
    assert_int_equal(file_map_open(&map, dir, &err), -1);
    assert_non_null(strstr(err.msg, "not a regular file"));
}

static void whole_files(void **state)
{
    (void)state;
    const char *dir = scratch_dir();
    struct err err;
    int64_t size, n = 600000; /* more than two chunks */
    char *big = mem_alloc(n);
    for (int64_t i = 0; i < n; i++) big[i] = (char)(i * 7);
    write_file(in(dir, "big"), big, n);
    char *text = file_read(in(dir, "big"), n, &size, &err);
    assert_non_null(text);
    assert_int_equal(size, n);
    assert_memory_equal(text, big, (size_t)n);
    assert_int_equal(text[n], 0);
    mem_free(text);
    assert_null(file_read(in(dir, "big"), n - 1, &size, &err));
    assert_non_null(strstr(err.msg, "/big: larger than the limit of 586 KiB"));
    mem_free(big);
    write_file(in(dir, "empty"), "", 0);
    assert_content(in(dir, "empty"), "");
    assert_null(file_read(dir, n, &size, &err));
    assert_null(file_read(in(dir, "none"), n, &size, &err));

    uint32_t crc;
    write_file(in(dir, "check"), "123456789", 9);
    assert_int_equal(file_crc32(in(dir, "check"), &crc, &size, &err), 0);
    assert_int_equal(crc, 0xcbf43926); /* CRC-32 of "123456789", its standard check value */
    assert_int_equal(size, 9);
    assert_int_equal(file_crc32(in(dir, "empty"), &crc, &size, &err), 0);
    assert_true(crc == 0 && size == 0);
    assert_int_equal(file_crc32(in(dir, "none"), &crc, &size, &err), -1);
    assert_int_equal(file_crc32(dir, &crc, &size, &err), -1);
}

/* ---- lines ---- */

/* Sets text to all lines of the file, each followed by '|'; returns their number, or -1 with err. */
static int64_t read_lines(const char *path, char *text, size_t cap, struct err *err)
{
    struct line_reader *r = line_reader_open(path, err);
    if (!r) return -1;
    char *line;
    int64_t size, n = 0;
    size_t used = 0;
    int rc;
    while ((rc = line_reader_next(r, &line, &size, err)) == 1) {
        n++;
        assert_int_equal(line_reader_line(r), n);
        assert_int_equal(line[size], 0);
        if (used + (size_t)size + 2 > cap) continue;
        memcpy(text + used, line, (size_t)size);
        used += (size_t)size;
        text[used++] = '|';
    }
    text[used] = 0;
    if (rc == 0) assert_int_equal(line_reader_next(r, &line, &size, err), 0); /* a call after the end returns 0 again */
    line_reader_close(r);
    return rc < 0 ? -1 : n;
}

/* A file that threads read in parts; the value is that of Python's zlib.crc32. */
static void checksum_in_parts(void **state)
{
    (void)state;
    struct err err;
    const int64_t n = (9 << 20) + 5;
    uint8_t *data = mem_alloc(n);
    const char *path = in(scratch_dir(), "parts");
    uint32_t crc;
    int64_t size;
    for (int64_t i = 0; i < n; i++) data[i] = (uint8_t)(i * 7 + (i >> 20) * 31);
    write_file(path, data, n);
    assert_int_equal(file_crc32(path, &crc, &size, &err), 0);
    assert_int_equal(crc, 0x33b8fbf8);
    assert_int_equal(size, n);
    mem_free(data);
}

static void lines(void **state)
{
    (void)state;
    static const struct {
        const char *file;
        int64_t size, n;
        const char *want;
    } rows[] = {
        {"", 0, 0, ""},
        {"\n", 1, 1, "|"},
        {"a", 1, 1, "a|"},
        {"a\n", 2, 1, "a|"},
        {"a\nb", 3, 2, "a|b|"},
        {"a\r\nb\r\n", 6, 2, "a|b|"},
        {"a\rb\n\r\n\n", 7, 3, "a\rb|||"},
        {"a\r", 2, 1, "a\r|"}, /* a CR without LF is content */
        {"\xef\xbb\xbf"
         "a\n\xef\xbb\xbf"
         "b",
         9, 2,
         "a|\xef\xbb\xbf"
         "b|"},
        {"\xef\xbb\xbf", 3, 1, "|"},
        {"\xef\xbb", 2, 1, "\xef\xbb|"},
        {"\n\n\n", 3, 3, "|||"},
    };
    const char *dir = scratch_dir();
    struct err err;
    char text[64];
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        write_file(in(dir, "lines"), rows[i].file, rows[i].size);
        assert_int_equal(read_lines(in(dir, "lines"), text, sizeof(text), &err), rows[i].n);
        assert_string_equal(text, rows[i].want);
    }
    assert_int_equal(read_lines(in(dir, "none"), text, sizeof(text), &err), -1);
    assert_non_null(strstr(err.msg, "/none: cannot open"));
    assert_int_equal(read_lines(dir, text, sizeof(text), &err), -1);

    write_file(in(dir, "nul"), "a\0b\nc", 5);
    struct line_reader *r = line_reader_open(in(dir, "nul"), &err);
    char *line;
    int64_t size;
    assert_int_equal(line_reader_next(r, &line, &size, &err), 1);
    assert_int_equal(size, 3);
    assert_memory_equal(line, "a\0b", 4);
    assert_int_equal(line_reader_next(r, &line, &size, &err), 1);
    assert_string_equal(line, "c");
    line_reader_close(r);
    line_reader_close(NULL);
}

/* Lines of about 256 KiB, the size of the reader's buffer, and much longer ones. */
static void long_lines(void **state)
{
    (void)state;
    static const int64_t sizes[] = {262143, 262144, 262145, 3 << 20, 0, 1};
    const char *dir = scratch_dir();
    struct err err;
    for (int crlf = 0; crlf < 2; crlf++) {
        FILE *f = fopen(in(dir, "long"), "wb");
        assert_non_null(f);
        for (int64_t i = 0; i < MT_LEN(sizes); i++) {
            for (int64_t k = 0; k < sizes[i]; k++) fputc('a' + (int)((i + k) % 26), f);
            fputs(crlf ? "\r\n" : "\n", f);
        }
        assert_int_equal(fclose(f), 0);
        struct line_reader *r = line_reader_open(in(dir, "long"), &err);
        assert_non_null(r);
        char *line;
        int64_t size;
        for (int64_t i = 0; i < MT_LEN(sizes); i++) {
            assert_int_equal(line_reader_next(r, &line, &size, &err), 1);
            assert_int_equal(size, sizes[i]);
            for (int64_t k = 0; k < size; k++)
                if (line[k] != 'a' + (int)((i + k) % 26)) fail_msg("line %d differs at %d", (int)i, (int)k);
        }
        assert_int_equal(line_reader_next(r, &line, &size, &err), 0);
        line_reader_close(r);
    }
}

/* gzip files made with Python's gzip: "one\ntwo\r\nthree" in one member, and as members "one\ntw", "", "o\r\nthree". */
static const uint8_t gzip_one[] = {0x1f, 0x8b, 0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x02, 0x03, 0xcb, 0xcf,
                                   0x4b, 0xe5, 0x2a, 0x29, 0xcf, 0xe7, 0xe5, 0x2a, 0xc9, 0x28, 0x4a, 0x4d,
                                   0x05, 0x00, 0xcd, 0x83, 0xb9, 0x8f, 0x0e, 0x00, 0x00, 0x00};
static const uint8_t gzip_three[] = {
    0x1f, 0x8b, 0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x02, 0x03, 0xcb, 0xcf, 0x4b, 0xe5, 0x2a, 0x29, 0x07, 0x00, 0x8a,
    0x0f, 0x3f, 0xea, 0x06, 0x00, 0x00, 0x00, 0x1f, 0x8b, 0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x02, 0x03, 0x03, 0x00,
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x1f, 0x8b, 0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x02, 0x03, 0xcb,
    0xe7, 0xe5, 0x2a, 0xc9, 0x28, 0x4a, 0x4d, 0x05, 0x00, 0x30, 0x00, 0x42, 0x2c, 0x08, 0x00, 0x00, 0x00};

static void gzip_lines(void **state)
{
    (void)state;
    const char *dir = scratch_dir();
    struct err err;
    char text[64];
    write_file(in(dir, "a.txt"), gzip_one, sizeof(gzip_one)); /* gzip is detected by content, not by name */
    assert_int_equal(read_lines(in(dir, "a.txt"), text, sizeof(text), &err), 3);
    assert_string_equal(text, "one|two|three|");
    write_file(in(dir, "b.gz"), gzip_three, sizeof(gzip_three));
    assert_int_equal(read_lines(in(dir, "b.gz"), text, sizeof(text), &err), 3);
    assert_string_equal(text, "one|two|three|");
    write_file(in(dir, "c.gz"), "plain\n", 6);
    assert_int_equal(read_lines(in(dir, "c.gz"), text, sizeof(text), &err), 1);

    uint8_t bad[sizeof(gzip_one) + 4] = {0};
    memcpy(bad, gzip_one, sizeof(gzip_one));
    write_file(in(dir, "d.gz"), bad, sizeof(bad)); /* garbage after the member */
    assert_int_equal(read_lines(in(dir, "d.gz"), text, sizeof(text), &err), -1);
    assert_non_null(strstr(err.msg, "/d.gz: damaged gzip data: incorrect header check"));
    bad[sizeof(gzip_one) - 6] ^= 1; /* the CRC of the content */
    write_file(in(dir, "d.gz"), bad, sizeof(gzip_one));
    assert_int_equal(read_lines(in(dir, "d.gz"), text, sizeof(text), &err), -1);
    assert_non_null(strstr(err.msg, "incorrect data check"));
}

/* A line of 65 MiB, and 288 KiB of gzip that decompress to 288 MiB. */
static void bombs(void **state)
{
    (void)state;
    const char *dir = scratch_dir(), *line = in(dir, "line"), *bomb = in(dir, "bomb.gz");
    struct err err;
    char text[64], command[1200];
    write_file(line, "a\n", 2);
    assert_int_equal(truncate(line, (int64_t)65 << 20), 0);
    assert_int_equal(read_lines(line, text, sizeof(text), &err), -1);
    assert_non_null(strstr(err.msg, "/line:2: the line is longer than the limit of 64.0 MiB"));
    snprintf(command, sizeof(command),
             "head -c 16777216 /dev/zero | gzip -9 > '%s.1' && for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18; "
             "do cat '%s.1'; done > '%s'",
             bomb, bomb, bomb);
    assert_int_equal(system(command), 0);
    struct line_reader *r = line_reader_open(bomb, &err);
    const char *bytes;
    int64_t size, n = 0;
    int rc;
    assert_non_null(r);
    while ((rc = line_reader_chunk(r, &bytes, &size, &err)) == 1) n += size;
    assert_int_equal(rc, -1);
    assert_true(n >= FILE_GZIP_FREE - (1 << 20) && n <= FILE_GZIP_FREE + (1 << 20));
    assert_non_null(strstr(err.msg, "bomb.gz: the gzip file unpacks to more than 256 MiB and more than 300 times its"));
    line_reader_close(r);
}

/* Every prefix of the gzip file: 0 bytes is an empty file, 1 byte is not gzip yet, all others are truncated. Of the
 * file of three members, prefixes that end with a member are complete. */
static void gzip_cut(void **state)
{
    (void)state;
    const char *dir = scratch_dir();
    struct err err;
    char text[64];
    for (size_t n = 2; n < sizeof(gzip_one); n++) {
        write_file(in(dir, "cut"), gzip_one, (int64_t)n);
        assert_int_equal(read_lines(in(dir, "cut"), text, sizeof(text), &err), -1);
        assert_non_null(strstr(err.msg, "/cut: the gzip file is truncated"));
    }
    int64_t whole = 0;
    for (size_t n = 2; n <= sizeof(gzip_three); n++) {
        write_file(in(dir, "cut"), gzip_three, (int64_t)n);
        whole += read_lines(in(dir, "cut"), text, sizeof(text), &err) >= 0;
    }
    assert_int_equal(whole, 3);
}

/* ---- writing ---- */

static void atomic_write(void **state)
{
    (void)state;
    const char *dir = scratch_dir();
    struct err err;
    char path[256];
    snprintf(path, sizeof(path), "%s/out", dir);
    assert_int_equal(file_write_atomic(path, "first", 5, &err), 0);
    assert_content(path, "first");
    assert_int_equal(file_write_atomic(path, "", 0, &err), 0);
    assert_content(path, "");
    struct file_part parts[] = {{"se", 2}, {NULL, 0}, {"cond", 4}};
    assert_int_equal(file_write_parts(path, parts, 3, &err), 0);
    assert_content(path, "second");
    assert_false(file_exists(in(dir, "out.tmp")));

    assert_int_equal(file_write_atomic(in(dir, "none/out"), "x", 1, &err), -1);
    assert_non_null(strstr(err.msg, "/none/out.tmp: cannot create: No such file"));
    assert_int_equal(mkdir(in(dir, "out.tmp"), 0777),
                     0); /* the temporary name exists as a directory: the old file stays */
    assert_int_equal(file_write_atomic(path, "third", 5, &err), -1);
    assert_content(path, "second");
    assert_int_equal(rmdir(in(dir, "out.tmp")), 0);
    struct file_writer w; /* the final name becomes a directory: the temporary file is deleted */
    assert_int_equal(file_writer_open(&w, in(dir, "taken"), &err), 0);
    assert_int_equal(mkdir(in(dir, "taken"), 0777), 0);
    assert_int_equal(file_writer_close(&w, true, &err), -1);
    assert_non_null(strstr(err.msg, "cannot rename to "));
    assert_false(file_exists(in(dir, "taken.tmp")));
    assert_int_equal(file_write_atomic(in(dir, "taken"), "x", 1, &err), -1);
    assert_non_null(strstr(err.msg, "/taken: a directory, not a file: choose the name of a new file"));
}

/* Two writers of one file, as when two runs write one cache: the second gets an error. The temporary file of a killed
 * process is overwritten. */
static void one_process_writes(void **state)
{
    (void)state;
    const char *dir = scratch_dir();
    struct file_writer w;
    struct err err;
    char path[256];
    snprintf(path, sizeof(path), "%s/out", dir);
    write_file(in(dir, "out.tmp"), "left behind", 11);
    assert_int_equal(file_writer_open(&w, path, &err), 0);
    assert_int_equal(file_writer_put(&w, "one", 3, &err), 0);
    assert_int_equal(file_write_atomic(path, "other", 5, &err), -1);
    assert_non_null(strstr(err.msg, "/out.tmp: another process is writing this file"));
    assert_int_equal(file_writer_close(&w, true, &err), 0);
    assert_content(path, "one");
    assert_int_equal(file_write_atomic(path, "other", 5, &err), 0);
    assert_content(path, "other");
}

/* A child with a limit on the file size simulates a full disk. */
static void write_full_disk(void **state)
{
    (void)state;
    const char *dir = scratch_dir();
    char path[256];
    snprintf(path, sizeof(path), "%s/out", dir);
    struct err err;
    assert_int_equal(file_write_atomic(path, "old", 3, &err), 0);
    fflush(stdout);
    pid_t child = fork();
    assert_true(child >= 0);
    if (!child) {
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &(struct rlimit){1000, 1000});
        static char big[5000];
        int rc = file_write_atomic(path, big, sizeof(big), &err);
        _exit(rc == -1 && strstr(err.msg, "out.tmp: cannot write: File too large") ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_content(path, "old");
    assert_false(file_exists(in(dir, "out.tmp")));
}

/* A read-only directory; root may write anywhere, so the child runs as nobody. */
static void write_refused(void **state)
{
    (void)state;
    const char *dir = scratch_dir();
    struct err err;
    assert_int_equal(file_write_atomic(in(dir, "out"), "old", 3, &err), 0);
    assert_int_equal(chmod(dir, 0555), 0);
    fflush(stdout);
    pid_t child = fork();
    assert_true(child >= 0);
    if (!child) {
        if (chdir(dir) || (geteuid() == 0 && setuid(65534))) _exit(2);
        int rc = file_write_atomic("out", "new", 3, &err);
        if (rc != -1 || strcmp(err.msg, "out.tmp: cannot create: Permission denied")) _exit(1);
        rc = file_make_dirs("sub/dir", &err);
        _exit(rc == -1 && !strcmp(err.msg, "sub: cannot create the directory: Permission denied") ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(chmod(dir, 0755), 0);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_content(in(dir, "out"), "old");
}

static void directories(void **state)
{
    (void)state;
    const char *dir = scratch_dir();
    struct err err;
    char deep[256];
    snprintf(deep, sizeof(deep), "%s/a//b/c/", dir);
    assert_int_equal(file_make_dirs(deep, &err), 0);
    assert_int_equal(file_make_dirs(deep, &err), 0);
    assert_true(file_is_dir(deep) && file_exists(deep));
    write_file(in(dir, "a/file"), "x", 1);
    assert_false(file_is_dir(in(dir, "a/file")));
    assert_int_equal(file_make_dirs(in(dir, "a/file/d"), &err), -1);
    assert_non_null(strstr(err.msg, "/a/file: not a directory"));
    write_file(in(dir, "a/Z"), "x", 1);
    assert_int_equal(symlink("/", in(dir, "a/root")), 0);

    char **names;
    int64_t n;
    assert_int_equal(file_list(in(dir, "a"), &names, &n, &err), 0);
    assert_int_equal(n, 4);
    static const char *const want[] = {"Z", "b", "file", "root"};
    for (int64_t i = 0; i < n; i++) assert_string_equal(names[i], want[i]);
    file_list_free(names, n);
    assert_int_equal(file_list(in(dir, "a/b/c"), &names, &n, &err), 0);
    assert_int_equal(n, 0);
    file_list_free(names, n);
    assert_int_equal(file_list(in(dir, "none"), &names, &n, &err), -1);
    assert_int_equal(file_list(in(dir, "a/file"), &names, &n, &err), -1);

    assert_int_equal(file_sync_dir(dir, &err), 0);
    assert_int_equal(file_sync_dir(in(dir, "none"), &err), -1);
    assert_int_equal(file_remove_tree(in(dir, "a"), &err), 0); /* deletes the link to /, not its target */
    assert_false(file_exists(in(dir, "a")));
    assert_true(file_is_dir("/"));
    assert_int_equal(file_remove_tree(in(dir, "a"), &err), 0);
}

/* The temporary file of an atomic write is a link to another file, or a pipe without a reader. */
static void planted_names(void **state)
{
    (void)state;
    struct err err;
    const char *dir = scratch_dir();
    char tmp[MT_PATH], victim[MT_PATH], out[MT_PATH];
    snprintf(tmp, sizeof(tmp), "%s", in(dir, "out.tmp"));
    snprintf(out, sizeof(out), "%s", in(dir, "out"));
    snprintf(victim, sizeof(victim), "%s", in(dir, "victim"));
    write_file(victim, "precious", 8);
    alarm(20);
    for (int kind = 0; kind < 3; kind++) {
        static const char *const says[] = {"a symbolic link", "a hard link", "a pipe"};
        assert_int_equal(kind == 0 ? symlink(victim, tmp) : kind == 1 ? link(victim, tmp) : mkfifo(tmp, 0600), 0);
        assert_int_equal(file_write_atomic(out, "new", 3, &err), -1);
        assert_non_null(strstr(err.msg, "/out.tmp: "));
        assert_non_null(strstr(err.msg, says[kind]));
        assert_content(victim, "precious");
        assert_int_equal(unlink(tmp), 0);
    }
    alarm(0);
    assert_int_equal(file_write_atomic(out, "new", 3, &err), 0);
    assert_content(out, "new");
}

int test_file(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(maps),
        cmocka_unit_test(whole_files),
        cmocka_unit_test(checksum_in_parts),
        cmocka_unit_test(lines),
        cmocka_unit_test(long_lines),
        cmocka_unit_test(gzip_lines),
        cmocka_unit_test(gzip_cut),
        cmocka_unit_test(bombs),
        cmocka_unit_test(atomic_write),
        cmocka_unit_test(one_process_writes),
        cmocka_unit_test(write_full_disk),
        cmocka_unit_test(write_refused),
        cmocka_unit_test(planted_names),
        cmocka_unit_test(directories),
    };
    return cmocka_run_group_tests_name("file", tests, NULL, NULL);
}
