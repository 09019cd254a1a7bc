/* plan_measure.h - the inputs of a plan, and dry runs with given options. */
#ifndef MT_PLAN_MEASURE_H
#define MT_PLAN_MEASURE_H

#include "model/model.h"
#include "train/config/config.h"
#include "train/plan/machine.h"

/* Bytes of a run with one choice of recompute mode, scratch and decoded layers. */
struct plan_memory {
    int64_t experts, dense; /* frozen weights on the device: of experts, with their biases; all others */
    int64_t host;           /* pinned host memory: the embedding and the three members below */
    int64_t host_moments;   /* moments; with cpu_update also masters and copies of gradients */
    int64_t host_inputs;    /* of activations: inputs of layers, and the groups MIXER and FFN (model/acts.h) */
    int64_t host_experts;   /* packed experts of some layers */
    int64_t expert_slots;   /* part of `experts`: buffers to which packed experts are copied */
    int64_t
        host_shared;   /* device bytes of the host memory: all if host and device share memory, otherwise page tables */
    int64_t state;     /* adapters, gradients, moments, working copies, tables */
    int64_t gradients; /* part of state */
    int64_t moments;   /* part of state */
    int64_t work_load; /* packed experts of a decoded layer, before they are decoded */
    int64_t work_fwd;  /* peak of forward and loss of a training micro-batch */
    int64_t work;      /* the same with the backward pass */
    int64_t work_eval; /* peak of passes that save nothing for a backward pass: with a loss, or with a KV cache */
    int64_t cache;     /* bytes of that cache */
    int64_t sampling;  /* part of work_eval: cache and passes of generation */
    char format[96];   /* format of the experts in memory, as weights.experts */
    int64_t decoded;   /* bytes of decoded layers beyond their packed bytes */
    int64_t n_decoded; /* number of decoded layers */
    int64_t n_packed;  /* layers that are not decoded before, because products that read packed experts make the run
                          faster */
    int64_t n_unused;  /* tensors of the checkpoint that are not used */
    const char *unused;      /* name of the first of them; owned by the checkpoint */
    double flops_fwd, flops; /* per token: forward; training step with recomputation */
    double inside_ms;        /* time that decoding inside the products adds to floor_ms */
    double tile_ms;          /* time that partly filled tiles add to floor_ms */
    double floor_ms;         /* time of a training micro-batch by plan_request.rates; 0: the rates are not known */
};

/* Memory that a plan may use: the least of all ranks, so that all ranks make the same choice and do not wait for each
 * other. */
struct plan_room {
    int64_t fixed; /* device bytes that are not the run's: context, libraries, other processes; the most of all ranks */
    int64_t device, host; /* free bytes of the device and of this machine's host memory; INT64_MAX: the plan is for
                             another machine */
    int64_t threads; /* CPU threads of a rank; INT64_MAX: the plan is for another machine, and train.threads is 0 */
};

enum plan_use { PLAN_EVAL, PLAN_TRAIN, PLAN_GENERATE };

/* Tokens of a prompt in each pass after the first; sequences that are sampled at once, at most. */
enum { PLAN_CHUNK = 128, PLAN_SEQS = 512 };
/* Sizes of generation (train/generate/engine.h); a text has up to seq_len tokens. */
struct plan_generation {
    int64_t n_seq;  /* sequences */
    int64_t n_tok;  /* tokens of a pass */
    int64_t chunk;  /* tokens of a sequence in a pass that is not its first */
    int64_t n_top;  /* likeliest tokens that are reported */
    int64_t n_edit; /* changes of logits per sequence, in addition to one per token of the sequence; 0: no logits are
                       changed */
    bool routing;   /* the choice of experts is recorded */
    bool keeps;     /* later prompts continue sequences in the cache (plan_keeps) */
    bool keeps_experts; /* only of training runs: the packed experts stay on the device */
    int64_t cache_tok;  /* only of training runs: tokens of the cache; 0: those of one full sequence */
    bool spare; /* only of training runs: fewer sequences than asked for if they need more memory than training does */
};

/* Kind of device, model, data: what a plan is for. */
struct plan_request {
    const struct device *dev;
    const struct parallel *par;
    const struct arch *a;
    const struct safetensors *st;
    const struct config *cfg;
    const char *adapter_dir;
    bool train;                        /* false: forward only */
    bool generates;                    /* texts */
    bool replays;                      /* training takes experts that the sampler chose */
    struct plan_generation generation; /* plan_request_of sets the sizes for one sequence; its caller may change them */
    int64_t n_tok;
    int64_t seq_len;
    struct plan_room room;
    struct machine machine;
    struct roofs rates; /* of the device, for estimates; 0: not known */
    bool checked;       /* as in weights_options: the tensors were checked, so dry runs do not check them again */
};

