/* export_card.c - see export_card.h. */
#include "train/export/export_card.h"

#include <stdlib.h>
#include <string.h>

#include "train/gguf/gguf_meta.h"
#include "train/run/model_card.h"

static const char use[] = "\n## Use\n", title[] = "# LoRA adapter for ", library[] = "\nlibrary_name: peft\n";

static int64_t vllm_rank(int64_t rank)
{
    static const int64_t ranks[] = {8, 16, 32, 64, 128, 256, 320, 512};
    for (int64_t i = 0; i < MT_LEN(ranks); i++)
        if (ranks[i] >= rank) return ranks[i];
    return rank;
}

static void put_vllm(FILE *out, const char *base_model, const struct arch *a, int64_t max_rank)
{
    fprintf(out,
            "%s\nThe adapter has the keys of vLLM 0.33 and later; PEFT may not load them.\n\n```bash\nvllm serve \"",
            use);
    model_card_quote(out, base_model, "\\\"$`");
    fprintf(out, "\" --enable-lora --max-lora-rank %lld --lora-modules mine=path/to/this/directory\n```\n\n",
            (long long)vllm_rank(max_rank));
    fprintf(out, "Requests name the model `mine`.\n");
    if (!a->names->published) return;
    fprintf(out, "\nvLLM 0.33 takes adapters of this model on NVIDIA GPUs. It refuses them on ROCm, on CPUs and with "
                 "MegaMoE\nbackends: there, serve what `moetrain export --to merged-mxfp4` writes.\n");
}

static void put_options_note(FILE *out, const char *options)
{
    if (options[0])
        fprintf(out,
                "\nllama.cpp does not read these values of YaRN from the file. Without the options%s\n"
                "its attention differs from that of the trained model.\n",
                options);
}

static void put_gguf(FILE *out, const char *base_model, const struct arch *a)
{
    char options[GGUF_OPTIONS_TEXT];
    gguf_meta_options(options, a);
    fprintf(out, "%s\nMODEL.gguf is the base model, converted by llama.cpp's convert_hf_to_gguf.py from\n`", use);
    model_card_quote(out, base_model, "`");
    fprintf(out,
            "`.\n\n```bash\nllama-server -m MODEL.gguf --lora path/to/this/directory/" EXPORT_GGUF_NAME "%s\n```\n",
            options);
    put_options_note(out, options);
}

static void put_gguf_model(FILE *out, const struct arch *a)
{
    char options[GGUF_OPTIONS_TEXT];
    gguf_meta_options(options, a);
    fprintf(out,
            "%s\nThe adapter is merged into the weights: no base model is needed.\n\n```bash\nllama-cli -m "
            "path/to/this/directory/" EXPORT_GGUF_MODEL_NAME
            "%s\nollama create NAME -f path/to/this/directory/Modelfile\n"
            "```\n",
            use, options);
    put_options_note(out, options);
}

static void put_merged(FILE *out, enum export_format format, const struct arch *a)
{
    const char *loader = model_card_loader(a);
    fprintf(out,
            "%s\nThe adapter is merged into the weights%s: no base model and no PEFT are needed.%s\n\n```python\n"
            "from transformers import %s, AutoTokenizer\n\n"
            "path = \"path/to/this/directory\"\n"
            "model = %s.from_pretrained(path, dtype=\"auto\")\n"
            "tokenizer = AutoTokenizer.from_pretrained(path)\n```\n\n`vllm serve path/to/this/directory` serves it.\n",
            use, format == EXPORT_MERGED_MXFP4 ? ", whose experts are in MXFP4" : ", which are in bf16",
            model_card_wrong(a), loader, loader);
}

static void put_packed(FILE *out, enum export_format format)
{
    fprintf(out,
            "%s\nThe adapter is merged into the weights, whose experts are in %s: no base model and no PEFT are "
            "needed.\n`vllm serve path/to/this/directory` serves it. transformers 5.23 does not apply the scales of "
            "these experts:\nits outputs would be wrong.\n",
            use,
            format == EXPORT_MERGED_NVFP4 ? "NVFP4 (Model-Optimizer's layout, weights only)"
                                          : "FP8 (compressed-tensors)");
}

static void put_use(FILE *out, enum export_format format, const char *base_model, const struct arch *a,
                    int64_t max_rank, bool warns)
{
    switch (format) {
    case EXPORT_PEFT: model_card_use(out, base_model, a, warns); break;
    case EXPORT_VLLM: put_vllm(out, base_model, a, max_rank); break;
    case EXPORT_GGUF: put_gguf(out, base_model, a); break;
    case EXPORT_MERGED_BF16:
    case EXPORT_MERGED_MXFP4: put_merged(out, format, a); break;
    case EXPORT_MERGED_NVFP4:
    case EXPORT_MERGED_FP8: put_packed(out, format); break;
    case EXPORT_GGUF_MODEL: put_gguf_model(out, a); break;
    case EXPORT_FORMATS: MT_REQUIRE(false, "format %d", (int)format);
    }
}

static void put_title(FILE *out, enum export_format format)
{
    fprintf(out, format >= EXPORT_MERGED_BF16 ? "# Merged with a LoRA adapter: " : "%s", title);
}

/* Writes the part of the card before "Use", with the title and library of the format. */
static void put_front(FILE *out, const char *card, size_t size, enum export_format format)
{
    static const char *const libraries[EXPORT_FORMATS] = {
        "peft", "vllm", "llama.cpp", "transformers", "transformers", "transformers", "transformers", "llama.cpp"};
    char *front = mem_alloc((int64_t)size + 1), *rest = front, *at;
    memcpy(front, card, size);
    if ((at = strstr(rest, library))) {
        fprintf(out, "%.*s\nlibrary_name: %s\n", (int)(at - rest), rest, libraries[format]);
        rest = at + sizeof(library) - 1;
    }
    if ((at = strstr(rest, title)) && (at == rest || at[-1] == '\n')) {
        fprintf(out, "%.*s", (int)(at - rest), rest);
        put_title(out, format);
        rest = at + sizeof(title) - 1;
    }
    fputs(rest, out);
    mem_free(front);
}

char *export_card(const char *adapter, enum export_format format, const char *base_model, const struct arch *a,
                  int64_t max_rank, bool warns)
{
    char *text = NULL, *copy;
    size_t size;
    FILE *out = open_memstream(&text, &size);
    MT_REQUIRE(out, "open_memstream failed");
    if (adapter) {
        const char *found = strstr(adapter, use), *next = found ? strstr(found + 1, "\n## ") : NULL;
        put_front(out, adapter, found ? (size_t)(found - adapter) : strlen(adapter), format);
        put_use(out, format, base_model, a, max_rank, warns);
        if (next) fputs(next, out);
    } else {
        put_title(out, format);
        model_card_quote(out, base_model, MODEL_CARD_SPECIAL);
        fputc('\n', out);
        put_use(out, format, base_model, a, max_rank, warns);
    }
    MT_REQUIRE(!fclose(out), "out of memory for the model card");
    copy = mem_strdup(text);
    free(text);
    return copy;
}
