/* gguf_tokenizer.c - tokenizer.json or Kimi's tiktoken.model as keys. Byte-level BPE, which llama.cpp calls "gpt2", and
 * Gemma's BPE of characters, "gemma4". A GGUF names the pre-tokenizer instead of its regular expressions. Source:
 * llama.cpp, conversion/base.py (get_vocab_base), src/llama-vocab.cpp. */
#include "train/gguf/gguf_tokenizer.h"

#include <stdio.h>
#include <string.h>

#include "data/eos_ids.h"
#include "data/file/file.h"
#include "data/json/json.h"

enum { NORMAL = 1, CONTROL = 3, USER_DEFINED = 4, UNUSED = 5, BYTE = 6 }; /* types of tokens */
#define FILE_MAX ((int64_t)256 << 20)

/* The first regular expression of each pre-tokenizer; glm4 and llama-bpe have the same one. */
#define TAIL   " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define SUFFIX "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define LETTER "[^\\r\\n\\p{L}\\p{N}]?"
#define UPPER  "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]"
#define LOWER  "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]"
#define KIMI   "kimi-k2"
static const struct {
    const char *regex, *name;
    int n_parts; /* of the sequence, with the byte-level one at its end */
} splits[] = {
    {"[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+" SUFFIX
     "?|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*" SUFFIX
     "?|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
     "gpt-4o", 2},
    {"[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+|"
     "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*|"
     "\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
     "tekken", 2},
    {SUFFIX "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}|" TAIL, "qwen2", 2},
    {SUFFIX "|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!"
            "\\S)|\\s+",
     "qwen35", 2},
    {SUFFIX "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|" TAIL, "glm4", 2},
    {"\\p{N}{1,3}", "deepseek-v3", 4},
    {"[\\p{Han}]+|" LETTER UPPER "*" LOWER "+" SUFFIX "?|" LETTER UPPER "+" LOWER "*" SUFFIX "?|\\p{N}{1,3}|" TAIL,
     KIMI, 2},
};

struct words {
    const char **tokens; /* [n] */
    int32_t *types;
    int64_t n;
    bool bytes; /* <0x41> is a byte */
};

static int put_token(const struct words *w, int64_t id, const char *text, int32_t type, struct json j, struct err *err)
{
    if (id >= w->n) return json_error(j, err, "token %lld of a model with %lld", (long long)id, (long long)w->n);
    w->tokens[id] = text;
    w->types[id] = type;
    return 0;
}

static int put_vocab(const struct words *w, struct json vocab, struct err *err)
{
    const char *text;
    struct json value;
    int64_t id;
    unsigned byte;
    for (int64_t i = 0; json_member(vocab, i, &text, &value); i++) {
        const int32_t type = w->bytes && strlen(text) == 6 && sscanf(text, "<0x%2X>", &byte) == 1 ? BYTE : NORMAL;
        if (json_i64(value, 0, INT32_MAX, &id, err) || put_token(w, id, text, type, value, err)) return -1;
    }
    return 0;
}

static int put_added(const struct words *w, struct json added, struct err *err)
{
    for (int64_t i = 0; i < json_count(added); i++) {
        const struct json token = json_at(added, i);
        const char *text;
        int64_t id;
        bool special = false;
        if (json_get_i64(token, "id", 0, INT32_MAX, &id, err) || json_get_str(token, "content", &text, err) ||
            json_opt_bool(token, "special", &special, err) ||
            put_token(w, id, text, special ? CONTROL : USER_DEFINED, token, err))
            return -1;
    }
    return 0;
}

/* Adds tokens for ids that have none, because the vocabulary of a model is often padded. */
static void pad(struct gguf_meta *m, const struct words *w)
{
    char text[32];
    for (int64_t i = 0; i < w->n; i++) {
        if (w->tokens[i]) continue;
        snprintf(text, sizeof(text), "[PAD%lld]", (long long)i);
        w->tokens[i] = gguf_meta_own(m, mem_strdup(text));
        w->types[i] = UNUSED;
    }
}

static struct words new_words(struct gguf_meta *m, const struct gguf_meta_model *model)
{
    const int64_t n = model->arch->vocab;
    return (struct words){.tokens = gguf_meta_own(m, mem_array(n, sizeof(const char *))),
                          .types = gguf_meta_own(m, mem_array(n, sizeof(int32_t))),
                          .n = n};
}

