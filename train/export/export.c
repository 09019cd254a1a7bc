/* export.c - see export.h. An export is written to a hidden directory, read back and compared, then renamed. A failure
 * leaves no files. */
#include "train/export/export.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "train/adapter/adapter_dir.h"
#include "train/adapter/amax_file.h"
#include "data/file/atomic_dir.h"
#include "train/run/chat_file.h"
#include "train/export/export_card.h"
#include "train/export/export_job.h"
#include "train/export/export_quant.h"
#include "train/export/export_targets.h"
#include "train/export/found_format.h"
#include "train/export/verify.h"
#include "train/gguf/gguf_meta.h"
#include "train/state/lock.h"
#include "train/adapter/peft.h"
#include "train/adapter/peft_config.h"
#include "train/launch/process.h"

static int find_format(struct export *x, const char *format, struct err *err)
{
    const char *names[EXPORT_FORMATS];
    for (int i = 0; i < EXPORT_FORMATS; i++) names[i] = export_format_name((enum export_format)i);
    int f = 0;
    while (f < EXPORT_FORMATS && strcmp(names[f], format)) f++;
    x->format = (enum export_format)f;
    if (f < EXPORT_FORMATS) return 0;
    const char *near = str_nearest(format, names, EXPORT_FORMATS);
    return err_set(err,
                   "--to \"%.64s\" is none of peft, vllm, gguf, merged-bf16, merged-mxfp4, merged-nvfp4, merged-fp8, "
                   "gguf-model%s%s%s",
                   format, near ? ": did you mean " : "", near ? near : "", near ? "?" : "");
}

static int find_type(struct export *x, const char *quantize, struct err *err)
{
    static const char *const names[] = {"q8_0", "q4_0", "f16", "f32"};
    static const enum ggml_type types[] = {GGML_Q8_0, GGML_Q4_0, GGML_F16, GGML_F32};
    const int64_t i = quantize ? str_index(quantize, names, MT_LEN(names)) : 0;
    if (quantize && x->format != EXPORT_GGUF_MODEL)
        return err_set(err, "--quantize %.64s is only for --to gguf-model", quantize);
    if (i == MT_LEN(names)) return err_set(err, "--quantize %.64s is none of q8_0, q4_0, f16, f32", quantize);
    x->ggml = types[i];
    return 0;
}

/* Checks the output directory: it must be new, or if verify is set it must exist. */
static int check_dir(const char *dir, bool verify, struct err *err)
{
    struct err why;
    if (!verify) return atomic_dir_check_new(dir, "name a new directory with --out", err);
    return file_check_kind(dir, true, &why) ? err_set(err, "--verify %s", why.msg) : 0;
}

static int bytes_of(struct export *x, int64_t *bytes, struct err *err)
{
    switch (x->format) {
    case EXPORT_PEFT: *bytes = 4 * x->adapter.ad.n_flat + (1 << 20); return 0;
    case EXPORT_VLLM: *bytes = export_vllm_bytes(x); return 0;
    case EXPORT_GGUF: *bytes = export_gguf_bytes(x); return 0;
    case EXPORT_MERGED_BF16:
    case EXPORT_MERGED_MXFP4:
    case EXPORT_MERGED_NVFP4:
    case EXPORT_MERGED_FP8: return export_merged_bytes(x, bytes, err);
    case EXPORT_GGUF_MODEL: *bytes = export_gguf_model_bytes(x); return 0;
    case EXPORT_FORMATS: break;
    }
    MT_REQUIRE(false, "format %d", (int)x->format);
}

/* Writes the adapter, and its file of magnitudes (quant.amax = static, quant.activations) if it has one. */
static int write_peft(struct export *x, struct err *err)
{
    char from[MT_PATH];
    int64_t size;
    if (peft_save(&x->adapter.ad, &x->adapter.dev, x->tmp, x->run.model_name, NULL, err) ||
        file_in(from, x->adapter_dir, AMAX_FILE, err))
        return -1;
    if (!file_exists(from)) return 0;
    char *amax = file_read(from, 64 << 20, &size, err);
    const int rc = amax ? file_write_in(x->tmp, AMAX_FILE, amax, size, err) : -1;
    mem_free(amax);
    return rc;
}

