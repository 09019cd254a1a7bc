/* main.c - the command line. The only place that turns an error into words on the screen and an exit code:
 * 0 done, 1 an error the user can fix, 2 wrong usage, 130 interrupted with the state saved. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "train/check.h"
#include "train/bench.h"
#include "train/commands.h"
#include "train/export.h"
#include "train/generate.h"
#include "train/inspect.h"
#include "train/launch.h"
#include "train/loop.h"
#include "train/synth.h"
#include "train/tokens.h"

enum { EXIT_DONE = 0, EXIT_USER = 1, EXIT_USAGE = 2, EXIT_SIGNAL = 130 };

static const char usage[] =
    "moetrain " MT_VERSION ": LoRA fine-tuning of mixture-of-experts models whose experts stay packed in 4 bits\n"
    "\n"
    "  moetrain CONFIG.ini [--set section.key=value ...]      train (also: moetrain train CONFIG.ini)\n"
    "  moetrain eval CONFIG.ini [--adapter DIR] [--set ...]   held-out loss of the base model or an adapter\n"
    "  moetrain export CONFIG.ini --to FORMAT [--adapter DIR] [--out DIR | --verify DIR] [--set ...]\n"
    "                                                         the adapter for other programs, read back and compared:\n"
    "                                                         peft, vllm, gguf, merged-bf16, merged-mxfp4; --verify\n"
    "                                                         compares an export that is there\n"
    "  moetrain generate CONFIG.ini --prompt TEXT | --messages FILE [--base]\n"
    "                                                         text from the adapter or the base model; --help: more\n"
    "  moetrain plan CONFIG.ini [--set ...]                   memory, FLOPs, trainable parameters; nothing is loaded\n"
    "  moetrain check CONFIG.ini [--layers N] [--set ...]     one batch on the device against the CPU in F64\n"
    "  moetrain bench ops|step|lora|dequant [--arch NAME] ... speed of this machine with random weights\n"
    "  moetrain tokens CONFIG.ini [--row N] [--html|--json]   what is trained, token by token; --help: more\n"
    "  moetrain inspect PATH                                  what a checkpoint or an adapter holds\n"
    "  moetrain synth ARCH OUT [--quant Q] [--seed N] [--layers N]\n"
    "                                                         a random checkpoint of a published architecture; alone:\n"
    "                                                         lists them. Q: mxfp4, nf4, bf16. The first N layers\n"
    "  moetrain config                                        every key: type, default, range, help\n"
    "\n"
    "  --set section.key=value   overrides the file; may repeat, the last one wins\n"
    "  --dump-config             prints the resolved configuration and stops\n"
    "  --help, --version\n"
    "\n"
    "Everything a run writes lies under output.dir: adapter/ (PEFT), best/, checkpoints/, metrics.jsonl, "
    "report.html.\n";

struct args {
    const char *command, *path, *adapter, *to, *out, *verify;
    int64_t layers; /* of check; 0: all */
    bool dump;
    struct synth_options synth; /* arch: path */
    struct config config;
};

static int usage_error(const char *what, const char *arg)
{
    fprintf(stderr, "moetrain: %s%s%s\n\n%s", what, arg ? ": " : "", arg ? arg : "", usage);
    return EXIT_USAGE;
}

static int user_error(const struct err *err)
{
    fprintf(stderr, "moetrain: error: %s\n", err->msg);
    return EXIT_USER;
}

/* Of one rank; whoever it is, the others are told and end, too. */
static int rank_error(struct comm *all, const struct comm_place *place, const struct err *err)
{
    comm_fail(all, err->msg);
    if (place->rank == 0) return user_error(err);
    fprintf(stderr, "moetrain: rank %d: error: %s\n", place->rank, err->msg);
    return EXIT_USER;
}