/* The texts stay in memory. pre: NULL: none. */
static void put_tokens(struct gguf_meta *m, const struct words *w, const char *name, const char *pre)
{
    pad(m, w);
    gguf_meta_text(m, "tokenizer.ggml.model", name);
    if (pre) gguf_meta_text(m, "tokenizer.ggml.pre", pre);
    gguf_meta_array(m, "tokenizer.ggml.tokens", GGUF_STRING, w->n, w->tokens);
    gguf_meta_array(m, "tokenizer.ggml.token_type", GGUF_I32, w->n, w->types);
}

/* "a b", or [a, b]. */
static int put_merges(struct gguf_meta *m, struct json merges, struct err *err)
{
    const int64_t n = json_count(merges);
    const char **all = gguf_meta_own(m, mem_array(n + 1, sizeof(*all)));
    for (int64_t i = 0; i < n; i++) {
        const struct json merge = json_at(merges, i);
        const bool pair = json_type(merge) == JSON_ARRAY;
        const char *a, *b = "";
        int64_t na, nb = 0;
        if (json_str(pair ? json_at(merge, 0) : merge, &a, &na, err) ||
            (pair && json_str(json_at(merge, 1), &b, &nb, err)))
            return -1;
        char *text = gguf_meta_own(m, mem_alloc(na + nb + 2));
        snprintf(text, (size_t)(na + nb + 2), pair ? "%s %s" : "%s%s", a, b);
        all[i] = text;
    }
    gguf_meta_array(m, "tokenizer.ggml.merges", GGUF_STRING, n, all);
    return 0;
}

/* llama.cpp's name for a pre-tokenizer: found by its first split, or "gpt-2" for plain byte-level; NULL: none. */
static const char *split_name(struct json pre)
{
    const char *type = "", *regex = "";
    const struct json parts = json_find(pre, "pretokenizers");
    const struct json first = json_type(parts) == JSON_ARRAY ? json_at(parts, 0) : pre;
    bool use_regex = true;
    if (json_opt_str(first, "type", &type, NULL) || json_opt_bool(first, "use_regex", &use_regex, NULL)) return NULL;
    if (!strcmp(type, "ByteLevel")) return use_regex ? "gpt-2" : NULL;
    if (strcmp(type, "Split") || json_opt_str(json_find(first, "pattern"), "Regex", &regex, NULL)) return NULL;
    for (int64_t i = 0; i < MT_LEN(splits); i++)
        if (!strcmp(splits[i].regex, regex) && json_count(parts) == splits[i].n_parts) return splits[i].name;
    return NULL;
}

/* llama.cpp puts U+2581 in place of spaces, and never merges over the start or end of a run of newlines. */
static bool is_gemma(struct json root)
{
    const char *behavior = "";
    return !json_opt_str(json_find(root, "pre_tokenizer"), "behavior", &behavior, NULL) &&
           !strcmp(behavior, "MergedWithPrevious"); /* tokenizer_open accepts it with spaces alone */
}

static int put_model(struct gguf_meta *m, const struct gguf_meta_model *model, struct json root, struct err *err)
{
    const struct json bpe = json_find(root, "model");
    const char *type = "", *split = split_name(json_find(root, "pre_tokenizer"));
    const bool gemma = is_gemma(root);
    bool bytes = false;
    if (json_opt_str(bpe, "type", &type, err) || json_opt_bool(bpe, "byte_fallback", &bytes, err)) return -1;
    if (strcmp(type, "BPE") || (!split && !gemma))
        return json_error(
            root, err,
            "llama.cpp has no name for this tokenizer that moetrain knows: export merged-bf16 and convert "
            "it with llama.cpp's convert_hf_to_gguf.py");
    struct words w = new_words(m, model);
    w.bytes = bytes;
    if (put_vocab(&w, json_find(bpe, "vocab"), err) || put_added(&w, json_find(root, "added_tokens"), err)) return -1;
    for (int64_t i = 0; i < w.n; i++)
        if (w.tokens[i]) w.tokens[i] = gguf_meta_own(m, mem_strdup(w.tokens[i]));
    /* lfm2 has the same split as glm4, but for the name glm4 llama.cpp removes bos_token */
    if (!strcmp(model->arch->family, "lfm2_moe") && !gemma && !strcmp(split, "glm4")) split = "lfm2";
    put_tokens(m, &w, gemma ? "gemma4" : "gpt2", gemma ? NULL : split);
    return put_merges(m, json_find(bpe, "merges"), err);
}

/* ---- tiktoken.model */

/* Any two tokens that form a token are a merge. llama.cpp merges in the order of the list, here by the token's id. The
 * converter of llama.cpp lists at most one merge for a token, none if parts of the token have higher ids. */
