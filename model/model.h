/* model.h - the whole model: embedding, layers, chunked loss head; one micro-batch at a time.
 *
 *   model_begin   allocates work memory, after what the caller has there; uploads the batch
 *   model_fwd     embedding and layers; acts.layers[l].x is the input of layer l, the last x that of the final norm
 *   model_loss    final norm, head, the objective's loss over the labelled tokens, added to the sums
 *   model_bwd     gradients of every adapter, added to the flat gradient
 *   model_end     frees that work memory
 *
 * For generation, model_sample replaces model_loss, and pass.cache keeps what later tokens see. To write the likeliest
 * tokens of a teacher, model_topk replaces model_loss.
 *
 * model_begin lets the objective (model/objective/) run a forward pass of a reference first: the same weights with
 * other adapters or none.
 *
 * None of these waits for the device. Losses and counts of a step accumulate in `sums`, in device memory. The host
 * reads it once, at the end of the step:
 *
 *   model_clear   sums = 0
 *   model_sum     all-reduces the losses in the sums over the ranks (pass.last does so for the gradients)
 *   model_norm    adds the gradient norm to the sums
 *   model_read    waits for the device and reads the sums
 *
 * With sum_in_order (grad_sums.h) the bits of losses and gradients do not depend on the number of ranks: training calls
 * model_add after each micro-batch, which adds the losses and gradients of all ranks' micro-batches, and
 * model_sum_step instead of model_sum. Without sum_in_order model_add does nothing, and model_sum_step is model_sum. */
#ifndef MT_MODEL_H
#define MT_MODEL_H

#include "data/safetensors.h"
#include "model/block.h"
#include "model/cache.h"
#include "model/layer_costs.h"
#include "model/layers/choices.h"
#include "model/objective/objective.h"
#include "model/qat.h"
#include "optim/grad_sums.h"
#include "kernels/recorded.h"

/* The teacher of a distillation. MODEL: the same weights with other adapters; ROWS: the data have the likeliest tokens
 * of a teacher. The loss of a labelled token is alpha CE + (1 - alpha) temperature^2 KL. */
enum distill_from { DISTILL_NONE, DISTILL_MODEL, DISTILL_ROWS };
struct distill {
    enum distill_from from;
    enum kl_kind kl;
    double alpha, temperature;
    int64_t n_top; /* ROWS: ids per token */
};

struct model_options {
    int64_t max_len; /* longest document: rows of the RoPE table */
    struct acts_save save;
    int64_t host_tok; /* above 0: the inputs of layers are in dev->host, which has room for a micro-batch of so many
                         tokens; 0: they are on the device */
    int64_t host_bytes[OFFLOAD_KINDS];   /* for SAVE_*_HOST: bytes of a layer's group in the largest micro-batch */
    int64_t expert_layers, expert_bytes; /* host_layers, host_bytes of struct weights_options */
    bool host_moments;                   /* the optimizer moments are kept in dev->host */
    bool cpu_update;                     /* the masters are in dev->host too, and the CPU makes the update (struct
                                            host_update) */
    double aux_coef;                     /* 0: no auxiliary loss */
    bool aux_pooled;            /* over all layers as in transformers; false: per layer as in Megatron (struct aux) */
    struct quantize quantize;   /* matrices to pack in 4 bits while loading */
    int64_t ce_chunk;           /* labelled tokens per pass of the loss head; 0: model_ce_chunk of 128 MiB */
    int64_t expert_group;       /* copied to struct device */
    bool embed_on_host;         /* the embedding is kept in dev->host */
    int64_t decoded_layers;     /* number of last layers whose experts are decoded while loading */
    enum fp8_products fp8;      /* of the experts (train.expert_dtype) */
    bool checked;               /* copied to struct weights_options */
    const struct parallel *par; /* NULL: one rank */
    bool shard_moments;         /* over the ranks of par->dp (ZeRO-1) */
    bool sum_in_order;          /* of grad_sums.h; not with ranks in par->ep */
    bool frozen;                /* forward only: no gradients, no moments */
    struct qat_options qat;
    struct ep_options ep; /* n_tok 0 when par->ep has one rank */
    struct distill distill;
    struct preference preference;      /* of objective_preference; scales and baseline are those of a pass */
    struct policy policy;              /* of objective_policy; entropy_scale: the coefficient; entropy_from: not set */
    const struct objective *objective; /* NULL: objective_sft */
    bool has_reference;                /* the objective calls model_reference */
    struct adapters *reference; /* the reference's adapters, from adapters_plan; the model takes them over. NULL: the
                                   base model is the reference */
};

