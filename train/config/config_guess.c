/* config_guess.c - see config_guess.h. A directory is recognised by its entries, a file by its first bytes, then by the
 * end of its name. */
#include "train/config/config_guess.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

#include "data/file/file.h"
#include "data/json/json.h"

enum { HEAD = 4096 };

#define CONFIG "a configuration"
#define ROWS   "convert it to JSONL (data/README.md) and set data.train to that file"

static bool ends_with(const char *path, const char *end)
{
    const size_t n = strlen(path), m = strlen(end);
    return n >= m && !strcasecmp(path + n - m, end);
}

static bool is_not(const char *wanted, struct err *err, const char *path, const char *what, const char *advice)
{
    err_set(err, "%.600s is %s, not %s: %s", path, what, wanted, advice);
    return true;
}

static bool is(struct err *err, const char *path, const char *what, const char *advice)
{
    return is_not(CONFIG, err, path, what, advice);
}

static bool describe_dir(const char *dir, struct err *err)
{
    char advice[MT_PATH];
    if (file_exists_in(dir, "config.ini")) {
        snprintf(advice, sizeof(advice), "write %.600s/config.ini", dir);
        return is(err, dir, "the directory of a run", advice);
    }
    if (file_exists_in(dir, "adapter_config.json"))
        return is(err, dir, "an adapter", "set lora.init_from to it, or name it with --adapter");
    if (file_exists_in(dir, "config.json") || file_exists_in(dir, "model.safetensors.index.json"))
        return is(err, dir, "a model", "set model.path to it in a configuration");
    return is(err, dir, "a directory", "name a file with the run's settings, such as configs/demo.ini");
}

/* Whether the text is JSON: it begins with {, or with [ and then {, [ or ". In a configuration a letter follows [. */
static bool is_json(const char *head)
{
    head += strspn(head, " \t\r\n");
    if (*head == '{') return true;
    return *head == '[' && strchr("{[\"", head[1 + strspn(head + 1, " \t\r\n")]) != NULL;
}

static bool describe_text(const char *path, const char *head, struct err *err)
{
    static const char *const tables[] = {".csv", ".tsv"}, *const texts[] = {".txt", ".md"};
    static const char *const peers[] = {".yaml", ".yml", ".toml"};
    if (is_json(head)) {
        if (ends_with(path, "config.json") || ends_with(path, "tokenizer.json") || ends_with(path, ".index.json"))
            return is(err, path, "a file of a model or an adapter",
                      "set model.path or lora.init_from to its directory");
        return is(err, path, "JSON", "if it holds training rows, set data.train to it in a configuration");
    }
    const char first = head[strspn(head, " \t\r\n")];
    for (int64_t i = 0; i < MT_LEN(peers); i++)
        if (ends_with(path, peers[i]) && !strchr("[;", first))
            return is(err, path, "YAML or TOML",
                      "write the settings as [section] and key = value; `moetrain config` "
                      "lists the keys");
    for (int64_t i = 0; i < MT_LEN(tables); i++)
        if (ends_with(path, tables[i]) && first != '[') return is(err, path, "a table", ROWS);
    for (int64_t i = 0; i < MT_LEN(texts); i++)
        if (ends_with(path, texts[i]) && !strchr("[;#", first))
            return is(err, path, "text",
                      "write each document as a row {\"text\": \"...\"} and set data.train to that "
                      "file");
    return false;
}

/* The first bytes of a file; -1: it cannot be read. */
static int64_t read_head(const char *path, char head[HEAD + 1])
{
    FILE *in = fopen(path, "rb");
    if (!in) return -1;
    const size_t n = fread(head, 1, HEAD, in);
    fclose(in);
    head[n] = 0;
    return (int64_t)n;
}

/* wanted: what the path was taken for. */
static bool describe_weights(const char *path, const char *head, int64_t n, const char *wanted, struct err *err)
{
    if (n >= 4 && !memcmp(head, "GGUF", 4))
        return is_not(wanted, err, path, "a GGUF file",
                      "set model.path to the directory of the original checkpoint (config.json and safetensors)");
    if (ends_with(path, ".safetensors") || (n > 8 && !head[7] && head[8] == '{'))
        return is_not(wanted, err, path, "a safetensors file",
                      "set model.path to its directory, or lora.init_from if it is an adapter");
    if (ends_with(path, ".bin") || ends_with(path, ".pt") || ends_with(path, ".pth"))
        return is_not(wanted, err, path, "a PyTorch file",
                      "convert the model to safetensors and set model.path to its directory");
    return false;
}

static bool describe_file(const char *path, struct err *err)
{
    char head[HEAD + 1];
    const int64_t n = read_head(path, head);
    if (n < 0) return false;
    if (n >= 4 && !memcmp(head, "PAR1", 4)) return is(err, path, "a Parquet file", ROWS);
    if (describe_weights(path, head, n, CONFIG, err)) return true;
    if (n >= 2 && !memcmp(head, "\x1f\x8b", 2))
        return is(err, path, "a gzip file", "if it holds training rows, set data.train to it in a configuration");
    return describe_text(path, head, err);
}

bool config_guess_for_config(const char *path, struct err *err)
{
    struct stat st;
    if (stat(path, &st)) return false;
    if (S_ISDIR(st.st_mode)) return describe_dir(path, err);
    return S_ISREG(st.st_mode) && describe_file(path, err);
}

/* The base model that an adapter names, for advice: "; by its adapter_config.json that is NAME". */
static void name_base(char to[512], const char *adapter)
{
    const char *base = "";
    *to = 0;
    struct json_doc *doc = json_load_in(adapter, "adapter_config.json", 16 << 20, NULL);
    if (doc && !json_opt_str(json_root(doc), "base_model_name_or_path", &base, NULL) && *base)
        snprintf(to, 512, "; by its adapter_config.json that is %.400s", base);
    json_free(doc);
}

static bool describe_gguf(const char *dir, struct err *err)
{
    char **names;
    int64_t n, gguf = 0;
    if (file_list(dir, &names, &n, NULL)) return false;
    for (int64_t i = 0; i < n; i++) gguf += ends_with(names[i], ".gguf");
    file_list_free(names, n);
    return gguf && is_not("a model", err, dir, "a directory of GGUF files",
                          "set model.path to the directory of the original checkpoint (config.json and safetensors)");
}

bool config_guess_for_model(const char *path, struct err *err)
{
    struct stat st;
    char head[HEAD + 1], run[MT_PATH], base[512];
    if (stat(path, &st)) return false;
    if (S_ISREG(st.st_mode)) {
        const int64_t n = read_head(path, head);
        return n >= 0 && describe_weights(path, head, n, "the directory of a model", err);
    }
    if (!S_ISDIR(st.st_mode) || file_exists_in(path, "config.json") || file_in(run, path, "adapter", NULL))
        return false;
    const bool is_run = file_exists_in(run, "adapter_config.json");
    if (!is_run && !file_exists_in(path, "adapter_config.json")) return describe_gguf(path, err);
    name_base(base, is_run ? run : path);
    err_set(err, "%.600s is %s, not a model: set model.path to the base model, and lora.init_from to it%s", path,
            is_run ? "the directory of a run" : "an adapter", base);
    return true;
}

bool config_names_model(const char *path) { return !strncmp(path, "hub:", 4) || file_exists_in(path, "config.json"); }
