/* launch.c - see launch.h.
 *
 * launch forks before this process has threads or uses a GPU. The parent only forwards signals and waits. If the parent
 * dies, the children are killed. */
#include "train/launch/launch.h"

#include <errno.h>
#include <math.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "data/file/file.h"
#include "train/launch/rank_key.h"

#define TORCH_PORT 29500 /* default of MASTER_PORT, as in torch */
#define GRACE_MS   15000 /* after a rank failed: time in which the hang detector of the other ranks ends them */
#define EXIT_SAVED 130   /* exit code of a rank that was interrupted */

int64_t launch_end_ms = 60000;

/* ---- from the environment */

/* The variables of one launcher; rank or world NULL: this launcher did not start the process. */
struct launcher_vars {
    const char *launcher, *rank, *world, *local_world;
};
struct found {
    const char *launcher;
    int64_t rank, world, local_world; /* local_world 0: not given */
};

static int number(const char *what, const char *text, int64_t *out, struct err *err)
{
    char *end;
    errno = 0;
    *out = strtoll(text, &end, 10); /* Slurm writes 4(x2) for two machines with 4 tasks each */
    if (end != text && (!*end || *end == '(' || *end == ',') && !errno && *out >= 0 && *out < 65536) return 0;
    return err_set(err, "%s = \"%.40s\" in the environment is not a number of ranks", what, text);
}

static int read_said(struct found *f, const struct launcher_vars *s, struct err *err)
{
    *f = (struct found){.launcher = s->launcher};
    if (number("the rank", s->rank, &f->rank, err) || number("the number of ranks", s->world, &f->world, err) ||
        (s->local_world && number("the number of ranks on this machine", s->local_world, &f->local_world, err)))
        return err_prefix(err, "%s", s->launcher);
    if (f->rank >= f->world)
        return err_set(err, "%s: this is rank %lld of %lld", s->launcher, (long long)f->rank, (long long)f->world);
    return 0;
}

/* The innermost launcher counts, since torchrun and mpirun may run inside srun as one task per machine. RANK and
 * WORLD_SIZE without torchrun may be set by hand in a script under srun; they must agree with srun. f->world 1: no
 * launcher. */
static int find_launcher(struct found *f, struct err *err)
{
    const bool torch = getenv("TORCHELASTIC_RUN_ID") != NULL;
    const struct launcher_vars rows[] = {
        {torch ? "torchrun" : "RANK and WORLD_SIZE", getenv("RANK"), getenv("WORLD_SIZE"), getenv("LOCAL_WORLD_SIZE")},
        {"mpirun", getenv("OMPI_COMM_WORLD_RANK"), getenv("OMPI_COMM_WORLD_SIZE"),
         getenv("OMPI_COMM_WORLD_LOCAL_SIZE")},
        {"srun", getenv("SLURM_PROCID"), getenv("SLURM_STEP_NUM_TASKS"), getenv("SLURM_STEP_TASKS_PER_NODE")},
    };
    *f = (struct found){.world = 1};
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct found other;
        if (!rows[i].rank || !rows[i].world) continue;
        if (read_said(&other, &rows[i], err)) return -1;
        if (other.world == 1) continue;
        if (f->world > 1 && (other.rank != f->rank || other.world != f->world))
            return err_set(err, "%s says that this is rank %lld of %lld, %s rank %lld of %lld: which is it?",
                           f->launcher, (long long)f->rank, (long long)f->world, other.launcher, (long long)other.rank,
                           (long long)other.world);
        *f = other;
        if (i == 1 || torch) break;
    }
    return 0;
}

/* The first name of "node[03-07,12],gpu1". */
static void first_host(char *host, size_t cap, const char *list)
{
    const size_t plain = strcspn(list, "[,"), inside = list[plain] == '[' ? strcspn(list + plain + 1, "-,]") : 0;
    snprintf(host, cap, "%.*s%.*s", (int)plain, list, (int)inside, list + plain + (inside > 0));
}

static int find_master(struct comm_place *p, const struct found *f, struct err *err)
{
    const char *host = getenv("MASTER_ADDR"), *port = getenv("MASTER_PORT"), *nodes = getenv("SLURM_STEP_NODELIST");
    const char *job = getenv("SLURM_JOB_ID"), *step = getenv("SLURM_STEP_ID");
    const bool srun = !strcmp(f->launcher, "srun");
    int64_t n = TORCH_PORT;
    if (host)
        snprintf(p->master, sizeof(p->master), "%.255s", host);
    else if (f->local_world == f->world)
        snprintf(p->master, sizeof(p->master), "127.0.0.1");
    else if (srun && nodes)
        first_host(p->master, sizeof(p->master), nodes);
    else
        return err_set(err, "%s: MASTER_ADDR is not set: the machine of rank 0 (with mpirun: -x MASTER_ADDR=HOST)",
                       f->launcher);
    if (port && number("MASTER_PORT", port, &n, err)) return -1;
    if (!port && srun && job) /* jobs that share a machine need different ports */
        n = 20000 + (strtoll(job, NULL, 10) * 16 + (step ? strtoll(step, NULL, 10) : 0)) % 10000;
    if (port && getenv("TORCHELASTIC_RUN_ID")) n++; /* torchrun's agent listens at MASTER_PORT */
    if (n < 1 || n > 65535) return err_set(err, "MASTER_PORT is %lld: expected 1 to 65535", (long long)n);
    p->port = (int)n;
    return 0;
}