/* A micro-batch in host memory: n_seq packed documents. In a dry run the arrays may be NULL. With `prefix` the pass
 * must have no cache, and n_seq must be at most n_tok / 2: a plan counts memory for the cu of n_tok sequences, which
 * then has room for cu and prefix. */
struct model_batch {
    int64_t n_tok, n_seq, n_label, max_len; /* max_len: longest document, tokens in pass.cache included */
    const int32_t *tok, *pos, *cu;          /* [n_tok], [n_tok], [n_seq+1] */
    const int32_t *label_row, *label_id;    /* [n_label] */
    const int32_t *group_cu;                /* [n+2] of passes with n adapters (layers/lora_rows.h): the tokens of
                                             * each, then those without one, begin there; or NULL */
    const uint16_t *choices;                /* [n_tok, choices_layers, J], of CHOICES_GIVEN (choices_push) */
    const int32_t *topk_id;                 /* [n_label, distill.n_top], of DISTILL_ROWS (struct teacher) */
    const float *topk_logprob;
    const int32_t *prefix;                   /* [n_seq] of struct seqs; NULL: none */
    int64_t n_answer;                        /* of objective_preference and objective_policy: */
    const int32_t *answer_cu, *answer_first; /* [n_answer+1], [n_answer] (struct answers) */
    const int32_t *good;                     /* [n_answer] KTO's labels; or NULL */
    const double *reference;              /* [n_answer, 2] log-probabilities that model_read_reference gave; or NULL */
    const double *row_values;             /* [n_answer, POLICY_VALUES]; this and the next three: objective_policy */
    const float *old_nll, *reference_nll; /* [n_label] struct policy_tokens; or NULL */
    const float *sampler_nll;             /* [n_label] of op_importance; NULL: no importance weights */
};

struct model_pass {
    bool backward;
    double loss_scale;        /* multiplies the loss: 1 / labelled tokens, pairs or rows of the optimizer step */
    double sft_scale;         /* 1 / tokens of chosen completions of the step */
    double baseline;          /* KTO's z of the step */
    double entropy_from;      /* of struct policy */
    double entropy_share;     /* factor of policy.entropy_scale: 1 / tokens of the step that have loss */
    bool wants_reference;     /* objective_policy: computes the reference also where no loss reads it */
    bool measures_baseline;   /* forward only: adds the log-ratios of KTO's baseline to the sums */
    double aux_share;         /* weight of this micro-batch in the step's auxiliary loss */
    uint64_t dropout_key;     /* differs for every micro-batch */
    double noise_alpha;       /* of op_embed_noise; 0: no noise */
    uint64_t noise_key;       /* differs for every micro-batch */
    bool objective;           /* the loss is that of the model's objective; otherwise the cross-entropy */
    bool counted;             /* forward only: as a backward, adds the routing to what model_read_experts returns */
    bool unquantised;         /* without the fake quantisation of struct qat */
    enum qat_inputs inputs;   /* of quant.activations */
    struct cache *cache;      /* forward only: stores the tokens, which see earlier ones (cache.h); NULL: none */
    const int32_t *cache_seq; /* [n_seq] the sequences in the cache */
    const struct adapters *adapters; /* in place of the model's own, forward only; NULL: its own */
    enum choices_use choices;        /* of experts; recorded ones are read with choices_read after model_fwd */
    bool decode;                     /* some sequences have tokens in the cache before this pass */
    bool last; /* micro-batch of a step on this rank: a layer's gradients are complete when its backward is done. They
                * are all-reduced then, and with adapters.opt.cpu_update copied out */
};

/* Sums over the micro-batches since model_clear. */
struct model_sums {
    double nll; /* sum over labelled tokens, natural log */
    double kl;  /* sum over labelled tokens of the passes with pass.objective, without factors */
    double aux; /* auxiliary losses, before coef; 0 when off */
    double preference[PREFERENCE_SUMS];
    double policy[POLICY_SUMS], importance[IMPORTANCE_SUMS];
    double policy_most[POLICY_EXTREMES], importance_most[IMPORTANCE_EXTREMES]; /* of this rank */
    int64_t n_label; /* on this rank; after model_sum the other members are sums over all ranks */
    int64_t n_hit;
    double grad_norm;   /* norm of all adapters' gradients; set when model_norm was called */
    int64_t n_bad_grad; /* gradient elements that are not finite */
};

