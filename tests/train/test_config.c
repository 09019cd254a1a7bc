/* test_config.c - the option table: files, --set, help, dump, validation. */
#include "tests/test.h"

#include <stdlib.h>
#include <string.h>

#include "data/file/file.h"
#include "train/config/config.h"
#include "train/config/peer_keys.h"

static struct config fresh(void)
{
    struct config c;
    config_defaults(&c);
    return c;
}

static int parse(struct config *c, const char *text, struct err *err)
{
    return config_parse(c, text, (int64_t)strlen(text), "run.ini", err);
}

/* Fails unless the text is refused with exactly this message. */
static void refuse(const char *text, const char *message)
{
    struct config c = fresh();
    struct err err = {""};
    assert_int_equal(parse(&c, text, &err), -1);
    assert_string_equal(err.msg, message);
}

static void accept(struct config *c, const char *text)
{
    struct err err;
    if (parse(c, text, &err)) fail_msg("%s", err.msg);
}

static void set(struct config *c, const char *assignment)
{
    struct err err;
    if (config_set(c, assignment, &err)) fail_msg("%s", err.msg);
}

static void refuse_set(const char *assignment, const char *message)
{
    struct config c = fresh();
    struct err err = {""};
    assert_int_equal(config_set(&c, assignment, &err), -1);
    assert_string_equal(err.msg, message);
}

static void check_round_trip(const struct config *c)
{
    struct config back = fresh();
    char *text = config_dump(c);
    accept(&back, text);
    assert_memory_equal(c, &back, sizeof(back));
    mem_free(text);
}

static void every_key_has_a_default(void **state)
{
    (void)state;
    struct config c = fresh();
    assert_int_equal(c.data.seq_len, 2048);
    assert_true(c.data.packing && c.data.shuffle && c.eval.at_start && c.eval.at_end && c.log.report);
    assert_int_equal(c.data.loss_on, LOSS_ASSISTANT);
    assert_string_equal(c.data.chat_date, "2025-06-28");
    assert_int_equal(c.lora.r, 16);
    assert_true(c.lora.alpha == 32 && config_lr(&c) == 2e-4 && c.optim.beta2 == 0.999 && c.train.epochs == 1);
    assert_string_equal(c.lora.targets, "attention,experts");
    assert_int_equal(c.train.max_nonfinite, 5);
    assert_string_equal(c.output.dir, "out");
    check_round_trip(&c);
}

/* The choices of an option are in the order of its enum. */
static void choices_match_their_enum(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int value;
    } format[] = {{"auto", DATA_AUTO},         {"text", DATA_TEXT},
                  {"messages", DATA_MESSAGES}, {"prompt_completion", DATA_PROMPT_COMPLETION},
                  {"sharegpt", DATA_SHAREGPT}, {"alpaca", DATA_ALPACA},
                  {"tokens", DATA_TOKENS}};
    struct config c = fresh();
    char line[128];
    for (int i = 0; i < MT_LEN(format); i++) {
        snprintf(line, sizeof(line), "data.format=%s", format[i].text);
        set(&c, line);
        assert_int_equal(c.data.format, format[i].value);
        snprintf(line, sizeof(line), "data.eval_format=%s", format[i].text);
        set(&c, line);
        assert_int_equal(c.data.eval_format, format[i].value + 1);
    }
#define CHOICE(section, key, text, value) (set(&c, #section "." #key "=" text), assert_int_equal(c.section.key, value))
    CHOICE(data, eval_format, "same", CFG_EVAL_FORMAT_SAME);
    CHOICE(data, loss_on, "assistant", LOSS_ASSISTANT);
    CHOICE(data, loss_on, "last", LOSS_LAST);
    CHOICE(data, loss_on, "all", LOSS_ALL);
    CHOICE(data, sample_by, "document", SAMPLE_DOCUMENT);
    CHOICE(data, sample_by, "paragraph", SAMPLE_PARAGRAPH);
    CHOICE(data, sample_by, "line", SAMPLE_LINE);
    CHOICE(data, overlong, "cut", OVERLONG_CUT);
    CHOICE(data, overlong, "drop", OVERLONG_DROP);
    CHOICE(optim, schedule, "cosine", SCHEDULE_COSINE);
    CHOICE(optim, schedule, "linear", SCHEDULE_LINEAR);
    CHOICE(optim, schedule, "constant", SCHEDULE_CONSTANT);
    CHOICE(optim, schedule, "wsd", SCHEDULE_WSD);
    CHOICE(optim, schedule, "polynomial", SCHEDULE_POLYNOMIAL);
    CHOICE(optim, schedule, "restarts", SCHEDULE_RESTARTS);
    CHOICE(model, quantize, "none", CFG_QUANTIZE_NONE);
    CHOICE(model, quantize, "nf4", CFG_QUANTIZE_NF4);
    CHOICE(model, quantize, "nf4-nested", CFG_QUANTIZE_NF4_NESTED);
    CHOICE(model, quantize, "mxfp4", CFG_QUANTIZE_MXFP4);
    CHOICE(model, quantize, "nvfp4", CFG_QUANTIZE_NVFP4);
    CHOICE(train, device, "auto", CFG_DEVICE_AUTO);
    CHOICE(train, device, "cpu", CFG_DEVICE_CPU);
    CHOICE(train, device, "cuda", CFG_DEVICE_CUDA);
    CHOICE(train, device, "cuda-portable", CFG_DEVICE_CUDA_PORTABLE);
    CHOICE(train, dtype, "auto", CFG_DTYPE_AUTO);
    CHOICE(train, dtype, "fp32", CFG_DTYPE_FP32);
    CHOICE(train, dtype, "bf16", CFG_DTYPE_BF16);
    CHOICE(train, recompute, "auto", CFG_RECOMPUTE_AUTO);
    CHOICE(train, recompute, "none", CFG_RECOMPUTE_NONE);
    CHOICE(train, recompute, "selective", CFG_RECOMPUTE_SELECTIVE);
    CHOICE(train, recompute, "full", CFG_RECOMPUTE_FULL);
    CHOICE(train, offload, "auto", CFG_OFFLOAD_AUTO);
    CHOICE(train, offload, "none", CFG_OFFLOAD_NONE);
    CHOICE(train, offload, "activations", CFG_OFFLOAD_ACTIVATIONS);
    CHOICE(train, offload, "moments", CFG_OFFLOAD_MOMENTS);
    CHOICE(train, offload, "experts", CFG_OFFLOAD_EXPERTS);
    CHOICE(train, offload, "all", CFG_OFFLOAD_ALL);
    CHOICE(train, aux_convention, "transformers", CFG_AUX_TRANSFORMERS);
    CHOICE(train, aux_convention, "megatron", CFG_AUX_MEGATRON);
    CHOICE(quant, weights, "none", CFG_QUANT_NONE);
    CHOICE(quant, mode, "merged", CFG_QUANT_MERGED);
    CHOICE(quant, mode, "base", CFG_QUANT_BASE);
    CHOICE(quant, targets, "experts", CFG_QUANT_EXPERTS);
    CHOICE(quant, targets, "all", CFG_QUANT_ALL);
    CHOICE(quant, amax, "current", CFG_QUANT_CURRENT);
    CHOICE(quant, amax, "static", CFG_QUANT_STATIC);
