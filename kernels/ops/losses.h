/* losses.h - for ops.h: the structs of the loss head's ops: teachers, whole answers, preferences. */
#ifndef MT_LOSSES_H
#define MT_LOSSES_H

#include "kernels/tensor.h"

/* The teacher's distribution q over the vocabulary, at `temperature` T, for each labelled token. It is given as the
 * teacher's final hidden state, from which the student's head computes logits, or as K ids with log q (id -1: no
 * entry). With ids, all other ids are one bucket of probability q_r = max(0, 1 - sum q_k). KL_REVERSE needs hidden
 * states. */
enum kl_kind { KL_FORWARD, KL_REVERSE };
struct teacher {
    enum kl_kind kind;
    float alpha, temperature;  /* share of the cross-entropy in the loss, [0, 1]; T > 0 */
    struct tensor hidden;      /* [N, D] act, after the final norm; or absent */
    struct tensor id, logprob; /* [N, K] i32, stat: distinct ids, log softmax(z / T); or absent */
};
/* The answers of a micro-batch whose loss is over whole answers. Labels [cu[a], cu[a+1]) are of answer a; those from
 * first[a] on are its completion, those before it of its prompt. */
struct answers {
    struct tensor cu, first; /* [A+1], [A] i32 */
};
/* The loss of a pair of answers (chosen, rejected), or with KTO of one answer. PREFERENCE_KL computes no loss, only the
 * log-ratios for KTO's baseline. preference_value.h has the formulas. */
enum preference_kind {
    PREFERENCE_DPO,
    PREFERENCE_IPO,
    PREFERENCE_SIMPO,
    PREFERENCE_ORPO,
    PREFERENCE_KTO,
    PREFERENCE_KL
};
struct preference {
    enum preference_kind kind;
    double beta, gamma, label_smoothing, desirable, undesirable;
    double sft_weight; /* of the cross-entropy of the chosen completions, a mean over their tokens in the step */
    double baseline;   /* KTO: z */
    double scale;      /* 1 / pairs (rows) of the step */
    double sft_scale;  /* sft_weight / tokens of chosen completions in the step */
};
/* Sums over pairs, or over rows of KTO. From PREFERENCE_SIDES on: five sums of the chosen answers, then the same five
 * of the rejected ones. */
enum preference_sum {
    PREFERENCE_LOSS,
    PREFERENCE_RIGHT, /* pairs whose chosen reward is the larger */
    PREFERENCE_NLL,   /* ORPO: means per token */
    PREFERENCE_RATIO, /* KL: log-ratios; KTO: the baseline, for its mean over steps */
    PREFERENCE_SIDES,
    PREFERENCE_REWARD = PREFERENCE_SIDES,
    PREFERENCE_LOGP,   /* as the objective reads them: of SimPO and ORPO means per token */
    PREFERENCE_TOTAL,  /* log-probabilities of completions */
    PREFERENCE_TOKENS, /* of completions */
    PREFERENCE_ANSWERS,
    PREFERENCE_SIDE = PREFERENCE_ANSWERS - PREFERENCE_SIDES + 1,
    PREFERENCE_SUMS = PREFERENCE_SIDES + 2 * PREFERENCE_SIDE
};

/* The importance weights that correct for the sampler, of each row or of each label: the probability by the old model
 * divided by that of the sampler. A weight above cap or below floor is limited to it, or becomes 0. */
struct importance {
    bool by_row, limits;
    double cap, floor;
};
/* What op_importance writes: weight [N] stat =; values [:, POLICY_WEIGHT] =: the weight of the row, 1 if labels have
 * weights; part [A, IMPORTANCE_PARTS] f64 =: sums, then the largest values. */
enum importance_sum {
    IMPORTANCE_WEIGHTS, /* their number, and their sum */
    IMPORTANCE_WEIGHT,
    IMPORTANCE_KNOWN, /* labels whose log-probability by the sampler is known; |difference| to that of the old model */
    IMPORTANCE_DIFFERENCE,
    IMPORTANCE_SUMS,
    IMPORTANCE_WEIGHT_MOST = 0,
    IMPORTANCE_BELOW_MOST, /* cap - weight */
    IMPORTANCE_DIFFERENCE_MOST,
    IMPORTANCE_EXTREMES,
    IMPORTANCE_PARTS = IMPORTANCE_SUMS + IMPORTANCE_EXTREMES
};

/* The loss of a completion in online RL (policy_value.h has the formulas). r is the ratio of new to old probability: of
 * each token, or one for the row, from the mean or from the sum of its log-probabilities. */
enum policy_ratio { POLICY_TOKEN, POLICY_MEAN, POLICY_SUM };
enum policy_kl { POLICY_K3, POLICY_K3_RATIO }; /* k3; k3 r */
struct policy {
    enum policy_ratio ratio;
    bool detached;    /* CISPO: min(r, high) weights the log-probability, as a constant */
    double low, high; /* bounds of r */
    double delta;     /* r is at most this where it is not clipped; 0: no bound */
    double beta;      /* of the KL in the loss */
    enum policy_kl kl;
    double temperature;           /* of the loss head; not read by op_policy */
    struct importance importance; /* of op_importance; not read by op_policy */
    double entropy_from;          /* tokens whose entropy is lower have only the KL in their loss; 0: none */
    double entropy_scale;         /* the loss is reduced by entropy_scale * entropy of each token that has loss */
};
/* Of every label: nll and entropy by the trained model; nll by the old model (absent: nll itself, as a constant) and by
 * the reference (absent: no KL); the weight of the loss that corrects for the sampler (absent: 1). All [N] stat. */
struct policy_tokens {
    struct tensor nll, entropy, old, reference, weight;
};
/* Of every row, [A, POLICY_VALUES] f64. */
enum policy_value {
    POLICY_ADVANTAGE,
    POLICY_SCALE,  /* factor of the loss: with POLICY_SUM of the row, else of each token */
    POLICY_WEIGHT, /* POLICY_SUM: of the row, in place of policy_tokens.weight */
    POLICY_VALUES
};
/* Sums over tokens; from POLICY_UNITS on, sums over rows if r is one per row. Then the largest values over rows. */
enum policy_sum {
    POLICY_LOSS, /* with scale */
    POLICY_TOKENS,
    POLICY_ENTROPY,
    POLICY_KL_SUM, /* with r for POLICY_K3_RATIO, without beta */
    POLICY_UNITS,  /* ratios */
    POLICY_RATIO,
    POLICY_LOW, /* r below its lower bound, negative advantage */
    POLICY_HIGH,
    POLICY_SUMS,
    POLICY_RATIO_MOST = 0,
    POLICY_INVERSE_MOST, /* 1 / r */
    POLICY_NOT_LOW_MOST, /* 1 - share of POLICY_LOW in a row */
    POLICY_HIGH_MOST,    /* share of POLICY_HIGH in a row */
    POLICY_EXTREMES,
    POLICY_PARTS = POLICY_SUMS + POLICY_EXTREMES
};
/* What op_policy writes: part [A, POLICY_PARTS] f64 =; weight [N,2] stat =: of the loss, dloss/dnll and dloss/dentropy
 * of each label. Without an entropy_scale the latter is 0. */

/* What op_preference writes and reads: sums [PREFERENCE_SUMS] f64 += ; weight [A,2] stat = : of the loss, dloss/dnll of
 * each label of the completion, and of the prompt; logps, reference [A,2] f64 of op_answer_sums, reference those of a
 * frozen model or absent; good [A] i32: KTO's labels, or absent. */

#endif