/* struct model.sums: nll, hits, kl; auxiliary loss; those of op_preference, op_policy and op_importance; sum of squares
 * and number of non-finite elements of the gradient, then of expert-parallel gradients; largest values of op_policy and
 * op_importance. */
enum {
    SUM_NLL = 0,
    SUM_AUX = 3,
    SUM_PREFERENCE,
    SUM_POLICY = SUM_PREFERENCE + PREFERENCE_SUMS,
    SUM_IMPORTANCE = SUM_POLICY + POLICY_SUMS,
    SUM_GRAD = SUM_IMPORTANCE + IMPORTANCE_SUMS,
    SUM_POLICY_MOST = SUM_GRAD + 4,
    SUM_IMPORTANCE_MOST = SUM_POLICY_MOST + POLICY_EXTREMES,
    MODEL_SUMS = SUM_IMPORTANCE_MOST + IMPORTANCE_EXTREMES
};

struct model {
    struct device *dev;
    struct parallel par;
    struct arch arch;
    float embed_factor; /* arch_embed_factor */
    struct weights weights;
    struct adapters adapters;
    struct qat qat;
    struct tensor rope[ATTN_KINDS]; /* [max_len, arch.rope.width] f32; absent where its width is 0 */
    struct tensor sums;             /* [MODEL_SUMS] f64 */
    struct grad_sums grad_sums;     /* open if model_options.sum_in_order */
    struct tensor sums_in_order;    /* [SUM_GRAD] f64, of the micro-batches that model_add has added; or ndim 0 */
    struct tensor expert_sums;      /* [2*L*E] f64: rows, then gates, of every expert since model_read_experts */
    int64_t ce_chunk;
    double aux_coef;
    bool aux_pooled;
    int64_t n_label; /* labelled tokens since model_clear, on this rank */
    int64_t n_chunk; /* largest number of chunks of any layer so far, with expert parallelism */
    const struct objective *objective;
    struct distill distill;
    struct preference preference;
    struct policy policy;
    struct layer_costs *costs;  /* of dry runs; NULL: none */
    struct recordings recorded; /* passes of decoding */
    struct adapters reference;  /* frozen; without parameters when the reference is the base model */
    bool referring;             /* inside the forward pass of the reference */

    /* the current micro-batch, all on dev->work */
    struct model_pass pass;
    bool begun;         /* between model_begin and model_end */
    int64_t work_mark;  /* of dev->work at model_begin */
    int64_t begin_mark; /* after it */
    struct acts acts;
    struct aux *aux; /* [L] host: one per layer; pooled ones share their tensors, dense layers have none */
    struct choices choices;
    struct seqs seqs;
    struct tensor tok, pos, label_row, label_id;
    struct tensor group; /* [T] i32 of struct lora_rows, in passes that decode */
    const int32_t *group_cu;
    struct site_acts end; /* of several streams, before the final norm */
    struct tensor dres;   /* [T, D], with N streams [T, N*D]: gradient of a layer's output in the backward pass */
    int64_t loss_mark;    /* mark of dev->work: model_bwd uses what was allocated after it, then releases that */
    struct tensor final_norm, final_rstd, dfinal; /* [T, D], [T], [T, D] */
    struct teacher kl;                            /* of a pass that distils; else without tensors */
    struct answers answers;                       /* of objective_preference and objective_policy */
    struct tensor good, reference_logps;          /* of objective_preference: [A] i32, [A, 2] f64; or absent */
    struct policy_tokens policy_tokens;           /* of objective_policy: what a batch gives, and the reference */
    struct tensor row_values;                     /* of objective_policy: [A, POLICY_VALUES] f64 */
    struct tensor sampler_nll;                    /* of objective_policy: [N] stat; absent: no importance weights */
};

/* Loads the weights and initialises the adapters (A random from seed, B zero) in dev's arenas; a dry run only counts
 * their bytes. ad comes from adapters_plan; the model takes it over, also after an error. st may be closed afterwards.
 */
int model_open(struct model *m, struct device *dev, const struct arch *a, const struct safetensors *st,
               struct adapters *ad, const struct model_options *opt, uint64_t seed, struct err *err) MT_CHECK;
void model_close(struct model *m);
/* With quant.activations: whether the largest magnitudes of the inputs are known, so that passes may quantise
 * inputs. */