static void warn_options(const struct export *x)
{
    char options[GGUF_OPTIONS_TEXT];
    gguf_meta_options(options, &x->run.arch);
    if (options[0] && (x->format == EXPORT_GGUF || x->format == EXPORT_GGUF_MODEL))
        log_warn("llama.cpp does not read beta_fast and beta_slow of YaRN from the file: run it with%s", options);
}

static int write_format(struct export *x, struct err *err)
{
    warn_options(x);
    switch (x->format) {
    case EXPORT_PEFT: return write_peft(x, err);
    case EXPORT_VLLM: return export_vllm(x, err);
    case EXPORT_GGUF: return export_gguf(x, err);
    case EXPORT_MERGED_BF16:
    case EXPORT_MERGED_MXFP4:
    case EXPORT_MERGED_NVFP4:
    case EXPORT_MERGED_FP8: return export_merged(x, err);
    case EXPORT_GGUF_MODEL: return export_gguf_model(x, err);
    case EXPORT_FORMATS: break;
    }
    MT_REQUIRE(false, "format %d", (int)x->format);
}

static int write_card(const struct export *x, struct err *err)
{
    char from[MT_PATH];
    int64_t size;
    if (file_in(from, x->adapter_dir, "README.md", err)) return -1;
    char *adapter = file_exists(from) ? file_read(from, 64 << 20, &size, err) : NULL;
    if (!adapter && file_exists(from)) return -1;
    const struct adapters *ad = &x->adapter.ad;
    char *card =
        export_card(adapter, x->format, x->run.model_name, &x->run.arch, adapters_max_rank(ad), peft_config_warns(ad));
    const int rc = file_write_in(x->tmp, "README.md", card, (int64_t)strlen(card), err);
    mem_free(card);
    mem_free(adapter);
    return rc;
}

/* What `ollama create` reads. Ollama does not run the chat template of a GGUF (server/model.go, detectChatTemplate). */
static int write_modelfile(const struct export *x, struct err *err)
{
    static const char model[] =
        "# ollama create NAME -f Modelfile\n"
        "# Ollama uses one of the chat templates that it contains, found by the template in the "
        "GGUF. If `ollama create` does\n"
        "# not print \"using autodetected template\", add the instruction TEMPLATE.\n"
        "FROM ./" EXPORT_GGUF_MODEL_NAME "\n";
    static const char adapter[] = "# ollama create NAME -f Modelfile\n"
                                  "# FROM: the base model, as a GGUF file or by its name in Ollama's library\n"
                                  "FROM ./MODEL.gguf\nADAPTER ./" EXPORT_GGUF_NAME "\n";
    const char *text = x->format == EXPORT_GGUF ? adapter : x->format == EXPORT_GGUF_MODEL ? model : NULL;
    return text ? file_write_in(x->tmp, "Modelfile", text, (int64_t)strlen(text), err) : 0;
}

/* Whether family, targets and quantisation of a run allow an export in this format. */
static bool is_exported(enum export_format to, const struct config *cfg, const struct arch *a,
                        const struct safetensors *st)
{
    struct adapters ad = {0};
    struct err why;
    const struct lora_options opt = config_lora(cfg);
    const bool planned = !adapters_plan(&ad, a, &opt, &why);
    const struct qat_options qat = plan_qat(cfg);
    const bool ok = export_quant_writes(to, a, st, &qat) && (!planned || !export_targets_check(to, a, &ad, &why));
    adapters_free(&ad);
    return ok;
}

const char *export_usual(const struct config *cfg, const struct arch *a, const struct safetensors *st)
{
    const struct qat_options run = plan_qat(cfg);
    for (int i = EXPORT_MERGED_BF16; run.merged && i <= EXPORT_MERGED_FP8; i++) {
        const enum export_format f = (enum export_format)i;
        if (export_quant_has(f, &run.weights) && is_exported(f, cfg, a, st)) return export_format_name(f);
    }
    if (is_exported(EXPORT_VLLM, cfg, a, st)) return export_format_name(EXPORT_VLLM);
    return export_format_name(is_exported(EXPORT_MERGED_BF16, cfg, a, st) ? EXPORT_MERGED_BF16 : EXPORT_PEFT);
}

