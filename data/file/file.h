/* file.h - files: read-only maps, lines of plain or gzip text, atomic writes, checksums. The only user of zlib. */
#ifndef MT_FILE_H
#define MT_FILE_H

#include "kernels/base.h"

/* A file mapped read-only. An empty file has data == NULL, size 0. */
struct file_map {
    const uint8_t *data;
    int64_t size, mtime_ns; /* time of last modification, since 1970 */
};
int file_map_open(struct file_map *map, const char *path, struct err *err) MT_CHECK;
void file_map_close(struct file_map *map);
/* Tells the kernel that [offset, offset+bytes) is not needed again, so that a copied checkpoint is not in resident
 * memory twice. */
void file_map_drop(const struct file_map *map, int64_t offset, int64_t bytes);

/* Reads the whole file into a NUL-terminated buffer of *size bytes and the NUL; free with mem_free. */
char *file_read(const char *path, int64_t max_bytes, int64_t *size, struct err *err) MT_CHECK;

/* A longer line, or item of a JSON array, is an error: a decompression bomb, or not text. */
#define FILE_LINE_MAX ((int64_t)64 << 20)
/* Lines of a plain or gzip file (detected by content). A gzip file that unpacks to more than FILE_GZIP_FREE bytes and
 * more than FILE_GZIP_RATIO times its size is refused; deflate reaches 1032 times, text typically 5 to 20. */
#define FILE_GZIP_FREE  ((int64_t)256 << 20)
#define FILE_GZIP_RATIO 300
struct line_reader;
struct line_reader *line_reader_open(const char *path, struct err *err) MT_CHECK;
/* line_reader_open for a caller that opens the path only once: it may also be a pipe named by its descriptor, such as a
 * shell's <(...) or /dev/stdin. */
struct line_reader *line_reader_open_once(const char *path, struct err *err) MT_CHECK;
/* Reads a line. 1: *line has its *size bytes without the end (LF or CR LF), NUL-terminated, valid until the next call.
 * 0: end of file. -1: error (unreadable, damaged or truncated gzip). A UTF-8 BOM at the start is dropped. */
int line_reader_next(struct line_reader *r, char **line, int64_t *size, struct err *err) MT_CHECK;
int64_t line_reader_line(const struct line_reader *r); /* number of the line last returned, from 1 */
/* Reads the next bytes instead of lines, in chunks of any size. 1: there are some; 0: end of file; -1: error. */
int line_reader_chunk(struct line_reader *r, const char **bytes, int64_t *size, struct err *err) MT_CHECK;
/* Returns the first byte within 256 KiB that is not blank, without consuming it; 0: none. -1: error. A BOM is dropped.
 * Call it only before the first read. */
int line_reader_peek(struct line_reader *r, char *first, struct err *err) MT_CHECK;
const char *line_reader_path(const struct line_reader *r);
/* Position in the file on disk after the returned bytes, if the caller has not used the last `unread` of them. */
int64_t line_reader_position(const struct line_reader *r, int64_t unread);
void line_reader_close(struct line_reader *r);

/* Sets path to DIR/NAME. Functions whose names end in _in take DIR and NAME instead of a path. */
int file_in(char path[MT_PATH], const char *dir, const char *name, struct err *err) MT_CHECK;

/* Writes path + ".tmp", fsyncs, renames it to path, fsyncs the directory: readers see the whole old or new file. */
int file_write_atomic(const char *path, const void *data, int64_t size, struct err *err) MT_CHECK;
int file_write_in(const char *dir, const char *name, const void *data, int64_t size, struct err *err) MT_CHECK;
/* file_write_atomic for a file of n concatenated parts. */
struct file_part {
    const void *data;
    int64_t size;
};
int file_write_parts(const char *path, const struct file_part *parts, int64_t n, struct err *err) MT_CHECK;
/* file_write_atomic in pieces, for files that are never in memory as a whole. Every open needs a close: with keep the
 * file gets its name; without, or after a failed put, it is deleted. */
struct file_writer {
    int fd;
    bool failed;
    int64_t size, sent; /* bytes put; bytes already sent to the disk */
    char path[MT_PATH], tmp[MT_PATH];
};
int file_writer_open(struct file_writer *w, const char *path, struct err *err) MT_CHECK;
int file_writer_put(struct file_writer *w, const void *data, int64_t size, struct err *err) MT_CHECK;
int file_writer_close(struct file_writer *w, bool keep, struct err *err);
/* Opens or creates a file that only moetrain writes, with the flags of open(2); its descriptor, or -1. Error: a
 * symbolic link, hard link, pipe or device, through which other files or programs would be written. */
int file_open_own(const char *path, int flags, struct err *err) MT_CHECK;
int file_check_link(const char *path, struct err *err) MT_CHECK;  /* an error for a symbolic link */
int file_make_dirs(const char *path, struct err *err) MT_CHECK;   /* mkdir -p */
int file_remove_tree(const char *path, struct err *err) MT_CHECK; /* succeeds when it does not exist */
int file_sync_dir(const char *path, struct err *err) MT_CHECK;
/* An error if no new file can get the name `path`: it exists, or its directory is missing or not writable. */
int file_check_new(const char *path, struct err *err) MT_CHECK;
/* An error with both sizes if the file system of `dir` has less than `bytes` free. */
int file_check_space(const char *dir, int64_t bytes, struct err *err) MT_CHECK;
/* An error for a regular file with a hole (bytes never written, which read as zeros): text files have none, and a file
 * of terabytes may be one hole. */
int file_check_holes(const char *path, struct err *err) MT_CHECK;
bool file_exists(const char *path);
bool file_exists_in(const char *dir, const char *name);
int64_t file_size(const char *path); /* 0: unknown */
bool file_is_dir(const char *path);
bool file_has_links(const char *path); /* a regular file with more than one name */
/* Checks that path is a directory (want_dir), or exists and is not one. The error names what is there instead, and the
 * target of a broken symbolic link. */
int file_check_kind(const char *path, bool want_dir, struct err *err) MT_CHECK;
/* Whether file_make_dirs could create path, with its error if not; changes nothing. */
int file_check_dirs(const char *path, struct err *err) MT_CHECK;
bool file_is_writable(const char *path); /* a file, or a directory in which files can be created */
/* Lists directory entries without "." and "..", sorted; free names with file_list_free. */
int file_list(const char *dir, char ***names, int64_t *count, struct err *err) MT_CHECK;
void file_list_free(char **names, int64_t count);
/* For an error about a relative path: "the path is relative to the current directory, DIR; "; else "". */
char *file_relative_to(char buf[MT_PATH + 64], const char *path);
/* in[n], of gzip or zlib, -> out[size]. False: damaged, or of another size. */
bool file_gunzip(uint8_t *out, int64_t size, const uint8_t *in, int64_t n);
/* Computes zlib's CRC-32 of a file. */
int file_crc32(const char *path, uint32_t *crc, int64_t *size, struct err *err) MT_CHECK;
/* "zlib 1.2.13", for --version, as the other *_library functions */
const char *file_library(char name[64]);

#endif
