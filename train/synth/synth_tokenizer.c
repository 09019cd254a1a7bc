/* synth_tokenizer.c - a byte-level tokenizer.json without merges, with the pre-tokenizer of o200k, and a chat
 * template. */
#include "train/synth/synth_tokenizer.h"

#include <string.h>

#include "data/chat/chat_template.h"
#include "data/file/file.h"

/* o200k's pre-tokenizer. Without merges it does not affect the ids. */
static const char o200k[] = "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+"
                            "(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
                            "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*"
                            "(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
                            "\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

/* The 256 characters of the byte-level alphabet in the order of their code points, in which o200k numbers them:
 * printable Latin-1 first, then U+0100 ... for the 68 other bytes. */
static int64_t alphabet(int i)
{
    return i < 94 ? 0x21 + i : i < 106 ? 0xa1 + i - 94 : i < 188 ? 0xae + i - 106 : 0x100 + i - 188;
}

static void put_vocab(struct json_out *o, const struct preset *p)
{
    const struct special_token *t = p->family->tokens;
    int64_t first = 0; /* first id of the bytes, after the special tokens with small ids */
    for (int64_t i = 0; t[i].text; i++)
        if (t[i].id < 256) first = MT_MAX(first, t[i].id + 1);
    json_out_open(o, "vocab", '{');
    for (int i = 0; i < 256; i++) {
        const int64_t c = alphabet(i);
        char text[3] = {(char)c}; /* UTF-8 */
        if (c >= 0x80) text[0] = (char)(0xc0 | c >> 6), text[1] = (char)(0x80 | (c & 0x3f));
        json_out_i64(o, text, first + i);
    }
    for (int64_t i = 0; t[i].text; i++) json_out_i64(o, t[i].text, preset_token(p, t[i].text));
    json_out_close(o, '}');
}

/* Special tokens are also in the vocabulary, because Hugging Face's library numbers added tokens consecutively after
 * model.vocab. */
static void put_added(struct json_out *o, const struct preset *p)
{
    static const char *const off[] = {"single_word", "lstrip", "rstrip", "normalized"};
    json_out_open(o, "added_tokens", '[');
    for (const struct special_token *t = p->family->tokens; t->text; t++) {
        json_out_open(o, NULL, '{');
        json_out_i64(o, "id", preset_token(p, t->text));
        json_out_str(o, "content", t->text);
        for (int i = 0; i < MT_LEN(off); i++) json_out_bool(o, off[i], false);
        json_out_bool(o, "special", true);
        json_out_close(o, '}');
    }
    json_out_close(o, ']');
}

static void put_byte_level(struct json_out *o, const char *key)
{
    json_out_open(o, key, '{');
    json_out_str(o, "type", "ByteLevel");
    json_out_bool(o, "add_prefix_space", false);
    json_out_bool(o, "trim_offsets", true);
    json_out_bool(o, "use_regex", false);
    json_out_close(o, '}');
}

static void put_split(struct json_out *o)
{
    json_out_open(o, "pre_tokenizer", '{');
    json_out_str(o, "type", "Sequence");
    json_out_open(o, "pretokenizers", '[');
    json_out_open(o, NULL, '{');
    json_out_str(o, "type", "Split");
    json_out_open(o, "pattern", '{');
    json_out_str(o, "Regex", o200k);
    json_out_close(o, '}');
    json_out_str(o, "behavior", "Isolated");
    json_out_bool(o, "invert", false);
    json_out_close(o, '}');
    put_byte_level(o, NULL);
    json_out_close(o, ']');
    json_out_close(o, '}');
}

static void put_tokenizer(struct json_out *o, const struct preset *p)
{
    static const char *const none[] = {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"};
    json_out_open(o, NULL, '{');
    json_out_str(o, "version", "1.0");
    json_out_str(o, "truncation", NULL);
    json_out_str(o, "padding", NULL);
    put_added(o, p);
    json_out_str(o, "normalizer", NULL);
    put_split(o);
    json_out_str(o, "post_processor", NULL);
    put_byte_level(o, "decoder");
    json_out_open(o, "model", '{');
    json_out_str(o, "type", "BPE");
    for (int i = 0; i < MT_LEN(none); i++) json_out_str(o, none[i], NULL);
    json_out_bool(o, "fuse_unk", false);
    json_out_bool(o, "byte_fallback", false);
    json_out_bool(o, "ignore_merges", false);
    put_vocab(o, p);
    json_out_open(o, "merges", '[');
    json_out_close(o, ']');
    json_out_close(o, '}');
    json_out_close(o, '}');
}

static void put_config(struct json_out *o, const struct preset *p)
{
    const struct preset_family *f = p->family;
    json_out_open(o, NULL, '{');
    json_out_str(o, "tokenizer_class", "PreTrainedTokenizerFast");
    if (f->bos) json_out_str(o, "bos_token", f->bos);
    json_out_str(o, "eos_token", f->eos);
    if (f->pad) json_out_str(o, "pad_token", f->pad);
    json_out_i64(o, "model_max_length", p->max_len);
    json_out_close(o, '}');
}

/* A chat template for any family, not the family's own. */
static int write_template(const char *dir, struct err *err)
{
    static const char text[] = "{%- for m in messages -%}{{ m.role }}: {{ m.content }}{{ eos_token }}{%- endfor -%}"
                               "{%- if add_generation_prompt -%}assistant: {% endif -%}";
    return file_write_in(dir, CHAT_TEMPLATE_FILE, text, (int64_t)strlen(text), err);
}

int synth_tokenizer(const char *dir, const struct preset *p, struct err *err)
{
    static const char *const names[] = {"tokenizer.json", "tokenizer_config.json"};
    static void (*const put[])(struct json_out *, const struct preset *) = {put_tokenizer, put_config};
    int rc = 0;
    for (int i = 0; i < 2 && !rc; i++) {
        struct json_out o = {.indent = true};
        put[i](&o, p);
        rc = file_write_in(dir, names[i], o.text, o.size, err);
        json_out_free(&o);
    }
    if (!rc && !p->family->compress) rc = write_template(dir, err); /* DeepSeek-V4: moetrain has its encoder */
    return rc;
}