#undef CHOICE
}

/* Takes the keys from the dump, sets each to another value, and reads the result back. */
static void every_key_reads_back(void **state)
{
    (void)state;
    static const char *const values[] = {"a b=c:d, \xc3\xa9;#",
                                         "false",
                                         "true",
                                         "nf4",
                                         "text",
                                         "all",
                                         "drop",
                                         "linear",
                                         "cpu",
                                         "fp32",
                                         "full",
                                         "megatron",
                                         "reverse",
                                         "nvfp4",
                                         "base",
                                         "fp8",
                                         "static",
                                         "pissa",
                                         "routing",
                                         "adamw8",
                                         "packed",
                                         "0.3",
                                         "77",
                                         "warn",
                                         "split",
                                         "2",
                                         "line",
                                         "dpo",
                                         "initial",
                                         "completion",
                                         "accuracy",
                                         "null",
                                         "normalize_then_sum",
                                         "all",
                                         "none",
                                         "auto",
                                         "k3",
                                         "group",
                                         "rows"};
    struct config all = fresh();
    char *dump = config_dump(&all), *save, section[64] = "", key[64], assignment[256];
    int n_keys = 0;
    for (char *line = strtok_r(dump, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        if (sscanf(line, "[%63[a-z]]", section) == 1 || sscanf(line, "%63[a-z0-9_] =", key) != 1) continue;
        struct config one = fresh(), before = one;
        for (int v = 0; v < MT_LEN(values) && !memcmp(&one, &before, sizeof(one)); v++) {
            struct err err;
            snprintf(assignment, sizeof(assignment), "%s.%s=%s", section, key, values[v]);
            if (config_set(&one, assignment, &err)) assert_memory_equal(&one, &before, sizeof(one));
        }
        if (!memcmp(&one, &before, sizeof(one))) fail_msg("%s.%s takes no other value", section, key);
        check_round_trip(&one);
        set(&all, assignment);
        n_keys++;
    }
    mem_free(dump);
    assert_int_equal(n_keys, 153);
    check_round_trip(&all);
}

/* `~` stands for HOME as in a shell, in each path of a value. */
static void home_in_paths(void **state)
{
    (void)state;
    const char *before = getenv("HOME");
    char *home = before ? mem_strdup(before) : NULL;
    struct config c = fresh();
    struct err err;
    setenv("HOME", "/h", 1);
    set(&c, "model.path=~/m");
    set(&c, "data.train=~/a,b~c, ~/d*2");
    set(&c, "distill.teacher=adapter:~/t");
    set(&c, "lora.targets=q_proj");
    assert_string_equal(c.model.path, "/h/m");
    assert_string_equal(c.data.train, "/h/a,b~c, /h/d*2");
    assert_string_equal(c.distill.teacher, "adapter:/h/t");
    assert_int_equal(config_set(&c, "output.dir=~other/x", &err), -1);
    assert_non_null(strstr(err.msg, "output.dir = ~other/x: ~ stands for $HOME, and only before a /"));
    unsetenv("HOME");
    assert_int_equal(config_set(&c, "output.dir=~/x", &err), -1);
    assert_non_null(strstr(err.msg, "which is not set"));
    if (home) setenv("HOME", home, 1);
    mem_free(home);
}

static void numbers_read_back_exactly(void **state)
{
    (void)state;
    char text[64];
    for (uint64_t i = 0; i < 2000; i++) {
        struct config c = fresh();
        double lr = rng_uniform(1, i) * (i % 2 ? 1 : 1e-7);
        snprintf(text, sizeof(text), "optim.lr=%.17g", lr);
        set(&c, text);
        assert_true(c.optim.lr == lr);
        check_round_trip(&c);
    }
    struct config c = fresh();
    set(&c, "optim.lr=0.1");
    char *dump = config_dump(&c);
    assert_true(strstr(dump, "\nlr = 0.1\n") && strstr(dump, "\ntimeout_s = 60\n")); /* the shortest text */
    mem_free(dump);
}

static void values_are_read(void **state)
{
    (void)state;
    struct config c = fresh();
    accept(
        &c,
        "\xef\xbb\xbf; a comment\n# another\r\n\n[data]\r\n  train = a.jsonl, b c.jsonl.gz  \n\teval=x=y#z\n"
        "packing = off\nshuffle: no\n  ; indented comment\n[model]\npath =\n[data]\nseq_len = +64\n[optim]\nlr=1E-3");
    assert_string_equal(c.data.train, "a.jsonl, b c.jsonl.gz");
    assert_string_equal(c.data.eval, "x=y#z");
    assert_true(!c.data.packing && !c.data.shuffle);
    assert_int_equal(c.data.seq_len, 64);
    assert_string_equal(c.model.path, "");
    assert_true(c.optim.lr == 1e-3);
    const char *yes[] = {"true", "yes", "on", "1"}, *no[] = {"false", "no", "off", "0"};
    for (int i = 0; i < 4; i++) {
        char text[64];
        snprintf(text, sizeof(text), "[lora]\nrslora = %s", yes[i]);
        accept(&c, text);
        assert_true(c.lora.rslora);
        snprintf(text, sizeof(text), "[lora]\nrslora = %s", no[i]);
        accept(&c, text);
        assert_false(c.lora.rslora);
    }
}

static void unknown_names_are_errors(void **state)
{
    (void)state;
    refuse("[optm]\nlr = 1\n", "run.ini:1: unknown section [optm]: did you mean [optim]?");
    refuse("\n[gpu]\n", "run.ini:2: unknown section [gpu]; the sections are model, data, lora, objective, distill, "
                        "quant, optim, train, "
                        "parallel, eval, reward, rollout, environment, generate, output, log");
    refuse("\xef\xbb\xbf[lor]\n", "run.ini:1: unknown section [lor]: did you mean [lora]?");
    refuse("[optim]\n\nxyzzy = 1\n",
           "run.ini:3: unknown key \"xyzzy\" in [optim]; its keys are kind, lr, lr_ratio_b, schedule, warmup_steps, "
           "warmup_ratio, min_lr_ratio, decay_ratio, power, cycles, weight_decay, beta1, beta2, eps, clip_norm");
    refuse("[optim]\nwarmup_step = 1\n",
           "run.ini:2: unknown key \"warmup_step\" in [optim]: did you mean \"warmup_steps\"?");
    refuse("[train]\nlr = 1e-4\n", "run.ini:2: unknown key \"lr\" in [train]: it belongs to [optim]");
    refuse("[parallel]\npieces = 2\n", "run.ini:2: parallel.pieces is now parallel.chunks");
    refuse_set("train.resident_layers=0", "--set train.resident_layers=0: train.resident_layers is now "
                                          "train.decoded_layers");
    refuse("[qat]\n", "run.ini:1: unknown section [qat]: did you mean [quant]?");
    refuse("[distillation]\n", "run.ini:1: unknown section [distillation]: did you mean [distill]?");
    refuse_set("qat.weights=int8", "--set qat.weights=int8: unknown section [qat]: did you mean [quant]?");
    refuse_set("distill.temp=2",
               "--set distill.temp=2: unknown key \"temp\" in [distill]: did you mean \"temperature\"?");
    refuse("[quant]\nformat = int8\n", "run.ini:2: unknown key \"format\" in [quant]: did you mean \"weights\"?");
    refuse("[quant]\nlr = 1\n", "run.ini:2: unknown key \"lr\" in [quant]: it belongs to [optim]");
    refuse("lr = 1\n", "run.ini:1: \"lr\" is before the first [section]");
    refuse("[optim]\n = 1\n",
           "run.ini:2: unknown key \"\" in [optim]; its keys are kind, lr, lr_ratio_b, schedule, warmup_steps, "
           "warmup_ratio, min_lr_ratio, decay_ratio, power, cycles, weight_decay, beta1, beta2, eps, clip_norm");
}

/* Each row of the table of other trainers' keys refers to an existing key. The other trainer's key appears once and is
 * not a key of moetrain. */
static void keys_of_other_trainers_are_known(void **state)
{
    (void)state;
    const struct peer_key *peer, *other;
    for (int64_t i = 0; (peer = peer_key_at(i)); i++) {
        bool known = !peer->key;
        char name[64], text[512], long_row[256];
        for (int64_t k = 0; config_key(k, name); k++) {
            known |= peer->key && !strcmp(name, peer->key);
            if (!strcmp(strchr(name, '.') + 1, peer->name)) fail_msg("%s is a key", peer->name);
        }
        if (!known) fail_msg("%s: there is no key %s", peer->name, peer->key);
        for (int64_t k = 0; k < i && (other = peer_key_at(k)); k++)
            if (!strcmp(other->name, peer->name)) fail_msg("%s is in the table twice", peer->name);
        assert_true(strlen(peer_key_advice(long_row, peer)) < 200);
        assert_true(config_suggest(peer->name, "3", text));
        assert_ptr_equal(peer_key_find(peer->name), peer);
    }
    refuse("[optim]\n\nlearning_rate = 1\n", "run.ini:3: unknown key \"learning_rate\" in [optim]: use optim.lr");
    refuse("[lora]\nrank = 8\n", "run.ini:2: unknown key \"rank\" in [lora]: use lora.r");
    refuse("[data]\nmax_seq_len = 8\n", "run.ini:2: unknown key \"max_seq_len\" in [data]: use data.seq_len");
    refuse("[train]\ngradient_accumulation_steps = 8\n",
           "run.ini:2: unknown key \"gradient_accumulation_steps\" in [train]: use train.grad_accum (micro-batches of "
           "all ranks together, so multiply by the number of GPUs)");
    refuse("[train]\nsave_steps = 8\n",
           "run.ini:2: unknown key \"save_steps\" in [train]: use output.save_every (a number of steps, not a share)");
    refuse("[optim]\noptimizer = x\n",
           "run.ini:2: unknown key \"optimizer\" in [optim]: use optim.kind (adamw or adamw8)");
    refuse("lora_alpha = 8\n", "run.ini:1: \"lora_alpha\" is before the first [section]: use lora.alpha");
    refuse_set("learning_rate=1e-4", "--set learning_rate=1e-4: expected --set section.key=value; use optim.lr");
    refuse_set("train.num_train_epochs=1",
               "--set train.num_train_epochs=1: unknown key \"num_train_epochs\" in [train]: use train.epochs");
}

static void keys_as_options_are_suggested(void **state)
{
    (void)state;
    const struct {
        const char *name, *value, *text;
    } cases[] = {
        {"steps", "3", "--set train.steps=3"},
        {"train.steps", "3", "--set train.steps=3"},
        {"seq-len", "64", "--set data.seq_len=64"},
        {"packing", NULL, "--set data.packing=true"},
        {"dropout", NULL, "--set lora.dropout=VALUE"},
        {"every", "5", "--set eval.every=5 or --set log.every=5"},
        {"learning-rate", "1e-4", "--set optim.lr=1e-4"},
        {"eval_steps", "0.1", "--set eval.every=VALUE (a number of steps, not a share)"},
        {"use_dora", "1", "--set lora.dora=1"},
        {"modules_to_save", "lm_head", "moetrain trains LoRA adapters alone"},
    };
    char text[512];
    for (int i = 0; i < MT_LEN(cases); i++) {
        assert_true(config_suggest(cases[i].name, cases[i].value, text));
        assert_string_equal(text, cases[i].text);
    }
    assert_false(config_suggest("xyzzy", "1", text));
    assert_false(config_suggest("", "1", text));
}

static void bad_values_are_errors(void **state)
{
    (void)state;
    refuse("[optim]\nlr = fast\n", "run.ini:2: optim.lr = \"fast\": expected auto or a number in [0, 1]");
    refuse("[optim]\nlr = 1.5\n", "run.ini:2: optim.lr = \"1.5\": expected auto or a number in [0, 1]");
    refuse("[optim]\nlr = nan\n", "run.ini:2: optim.lr = \"nan\": expected auto or a number in [0, 1]");
    refuse("[optim]\nlr = 1e-4 x\n", "run.ini:2: optim.lr = \"1e-4 x\": expected auto or a number in [0, 1]");
    refuse("[optim]\nlr =\n", "run.ini:2: optim.lr = \"\": expected auto or a number in [0, 1]");
    refuse("[optim]\nbeta1 = 1\n", "run.ini:2: optim.beta1 = \"1\": expected a number in [0, 1)");
    refuse("[optim]\neps = 0\n", "run.ini:2: optim.eps = \"0\": expected a number in [1e-30, 1]");
    refuse("[lora]\nr = 0\n", "run.ini:2: lora.r = \"0\": expected an integer in [1, 4096]");
    refuse("[lora]\nr = 1e2\n", "run.ini:2: lora.r = \"1e2\": expected an integer in [1, 4096]");
    refuse("[train]\nthreads = 513\n", "run.ini:2: train.threads = \"513\": expected an integer in [0, 512]");
    refuse("[train]\nseed = 99999999999999999999\n",
           "run.ini:2: train.seed = \"99999999999999999999\": expected an integer in [0, 9e15]");
    refuse("[data]\npacking = maybe\n", "run.ini:2: data.packing = \"maybe\": expected one of true|false");
    refuse("[optim]\nschedule = cosin\n", "run.ini:2: optim.schedule = \"cosin\": expected one of "
                                          "cosine|linear|constant|wsd|polynomial|restarts; did you mean \"cosine\"?");
    refuse("[train]\ndevice = xyzzy\n",
           "run.ini:2: train.device = \"xyzzy\": expected one of auto|cpu|cuda|cuda-portable");
    refuse("[train]\ndtype = fp16\n",
           "run.ini:2: train.dtype = \"fp16\": expected one of auto|fp32|bf16; use bf16, which "
           "has the range of fp32; fp16 is not supported");
    refuse("[model]\nquantize = 8bit\n",
           "run.ini:2: model.quantize = \"8bit\": expected one of none|nf4|nf4-nested|mxfp4|nvfp4; 8 bits are not "
           "supported, use nf4");
    refuse("[train]\ndevice = gpu\n", /* one letter from cpu */
           "run.ini:2: train.device = \"gpu\": expected one of auto|cpu|cuda|cuda-portable; did you mean \"cuda\"?");
}

static void duplicate_keys_are_errors(void **state)
{
    (void)state;
    refuse("[optim]\nlr = 1e-4\neps = 1e-6\nlr = 1e-4\n", "run.ini:4: optim.lr is set twice, first on line 2");
    refuse("[optim]\nlr = 1e-4\n[lora]\nr=1\n[optim]\nlr = 1\n", "run.ini:6: optim.lr is set twice, first on line 2");
}

static void comments_never_join_a_value(void **state)
{
    (void)state;
    const char *text = ": comments after a value are not supported: put the comment on a separate line";
    char message[256];
    struct err err;
    snprintf(message, sizeof(message), "run.ini:2: output.dir = \"out ; mine\"%s", text);
    refuse("[output]\ndir = out ; mine\n", message);
    snprintf(message, sizeof(message), "run.ini:2: output.dir = \"out\t# mine\"%s", text);
    refuse("[output]\ndir = out\t# mine\n", message);
    snprintf(message, sizeof(message), "run.ini:2: output.dir = \"#mine\"%s", text);
    refuse("[output]\ndir = #mine\n", message);
    snprintf(message, sizeof(message), "run.ini:2: optim.lr = \"1e-4 ; peak\"%s", text);
    refuse("[optim]\nlr = 1e-4 ; peak\n", message);
    snprintf(message, sizeof(message), "run.ini:2: train.steps = \"100 # few\"%s", text);
    refuse("[train]\nsteps = 100 # few\n", message);
    snprintf(message, sizeof(message), "run.ini:2: data.packing = \"true # yes\"%s", text);
    refuse("[data]\npacking = true # yes\n", message);
    snprintf(message, sizeof(message), "run.ini:2: optim.schedule = \"linear ; not cosine\"%s", text);
    refuse("[optim]\nschedule = linear ; not cosine\n", message);
    text =
        ": a ; or # at the start or after a blank begins a comment in the run's config.ini: leave out the blank, or in "
        "JSON write \\u003b or \\u0023";
    snprintf(message, sizeof(message), "--set output.dir=a ; b%s", text);
    refuse_set("output.dir=a ; b", message);
    snprintf(message, sizeof(message), "--set data.chat_kwargs={\"a\": \"x # z\"}%s", text);
    refuse_set("data.chat_kwargs={\"a\": \"x # z\"}", message);
    struct config c = fresh();
    assert_int_equal(config_set(&c, "data.chat_kwargs={\"a\": \"x \\u0023 z\"}", &err), 0);
    check_round_trip(&c);
    accept(&c, "[output]\ndir = /data/run#3;b\n");
    assert_string_equal(c.output.dir, "/data/run#3;b");
}

static void malformed_lines_are_errors(void **state)
{
    (void)state;
    struct config c = fresh();
    struct err err;
    refuse("[optim]\nlr 1e-4\n", "run.ini:2: expected [section], key = value, or a comment line");
    refuse("[optim\nlr = 1\n", "run.ini:1: expected [section], key = value, or a comment line");
    refuse("[optim]\nlr = 1\x1b[31m\n", "run.ini:2: byte 0x1b: this is not a text file");
    assert_int_equal(config_parse(&c, "[optim]\nlr = \0001\n", 16, "run.ini", &err), -1);
    assert_string_equal(err.msg, "run.ini:2: byte 0x00: this is not a text file");
    assert_int_equal(config_load(&c, "/no/such/file.ini", &err), -1);
    assert_non_null(strstr(err.msg, "/no/such/file.ini"));
}

/* Files that users pass instead of a configuration. The error says what the file is and which key it belongs to. */
static void other_files_are_recognised(void **state)
{
    (void)state;
    const struct {
        const char *name, *bytes, *what, *key;
    } cases[] = {
        {"a.jsonl", "{\"text\": \"a\"}\n", "JSON", "data.train"},
        {"a.json", " [\n {\"text\": \"a\"}]\n", "JSON", "data.train"},
        {"config.json", "{\"a\": 1}", "a file of a model or an adapter", "model.path"},
        {"a", "PAR1\1\2", "a Parquet file", "data.train"},
        {"b", "GGUF\3", "a GGUF file", "model.path"},
        {"a.gz", "\x1f\x8b\x08", "a gzip file", "data.train"},
        {"model.safetensors", "\x60\1", "a safetensors file", "model.path"},
        {"a.pt", "PK\3\4", "a PyTorch file", "model.path"},
        {"a.csv", "question,answer\n1,2\n", "a table", "data.train"},
        {"a.txt", "Once upon a time\n", "text", "data.train"},
        {"a.yaml", "# comment\nlora_r: 8\n", "YAML or TOML", "moetrain config"},
        {"run", NULL, "the directory of a run", "run/config.ini"},
        {"adapter", NULL, "an adapter", "lora.init_from"},
        {"model", NULL, "a model", "model.path"},
        {"other", NULL, "a directory", "configs/demo.ini"},
        {"run/config.ini", "[optim]\nlrr = 1\n", "unknown key", "did you mean \"lr\"?"},
        {"ini.txt", "[optim]\nlrr = 1\n", "unknown key", "did you mean \"lr\"?"},
        {"comment.txt", "# mine\n[optim]\nlrr = 1\n", "unknown key", "did you mean \"lr\"?"},
    };
    char dir[MT_PATH], path[MT_PATH + 64];
    struct err err;
    snprintf(dir, sizeof(dir), "%s", scratch_dir());
    const char *const entries[] = {"run/config.ini", "adapter/adapter_config.json", "model/config.json", "other/x"};
    for (int i = 0; i < MT_LEN(entries); i++) {
        snprintf(path, sizeof(path), "%s/%s", dir, entries[i]);
        *strrchr(path, '/') = 0;
        assert_int_equal(file_make_dirs(path, &err), 0);
        snprintf(path, sizeof(path), "%s/%s", dir, entries[i]);
        assert_int_equal(file_write_atomic(path, "", 0, &err), 0);
    }
    for (int i = 0; i < MT_LEN(cases); i++) {
        struct config c = fresh();
        snprintf(path, sizeof(path), "%s/%s", dir, cases[i].name);
        if (cases[i].bytes)
            assert_int_equal(file_write_atomic(path, cases[i].bytes, (int64_t)strlen(cases[i].bytes), &err), 0);
        assert_int_equal(config_load(&c, path, &err), -1);
        assert_non_null(strstr(err.msg, path));
        if (!strstr(err.msg, cases[i].what) || !strstr(err.msg, cases[i].key)) fail_msg("%s", err.msg);
    }
}

/* inih's limits (200 bytes a line, 50 a section) would truncate silently. */
static void long_lines_are_not_truncated(void **state)
{
    (void)state;
    enum { LONG = MT_PATH + 10000 };
    static char text[LONG + 64], path[LONG + 1];
    const struct {
        int n;
        const char *message;
    } cases[] = {
        {180, NULL},
        {1000, NULL},
        {MT_PATH - 1, NULL},
        {MT_PATH, "run.ini:2: model.path is 4096 bytes long; the limit is 4095"},
        {8000, "run.ini:2: model.path is 8000 bytes long; the limit is 4095"},
        {LONG, "run.ini:2: the line is longer than 8190 bytes"},
    };
    for (int i = 0; i < MT_LEN(cases); i++) {
        for (int k = 0; k < cases[i].n; k++) path[k] = (char)('a' + k % 26);
        path[cases[i].n] = 0;
        snprintf(text, sizeof(text), "[model]\npath = %s", path);
        if (cases[i].message) {
            refuse(text, cases[i].message);
            continue;
        }
        struct config c = fresh(), keyed = fresh();
        struct err err;
        accept(&c, text);
        assert_string_equal(c.model.path, path);
        check_round_trip(&c);
        assert_int_equal(config_set_key(&keyed, "model.path", path, "state.json", &err), 0);
        assert_string_equal(keyed.model.path, path);
    }
    /* a section longer than inih's 50 */
    refuse("[optimmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm]\n",
           "run.ini:1: unknown section [optimmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm]; the sections "
           "are model, data, lora, objective, distill, quant, optim, train, parallel, eval, reward, rollout, "
           "environment, generate, "
           "output, "
           "log");
}

static void set_overrides_in_order(void **state)
{
    (void)state;
    struct config c = fresh();
    accept(&c, "[optim]\nlr = 1e-3\n[output]\ndir = a\n");
    set(&c, "optim.lr=1e-4");
    set(&c, " optim . lr = 5e-5 ");
    set(&c, "output.dir=b.c=d");
    assert_true(c.optim.lr == 5e-5);
    assert_string_equal(c.output.dir, "b.c=d");
    set(&c, "output.dir=/tmp/x//");
    assert_string_equal(c.output.dir, "/tmp/x");
    set(&c, "output.dir=//");
    assert_string_equal(c.output.dir, "/");
    refuse_set("optim.lr", "--set optim.lr: expected --set section.key=value");
    refuse_set("lr=3", "--set lr=3: expected --set section.key=value; did you mean optim.lr?");
    refuse_set(" lr = 3.5", "--set  lr = 3.5: expected --set section.key=value; did you mean optim.lr?");
    refuse_set("every=10", "--set every=10: expected --set section.key=value"); /* both [eval] and [log] have `every` */
    refuse_set("xyzzy=1", "--set xyzzy=1: expected --set section.key=value");
    refuse_set("optim.lrr=3", "--set optim.lrr=3: unknown key \"lrr\" in [optim]: did you mean \"lr\"?");
    refuse_set("optm.lr=3", "--set optm.lr=3: unknown section [optm]: did you mean [optim]?");
    refuse_set("optim.lr=3", "--set optim.lr=3: optim.lr = \"3\": expected auto or a number in [0, 1]");
    refuse_set("output.dir=a\nb", "--set output.dir=a b: byte 0x0a in a value");
}

static void validation_names_the_key(void **state)
{
    (void)state;
    const struct {
        const char *set, *message;
    } cases[] = {
        {"model.path=", "model.path is not set: the directory of the base model, or hub:OWNER/NAME"},
        {"model.quantize_attention=yes",
         "model.quantize_attention needs a model.quantize: nf4, nf4-nested, mxfp4 or nvfp4"},
        {"output.dir=", "output.dir is empty: set the directory for the files of the run"},
        {"train.resume=", "train.resume is empty: expected auto, never or a checkpoint directory"},
        {"data.chat_date=28.6.2025", "data.chat_date = \"28.6.2025\": expected a date, YYYY-MM-DD"},
        {"data.chat_date=2025-13-01", "data.chat_date = \"2025-13-01\": expected a date, YYYY-MM-DD"},
        {"data.chat_date=2025-02-29", "data.chat_date = \"2025-02-29\": expected a date, YYYY-MM-DD"},
        {"data.chat_date=-123-01-01", "data.chat_date = \"-123-01-01\": expected a date, YYYY-MM-DD"},
        {"data.eval_split=0.1", "data.eval and data.eval_split exclude each other: leave one of them out"},
        {"data.eval=", "eval.every = 5, but nothing is held out: set data.eval, data.eval_split or eval.prompts"},
        {"data.train=,,", "data.train = \",,\": expected files separated by commas"},
        {"data.eval=, ,", "data.eval = \", ,\": expected files separated by commas"},
        {"data.columns=,", "data.columns = \",\": expected TO=COLUMN separated by commas"},
        {"data.columns=user", "data.columns: \"user\" is not TO=COLUMN, as in user=question"},
        {"data.eval_columns=a=", "data.eval_columns: \"a=\" is not TO=COLUMN, as in user=question"},
        {"data.chat_kwargs=[1]",
         "data.chat_kwargs = [1]: chat_template_kwargs: must be an object of at most 12 members, "
         "as in {\"thinking\": true}"},
        {"lora.targets=q_prj", "lora.targets: unknown target \"q_prj\" (did you mean q_proj?); known: q_proj, k_proj, "
                               "v_proj, o_proj, q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj, kv_proj, o_b_proj, "
                               "conv_in_proj, conv_out_proj, in_proj_qkv, in_proj_z, in_proj_b, in_proj_a, "
                               "in_proj_qkvz, in_proj_ba, in_proj, out_proj, gate_up_proj, down_proj, "
                               "shared_gate_proj, shared_up_proj, shared_down_proj, dense_gate_proj, dense_up_proj, "
                               "dense_down_proj, fc1_latent_proj, fc2_latent_proj, attention, mixers, experts, "
                               "shared_experts, dense, all-linear"},
        {"lora.targets=gate_proj",
         "lora.targets: \"gate_proj\": in PEFT this name matches routed experts, shared experts and dense layers; "
         "write "
         "experts, shared_experts or dense, or one matrix: shared_gate_proj, dense_gate_proj"},
        {"lora.targets=", "lora.targets is empty: nothing would be trained"},
        {"lora.rank_pattern=experts",
         "lora.rank_pattern: \"experts\": expected TARGET=RANK, like experts=8, the rank 1 "
         "to 65536"},
        {"lora.layers=3-1", "lora.layers: \"3-1\" is neither a layer nor a range; write \"all\" or like \"0-3,7\""},
        {"train.epochs=0", "train.steps and train.epochs are both 0: set one of them"},
        {"train.profile=3", "train.profile is \"3\": write first:last, two steps of the run, e.g. 10:12"},
        {"train.steps=3", "optim.warmup_steps = 4 is more than train.steps = 3"},
    };
    struct config good = fresh();
    struct err err;
    accept(&good, "[model]\npath=m\n[data]\ntrain=t\neval=e\n[eval]\nevery=5\n[optim]\nwarmup_steps=4\n");
    assert_int_equal(config_validate(&good, &err), 0);
    for (int i = 0; i < MT_LEN(cases); i++) {
        struct config c = good;
        set(&c, cases[i].set);
        assert_int_equal(config_validate(&c, &err), -1);
        assert_string_equal(err.msg, cases[i].message);
    }
    accept(&good, "[data]\nseq_len=65536\n[train]\nmicro_batch=65536\n");
    assert_int_equal(config_validate(&good, &err), -1);
    assert_string_equal(err.msg, "train.micro_batch * data.seq_len = 4294967296 tokens in a micro-batch; the limit is "
                                 "2147483647");
}

static void help_is_a_table_of_every_key(void **state)
{
    (void)state;
    char *help = NULL, *save, key[64];
    size_t size;
    FILE *out = open_memstream(&help, &size);
    config_help(out);
    fclose(out);
    struct config c = fresh();
    char *dump = config_dump(&c);
    for (char *line = strtok_r(dump, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        if (sscanf(line, "%62[a-z0-9_] =", key) != 1) continue;
        char row[80];
        snprintf(row, sizeof(row), "\n  %s ", key);
        if (!strstr(help, row)) fail_msg("no help for %s", key);
    }
    for (char *line = strtok_r(help, "\n", &save); line; line = strtok_r(NULL, "\n", &save))
        assert_true(strlen(line) <= 120);
    mem_free(dump);
    free(help);
}

/* The parser returns for a file truncated at any byte. The dump of an accepted file reads back. */
static void truncated_files_are_parsed(void **state)
{
    (void)state;
    const char *text = "\xef\xbb\xbf; demo\r\n[model]\npath = models/a b\n\n[data]\ntrain = x.jsonl,y.jsonl.gz\n"
                       "packing = on\nformat = messages\n[optim]\nlr = 2.5e-4\nschedule = linear\n[train]\nseed=7\n";
    int n_ok = 0;
    for (size_t n = 0; n <= strlen(text); n++) {
        char *part = mem_alloc((int64_t)n); /* exactly n bytes, so that a sanitizer detects a read past them */
        memcpy(part, text, n);
        struct config c = fresh();
        struct err err = {""};
        if (config_parse(&c, part, (int64_t)n, "run.ini", &err) == 0) {
            check_round_trip(&c);
            n_ok++;
        } else {
            assert_memory_equal(err.msg, "run.ini:", 8);
        }
        mem_free(part);
    }
    assert_true(n_ok > 20);
}

/* "{here}/" at the start of a value, or of a file in a list, is the folder of the file, as the file was named. */
static void here_is_the_folder_of_the_file(void **state)
{
    (void)state;
    static const char text[] =
        "[model]\npath = {here}/base\n[data]\ntrain = {here}/a.jsonl*0.5,x/{here}/b,\t {here}/*.csv, "
        "c\n[output]\ndir = a,{here}/x\n[reward]\na = command p --s={here}/s x{here}/y\n";
    static const struct {
        const char *file, *path, *train;
    } cases[] = {{"run.ini", "base", "a.jsonl*0.5,x/{here}/b,\t *.csv, c"},
                 {"a/b/run.ini", "a/b/base", "a/b/a.jsonl*0.5,x/{here}/b,\t a/b/*.csv, c"},
                 {"./run.ini", "./base", "./a.jsonl*0.5,x/{here}/b,\t ./*.csv, c"},
                 {"/run.ini", "/base", "/a.jsonl*0.5,x/{here}/b,\t /*.csv, c"}};
    for (int i = 0; i < MT_LEN(cases); i++) {
        struct config c = fresh();
        struct err err;
        if (config_parse(&c, text, (int64_t)strlen(text), cases[i].file, &err)) fail_msg("%s", err.msg);
        assert_string_equal(c.model.path, cases[i].path);
        assert_string_equal(c.data.train, cases[i].train);
        assert_string_equal(c.output.dir, "a,{here}/x"); /* a path, not a list */
        char reward[64];
        snprintf(reward, sizeof(reward), "a=command p --s=%.*ss x{here}/y", (int)(strlen(c.model.path) - 4),
                 c.model.path);
        assert_string_equal(c.reward.NAME, reward);
        check_round_trip(&c);
    }
    struct config c = fresh();
    struct err err;
    assert_int_equal(config_set(&c, "model.path={here}/base", &err), -1);
    assert_string_equal(err.msg,
                        "--set model.path={here}/base: {here} is the folder of an INI file, which --set does not "
                        "have: write the path");
}

/* Keys that have an effect only beside another key's value. */
static void unused_keys(void **state)
{
    (void)state;
    static const struct {
        const char *key, *without, *with;
    } rows[] = {{"optim.power", "optim.schedule=cosine", "optim.schedule=polynomial"},
                {"optim.cycles", "optim.schedule=wsd", "optim.schedule=restarts"},
                {"optim.decay_ratio", "optim.schedule=restarts", "optim.schedule=wsd"},
                {"quant.start", "quant.weights=none", "quant.weights=int8"},
                {"quant.start", "quant.activations=none", "quant.activations=fp8"},
                {"distill.topk", "distill.teacher=none", "distill.teacher=rows"}};
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct config c = fresh();
        set(&c, rows[i].without);
        assert_true(config_unused(&c, rows[i].key));
        set(&c, rows[i].with);
        assert_false(config_unused(&c, rows[i].key));
        assert_false(config_unused(&c, "optim.schedule"));
    }
}

static void configs_of_the_repository_are_valid(void **state)
{
    (void)state;
    const char *const names[] = {"demo.ini",
                                 "gptoss_20b_qlora.ini",
                                 "gptoss_20b_16gb.ini",
                                 "gptoss_20b_16gb_attention.ini",
                                 "gptoss_120b_qlora.ini",
                                 "qwen3_30b_a3b_qlora.ini",
                                 "qwen35_35b_a3b_qlora.ini",
                                 "qwen3next_80b_a3b_qlora.ini",
                                 "olmoe_1b_7b_lora.ini",
                                 "lfm2_8b_a1b_lora.ini",
                                 "mixtral_8x7b_qlora.ini",
                                 "minimax_m2_qlora.ini",
                                 "glm47_flash_qlora.ini",
                                 "gemma4_26b_a4b_qlora.ini",
                                 "deepseek_v4_flash_qlora.ini"};
    for (int i = 0; i < MT_LEN(names); i++) {
        char path[MT_PATH + 64];
        snprintf(path, sizeof(path), "%s/../../configs/%s", fixture(""), names[i]);
        if (!file_exists(path)) {
            print_message("skip: %s is not beside the fixtures\n", names[i]);
            skip();
        }
        struct config c = fresh();
        struct err err;
        if (config_load(&c, path, &err) || config_validate(&c, &err)) fail_msg("%s", err.msg);
        check_round_trip(&c);
        const char *card = strstr(names[i], "gb"); /* a card sold with N GB has 0.95 N GiB for a program at most */
        if (card && c.train.memory_gb > 0.95 * atof(card - 2)) fail_msg("%s takes %g GiB", names[i], c.train.memory_gb);
        if (i == 0) continue; /* the demo's model and data are in the repository */
        if (strncmp(c.model.path, "hub:", 4) || strncmp(c.data.train, "hub:", 4))
            fail_msg("%s needs what a fresh machine has not: %s, %s", names[i], c.model.path, c.data.train);
    }
}

int test_config(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_key_has_a_default),
        cmocka_unit_test(every_key_reads_back),
        cmocka_unit_test(choices_match_their_enum),
        cmocka_unit_test(numbers_read_back_exactly),
        cmocka_unit_test(home_in_paths),
        cmocka_unit_test(values_are_read),
        cmocka_unit_test(unknown_names_are_errors),
        cmocka_unit_test(keys_of_other_trainers_are_known),
        cmocka_unit_test(keys_as_options_are_suggested),
        cmocka_unit_test(bad_values_are_errors),
        cmocka_unit_test(other_files_are_recognised),
        cmocka_unit_test(duplicate_keys_are_errors),
        cmocka_unit_test(comments_never_join_a_value),
        cmocka_unit_test(malformed_lines_are_errors),
        cmocka_unit_test(long_lines_are_not_truncated),
        cmocka_unit_test(set_overrides_in_order),
        cmocka_unit_test(validation_names_the_key),
        cmocka_unit_test(help_is_a_table_of_every_key),
        cmocka_unit_test(truncated_files_are_parsed),
        cmocka_unit_test(here_is_the_folder_of_the_file),
        cmocka_unit_test(unused_keys),
        cmocka_unit_test(configs_of_the_repository_are_valid),
    };
    return cmocka_run_group_tests_name("config", tests, NULL, NULL);
}
