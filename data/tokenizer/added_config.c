/* added_config.c - added tokens of tokenizer_config.json. transformers passes them to Hugging Face's tokenizers
 * library, which finds or makes their ids. */
#include "data/tokenizer/added_config.h"

#include <stdlib.h>
#include <string.h>

#define MAX_TOKENS (1 << 16)

struct adder {
    struct added_list *list;
    const struct bpe *bpe;
    struct added_list unreachable; /* vocabulary entries with characters outside the byte-level alphabet, which merges
                                      never give; an added token of the same text gets the entry's id */
    int64_t n_vocab;               /* entries of the vocabulary */
};

static struct adder adder_new(struct added_list *list, const struct bpe *bpe)
{
    struct adder a = {.list = list, .bpe = bpe};
    for (int64_t id = 0; id < bpe->n_ids; id++) {
        const struct bpe_token *t = &bpe->tokens[id];
        a.n_vocab += t->bytes != NULL;
        if (!t->bytes || t->text) continue;
        char *text = mem_strndup((const char *)t->bytes, t->size);
        added_list_push(&a.unreachable, (struct added){.text = text, .size = t->size, .id = (int32_t)id});
    }
    return a;
}

/* The id of a token that the list does not have. */
static int32_t find_id(const struct adder *a, const struct added *token)
{
    const struct added *there = added_list_find(&a->unreachable, token->text, token->size);
    const int32_t id = there ? there->id : bpe_text_id(a->bpe, token->text, token->size);
    if (id >= 0) return id;
    return (int32_t)(a->list->n && a->list->max_id >= a->n_vocab ? a->list->max_id + 1 : a->n_vocab);
}

/* Takes token.text over. key: the id that the file gives, or -1. */
static int add(struct adder *a, struct added token, int64_t key, bool key_is_id, struct json where, struct err *err)
{
    struct added *there = added_list_find(a->list, token.text, token.size);
    const bool known = there != NULL;
    token.id = known ? there->id : key_is_id ? (int32_t)key : find_id(a, &token);
    if (known) {
        mem_free(there->text);
        *there = token;
    } else {
        added_list_push(a->list, token);
    }
    if (token.normalized && a->bpe->chars)
        return json_error(where, err, "\"normalized\" is not supported together with byte_fallback");
    if (token.id >= BPE_MAX_ID || a->list->n > MAX_TOKENS) return json_error(where, err, "too many added tokens");
    if (!known && key_is_id && token.id < a->bpe->n_ids && a->bpe->tokens[token.id].bytes &&
        bpe_text_id(a->bpe, token.text, token.size) != token.id)
        return json_error(where, err, "id %d and content \"%.64s\" contradict the vocabulary", token.id, token.text);
    if (key >= 0 && key != token.id) {
        struct err why;
        json_error(where, &why, "\"%.64s\" has id %d, as in transformers, not %lld", token.text, token.id,
                   (long long)key);
        log_warn("%s", why.msg);
    }
    return 0;
}

/* ---- added_tokens_decoder ---- */

struct entry {
    int64_t key;
    struct json token;
};

static int compare_entries(const void *a, const void *b)
{
    const struct entry *x = a, *y = b;
    return (x->key > y->key) - (x->key < y->key);
}

static int read_entries(struct entry *entries, int64_t n, struct json map, struct err *err)
{
    const char *key;
    struct json token;
    for (int64_t i = 0; i < n && json_member(map, i, &key, &token); i++) {
        char *end;
        entries[i] = (struct entry){strtoll(key, &end, 10), token};
        if (*key < '0' || *key > '9' || *end || entries[i].key < 0 || entries[i].key >= BPE_MAX_ID)
            return json_error(token, err, "the key must be an id from 0 to %d", BPE_MAX_ID - 1);
    }
    qsort(entries, (size_t)n, sizeof(*entries), compare_entries);
    return 0;
}

int added_config_decoder(struct added_list *list, const struct bpe *bpe, bool keys_are_ids, struct json config,
                         struct err *err)
{
    struct json map = json_find(config, "added_tokens_decoder");
    const int64_t n = json_count(map);
    if (!json_given(map)) return 0;
    if (json_type(map) != JSON_OBJECT) return json_error(map, err, "must be an object of id: token");
    if (n > MAX_TOKENS) return json_error(map, err, "more than %d tokens", MAX_TOKENS);
    struct entry *entries = mem_array(n, sizeof(*entries));
    struct adder a = adder_new(list, bpe);
    int rc = read_entries(entries, n, map, err);
    for (int64_t i = 0; i < n && !rc; i++) {
        struct added token;
        rc = added_read(&token, entries[i].token, false, err);
        if (rc) break;
        if (keys_are_ids) token.normalized = false;
        if (token.size) /* the library leaves out a token without text */
            rc = add(&a, token, entries[i].key, keys_are_ids, entries[i].token, err);
        else
            mem_free(token.text);
    }
    added_list_free(&a.unreachable);
    mem_free(entries);
    return rc;
}

/* ---- named tokens ---- */

/* Adds a token that is given by its text, or as an object; any other value adds none. */
static int add_named(struct adder *a, struct json value, struct err *err)
{
    struct added token = {0}, *there;
    const char *text;
    if (json_type(value) == JSON_STRING) {
        if (json_str(value, &text, &token.size, err)) return -1;
        token.text = mem_strndup(text, token.size);
    } else if (!json_has(value, "content"))
        return 0;
    else if (added_read(&token, value, false, err))
        return -1;
    if (!json_has(value, "special")) token.normalized = false; /* a special token by default */
    token.special = true;
    there = added_list_find(a->list, token.text, token.size);
    if (token.size && !there) return add(a, token, -1, false, value, err);
    if (there) there->special = true;
    mem_free(token.text);
    return 0;
}

static int add_each(struct adder *a, struct json list, struct err *err)
{
    const char *key;
    struct json value;
    for (int64_t i = 0; json_item(list, i, &key, &value); i++)
        if (add_named(a, value, err)) return -1;
    return 0;
}

int added_config_named(struct added_list *list, const struct bpe *bpe, struct json config, struct err *err)
{
    static const char *const first[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                        "pad_token", "cls_token", "mask_token"};
    const char *key;
    struct json value, extra = json_find(config, "extra_special_tokens");
    struct adder a = adder_new(list, bpe);
    int rc = 0;
    for (int64_t i = 0; i < MT_LEN(first) && !rc; i++) rc = add_named(&a, json_find(config, first[i]), err);
    for (int64_t i = 0; !rc && json_member(config, i, &key, &value); i++)
        if (str_ends(key, "_token") && !str_in(key, first, MT_LEN(first))) rc = add_named(&a, value, err);
    if (!json_count(extra)) extra = json_find(config, "additional_special_tokens");
    if (!rc) rc = add_each(&a, extra, err);
    added_list_free(&a.unreachable);
    return rc;
}
