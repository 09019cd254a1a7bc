/* fault.c - runs a command and makes its n-th file system call fail, or kills the process at that call.
 *
 *   moetrain_fault LOG N ERRNO COMMAND...   call N returns -ERRNO; with N+ every call from N on; N = 0 only counts
 *   moetrain_fault LOG N kill COMMAND...    call N is not made; the process gets SIGKILL
 *
 * The program counts write, fsync, rename, unlink, mkdir, link, ftruncate, open with O_CREAT and mmap of a file, with
 * their variants, on regular files and directories, of every thread and child. It writes the number of calls and call N
 * to LOG. A seccomp filter stops each call, and the kernel asks this process for a decision (SECCOMP_RET_USER_NOTIF,
 * Linux 5.5); calls inside libc are therefore counted too. Exit status: that of the command; 128 + signal; 77: the
 * kernel does not support this. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CANNOT = 77 };

/* How a call names its file: by descriptor, by a path in argument 0 or 1, or as open does. */
enum form { BY_FD, BY_PATH0, BY_PATH1, OPEN, OPENAT, MAP };
static const struct call {
    const char *name;
    int nr;
    enum form form;
} calls[] = {
    {"write", SYS_write, BY_FD},
    {"pwrite", SYS_pwrite64, BY_FD},
    {"writev", SYS_writev, BY_FD},
    {"fsync", SYS_fsync, BY_FD},
    {"fdatasync", SYS_fdatasync, BY_FD},
    {"ftruncate", SYS_ftruncate, BY_FD},
    {"fallocate", SYS_fallocate, BY_FD},
    {"mmap", SYS_mmap, MAP},
    {"openat", SYS_openat, OPENAT},
    {"mkdirat", SYS_mkdirat, BY_PATH1},
    {"renameat2", SYS_renameat2, BY_PATH1},
    {"unlinkat", SYS_unlinkat, BY_PATH1},
    {"linkat", SYS_linkat, BY_PATH1},
    {"symlinkat", SYS_symlinkat, BY_PATH0},
#ifdef SYS_renameat
    {"renameat", SYS_renameat, BY_PATH1},
#endif
#ifdef SYS_open /* absent on newer architectures */
    {"open", SYS_open, OPEN},
    {"mkdir", SYS_mkdir, BY_PATH0},
    {"rename", SYS_rename, BY_PATH0},
    {"unlink", SYS_unlink, BY_PATH0},
    {"rmdir", SYS_rmdir, BY_PATH0},
    {"link", SYS_link, BY_PATH0},
    {"symlink", SYS_symlink, BY_PATH0},
#endif
};
enum { N_CALLS = sizeof(calls) / sizeof(calls[0]) };

static _Noreturn void fail(const char *what)
{
    fprintf(stderr, "moetrain_fault: %s: %s\n", what, strerror(errno));
    exit(CANNOT);
}

/* ---- the child */

static int install_filter(void)
{
    struct sock_filter code[N_CALLS + 3] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))};
    for (unsigned i = 0; i < N_CALLS; i++)
        code[i + 1] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)calls[i].nr,
                                                   (unsigned char)(N_CALLS - i), 0);
    code[N_CALLS + 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    code[N_CALLS + 2] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF);
    struct sock_fprog program = {N_CALLS + 3, code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return -1;
    return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &program);
}

/* Sends a descriptor over a socket (fd >= 0) or receives one. */
static int pass_fd(int sock, int fd)
{
    char byte = 0, control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec io = {&byte, 1};
    struct msghdr msg = {.msg_iov = &io, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
    if (fd < 0) {
        if (recvmsg(sock, &msg, MSG_CMSG_CLOEXEC) != 1 || !CMSG_FIRSTHDR(&msg)) return -1;
        memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&msg)), sizeof(fd));
        return fd;
    }
    struct cmsghdr *head = CMSG_FIRSTHDR(&msg);
    *head = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(fd)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(head), &fd, sizeof(fd));
    return sendmsg(sock, &msg, 0) == 1 ? 0 : -1;
}

static _Noreturn void child(int sock, char **command)
{
    const int listener = install_filter();
    if (listener < 0 || pass_fd(sock, listener)) _exit(CANNOT);
    execvp(command[0], command);
    _exit(CANNOT);
}

/* ---- the decision on each call */

static const struct call *find(int nr)
{
    for (int i = 0; i < N_CALLS; i++)
        if (calls[i].nr == nr) return &calls[i];
    return NULL;
}