static int from_launcher(struct comm_place *p, const struct found *f, const struct config *cfg, struct err *err)
{
    const int64_t asked = MT_MAX(config_gpus(cfg), cfg->parallel.cpu_ranks); /* gpus 0: auto; cpu_ranks 1: not set */
    if (asked > 1 && f->local_world && asked != f->local_world)
        return err_set(
            err,
            "%s started %lld ranks on this machine, the configuration asks for %lld: leave out parallel.gpus "
            "and parallel.cpu_ranks, or set them to what is started",
            f->launcher, (long long)f->local_world, (long long)asked);
    p->rank = (int)f->rank;
    p->world = (int)f->world;
    return find_master(p, f, err) || rank_key_open(p, cfg->output.dir, err) ? -1 : 0;
}

/* ---- ranks started here */

/* Counts GPUs in a child process, because a process that has used CUDA must not fork. -1: error. */
static int count_gpus(struct err *err)
{
    int status;
    const pid_t pid = fork();
    if (pid == 0) _exit(MT_MIN(ops_cuda_count(), 255));
    if (pid < 0 || waitpid(pid, &status, 0) != pid)
        return err_set(err, "the process that counts GPUs cannot be started: %s", strerror(errno));
    if (WIFEXITED(status)) return WEXITSTATUS(status);
    return err_set(err, "the process that counts GPUs was ended by signal %d (%s): check the driver (nvidia-smi)",
                   WTERMSIG(status), strsignal(WTERMSIG(status)));
}

static int count_ranks(const struct config *cfg, int64_t *n, struct err *err)
{
    const int64_t gpus = config_gpus(cfg);
    const bool cpu = cfg->train.device == CFG_DEVICE_CPU;
    *n = cpu ? cfg->parallel.cpu_ranks : gpus;
    if (cpu || gpus == 1) return 0;
    const int have = count_gpus(err);
    if (have < 0) return -1;
    if (gpus > have)
        return err_set(err,
                       "parallel.gpus = %lld, but %d NVIDIA GPUs can be used here: set parallel.gpus (auto: all of "
                       "them), or train.device = cpu with parallel.cpu_ranks",
                       (long long)gpus, have);
    if (!gpus) *n = MT_MAX(have, 1); /* without a GPU, opening the device fails or takes the CPU */
    return 0;
}

static int open_listener(int *port, struct err *err)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof(a);
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&a, size) || listen(fd, 128) ||
        getsockname(fd, (struct sockaddr *)&a, &size))
        return err_set(err, "cannot open a port for the ranks: %s", strerror(errno));
    *port = ntohs(a.sin_port);
    return fd;
}

static struct {
    pid_t *pids; /* [n] 0: ended */
    int64_t n;
    volatile sig_atomic_t signals,
        asked;    /* signals: number of SIGINT and SIGTERM so far; asked: any signal has asked to save and stop */
    bool unsaved; /* a rank was ended by such a signal */
    bool late;    /* rank 0 has ended, and ranks that have not are killed */
} children;

static void signal_all(int number)
{
    for (int64_t r = 0; r < children.n; r++)
        if (children.pids[r] > 0) kill(children.pids[r], number);
}

/* The first signal asks the ranks to save and stop. The terminal may have sent it to the ranks too, so the parent
 * forwards SIGUSR1. The second signal ends the ranks. SIGHUP is not counted, because a closing terminal sends it more
 * than once. */
static void forward_signal(int number)
{
    children.asked = 1;
    if (number == SIGHUP)
        signal_all(SIGUSR1);
    else
        signal_all(children.signals++ ? SIGKILL : SIGUSR1);
}

/* Ranks that are loading have no handlers yet. */
static bool was_asked(int number)
{
    if (number == SIGKILL) return children.signals > 1;
    return children.asked && (number == SIGUSR1 || number == SIGINT || number == SIGTERM || number == SIGHUP);
}

/* Records how rank r ended; returns its exit code. */
static int code_of(int64_t r, int status)
{
    if (WIFEXITED(status)) return WEXITSTATUS(status);
    if (children.late && WTERMSIG(status) == SIGKILL) {
        log_warn(
            "rank %lld (process %d) did not end within %lld s of rank 0, which has saved everything: it was killed",
            (long long)r, (int)children.pids[r], (long long)launch_end_ms / 1000);
        return 0;
    }
    if (was_asked(WTERMSIG(status)))
        children.unsaved = true;
    else
        fprintf(stderr, "moetrain: error: rank %lld (process %d) was ended by signal %d (%s)\n", (long long)r,
                (int)children.pids[r], WTERMSIG(status), strsignal(WTERMSIG(status)));
    return 1;
}