static void put_splits(struct gguf_meta *m, const struct words *w, const struct tokenizer *tok)
{
    const char **all = NULL;
    int64_t n = 0, cap = 0, size = 0;
    int32_t left, right;
    for (int32_t id = 0; id < w->n; id++) {
        if (w->types[id] != NORMAL) continue;
        tokenizer_bytes(tok, id, &size);
        for (int64_t at = 1; at < size; at++) {
            if (!tokenizer_split(tok, id, at, &left, &right)) continue;
            const size_t bytes = strlen(w->tokens[left]) + strlen(w->tokens[right]) + 2;
            char *text = gguf_meta_own(m, mem_alloc((int64_t)bytes));
            snprintf(text, bytes, "%s %s", w->tokens[left], w->tokens[right]);
            all = mem_reserve(all, &cap, n + 1, sizeof(*all));
            all[n++] = text;
        }
    }
    gguf_meta_array(m, "tokenizer.ggml.merges", GGUF_STRING, n, gguf_meta_own(m, all));
}

static int put_ranks(struct gguf_meta *m, const struct gguf_meta_model *model, const struct tokenizer *tok,
                     struct err *err)
{
    const struct words w = new_words(m, model);
    int64_t size;
    if (tokenizer_bytes(tok, (int32_t)w.n, &size))
        return err_set(err, "%s/tiktoken.model: token %lld of a model with %lld", model->dir, (long long)w.n,
                       (long long)w.n);
    for (int32_t id = 0; id < w.n; id++) {
        char *text = tokenizer_item(tok, id);
        if (!text) continue;
        w.tokens[id] = gguf_meta_own(m, text);
        w.types[id] = tokenizer_is_special(tok, id) ? CONTROL : tokenizer_is_added(tok, id) ? USER_DEFINED : NORMAL;
    }
    put_tokens(m, &w, "gpt2", KIMI);
    put_splits(m, &w, tok);
    return 0;
}

/* The id of the token that a key of tokenizer_config.json names, as text or as an object; -1: none. */
static int32_t named_token(struct json config, const char *key, const struct tokenizer *tok)
{
    const struct json named = json_find(config, key);
    const char *text = NULL;
    if (json_type(named) == JSON_OBJECT ? json_opt_str(named, "content", &text, NULL)
                                        : json_opt_str(config, key, &text, NULL))
        return -1;
    return text ? tokenizer_id(tok, text) : -1;
}

static void put_id(struct gguf_meta *m, const char *key, int32_t id)
{
    if (id >= 0) gguf_meta_u32(m, key, id);
}

static int put_special(struct gguf_meta *m, const struct gguf_meta_model *model, const struct tokenizer *tok,
                       bool add_bos, struct err *err)
{
    struct json_doc *doc = NULL;
    int32_t eos = -1;
    int rc = eos_ids_main(&eos, model->dir, tok, err);
    if (!rc && file_exists_in(model->dir, "tokenizer_config.json")) {
        doc = json_load_in(model->dir, "tokenizer_config.json", FILE_MAX, err);
        rc = doc ? json_opt_flag(json_root(doc), "add_bos_token", &add_bos, err) : -1;
    }
    if (!rc && doc) {
        put_id(m, "tokenizer.ggml.bos_token_id", named_token(json_root(doc), "bos_token", tok));
        put_id(m, "tokenizer.ggml.padding_token_id", named_token(json_root(doc), "pad_token", tok));
    }
    put_id(m, "tokenizer.ggml.eos_token_id", eos);
    gguf_meta_bool(m, "tokenizer.ggml.add_bos_token", add_bos);
    json_free(doc);
    return rc;
}

/* gemma: llama.cpp adds <bos> in any case. */
static int put_file(struct gguf_meta *m, const struct gguf_meta_model *model, bool *gemma, struct err *err)
{
    struct json_doc *doc = json_load_in(model->dir, "tokenizer.json", FILE_MAX, err);
    if (!doc) return -1;
    const int rc = put_model(m, model, json_root(doc), err);
    *gemma = is_gemma(json_root(doc));
    json_free(doc);
    return rc;
}

int gguf_tokenizer_put(struct gguf_meta *m, const struct gguf_meta_model *model, struct err *err)
{
    bool gemma = false;
    struct tokenizer *tok = tokenizer_open(model->dir, err);
    if (!tok) return -1;
    int rc = tokenizer_has_ranks(tok) ? put_ranks(m, model, tok, err) : put_file(m, model, &gemma, err);
    if (!rc) rc = put_special(m, model, tok, gemma, err);
    tokenizer_free(tok);
    if (!rc && model->chat_template) gguf_meta_text(m, "tokenizer.chat_template", model->chat_template);
    return rc;
}