/* Makes a request with the largest micro-batch of cfg and the memory that is free now. All ranks call it. */
struct plan_request plan_request_of(const struct device *dev, const struct parallel *par, const struct arch *a,
                                    const struct safetensors *st, const struct config *cfg, const char *adapter_dir,
                                    enum plan_use use);

/* Reads the room again. All ranks call it. */
void plan_request_room(struct plan_request *q);

/* A model on a dry-run device. model.acts.save, model.ce_chunk and dev.expert_group may change between passes. */
struct plan_probe {
    const struct plan_request *q;
    struct device dev;
    struct model model;
    /* Upper bounds that no batch reaches together: all tokens of the largest micro-batch, as many documents and labels
     * as tokens, the length of a full sequence. */
    struct model_batch batch;
};
int plan_probe_open(struct plan_probe *p, const struct plan_request *q, const struct model_options *opt,
                    struct err *err) MT_CHECK;
void plan_probe_close(struct plan_probe *p);
/* Returns the peak of the work arena in the passes of training. *ms: the time of a micro-batch by dev.roofs; with
 * quant.start the mean of the times with and without quantisation. */
int64_t plan_probe_work(struct plan_probe *p, double *ms);
/* The peak of the work arena in the passes that save nothing: evaluation, calibration, generation. */
int64_t plan_probe_other(struct plan_probe *p);
/* plan_memory.n_packed */
int64_t plan_packed_layers(const struct plan_probe *p);
/* Time that products which decode experts add to the floor of a micro-batch, forward and backward. *gain_ms: the part
 * that would be saved if their layers were decoded layers. The rest is the time of reading bf16 experts, which the
 * floor does not count for these products. */
double plan_inside_ms(const struct plan_probe *p, const struct roofs *roofs, double *gain_ms);
/* Bytes of a cache for n_tok tokens of q's sequences. */
int64_t plan_cache_bytes(const struct plan_request *q, int64_t n_tok);
/* All of struct plan_memory. */
int plan_measure(struct plan_memory *m, int64_t *trainable, const struct plan_request *q,
                 const struct model_options *opt, struct err *err) MT_CHECK;
/* Plans for sequences of up to len tokens that stay in the cache. Later prompts continue them: a pass has a chunk of a
 * prompt and one token of each other sequence. */
void plan_keeps(struct plan_generation *g, int64_t len);
/* Device bytes of pinned host memory: all if host and device share memory, otherwise page tables. */
int64_t plan_host_shared(const struct device *dev, int64_t bytes);
/* Device bytes of a run, `fixed` included. */
int64_t plan_memory_peak(const struct plan_memory *m, int64_t fixed, bool train);

/* The sizes of scratch that a plan tries, the largest first: bytes of logits, and experts decoded at a time (0: all of
 * a layer; a CPU decodes tile by tile, and ignores it). Larger scratch is faster, for example because the head's matrix
 * is read once per chunk of labelled tokens. */
enum { PLAN_LOGITS = 5 };
int64_t plan_logits_bytes(const struct device *dev, int i);
int64_t plan_expert_group(int i);
/* Shapes of the adapters: from the [lora] section, or from adapter_dir (a PEFT directory) when it is given.
 */
int plan_adapters(struct adapters *ad, const struct arch *a, const struct config *cfg, const char *adapter_dir,
                  struct err *err) MT_CHECK;
/* As plan_adapters, for the adapter of the objective's reference. *planned, for model_options.reference: ad, or NULL if
 * the reference has no adapter. */
int plan_reference(struct adapters *ad, struct adapters **planned, const struct arch *a, const struct config *cfg,
                   struct err *err) MT_CHECK;
/* The quantisation of the [model] section; the cache is not set. */
struct quantize plan_quantize(const struct config *cfg);
/* The [quant] section; weights.bits 0: none. */
struct qat_options plan_qat(const struct config *cfg);
/* The options of the configuration that the plan does not choose. */
struct model_options plan_fixed_options(const struct plan_request *q);
/* train.decoded_layers, or its value by model.expert_weight_format; -1: as many as fit. */
int64_t plan_decoded_layers(const struct plan_request *q);

/* After a second, prints the number of dry runs so far on standard error: on a terminal in one line, elsewhere every 10
 * s. Each dry run of rank 0 calls plan_progress; plan_progress_end clears the line. */
void plan_progress(const struct plan_request *q);
void plan_progress_end(void);
extern double plan_quiet_ms, plan_log_ms; /* 1 s and 10 s */

#endif