/* The words without dashes: [command] path. */
static int parse_words(struct args *a, int argc, char **argv)
{
    static const char *const commands[] = {"train", "eval", "export", "plan", "check", "inspect", "config", "synth"};
    static const char *const valued[] = {"--set",    "--adapter", "--to",   "--out",
                                         "--verify", "--quant",   "--seed", "--layers"};
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] == '-') {
            bool has_value = false;
            for (int v = 0; v < MT_LEN(valued); v++) has_value |= !strcmp(argv[i], valued[v]);
            if (has_value && i + 1 == argc) return usage_error("an option lacks its value", argv[i]);
            i += has_value;
            continue;
        }
        bool is_command = false;
        for (int c = 0; c < MT_LEN(commands) && !a->command && !a->path; c++)
            is_command |= !strcmp(argv[i], commands[c]);
        if (is_command)
            a->command = argv[i];
        else if (!a->path)
            a->path = argv[i];
        else if (!a->synth.dir && a->command && !strcmp(a->command, "synth"))
            a->synth.dir = argv[i];
        else
            return usage_error("one word too many", argv[i]);
    }
    if (!a->command) a->command = "train";
    if (!a->path && strcmp(a->command, "config") && strcmp(a->command, "synth"))
        return usage_error("which configuration (or path)?", NULL);
    return EXIT_DONE;
}

static bool parse_number(const char *text, int64_t min, int64_t *out)
{
    char *end;
    const bool digit = text[0] >= '0' && text[0] <= '9';
    *out = strtoll(text, &end, 10); /* what does not fit becomes the largest */
    return digit && !*end && *out >= min && *out < INT64_MAX;
}

/* Where the value of an option of `export` goes; NULL: it is none. */
static const char **export_option(struct args *a, const char *name)
{
    return !strcmp(name, "--to")       ? &a->to
           : !strcmp(name, "--out")    ? &a->out
           : !strcmp(name, "--verify") ? &a->verify
                                       : NULL;
}

static int run_export(const struct args *a, struct err *err)
{
    if (a->verify) return export_check(&a->config, a->adapter, a->to, a->verify, stdout, err);
    return export_run(&a->config, a->adapter, a->to, a->out, stdout, err);
}

/* Options, in order, over the configuration file. */
static int parse_options(struct args *a, int argc, char **argv, struct err *err)
{
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] != '-') continue;
        if (!strcmp(argv[i], "--set")) {
            if (config_set(&a->config, argv[++i], err)) return user_error(err);
        } else if (!strcmp(argv[i], "--adapter")) {
            if (strcmp(a->command, "eval") && strcmp(a->command, "export"))
                return usage_error("--adapter belongs to `moetrain eval` and `moetrain export`", NULL);
            a->adapter = argv[++i];
        } else if (export_option(a, argv[i])) {
            if (strcmp(a->command, "export")) return usage_error("this option belongs to `moetrain export`", argv[i]);
            *export_option(a, argv[i]) = argv[i + 1];
            i++;
        } else if (!strcmp(argv[i], "--layers")) {
            if (strcmp(a->command, "check")) return usage_error("--layers belongs to `moetrain check`", NULL);
            if (!parse_number(argv[++i], 1, &a->layers))
                return usage_error("--layers wants a number from 1 on", argv[i]);
        } else if (!strcmp(argv[i], "--dump-config")) {
            a->dump = true;
        } else {
            return usage_error("unknown option", argv[i]);
        }
    }
    return EXIT_DONE;
}

static int synth_option(struct synth_options *s, const char *name, const char *value)
{
    int64_t seed;
    if (!strcmp(name, "--quant")) {
        s->quant = value;
    } else if (!strcmp(name, "--layers")) {
        if (!parse_number(value, 1, &s->n_layer)) return usage_error("--layers wants a number from 1 on", value);
    } else if (!strcmp(name, "--seed")) {
        if (!parse_number(value, 0, &seed)) return usage_error("--seed wants a number from 0 on", value);
        s->seed = (uint64_t)seed;
    } else {
        return usage_error("no option of `moetrain synth`", name);
    }
    return EXIT_DONE;
}