static void path_of_fd(char path[256], uint32_t pid, uint64_t fd)
{
    char link[64];
    snprintf(link, sizeof(link), "/proc/%u/fd/%d", pid, (int)fd);
    const ssize_t n = readlink(link, path, 255);
    path[n > 0 ? n : 0] = 0;
}

static void path_at(char path[256], uint32_t pid, uint64_t address)
{
    memset(path, 0, 256);
    for (size_t at = 0; at < 255 && strlen(path) == at;) { /* page by page: the next one may not be mapped */
        const size_t room = 4096 - (address + at) % 4096;
        struct iovec to = {path + at, room < 255 - at ? room : 255 - at};
        struct iovec from = {(void *)(uintptr_t)(address + at), to.iov_len};
        if (process_vm_readv((pid_t)pid, &to, 1, &from, 1, 0) <= 0) return;
        at += to.iov_len;
    }
}

/* Whether the call changes or maps a regular file or directory that is not a library; sets its path. */
static bool counts(const struct seccomp_notif *req, const struct call *call, char path[256])
{
    const uint64_t *arg = (const uint64_t *)req->data.args;
    switch (call->form) {
    case BY_FD: return path_of_fd(path, req->pid, arg[0]), arg[0] > 2 && path[0] == '/';
    case BY_PATH0: return path_at(path, req->pid, arg[0]), true;
    case BY_PATH1: return path_at(path, req->pid, arg[1]), true;
    case OPEN: return path_at(path, req->pid, arg[0]), arg[1] & O_CREAT;
    case OPENAT: return path_at(path, req->pid, arg[1]), arg[2] & O_CREAT;
    case MAP: break;
    }
    if (arg[3] & MAP_ANONYMOUS || arg[2] & PROT_EXEC) return false;
    path_of_fd(path, req->pid, arg[4]);
    return path[0] == '/' && !strstr(path, ".so") && strncmp(path, "/proc/", 6) && strncmp(path, "/etc/", 5) &&
           strncmp(path, "/usr/", 5);
}

struct plan {
    FILE *log;
    long n, seen;
    int error; /* 0: kill */
    bool from;
    pid_t child;
};

static void judge(struct plan *p, const struct seccomp_notif *req, struct seccomp_notif_resp *resp)
{
    char path[256] = "";
    const struct call *call = find(req->data.nr);
    resp->id = req->id;
    resp->flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
    if (!call || !counts(req, call, path) || strstr(path, ".gcda")) return; /* .gcda: counts of executed lines */
    p->seen++;
    if (!p->n || p->seen < p->n || (p->seen > p->n && !p->from)) return;
    if (p->seen == p->n) fprintf(p->log, "chosen %ld %s %s\n", p->seen, call->name, path);
    if (!p->error) {
        kill(p->child, SIGKILL);
        return;
    }
    resp->flags = 0;
    resp->error = -p->error;
}

static void serve(struct plan *p, int listener)
{
    struct pollfd poll_fd = {listener, POLLIN, 0};
    while (poll(&poll_fd, 1, -1) >= 0 || errno == EINTR) {
        if (poll_fd.revents & POLLIN) {
            struct seccomp_notif req = {0};
            struct seccomp_notif_resp resp = {0};
            if (ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &req)) continue; /* the caller has died */
            judge(p, &req, &resp);
            ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &resp);
        } else if (poll_fd.revents) {
            return; /* no process is left */
        }
    }
}

int main(int argc, char **argv)
{
    int sockets[2], status;
    if (argc < 5) return fprintf(stderr, "moetrain_fault LOG N[+] ERRNO|kill COMMAND...\n"), 2;
    struct plan p = {.log = fopen(argv[1], "w"), .n = strtol(argv[2], NULL, 10)};
    if (!p.log) fail(argv[1]);
    p.from = strchr(argv[2], '+') != NULL;
    p.error = strcmp(argv[3], "kill") ? (int)strtol(argv[3], NULL, 10) : 0;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets)) fail("socketpair");
    p.child = fork();
    if (p.child < 0) fail("fork");
    if (p.child == 0) child(sockets[1], argv + 4);
    close(sockets[1]);
    const int listener = pass_fd(sockets[0], -1);
    if (listener < 0) fail("no seccomp user notification");
    serve(&p, listener);
    if (waitpid(p.child, &status, 0) < 0) fail("waitpid");
    fprintf(p.log, "calls %ld\n", p.seen);
    if (fclose(p.log)) fail(argv[1]);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