/* Kills ranks after the deadline; false: they have not ended after that either. */
static bool end_late_ranks(double deadline, int64_t left)
{
    if (clock_ms() > deadline) signal_all(SIGKILL);
    if (clock_ms() <= deadline + GRACE_MS) return true;
    fprintf(stderr, "moetrain: error: %lld of the ranks did not end: the kernel blocks them on a disk or a GPU\n",
            (long long)left);
    return false;
}

static void tell_unsaved(void)
{
    fprintf(stderr, "moetrain: %s\n",
            children.signals > 1 ? "ended by a second signal: the same command continues from the last checkpoint"
                                 : "interrupted before the first step: nothing to save");
}

int launch_wait(pid_t *pids, int64_t n)
{
    const struct timespec tick = {.tv_nsec = 20000000};
    double deadline = INFINITY;
    int code = 0;
    bool failed = false;
    children.pids = pids;
    children.n = n;
    for (int64_t left = n; left;) {
        int status;
        const pid_t pid = waitpid(-1, &status, isfinite(deadline) ? WNOHANG : 0);
        if (pid < 0 && errno != EINTR) {
            fprintf(stderr, "moetrain: error: cannot wait for %lld of the ranks: %s\n", (long long)left,
                    strerror(errno));
            return code ? code : 1;
        }
        for (int64_t r = 0; pid > 0 && r < n; r++) {
            if (pids[r] != pid) continue;
            const int own = code_of(r, status);
            pids[r] = 0;
            left--;
            if (own && (!code || code == EXIT_SAVED)) code = own;
            failed |= own && own != EXIT_SAVED;
            if (failed) deadline = fmin(deadline, clock_ms() + GRACE_MS);
            if (r == 0) deadline = fmin(deadline, clock_ms() + (double)launch_end_ms);
        }
        children.late = !failed && clock_ms() > deadline;
        if (left && !end_late_ranks(deadline, left)) return code ? code : 1;
        if (isfinite(deadline) && pid == 0) nanosleep(&tick, NULL);
    }
    if (children.unsaved) tell_unsaved();
    return code;
}

static int start_ranks(struct comm_place *p, int64_t n, int *code, struct err *err)
{
    const struct sigaction handler = {.sa_handler = forward_signal};
    const pid_t parent = getpid();
    if (comm_make_key(p->key, err)) return -1; /* the ranks inherit it */
    const int listener = open_listener(&p->port, err);
    if (listener < 0) return -1;
    fflush(NULL);
    children.pids = mem_array(n, sizeof(*children.pids));
    children.n = n;
    p->world = (int)n;
    snprintf(p->master, sizeof(p->master), "127.0.0.1");
    for (int r = 0; r < n; r++) {
        const pid_t pid = fork();
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (getppid() != parent) _exit(1);
            p->rank = r;
            p->listener = r ? -1 : listener;
            if (r) close(listener);
            return 0;
        }
        if (pid < 0) {
            signal_all(SIGKILL);
            return err_set(err, "rank %d cannot be started: %s", r, strerror(errno));
        }
        children.pids[r] = pid;
    }
    close(listener);
    sigaction(SIGTERM, &handler, NULL);
    sigaction(SIGINT, &handler, NULL);
    if (signal(SIGHUP, forward_signal) == SIG_IGN) signal(SIGHUP, SIG_IGN); /* nohup */
    signal(SIGPIPE, SIG_IGN); /* rank 0 saves when standard output is closed */
    *code = launch_wait(children.pids, n);
    mem_free(children.pids);
    return 1;
}

int launch(struct comm_place *place, const struct config *cfg, int *code, struct err *err)
{
    struct found f;
    int64_t n;
    *place = (struct comm_place){.world = 1, .listener = -1, .timeout_s = cfg->parallel.timeout_s};
    if (find_launcher(&f, err)) return -1;
    if (f.world > 1) return from_launcher(place, &f, cfg, err);
    if (count_ranks(cfg, &n, err)) return -1;
    return n > 1 ? start_ranks(place, n, code, err) : 0;
}

/* ---- meeting */

static uint64_t program_hash(void)
{
    uint32_t crc = 0;
    int64_t bytes = 0;
    struct err err;
    if (file_crc32("/proc/self/exe", &crc, &bytes, &err)) log_warn("%s", err.msg);
    return rng_u64(crc, (uint64_t)bytes);
}

static uint64_t config_hash(const struct config *cfg)
{
    char *text = config_dump(cfg);
    const uint64_t hash = rng_key(0, text);
    mem_free(text);
    return hash;
}

int launch_meet(struct comm *all, struct comm_place *place, const struct config *cfg, struct err *err)
{
    log_rank(place->rank, place->rank == 0);
    const int rc = comm_open(all, place, err);
    rank_key_close(place);
    if (rc) return -1;
    if (all->world == 1) return 0;
    log_rank(place->rank, all->local_rank == 0);
    ops_cuda_choose(all->local_rank);
    if (comm_agree(all, "program (another build of moetrain)", program_hash(), err) ||
        comm_agree(all, "configuration", config_hash(cfg), err))
        return -1;
    log_info("%d ranks, %d of them on this machine", all->world, all->local_world);
    return 0;
}