bool export_note(char text[EXPORT_NOTE_TEXT], const struct config *cfg, const struct arch *a)
{
    struct adapters ad = {0};
    struct err why;
    const struct lora_options opt = config_lora(cfg);
    const bool any = !adapters_plan(&ad, a, &opt, &why) && export_targets_note(text, a, &ad);
    adapters_free(&ad);
    return any;
}

void export_warn(const struct config *cfg, const struct arch *a, const struct safetensors *st)
{
    char note[EXPORT_NOTE_TEXT];
    const struct qat_options run = plan_qat(cfg);
    struct qat_options experts = run;
    char text[200], with[120] = "an export will differ from the trained model";
    if (export_note(note, cfg, a)) log_info("%s", note);
    if (!run.weights.bits || !run.merged || export_quant_exact(a, st, &run)) return;
    experts.all = false;
    const char *other = export_quant_exact(a, st, &experts);
    if (other) snprintf(with, sizeof(with), "%s does with quant.targets = experts", other);
    log_warn("no export of this checkpoint holds exactly what this run trains (%s): %s",
             run_quant_text(text, cfg, true), with);
}

/* Checks that the base model is the one that the adapter was trained on: if not, a merge without --force is an error,
 * everything else a warning. */
static int check_base(struct export *x, struct err *err)
{
    struct err why;
    if (x->other_base || !run_check_base(&x->run, &x->adapter.ad, x->adapter_dir, &why)) return 0;
    if (x->format >= EXPORT_MERGED_BF16 && !x->accept.force)
        return err_set(err, "%s; --force merges nevertheless", why.msg);
    log_warn("%s", why.msg);
    x->other_base = true;
    return 0;
}

/* Calls check_base before anything is written, with hashes of only a sample of the weights (run_fingerprint). */
static int check_base_soon(struct export *x, struct err *err)
{
    uint64_t fingerprint;
    return run_fingerprint(&x->run, &fingerprint, err) || check_base(x, err) ? -1 : 0;
}

/* Calls check_base after the verification, which has read all weights. */
static int verify(struct export *x, struct err *err) { return verify_export(x, err) || check_base(x, err) ? -1 : 0; }

/* Opens everything that the export needs; cheap checks first. x->tmp: the export to verify, or "". */
static int open_all(struct export *x, const char *format, const char *quantize, struct err *err)
{
    if (find_format(x, format, err) || find_type(x, quantize, err) || run_open_headers(&x->run, x->cfg, err) ||
        (x->tmp[0] && found_format(&x->run.arch, x->tmp, x->format, err)) ||
        export_family_check(x->format, &x->run.arch, err) ||
        cpu_adapter_load(&x->adapter, &x->run.arch, x->adapter_dir, err) ||
        export_targets_check(x->format, &x->run.arch, &x->adapter.ad, err) || check_base_soon(x, err) ||
        export_quant_open(x, err) || run_open_data(&x->run, false, err))
        return -1;
    x->quantize = plan_quantize(x->cfg);
    if (x->run.eval.n_docs) return 0;
    if (!x->accept.force)
        return err_set(err, "no held-out rows to verify the export: set data.eval, or data.eval_split with data.train; "
                            "--force exports without them");
    log_warn("NOT VERIFIED ON DATA: without held-out rows, the outputs of the exported model are not compared with the "
             "trainer's. The written values are read back and compared one by one%s",
             x->format >= EXPORT_MERGED_BF16 ? "" : ". Of the base model, 64 KiB of each tensor are compared");
    return 0;
}

