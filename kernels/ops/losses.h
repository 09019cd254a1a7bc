/* losses.h - for ops.h: the structs of the loss head's ops: teachers, whole answers, preferences, policies. A labelled
 * token is a token with loss, a label its id; N is their number, A that of answers or rows. */
#ifndef MT_LOSSES_H
#define MT_LOSSES_H

#include "kernels/tensor.h"

/* The teacher's distribution q over the vocabulary, at `temperature` T, for each labelled token: given as its final
 * hidden state, from which the student's head computes logits, or as K ids with log q (id -1: unused). With ids, all
 * other ids are one bucket of probability q_r = max(0, 1 - sum q_k). KL_REVERSE needs hidden states. */
enum kl_kind { KL_FORWARD, KL_REVERSE };
struct teacher {
    enum kl_kind kind;
    float alpha, temperature;  /* share of the cross-entropy in the loss, [0, 1]; T > 0 */
    struct tensor hidden;      /* [N, D] act, after the final norm; or absent */
    struct tensor id, logprob; /* [N, K] i32, stat: distinct ids, log softmax(z / T); or absent */
};
/* Whole answers. Labels cu[a] .. cu[a+1]-1 are of answer a; those from first[a] on are its completion, earlier ones its
 * prompt. */
struct answers {
    struct tensor cu, first; /* [A+1], [A] i32 */
};
/* The loss of a pair of answers (chosen, rejected), or with KTO of one answer (preference_value.h has the formulas).
 * PREFERENCE_KL computes no loss, only the log-ratios for KTO's baseline. */
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
    double sft_weight; /* of the cross-entropy of chosen completions, a mean over their tokens in the step */
    double baseline;   /* KTO: z */
    double scale;      /* 1 / pairs of the step; KTO: 1 / rows */
    double sft_scale;  /* sft_weight / tokens of chosen completions in the step */
};
/* Sums over pairs, or with KTO over rows. From PREFERENCE_SIDES on: five sums of chosen answers, then the same five of
 * rejected ones. */
enum preference_sum {
    PREFERENCE_LOSS,
    PREFERENCE_RIGHT, /* pairs whose chosen reward is the larger */
    PREFERENCE_NLL,   /* ORPO: means per token */
    PREFERENCE_RATIO, /* KL: log-ratios; KTO: the baseline, for its mean over steps */
    PREFERENCE_SIDES,
    PREFERENCE_REWARD = PREFERENCE_SIDES,
    PREFERENCE_LOGP,   /* log-probabilities of completions; in SimPO and ORPO their means per token */
    PREFERENCE_TOTAL,  /* log-probabilities of completions */
    PREFERENCE_TOKENS, /* of completions */
    PREFERENCE_ANSWERS,
    PREFERENCE_SIDE = PREFERENCE_ANSWERS - PREFERENCE_SIDES + 1,
    PREFERENCE_SUMS = PREFERENCE_SIDES + 2 * PREFERENCE_SIDE
};

/* The importance weights that correct for the sampler, of each row or of each label: the probability by the old model
 * (the one before this batch's updates) divided by that of the sampler. Weights above cap or below floor become cap or
 * floor if `limits`, else 0. */
struct importance {
    bool by_row, limits;
    double cap, floor;
};
/* What op_importance writes: weight [N] stat =; values [:, POLICY_WEIGHT] =: the weight of the row, 1 if
 * !by_row; part [A, IMPORTANCE_PARTS] f64 =: first the sums, then the largest values. */
enum importance_sum {
    IMPORTANCE_WEIGHTS, /* number of weights; next, their sum */
    IMPORTANCE_WEIGHT,
    IMPORTANCE_KNOWN, /* labels with a log-probability by the sampler; next, its |difference| to the old model's */
    IMPORTANCE_DIFFERENCE,
    IMPORTANCE_SUMS,
    IMPORTANCE_WEIGHT_MOST = 0,
    IMPORTANCE_BELOW_MOST, /* cap - weight */
    IMPORTANCE_DIFFERENCE_MOST,
    IMPORTANCE_EXTREMES,
    IMPORTANCE_PARTS = IMPORTANCE_SUMS + IMPORTANCE_EXTREMES
};

/* The loss of a completion in online RL (policy_value.h has the formulas). r is the ratio of the probabilities by the
 * new and the old model: of each token, or one for the row, from the mean or the sum of its log-probabilities. */
enum policy_ratio { POLICY_TOKEN, POLICY_MEAN, POLICY_SUM };
enum policy_kl { POLICY_K3, POLICY_K3_RATIO }; /* k3; k3 r */
struct policy {
    enum policy_ratio ratio;
    bool detached;    /* CISPO: min(r, high) weights the log-probability, as a constant */
    double low, high; /* bounds of r */
    double delta;     /* upper bound of r in the unclipped term; 0: none */
    double beta;      /* of the KL in the loss */
    enum policy_kl kl;
    double temperature;           /* for the loss head */
    struct importance importance; /* for op_importance */
    double entropy_from;          /* tokens with a lower entropy have only the KL as loss; 0: none */
    double entropy_scale;         /* the loss is reduced by entropy_scale * entropy of each token that has loss */
};
/* Of every label: nll and entropy by the trained model; nll by the old model (absent: nll itself, as a constant) and by
 * the reference (absent: no KL); the importance weight (absent: 1). All [N] stat. */
struct policy_tokens {
    struct tensor nll, entropy, old, reference, weight;
};
/* Of every row, [A, POLICY_VALUES] f64. */
enum policy_value {
    POLICY_ADVANTAGE,
    POLICY_SCALE,  /* factor of the loss */
    POLICY_WEIGHT, /* importance weight of the row, with POLICY_SUM */
    POLICY_VALUES
};
/* Sums over tokens, from POLICY_UNITS on over ratios r (of tokens or rows). Then the largest values over rows. */
enum policy_sum {
    POLICY_LOSS, /* times POLICY_SCALE */
    POLICY_TOKENS,
    POLICY_ENTROPY,
    POLICY_KL_SUM, /* with r for POLICY_K3_RATIO, without beta */
    POLICY_UNITS,  /* number of ratios */
    POLICY_RATIO,
    POLICY_LOW,  /* number of r below `low` with a negative advantage */
    POLICY_HIGH, /* number of r above `high` with a positive advantage */
    POLICY_SUMS,
    POLICY_RATIO_MOST = 0,
    POLICY_INVERSE_MOST, /* 1 / r */
    POLICY_NOT_LOW_MOST, /* 1 - share of POLICY_LOW in a row */
    POLICY_HIGH_MOST,    /* share of POLICY_HIGH in a row */
    POLICY_EXTREMES,
    POLICY_PARTS = POLICY_SUMS + POLICY_EXTREMES
};
/* What op_policy writes: part [A, POLICY_PARTS] f64 =; weight [N,2] stat =: dloss/dnll and dloss/dentropy of each
 * label. */

/* For op_preference: sums [PREFERENCE_SUMS] f64 +=; weight [A,2] stat =: dloss/dnll of each label of the completion,
 * and of the prompt; logps, reference [A,2] f64 from op_answer_sums, reference those of a frozen model or absent;
 * good [A] i32: KTO's labels, or absent. */

#endif