static int run_synth(struct args *a, int argc, char **argv, struct err *err)
{
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] != '-') continue;
        int rc = synth_option(&a->synth, argv[i], argv[i + 1]);
        if (rc) return rc;
        i++;
    }
    if (!a->path) return synth_list(stdout), EXIT_DONE;
    if (!a->synth.dir) return usage_error("which directory to write? moetrain synth ARCH OUT", NULL);
    a->synth.arch = a->path;
    return synth_run(&a->synth, err) ? user_error(err) : EXIT_DONE;
}

static int dump(const struct config *c)
{
    char *text = config_dump(c);
    fputs(text, stdout);
    mem_free(text);
    return EXIT_DONE;
}

/* What several ranks can do together: `train` and `eval`. */
static int run_ranks(const struct args *a, struct err *err)
{
    struct comm_place place;
    struct comm all = COMM_ALONE;
    int code = EXIT_DONE;
    int rc = launch(&place, &a->config, &code, err);
    if (rc) return rc < 0 ? user_error(err) : code;
    rc = launch_meet(&all, &place, &a->config, err);
    if (!rc && !strcmp(a->command, "eval"))
        rc = commands_eval(&a->config, a->adapter, &all, err);
    else if (!rc)
        rc = loop_train(&a->config, &all, err);
    if (rc < 0) return rank_error(&all, &place, err);
    comm_close(&all);
    return rc == LOOP_INTERRUPTED ? EXIT_SIGNAL : EXIT_DONE;
}

static int run_command(const struct args *a, struct err *err)
{
    if (!strcmp(a->command, "export")) return run_export(a, err);
    if (!strcmp(a->command, "check")) return check_run(&a->config, a->layers, NULL, stdout, err);
    return commands_plan(&a->config, err);
}

/* Its options are its own. */
static int bench(int argc, char **argv)
{
    struct err err = {{0}};
    for (int i = 0; i < argc; i++)
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) return bench_help(stdout), EXIT_DONE;
    return bench_run(argc, argv, &err) ? user_error(&err) : EXIT_DONE;
}

static int tokens(int argc, char **argv)
{
    struct err err = {{0}};
    for (int i = 0; i < argc; i++)
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) return tokens_help(stdout), EXIT_DONE;
    return tokens_run(argc, argv, &err) ? user_error(&err) : EXIT_DONE;
}

static int generate(int argc, char **argv)
{
    struct err err = {{0}};
    for (int i = 0; i < argc; i++)
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) return generate_help(stdout), EXIT_DONE;
    return generate_run(argc, argv, &err) ? user_error(&err) : EXIT_DONE;
}

int main(int argc, char **argv)
{
    static struct args a;
    struct err err = {{0}};
    if (argc > 1 && !strcmp(argv[1], "bench")) return bench(argc - 2, argv + 2);
    if (argc > 1 && !strcmp(argv[1], "tokens")) return tokens(argc - 2, argv + 2);
    if (argc > 1 && !strcmp(argv[1], "generate")) return generate(argc - 2, argv + 2);
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) return fputs(usage, stdout), EXIT_DONE;
        if (!strcmp(argv[i], "--version")) return puts("moetrain " MT_VERSION), EXIT_DONE;
    }
    if (argc == 1) return fputs(usage, stderr), EXIT_USAGE;
    int rc = parse_words(&a, argc, argv);
    if (rc) return rc;
    if (!strcmp(a.command, "config")) return config_help(stdout), EXIT_DONE;
    if (!strcmp(a.command, "inspect")) return inspect_run(a.path, stdout, &err) ? user_error(&err) : EXIT_DONE;
    if (!strcmp(a.command, "synth")) return run_synth(&a, argc, argv, &err);
    config_defaults(&a.config);
    if (config_load(&a.config, a.path, &err)) return user_error(&err);
    if ((rc = parse_options(&a, argc, argv, &err))) return rc;
    if (a.dump) return dump(&a.config);
    if (!strcmp(a.command, "export") && !a.to) return usage_error("export to which format? --to FORMAT", NULL);
    if (!strcmp(a.command, "train") || !strcmp(a.command, "eval")) return run_ranks(&a, &err);
    return run_command(&a, &err) ? user_error(&err) : EXIT_DONE;
}