bool model_calibrated(const struct model *m);
/* With quantisation-aware training: computes the largest magnitudes of the weights. Error: one is not finite. Waits. */
int model_check_quant(struct model *m, struct err *err) MT_CHECK;

/* The least rows of a shared prefix (struct seqs) that all mixers take (mixer_kind.prefixes); 0: a mixer takes none. */
int64_t model_prefixes(const struct arch *a);

void model_begin(struct model *m, const struct model_batch *b, const struct model_pass *pass);
void model_fwd(struct model *m);
void model_loss(struct model *m);
void model_bwd(struct model *m);
void model_end(struct model *m);

/* Runs a forward pass with the reference's adapters or none, without dropout; objectives call it in model_begin.
 * Returns the final hidden states of the labelled rows [n_label, D]. Takes no more work memory than an evaluation. */
struct tensor model_reference(struct model *m, int64_t n_tok);

/* ---- model_head.c: call these instead of model_loss, in a pass without backward; all wait for the device */

/* Logits of the token after row `row` of the micro-batch: [V] on the host. Needs less work memory than model_loss with
 * two labelled tokens. */
void model_logits(struct model *m, int64_t row, float *logits);
/* Reads the k likeliest tokens after each labelled row, ids ascending: id, logprob [n_label, k] host, the log of
 * softmax(logits / temperature). */
void model_topk(struct model *m, int64_t k, double temperature, int32_t *id, float *logprob);
/* Reads nll [n_label] host of each labelled token. */
void model_nll(struct model *m, float *nll);
/* Reads nll and entropy [n_label] host of each labelled token at the temperature of objective_policy; entropy may be
 * NULL. */
void model_policy_values(struct model *m, float *nll, float *entropy);
/* After model_begin of a pass with a reference: reads nll [n_label] host, the reference's for each labelled token. */
void model_policy_reference(struct model *m, float *nll);
/* After model_begin of a pass with objective_preference: reads the reference's log-probabilities of the answers, for a
 * later batch: reference [n_answer, 2] host. */
void model_read_reference(struct model *m, double *reference);
/* Tokens drawn after n rows of the micro-batch (op_sample); all in host memory. */
struct model_draw {
    int64_t n, n_edit, n_top;
    const int32_t *row;              /* [n] */
    const struct sample_row *rows;   /* [n] */
    const struct sample_edit *edits; /* [n_edit] */
    int32_t *token, *top_id;         /* [n], [n, n_top] = */
    float *logprob, *top_logprob;    /* [n, 3], [n, n_top] = */
};
void model_sample(struct model *m, const struct model_draw *d);
/* The input of the final norm for rows x of the last layer's output: x, or the sum of its streams, whose activations it
 * allocates in end. */
struct tensor model_sum_streams(struct model *m, struct site_acts *end, struct tensor x);

void model_clear(struct model *m);
void model_add(struct model *m);
void model_sum(struct model *m);
void model_sum_step(struct model *m);
void model_norm(struct model *m);
void model_read(struct model *m, struct model_sums *out); /* waits for the device */
/* The mean loss that is trained, and what is logged beside it; n_label: labelled tokens of all ranks. */
double model_objective(const struct model *m, const struct model_sums *t, int64_t n_label);
struct objective_means model_parts(const struct model *m, const struct model_sums *t, int64_t n_label);
/* Reads for every expert the number of its rows in training micro-batches since the last call, and the sum of their
 * combine weights, over all ranks: rows, gates [L*E] host; 0 in layers without routed experts. gates may be NULL.
 * Resets both. Waits for the device. */
void model_read_experts(struct model *m, int64_t *rows, double *gates);

/* The input of layer l, or at n_layer the last output, as the forward left it: on the device or in host memory. After
 * the backward its place on the device may hold the input of another layer (kernels/host_ring.h). */
struct tensor model_forward_x(const struct model *m, int64_t l);
/* Names the first tensor of the forward that is not finite, e.g. "output of layer 3". Call it after model_loss. Waits
 * for the device. */
void model_first_bad(struct model *m, char name[64]);
/* Names the first adapter whose gradient is not finite; false when all are finite. */
bool model_first_bad_grad(struct model *m, char name[64]);

/* Labelled tokens per pass of the loss head whose logits take about logits_bytes. A logit has choice_logit_bytes, or is
 * f32 if the pass distils from a teacher. */
int64_t model_ce_chunk(const struct device *dev, const struct arch *a, bool teacher, int64_t logits_bytes);

#endif