static int write_and_verify(struct export *x, struct err *err)
{
    char size[32];
    int64_t bytes;
    if (bytes_of(x, &bytes, err) || atomic_dir_begin(x->out, x->tmp, err)) return -1;
    log_info("exporting %s as %s to %s: at most %s", x->adapter_dir, export_format_name(x->format), x->out,
             str_bytes(size, bytes));
    process_delete_on_signal(x->tmp);
    const bool done = !file_check_space(x->tmp, bytes, err) && !write_format(x, err) && !write_card(x, err) &&
                      !write_modelfile(x, err) && !chat_file_export(&x->run, x->adapter_dir, x->tmp, err) &&
                      !verify(x, err) && !atomic_dir_commit(x->tmp, x->out, err);
    process_delete_on_signal(NULL);
    if (!done) (void)!file_remove_tree(x->tmp, NULL);
    return done ? 0 : -1;
}

/* Deletes hidden directories of killed exports in output.dir. The caller holds the lock of output.dir. */
static int sweep(const struct config *cfg, struct err *err)
{
    char text[EXPORT_FORMATS][32];
    const char *names[EXPORT_FORMATS];
    for (int i = 0; i < EXPORT_FORMATS; i++) {
        snprintf(text[i], sizeof(text[i]), "export-%s", export_format_name((enum export_format)i));
        names[i] = text[i];
    }
    return atomic_dir_sweep(cfg->output.dir, names, EXPORT_FORMATS, true, err);
}

/* dir NULL: writes an export. Otherwise verifies the export in dir. */
static int run(const struct config *cfg, const char *adapter_dir, const char *format, const char *quantize,
               const char *out, const char *dir, struct export_accept accept, FILE *report, struct err *err)
{
    char adapter[MT_PATH], usual[MT_PATH];
    if (str_format(usual, sizeof(usual), err, "path", "%s/export-%s", cfg->output.dir, format)) return -1;
    struct export *x = mem_array(1, sizeof(*x));
    struct config *on_cpu = mem_array(1, sizeof(*on_cpu));
    *on_cpu = *cfg;
    on_cpu->train.device = CFG_DEVICE_CPU; /* f32 on the CPU is the reference and needs no device memory */
    on_cpu->train.dtype = CFG_DTYPE_FP32;
    x->cfg = on_cpu;
    x->adapter_dir = adapter;
    x->out = out ? out : usual;
    x->report = report;
    x->accept = accept;
    struct lock lock = {.held = false};
    int rc = check_dir(dir ? dir : x->out, dir, err);
    if (!rc && !dir) rc = lock_take_for(&lock, cfg->output.dir, x->out, err);
    if (!rc && lock.held) rc = sweep(cfg, err);
    if (!rc) rc = adapter_dir_of(adapter, adapter_dir, cfg, "", err);
    if (!rc && dir) rc = str_format(x->tmp, sizeof(x->tmp), err, "path", "%s", dir);
    if (!rc) rc = open_all(x, format, quantize, err);
    if (!rc) rc = dir ? verify(x, err) : write_and_verify(x, err);
    export_quant_close(x);
    cpu_adapter_close(&x->adapter);
    run_close(&x->run);
    lock_release(&lock);
    mem_free(on_cpu);
    mem_free(x);
    return rc;
}

static const char *how_verified(const struct config *cfg)
{
    const bool rows = cfg->data.eval[0] || cfg->data.eval_split > 0;
    return rows ? "verified" : "compared value by value, not verified on data,";
}

int export_run(const struct config *cfg, const char *adapter_dir, const char *format, const char *quantize,
               const char *out, struct export_accept accept, FILE *report, struct err *err)
{
    const double start = clock_ms();
    const int rc = run(cfg, adapter_dir, format, quantize, out, NULL, accept, report, err);
    if (!rc) log_info("written and %s in %.1f s", how_verified(cfg), (clock_ms() - start) / 1e3);
    return rc;
}

int export_check(const struct config *cfg, const char *adapter_dir, const char *format, const char *quantize,
                 const char *dir, struct export_accept accept, FILE *report, struct err *err)
{
    const double start = clock_ms();
    const int rc = run(cfg, adapter_dir, format, quantize, NULL, dir, accept, report, err);
    if (!rc) log_info("%s: %s in %.1f s", dir, how_verified(cfg), (clock_ms() - start) / 1e3);
    return rc;
}
